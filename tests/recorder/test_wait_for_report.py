"""The program waits for its report at a run's end only as long as the sidecar makes progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.recorder.test_late_report import WRITING, sidecar_of, watched
from tests.support.processes import clean_environ, wait_for_sidecar
from tests.support.warm_python import WarmPython
from torchlens_perf.config import Config
from torchlens_perf.results import last_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import REPORT

# This code of a sidecar computes until the test ends it.
BUSY = """
import os, sys, time

class Busy:
    def find_spec(self, name, path=None, target=None):
        if name == "torchlens_perf.report.run_report":
            ends_s = time.process_time() + {seconds}
            while time.process_time() < ends_s and not os.path.exists({enough!r}): pass

sys.meta_path.insert(0, Busy())
"""


@pytest.fixture
def enough(tmp_path: Path) -> Path:
    """Return the path of a file that ends the computation of a busy sidecar."""
    return tmp_path / "enough"


def late_sidecar(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Run the given source at the start of each sidecar."""
    (folder / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_program_waits_while_the_sidecar_computes(
    enough: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar computes for two seconds before it writes the report.

    One line says that the program waits.
    """
    # The test does not know the load of the machine.
    monkeypatch.setattr(last_report, "_LONGEST_S", 60.0)
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=2, enough=str(enough)))
    with watched(tmp_path / "runs"):
        pass
    printed = capfd.readouterr().err

    assert printed.startswith(WRITING)
    assert printed.count("writing the report") == 1
    assert "20 steps" in printed


def test_program_stops_waiting_a_second_after_the_sidecar_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait lasts at least half a second after the sidecar's last progress."""
    monkeypatch.setattr(last_report, "_LONGEST_S", 600.0)
    with watched(tmp_path / "runs") as watch:
        pid = sidecar_of(watch)
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
    took_s = time.monotonic() - began_s
    printed = capfd.readouterr().err
    os.kill(pid, signal.SIGCONT)
    wait_for_sidecar(RunDirectory(watch.run_dir))

    assert took_s < 60
    assert f"is stopped: kill -CONT {pid}" in printed


@pytest.mark.parametrize("timeout_s", [0.0, 0.7])
def test_wait_is_limited_by_the_users_exit_timeout(
    timeout_s: float,
    enough: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sidecar in this test makes progress."""
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=20, enough=str(enough)))
    with watched(tmp_path / "runs", config=Config(_exit_timeout_s=timeout_s)) as watch:
        sidecar_of(watch)
    enough.touch()
    printed = capfd.readouterr().err
    wait_for_sidecar(RunDirectory(watch.run_dir), 120)

    assert WRITING not in printed
    assert f"the report is not ready after {timeout_s:.1f}" in printed


@pytest.mark.parametrize("raised", ["RuntimeError", "KeyboardInterrupt"])
def test_report_after_an_exception_is_printed_below_the_traceback(
    raised: str, enough: Path, tmp_path: Path
) -> None:
    """The traceback is printed after at most a second.

    After the traceback, the program waits as after a normal end.
    """
    (tmp_path / "sitecustomize.py").write_text(BUSY.format(seconds=30, enough=str(enough)))
    program = f"""
import torchlens_perf as perf
from torchlens_perf.results import last_report
last_report._LONGEST_S = 600.0
with perf.watch(dir={str(tmp_path / "runs")!r}):
    raise {raised}("lost")
"""
    environ = clean_environ({"PYTHONPATH": str(tmp_path)})
    with WarmPython(
        [sys.executable, "-c", program], env=environ, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        killer = threading.Timer(240, process.kill)
        killer.start()
        lines = []
        while (line := process.stderr.readline()) and not line.startswith(WRITING):
            lines.append(line)
        enough.touch()
        report = process.stderr.read()
        process.wait()
        killer.cancel()

    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith(raised)
    assert "torchlens-perf report" in report
    assert "not ready" not in report
    (run,) = (tmp_path / "runs").iterdir()
    wait_for_sidecar(RunDirectory(run), 240)
    assert not list(RunDirectory(run).find_local_mailboxes(REPORT))


def test_next_watch_ends_the_wait_for_the_previous_report(
    enough: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search over many failing trials must not wait for each report."""
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=30, enough=str(enough)))
    with pytest.raises(RuntimeError), watched(tmp_path / "runs") as first:
        raise RuntimeError
    assert last_report._at_exit is not None
    assert capfd.readouterr().err == ""
    enough.touch()
    with watched(tmp_path / "runs"):
        pass

    assert last_report._at_exit is None
    assert not list(RunDirectory(first.run_dir).find_local_mailboxes(REPORT))
    wait_for_sidecar(RunDirectory(first.run_dir), 120)


def test_job_of_several_nodes_waits_at_most_a_second(
    enough: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one node waited longer, all nodes would have to wait."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=10, enough=str(enough)))
    with watched(tmp_path / "runs", exchange="off") as watch:
        pass
    enough.touch()
    printed = capfd.readouterr().err
    wait_for_sidecar(RunDirectory(watch.run_dir), 120)

    assert WRITING not in printed
    assert "the report is not ready after 1." in printed


def test_ctrl_c_ends_the_wait_and_not_the_program(enough: Path, tmp_path: Path) -> None:
    """Training has succeeded. The rest of the program runs, and its exit code is 0."""
    (tmp_path / "sitecustomize.py").write_text(BUSY.format(seconds=30, enough=str(enough)))
    program = (
        "import torch, torchlens_perf as perf\n"
        "from torchlens_perf.results import last_report\n"
        "last_report._LONGEST_S = 600.0\n"
        "model = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"with perf.watch(model, optimizer, dir={str(tmp_path / 'runs')!r}) as watch:\n"
        "    for _ in range(20):\n"
        "        model(torch.ones(1, 2)).sum().backward(); optimizer.step()\n"
        "print('saved', watch.run_dir)\n"
    )
    environ = clean_environ({"PYTHONPATH": str(tmp_path)})
    with WarmPython(
        [sys.executable, "-c", program],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        killer = threading.Timer(240, process.kill)
        killer.start()
        assert process.stderr is not None
        assert process.stderr.readline().startswith(WRITING)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
        killer.cancel()
    enough.touch()

    assert process.returncode == 0, stderr
    assert stdout.startswith("saved ")
    assert "the report is not ready after" in stderr
    assert "KeyboardInterrupt" not in stderr
    wait_for_sidecar(RunDirectory(Path(stdout.split()[1])), 240)
