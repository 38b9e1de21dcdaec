"""Tests of SIGTERM to the sidecar, and of a cleaner that removes its files in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.sidecar.test_node import WORK
from tests.support.leftovers import eventually
from tests.support.processes import SCRIPTS, clean_environ, report, wait_for_sidecar
from tests.support.ranks import HOST, Rank
from tests.support.warm_python import WarmPython
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock, sidecar_lock_path
from torchlens_perf.run.ring import STEP, RingReader
from torchlens_perf.run.sidecar_lock import is_lock_held
from torchlens_perf.run.sidecar_status import read_status
from torchlens_perf.sidecar.node import Sidecar

SCRIPT = str(SCRIPTS / "train_until_told.py")
# Code for the sidecar's process. As in an old run, the next segment is written late. A young run
# writes a segment every five seconds.
OLD = """
import sys
if "sidecar" in sys.orig_argv:
    from torchlens_perf.sidecar import schedule
    schedule._KEEP_S = schedule._LATEST_KEEP_S = 600.0
"""


class Job:
    """One rank that trains until the test ends it, with its sidecar."""

    def __init__(self, folder: Path) -> None:
        self.stop = folder / "stop"
        (folder / "old").mkdir()
        (folder / "old" / "sitecustomize.py").write_text(OLD)
        path = f"{folder / 'old'}:{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, SCRIPT, str(folder / "runs"), str(self.stop)]
        self.trainer = WarmPython(
            command,
            env=clean_environ({"PYTHONPATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert eventually(lambda: list(folder.glob("runs/*/nodes")))
        (nodes,) = folder.glob("runs/*/nodes")
        self.run = RunDirectory(nodes.parent)
        assert eventually(lambda: len(self.run.local_rings()) == 1 and self.sidecar_pid() > 0)
        self.reader = RingReader(self.run.local_rings()[0])
        self.sidecar = self.sidecar_pid()
        assert eventually(lambda: self.steps() > 50)

    def sidecar_pid(self) -> int:
        lock = find_sidecar_lock(self.run.run_id)
        return 0 if lock is None else read_status(str(lock))[0]

    def sidecar_has_the_ring_open(self) -> bool:
        found = set()
        for descriptor in Path(f"/proc/{self.sidecar}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor))
        return any(each.endswith(".ring") for each in found)

    def steps(self) -> int:
        """Return the number of finished steps."""
        return self.reader.read_counter(STEP)

    def kept_steps(self) -> int:
        """Return the number of steps in segments, up to the first gap."""
        steps = [
            step
            for path in sorted(self.run.steps.glob("*.parquet"))
            for step in pd.read_parquet(path)["step"]
        ]
        assert steps == list(range(len(steps)))
        return len(steps)

    def end(self) -> str:
        """End the job normally. Return its output."""
        self.stop.touch()
        _, output = self.trainer.communicate(timeout=60)
        assert self.trainer.returncode == 0, output
        return output

    def kill(self) -> None:
        """Kill all processes and remove shared memory, as the end of a pod does."""
        for pid in (self.sidecar, self.trainer.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.trainer.wait(10)
        shutil.rmtree(
            f"/dev/shm/torchlens-perf-{os.getuid()}/{self.run.run_id}", ignore_errors=True
        )


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.reader.close()
    made.kill()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_steps_between_sigterm_and_sigkill_are_saved(job: Job) -> None:
    """Training continues after SIGTERM. The report has all steps that are in segments."""
    at_signal = job.steps()
    assert job.kept_steps() == 0
    os.kill(job.sidecar, signal.SIGTERM)
    assert eventually(lambda: job.kept_steps() >= at_signal)
    later = job.steps()
    assert eventually(lambda: job.kept_steps() >= later), "it goes on, and soon"
    assert lives(job.sidecar)
    job.kill()

    (rank,) = report(job.run)["ranks"]
    assert rank["steps"] >= later


@pytest.mark.parametrize("written", [0, 1, 2])
def test_report_has_all_steps_of_segments_if_a_save_is_killed(
    written: int, run: RunDirectory
) -> None:
    """SIGKILL arrives after some of the files of a save are written."""
    rank, sidecar = Rank(run, 0, 1), Sidecar(run, HOST, None, lambda run, settings: None)
    for steps in (20, 7):
        sidecar.save_records()
        rank.steps(steps, **WORK)
        sidecar.read_rings()
        sidecar.count_records()
    child = os.fork()
    if not child:
        os.replace = kill_after(written)
        sidecar.save_records()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    rank.close()

    saved = sum(len(pd.read_parquet(path)) for path in run.steps.glob("*.parquet"))
    assert report(run)["ranks"][0]["steps"] >= saved >= 20


def kill_after(written: int) -> Callable[[Path, Path], None]:
    """Return a function in place of os.replace() that kills this process at one of its calls."""
    replace, paths = os.replace, list[Path]()

    def replace_or_die(partial: Path, path: Path) -> None:
        if len(paths) == written:
            os.kill(os.getpid(), signal.SIGKILL)
        paths.append(path)
        replace(partial, path)

    return replace_or_die


def test_report_is_complete_if_training_ends_after_sigterm(job: Job) -> None:
    os.kill(job.sidecar, signal.SIGTERM)
    output = job.end()
    wait_for_sidecar(job.run)

    (rank,) = report(job.run)["ranks"]
    assert f"{rank['steps']} steps" in output
    assert (rank["state"], rank["lost"]) == ("closed", 0)
    assert job.kept_steps() == rank["steps"]


def test_second_sigterm_ends_the_sidecar(job: Job) -> None:
    """A second SIGTERM at the same time as the first one has no effect.

    The job starts a new sidecar at the job's end.
    """
    assert job.kept_steps() == 0
    os.kill(job.sidecar, signal.SIGTERM)
    os.kill(job.sidecar, signal.SIGTERM)
    # The sidecar has received the signals once it writes a segment.
    assert eventually(lambda: job.kept_steps() > 0)
    time.sleep(1.2)
    assert lives(job.sidecar)
    lock = sidecar_lock_path(job.run.run_id)
    os.kill(job.sidecar, signal.SIGTERM)
    # The sidecar's second thread may own the lock for a moment after the first one has ended.
    assert eventually(lambda: not lives(job.sidecar) and not is_lock_held(lock))
    output = job.end()
    # The new sidecar may have started only a moment ago.
    assert eventually(lambda: report(job.run)["ranks"][0]["state"] == "closed")
    wait_for_sidecar(job.run)

    (rank,) = report(job.run)["ranks"]
    assert (rank["state"], rank["lost"]) == ("closed", 0)
    assert "torchlens_perf" in output


def test_files_removed_from_shared_memory_lose_no_records(job: Job) -> None:
    """All files of the run are removed twice.

    The lock is created again, and only one sidecar runs.
    """
    folder = find_sidecar_lock(job.run.run_id).parent
    # A ring that the sidecar has not opened yet would be lost.
    assert eventually(job.sidecar_has_the_ring_open)
    for _ in range(2):  # Files are removed before and while the sidecar reads them.
        shutil.rmtree(folder)
        assert eventually(lambda: job.sidecar_pid() == job.sidecar)
    output = job.end()
    wait_for_sidecar(job.run)

    (rank,) = report(job.run)["ranks"]
    assert (rank["state"], rank["lost"]) == ("closed", 0)
    assert job.kept_steps() == rank["steps"]
    assert output.startswith("torchlens_perf")
    assert (
        "Traceback"
        not in job.run.node_log_path(next(job.run.nodes.glob("*.json")).stem).read_text()
    )
    assert not folder.exists()


def report_of(run: RunDirectory) -> object:
    """Return the first rank of the state, once there is a state."""
    return next(iter(report(run)["ranks"]), None) if run.node_state_path(HOST).exists() else None
