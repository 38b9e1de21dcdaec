"""The message at a run's end if the report is late: the reason and the remedy.

The sidecars are real.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import torchlens_perf as perf
from tests.support.busy_machine import busy_machine, one_cpu
from tests.support.long import long
from tests.support.processes import read_by_hand, report, run, wait_for_sidecar
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock, sidecar_log_path
from torchlens_perf.run.place.node import node_name
from torchlens_perf.run.sidecar_status import read_status
from torchlens_perf.watching import Watch

WRITING = "torchlens_perf: writing the report to "
# Code for the sidecar's start: it sleeps immediately or when a module is imported.
SLOW = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            time.sleep({seconds})

time.sleep({seconds} * (not {name!r}))
sys.meta_path.insert(0, Slow())
"""


@contextmanager
def watched(folder: Path, **settings: object) -> Iterator[Watch]:
    """Record a short run whose sidecar is running at the last step."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with perf.watch(model, optimizer, dir=str(folder), **settings) as watch:
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        yield watch


def sidecar_of(watch: Watch) -> int:
    """Return the pid of the sidecar as soon as it has written its status."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        lock = find_sidecar_lock(watch.run_dir.name)
        pid = read_status(str(lock))[0] if lock is not None else 0
        if pid:
            return pid
        time.sleep(0.005)
    raise TimeoutError("no sidecar")


def line(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only printed line."""
    (only,) = capfd.readouterr().err.splitlines()
    return only


def not_ready(watch: Watch, why: str) -> re.Pattern[str]:
    """Return the message for a running sidecar whose activity is `why`."""
    where = re.escape(str(watch.run_dir))
    return re.compile(
        rf"torchlens_perf: the report is not ready after \d+\.\d s \(the sidecar {why}\); it will"
        r" be in "
        rf"{where}/report\.txt; show it with: torchlens-perf report {where}"
    )


def test_program_does_not_wait_for_the_report_with_an_exit_timeout_of_0(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report appears later at the path in the message."""
    with watched(tmp_path, config=perf.Config(_exit_timeout_s=0)) as watch:
        sidecar_of(watch)
    printed = line(capfd)
    wait_for_sidecar(RunDirectory(watch.run_dir))

    assert not_ready(watch, "(has not begun to read|is loading its libraries)").fullmatch(printed)
    assert "20 steps" in (watch.run_dir / "report.txt").read_text()


def test_message_for_a_stopped_sidecar_has_the_command_to_continue_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGSTOP stops the sidecar. The report is written after the user has run the command."""
    with watched(tmp_path, config=perf.Config(_exit_timeout_s=0.3)) as watch:
        pid = sidecar_of(watch)
        os.kill(pid, signal.SIGSTOP)
    printed = line(capfd)
    os.kill(pid, signal.SIGCONT)
    wait_for_sidecar(RunDirectory(watch.run_dir))

    assert not_ready(watch, f"is stopped: kill -CONT {pid}").fullmatch(printed)
    assert "20 steps" in (watch.run_dir / "report.txt").read_text()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_message_for_a_killed_sidecar_has_its_log_and_the_next_command(
    signal_number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sidecar is killed while the program waits. The command finishes the sidecar's work."""
    with watched(tmp_path, config=perf.Config(_exit_timeout_s=1.0)) as watch:
        pid = sidecar_of(watch)
        os.kill(pid, signal.SIGSTOP)

        def kill() -> None:
            os.kill(pid, signal_number)
            os.kill(pid, signal.SIGCONT)

        killer = threading.Timer(0.3, kill)
        killer.start()
    killer.join()
    log = sidecar_log_path(find_sidecar_lock(watch.run_dir.name))
    # The sidecar had started before it was stopped.
    if not log.exists():
        log = RunDirectory(watch.run_dir).node_log_path(node_name())
    printed = line(capfd)
    begin, _, command = printed.partition(" Next: ")
    by_hand = read_by_hand(watch.run_dir, tmp_path)

    assert begin == f"torchlens_perf: there is no report: the sidecar died (see {log})."
    assert command == f"torchlens-perf sidecar {watch.run_dir}"
    assert by_hand.returncode == 0, by_hand.stderr
    assert report(RunDirectory(watch.run_dir))["ranks"][0]["steps"] == 20


@pytest.mark.long
@pytest.mark.parametrize(
    ("import_of", "doing"),
    [
        *long(("", "has not started yet"), ("numpy", "is loading its libraries")),
        # The sidecar imports this module only when it is needed.
        ("torchlens_perf.report.run_report", "is writing the report"),
    ],
)
def test_message_for_a_slow_sidecar_has_its_current_activity(
    import_of: str,
    doing: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first line says that the program waits."""
    (tmp_path / "sitecustomize.py").write_text(SLOW.format(name=import_of, seconds=14))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with watched(tmp_path / "runs", config=perf.Config(_exit_timeout_s=10)) as watch:
        pass
    writing, printed = capfd.readouterr().err.splitlines()
    wait_for_sidecar(RunDirectory(watch.run_dir))

    assert writing.startswith(WRITING)
    assert not_ready(watch, doing + "(; other programs .*)?").fullmatch(printed)
    assert "20 steps" in (watch.run_dir / "report.txt").read_text()


def test_message_says_if_other_programs_use_all_processors(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sidecar may use only one processor, where four programs spin, each in its own scheduling
    group.
    """
    with one_cpu(), busy_machine(4):
        with watched(tmp_path, config=perf.Config(_exit_timeout_s=0.5)) as watch:
            sidecar_of(watch)
        printed = line(capfd)
    wait_for_sidecar(RunDirectory(watch.run_dir))
    why = r"\w+.*; other programs keep the processors busy: it had one for 0\.\d\d s of that"

    assert not_ready(watch, why).fullmatch(printed)


@pytest.mark.parametrize("works_otherwise", long(True, False))
def test_message_has_the_reason_if_the_sidecar_could_not_start(
    works_otherwise: bool, tmp_path: Path
) -> None:
    """In one case Python ends when it starts as a sidecar, in the other also when it creates the
    run directory.

    The records are in the ring, and the command in the message reads them.
    """
    python = tmp_path / "python"
    ends = 'echo "$*" | grep -q " sidecar "' if works_otherwise else "true"
    python.write_text(f'#!/bin/sh\nif {ends}; then exit 1; fi\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    program = (
        f"import sys, torch, torchlens_perf as perf\nfrom torchlens_perf.run import children\n"
        # A program of another name would be refused before.
        f"children._is_interpreter = lambda path: True\nsys.executable = {str(python)!r}\nmodel ="
        " torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwith"
        f" perf.watch(model, optimizer, dir={str(tmp_path)!r},"
        " config=perf.Config(_exit_timeout_s=0.2)):\n    for _ in range(20):\n       "
        " model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
    )
    done = run([sys.executable, "-c", program], tmp_path)
    printed = done.stderr.splitlines()[-1]
    begin, _, command = printed.partition(" Next: ")
    by_hand = run([sys.executable, "-m", "torchlens_perf", *command.split()[1:]], tmp_path)
    made = RunDirectory(Path(command.split()[-1]))

    assert done.returncode == 0
    assert begin.startswith(
        "torchlens_perf: there is no report: the sidecar could not be started (see "
    )
    assert by_hand.returncode == 0, by_hand.stderr
    assert report(made)["ranks"][0]["steps"] == 20
