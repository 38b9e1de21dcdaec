"""The program waits for its report at a run's end only as long as the sidecar makes progress."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from tests.recorder.test_late_report import WRITING, sidecar_of, watched
from tests.support.processes import clean_environ, wait_for_sidecar
from tests.support.warm_python import WarmPython
from torchlens_perf.config import Config
from torchlens_perf.results import last_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import REPORT
from torchlens_perf.watching import Watch

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


@pytest.mark.long
def test_program_waits_while_the_sidecar_computes(
    enough: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar computes for two seconds before it writes the report.

    One line says that the program waits.
    """
    # The test does not know the load of the machine, nor the signal handlers of other tests.
    monkeypatch.setattr(last_report, "_LONGEST_S", 60.0)
    monkeypatch.setattr(last_report, "_WARNING_SIGNALS", ())
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


def stop_busy_sidecar(watch: Watch, enough: Path) -> None:
    enough.touch()
    wait_for_sidecar(RunDirectory(watch.run_dir), 240)


def assert_only_path_is_printed(printed: str, folder: Path) -> None:
    (line,) = printed.splitlines()
    assert "the report is not ready after" in line
    assert f"it will be in {folder}" in line


@pytest.mark.parametrize(
    "raised", [RuntimeError, KeyboardInterrupt, SystemExit, SystemExit(0), GeneratorExit]
)
def test_wait_is_short_after_any_exception(
    raised: type[BaseException] | BaseException,
    enough: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler may end the program soon, so the path of the report is printed at once."""
    monkeypatch.setattr(last_report, "_LONGEST_S", 600.0)
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=20, enough=str(enough)))
    kind = raised if isinstance(raised, type) else type(raised)
    with pytest.raises(kind), watched(tmp_path / "runs") as watch:
        raise raised
    printed = capfd.readouterr().err
    stop_busy_sidecar(watch, enough)

    assert_only_path_is_printed(printed, watch.run_dir)
    assert not list(RunDirectory(watch.run_dir).find_local_mailboxes(REPORT))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU])
def test_wait_is_short_in_a_program_that_handles_a_warning_of_its_end(
    number: signal.Signals,
    enough: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler only sets a flag, and the loop leaves the watch without an exception."""
    monkeypatch.setattr(last_report, "_LONGEST_S", 600.0)
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=20, enough=str(enough)))
    received = list[int]()
    before = signal.signal(number, lambda *_: received.append(1))
    try:
        with watched(tmp_path / "runs") as watch:
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    printed = capfd.readouterr().err
    stop_busy_sidecar(watch, enough)

    assert received
    assert_only_path_is_printed(printed, watch.run_dir)


def test_wait_is_short_if_a_signal_handler_exits_a_program_that_started_a_watch(
    enough: Path, tmp_path: Path
) -> None:
    """Exit handlers stop the watch after the SystemExit has gone."""
    (tmp_path / "sitecustomize.py").write_text(BUSY.format(seconds=20, enough=str(enough)))
    program = f"""
import signal, sys
import torchlens_perf as perf
from torchlens_perf.results import last_report
last_report._LONGEST_S = 600.0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print(perf.watch(dir={str(tmp_path / "runs")!r}).start().run_dir)
signal.raise_signal(signal.SIGTERM)
"""
    environ = clean_environ({"PYTHONPATH": str(tmp_path)})
    # A warm process would run the exit handlers while the SystemExit is being handled.
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=240
    )
    enough.touch()
    folder = Path(done.stdout.strip())
    wait_for_sidecar(RunDirectory(folder), 240)

    assert done.returncode == 3
    assert_only_path_is_printed(done.stderr, folder)


def test_path_is_printed_if_a_signal_handler_exits_during_the_wait(
    enough: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_report, "_LONGEST_S", 600.0)
    late_sidecar(monkeypatch, tmp_path, BUSY.format(seconds=20, enough=str(enough)))

    def exit_in_wait(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == "wait_for_message":
                sys.exit()
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, exit_in_wait)
    try:
        with pytest.raises(SystemExit), watched(tmp_path / "runs") as watch:
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    printed = capfd.readouterr().err
    stop_busy_sidecar(watch, enough)

    assert f"it will be in {watch.run_dir}" in printed


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
