"""Tests that training starts, runs and ends although the disk does not answer.

The records are read when the disk answers again.

A library makes every call on the run folder hang, also in the training process, which must
therefore make none.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recorder.test_late_report import WRITING
from tests.support import warm_python
from tests.support.failing_calls import kill_all_at_end, library
from tests.support.leftovers import eventually, remove_local
from tests.support.long import long
from tests.support.processes import (
    SCRIPTS,
    TRAIN,
    clean_environ,
    report,
    torchrun,
    wait_for_sidecar,
)
from torchlens_perf.recorder.folder_request import MADE, FolderRequest, find_folder_problem
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock

pytestmark = pytest.mark.slow
WATCHED = str(SCRIPTS / "train_watched.py")
# The limit is high, because hanging programs do not end at all.
ENDS_WITHIN_S = 150


_said: list[str] = []


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of run directories, on the hanging disk."""
    with kill_all_at_end(str(tmp_path)):
        yield tmp_path / "disk" / "runs"
    while _said:
        remove_local(_said.pop())


def train(command: list[str], runs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command. Calls on the run folder fail or hang as the environment sets."""
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library()), "FAILING_PATHS": str(runs.parent),
        **environment,
    }  # fmt: skip
    done = warm_python.run(command, ENDS_WITHIN_S, cwd=runs.parent.parent, env=environ)
    _said.append(done.stdout + done.stderr)
    return done


def run_of(done: subprocess.CompletedProcess[str]) -> RunDirectory:
    """Return the run directory that the output names."""
    (path,) = [
        line.removeprefix("recorded ")
        for line in done.stdout.splitlines()
        if line.startswith("recorded ")
    ]
    return RunDirectory(Path(path))


def said_at_last(done: subprocess.CompletedProcess[str]) -> str:
    """Return what stderr has after the line that the program waits, which a slow machine adds."""
    lines = done.stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(WRITING))


def trained(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the parameters that the output contains."""
    return [line for line in done.stdout.splitlines() if line.startswith(("trained", "parameters"))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the parameters of 20 unwatched steps with a working disk."""
    folder = tmp_path_factory.mktemp("unwatched") / "disk" / "runs"
    done = train([sys.executable, WATCHED, str(folder), "20"], folder, TORCHLENS_PERF="0")
    assert done.returncode == 0, done.stderr
    return trained(done)


def test_training_process_makes_no_call_on_the_run_folder(runs: Path, tmp_path: Path) -> None:
    """Only child processes make calls on the run folder."""
    told = {"FAILING_LOG": str(tmp_path / "calls"), "TORCHLENS_PERF_EXIT_TIMEOUT_S": "60"}
    done = train([sys.executable, WATCHED, str(runs), "20"], runs, **told)
    wait_for_sidecar(run_of(done))
    process = done.stdout.partition("process ")[2].split()[0]
    calls = [line.split(" ", 2) for line in (tmp_path / "calls").read_text().splitlines()]

    assert done.returncode == 0, done.stderr
    assert [call for call in calls if call[0] == process] == []
    assert len(calls) > 20
    assert "20 steps" in done.stderr


def test_training_completes_on_a_disk_that_never_answers(runs: Path, expected: list[str]) -> None:
    """One line says that there is no report yet."""
    done = train([sys.executable, WATCHED, str(runs), "20"], runs, FAILING_WITH="hang")

    assert done.returncode == 0, done.stderr
    assert trained(done) == expected
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("torchlens_perf: the report ")
    assert not runs.exists()


def test_training_completes_on_a_disk_that_hangs_at_the_end(
    runs: Path, tmp_path: Path, expected: list[str]
) -> None:
    """The disk answers until the last step, and then hangs.

    The sidecar may continue for a second until it needs the disk.
    """
    flag = tmp_path / "hangs"
    command = [sys.executable, WATCHED, str(runs), "20", str(flag)]
    done = train(command, runs, FAILING_WITH="hang", FAILING_WHILE=str(flag))

    assert done.returncode == 0, done.stderr
    assert trained(done) == expected
    assert said_at_last(done).count("\n") == 1
    assert said_at_last(done).startswith("torchlens_perf: the report ")


@pytest.mark.parametrize("since", ["end", *long("start")])
def test_records_are_read_when_the_disk_recovers(since: str, runs: Path, tmp_path: Path) -> None:
    """No record that the ring file still contains is lost."""
    flag = tmp_path / "hangs"
    if since == "start":
        flag.touch()
    done = train(
        [sys.executable, WATCHED, str(runs), "20", str(flag)],
        runs,
        FAILING_WITH="hang",
        FAILING_WHILE=str(flag),
    )
    assert done.returncode == 0, done.stderr
    flag.unlink()
    run = run_of(done)
    wait_for_sidecar(run)
    value = report(run)

    assert [rank["steps"] for rank in value["ranks"]] == [20]
    assert (value["ranks"][0]["state"], value["quality"]["lost"]) == ("closed", 0)
    assert "20 steps" in run.report.read_text()


@pytest.mark.long
def test_unmodified_script_trains_on_a_hung_disk(runs: Path) -> None:
    """TORCHLENS_PERF=1 records the script."""
    command = [sys.executable, TRAIN, "--steps", "20"]
    unwatched = train(command, runs)
    done = train(
        command, runs, FAILING_WITH="hang", TORCHLENS_PERF="1", TORCHLENS_PERF_DIR=str(runs)
    )

    assert (unwatched.returncode, done.returncode) == (0, 0), done.stderr
    assert trained(done) == trained(unwatched)
    assert "torchlens_perf: the report " in done.stderr


@pytest.mark.long
@pytest.mark.distributed
def test_ranks_under_torchrun_train_on_a_hung_disk(runs: Path) -> None:
    """Neither rank waits for the disk of the other one."""
    command = torchrun("--logs-specs", "torchlens_perf", TRAIN, "--steps", "20")
    unwatched = train(torchrun(TRAIN, "--steps", "20"), runs)
    done = train(command, runs, FAILING_WITH="hang", TORCHLENS_PERF_DIR=str(runs))

    assert (unwatched.returncode, done.returncode) == (0, 0), done.stderr
    assert trained(done) == trained(unwatched)
    assert done.stderr.count("torchlens_perf: the report ") == 1


def wait_until_unattended(run: RunDirectory) -> None:
    """Wait as wait_for_sidecar() does, but without creating a folder."""
    deadline_s = time.monotonic() + 60
    while find_sidecar_lock(run.run_id) is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.mark.parametrize(
    "error", [errno.EROFS, *long(errno.ENOSPC, errno.ESTALE, errno.EIO, errno.EACCES)]
)
def test_disk_error_at_the_end_is_reported_with_the_place_of_records(
    error: int, runs: Path, tmp_path: Path, expected: list[str]
) -> None:
    """The records are read once the disk accepts writes again."""
    flag = tmp_path / "refuses"
    command = [sys.executable, WATCHED, str(runs), "20", str(flag)]
    environment = {
        "FAILING_WITH": str(error),
        "FAILING_WHILE": str(flag),
        "TORCHLENS_PERF_EXIT_TIMEOUT_S": "60",
    }
    done = train(command, runs, **environment)

    assert done.returncode == 0, done.stderr
    assert trained(done) == expected
    assert said_at_last(done).startswith("torchlens_perf: no report: ")
    assert os.strerror(error) in done.stderr
    run = run_of(done)
    wait_until_unattended(run)
    (ring,) = run.local_rings()
    assert f"The records stay in {ring.parent} until this node restarts." in done.stderr
    flag.unlink()
    by_hand = [
        sys.executable,
        "-m",
        "torchlens_perf",
        *done.stderr.split("torchlens-perf ")[-1].split(),
    ]
    assert eventually(lambda: subprocess.run(by_hand, env=clean_environ()).returncode == 0), (
        "or another start reads it"
    )
    assert report(run)["ranks"][0]["steps"] == 20
    assert not ring.exists()


@pytest.mark.long
def test_sidecar_retries_and_reports_a_disk_error_after_the_start(
    runs: Path, expected: list[str]
) -> None:
    """Setup: the first child process, which creates folders, sends no answer.

    After the error, the sidecar leaves no file.
    """
    unanswered = (
        "import runpy, sys; from torchlens_perf.run import make_folders; make_folders.__file__ ="
        " '/nonexistent'\nsys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", unanswered, WATCHED, str(runs), "20"]
    done = train(command, runs, FAILING_WITH=str(errno.EACCES), TORCHLENS_PERF_EXIT_TIMEOUT_S="60")
    run = run_of(done)
    wait_for_sidecar(run)

    assert trained(done) == expected
    assert said_at_last(done) == (
        f"torchlens_perf: no report: cannot write to {run.path}: Permission denied\n"
    )
    assert list(run._find_local_files("*")) == []


# -- the child process that creates folders


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Yield a folder whose disk hangs for child processes while a flag file exists, and the path of
    that file.
    """
    monkeypatch.setenv("LD_PRELOAD", str(library()))
    monkeypatch.setenv("FAILING_PATHS", str(tmp_path / "disk"))
    monkeypatch.setenv("FAILING_WITH", "hang")
    monkeypatch.setenv("FAILING_WHILE", str(tmp_path / "hangs"))
    (tmp_path / "hangs").touch()
    with kill_all_at_end(str(tmp_path)):
        yield tmp_path / "disk" / "runs", tmp_path / "hangs"


def test_missing_answer_of_the_child_is_reported_after_the_timeout(
    hanging: tuple[Path, Path],
) -> None:
    folder, _ = hanging

    assert find_folder_problem(folder, 0.5) == "its disk did not answer within 0.5 s"


def test_folders_of_a_late_answer_are_removed(hanging: tuple[Path, Path]) -> None:
    """When the disk answers after the timeout, the child removes the folders that it creates."""
    folder, flag = hanging
    request, again = FolderRequest([folder / "a" / "b"]), FolderRequest([folder / "a" / "c"])
    assert request.wait_for_answer(0.5) == ""
    request.close()
    flag.unlink()
    assert again.wait_for_answer(60) == MADE
    again.close()

    assert eventually(lambda: not folder.parent.exists())


def test_nested_folders_of_closed_requests_are_removed(tmp_path: Path) -> None:
    """A folder that contains another request's folders is removed after that request is
    closed too.
    """
    folder = tmp_path / "runs"
    first, second = FolderRequest([folder]), FolderRequest([folder / "one"])
    assert first.wait_for_answer(60) == second.wait_for_answer(60) == MADE
    third = FolderRequest([folder / "one" / "deep"])
    assert third.wait_for_answer(60) == MADE
    for request in (first, second, third):
        request.close()

    assert eventually(lambda: not folder.exists())


def test_kept_folders_and_folders_with_other_files_stay(hanging: tuple[Path, Path]) -> None:
    """Only new folders without files of other programs are removed."""
    folder, flag = hanging
    flag.unlink()
    kept, undone = FolderRequest([folder / "a"]), FolderRequest([folder / "b", folder / "c" / "d"])
    assert kept.wait_for_answer(60) == MADE
    kept.keep_folders()
    assert undone.wait_for_answer(60) == MADE
    (folder / "c" / "theirs").write_text("")
    undone.close()

    assert eventually(lambda: not (folder / "b").exists() and not (folder / "c" / "d").exists())
    assert (folder / "a").is_dir()
    assert (folder / "c" / "theirs").exists()


def test_killed_parent_leaves_no_folder(tmp_path: Path) -> None:
    """The parent is killed between its request and its first record."""
    program = (
        "import sys, time; from pathlib import Path; from torchlens_perf.recorder.folder_request"
        " import FolderRequest\nrequest = FolderRequest([Path(sys.argv[1])]);"
        " print(request.wait_for_answer(60), flush=True); time.sleep(600)\n"
    )
    folder = tmp_path / "runs" / "one"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "made\n"
    assert folder.is_dir()
    parent.send_signal(signal.SIGKILL)
    parent.wait()

    assert eventually(lambda: not (tmp_path / "runs").exists())
