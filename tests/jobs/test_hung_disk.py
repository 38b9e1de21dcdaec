"""A disk that does not answer: the training process begins, trains and ends all the same, and the rest is caught up on.

A library makes each call on the run folder hang, in the training process too, so that it must make none.
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
from tests.support.failing_calls import everything_ended, library
from tests.support.leftovers import eventually, remove_local
from tests.support.long import long
from tests.support.processes import SCRIPTS, TRAIN, clean_environ, report, torchrun, wait_for_sidecar
from torchlens_perf.recorder.folder_request import MADE, FolderRequest, problem_with
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock

pytestmark = pytest.mark.slow
WATCHED = str(SCRIPTS / "train_watched.py")
ENDS_WITHIN_S = 150  # what hangs does not end at all


_said: list[str] = []


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """The folder of run directories, on the disk that does not answer."""
    with everything_ended(str(tmp_path)):
        yield tmp_path / "disk" / "runs"
    while _said:
        remove_local(_said.pop())


def train(command: list[str], runs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs it where each call on the run folder hangs, as the environment says."""
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library()), "FAILING_PATHS": str(runs.parent),
        **environment,
    }  # fmt: skip
    done = warm_python.run(command, ENDS_WITHIN_S, cwd=runs.parent.parent, env=environ)
    _said.append(done.stdout + done.stderr)
    return done


def run_of(done: subprocess.CompletedProcess[str]) -> RunDirectory:
    """Its run directory."""
    (path,) = [line.removeprefix("recorded ") for line in done.stdout.splitlines() if line.startswith("recorded ")]
    return RunDirectory(Path(path))


def trained(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What came of it."""
    return [line for line in done.stdout.splitlines() if line.startswith(("trained", "parameters"))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The parameters of 20 steps without a disk that hangs, and without us."""
    folder = tmp_path_factory.mktemp("unwatched") / "disk" / "runs"
    done = train([sys.executable, WATCHED, str(folder), "20"], folder, TORCHLENS_PERF="0")
    assert done.returncode == 0, done.stderr
    return trained(done)


def test_the_training_process_touches_nothing_in_the_run_folder(runs: Path, tmp_path: Path) -> None:
    """Not one call on it, at the start, in the steps and at the end; its children make some."""
    told = {"FAILING_LOG": str(tmp_path / "calls"), "TORCHLENS_PERF_EXIT_TIMEOUT_S": "60"}
    done = train([sys.executable, WATCHED, str(runs), "20"], runs, **told)
    wait_for_sidecar(run_of(done))
    process = done.stdout.partition("process ")[2].split()[0]
    calls = [line.split(" ", 2) for line in (tmp_path / "calls").read_text().splitlines()]

    assert done.returncode == 0, done.stderr
    assert [call for call in calls if call[0] == process] == []
    assert len(calls) > 20
    assert "20 steps" in done.stderr


def test_from_the_start(runs: Path, expected: list[str]) -> None:
    """It never answers: everything is trained, and one line says that there is no report yet."""
    done = train([sys.executable, WATCHED, str(runs), "20"], runs, FAILING_WITH="hang")

    assert done.returncode == 0, done.stderr
    assert trained(done) == expected
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("torchlens_perf: the report ")
    assert not runs.exists()


def test_from_the_end(runs: Path, tmp_path: Path, expected: list[str]) -> None:
    """It answers until the last step. The sidecar makes progress until it needs the disk, which may take a second."""
    flag = tmp_path / "hangs"
    command = [sys.executable, WATCHED, str(runs), "20", str(flag)]
    done = train(command, runs, FAILING_WITH="hang", FAILING_WHILE=str(flag))

    assert done.returncode == 0, done.stderr
    assert trained(done) == expected
    last = done.stderr.removeprefix(WRITING)
    assert last.count("\n") == 1
    assert last.startswith("torchlens_perf: the report ")


@pytest.mark.parametrize("since", ["end", *long("start")])
def test_a_disk_that_comes_back(since: str, runs: Path, tmp_path: Path) -> None:
    """What was recorded meanwhile is read then, and nothing is lost of what its ring file holds."""
    flag = tmp_path / "hangs"
    if since == "start":
        flag.touch()
    done = train(
        [sys.executable, WATCHED, str(runs), "20", str(flag)], runs, FAILING_WITH="hang", FAILING_WHILE=str(flag)
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
def test_a_script_that_does_not_know_of_us(runs: Path) -> None:
    """TORCHLENS_PERF=1 where the disk hangs: it trains as ever."""
    command = [sys.executable, TRAIN, "--steps", "20"]
    unwatched = train(command, runs)
    done = train(command, runs, FAILING_WITH="hang", TORCHLENS_PERF="1", TORCHLENS_PERF_DIR=str(runs))

    assert (unwatched.returncode, done.returncode) == (0, 0), done.stderr
    assert trained(done) == trained(unwatched)
    assert "torchlens_perf: the report " in done.stderr


@pytest.mark.long
@pytest.mark.distributed
def test_ranks_of_a_job(runs: Path) -> None:
    """Two ranks under torchrun: neither waits for the other's disk."""
    command = torchrun("--logs-specs", "torchlens_perf", TRAIN, "--steps", "20")
    unwatched = train(torchrun(TRAIN, "--steps", "20"), runs)
    done = train(command, runs, FAILING_WITH="hang", TORCHLENS_PERF_DIR=str(runs))

    assert (unwatched.returncode, done.returncode) == (0, 0), done.stderr
    assert trained(done) == trained(unwatched)
    assert done.stderr.count("torchlens_perf: the report ") == 1


def wait_until_unattended(run: RunDirectory) -> None:
    """As wait_for_sidecar(), without making a folder."""
    deadline_s = time.monotonic() + 60
    while find_sidecar_lock(run.run_id) is not None and time.monotonic() < deadline_s:
        time.sleep(0.05)


@pytest.mark.parametrize("error", [errno.EROFS, *long(errno.ENOSPC, errno.ESTALE, errno.EIO, errno.EACCES)])
def test_a_disk_that_refuses_at_the_end(error: int, runs: Path, tmp_path: Path, expected: list[str]) -> None:
    """The line says why there is no report, and where the records are. They are read once the disk takes them."""
    flag = tmp_path / "refuses"
    command = [sys.executable, WATCHED, str(runs), "20", str(flag)]
    environment = {"FAILING_WITH": str(error), "FAILING_WHILE": str(flag), "TORCHLENS_PERF_EXIT_TIMEOUT_S": "60"}
    done = train(command, runs, **environment)

    assert done.returncode == 0, done.stderr
    assert trained(done) == expected
    assert done.stderr.startswith("torchlens_perf: no report: ")
    assert os.strerror(error) in done.stderr
    run = run_of(done)
    wait_until_unattended(run)
    (ring,) = run.local_rings()
    assert f"The records stay in {ring.parent} until this node restarts." in done.stderr
    flag.unlink()
    by_hand = [sys.executable, "-m", "torchlens_perf", *done.stderr.split("torchlens-perf ")[-1].split()]
    assert eventually(lambda: subprocess.run(by_hand, env=clean_environ()).returncode == 0), "or another start reads it"
    assert report(run)["ranks"][0]["steps"] == 20
    assert not ring.exists()


@pytest.mark.long
def test_a_disk_that_refuses_after_the_watch_has_begun(runs: Path, expected: list[str]) -> None:
    """The child that was asked first had no answer. The sidecar goes on asking, says why, and leaves nothing."""
    unanswered = (
        "import runpy, sys; from torchlens_perf.run import make_folders; make_folders.__file__ = '/nonexistent'\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", unanswered, WATCHED, str(runs), "20"]
    done = train(command, runs, FAILING_WITH=str(errno.EACCES), TORCHLENS_PERF_EXIT_TIMEOUT_S="60")
    run = run_of(done)
    wait_for_sidecar(run)

    assert trained(done) == expected
    assert done.stderr == f"torchlens_perf: no report: cannot write to {run.path}: Permission denied\n"
    assert list(run._local_files("*")) == []


# -- the child that is asked


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A folder whose disk hangs for this process's children, for as long as a file is there; both."""
    monkeypatch.setenv("LD_PRELOAD", str(library()))
    monkeypatch.setenv("FAILING_PATHS", str(tmp_path / "disk"))
    monkeypatch.setenv("FAILING_WITH", "hang")
    monkeypatch.setenv("FAILING_WHILE", str(tmp_path / "hangs"))
    (tmp_path / "hangs").touch()
    with everything_ended(str(tmp_path)):
        yield tmp_path / "disk" / "runs", tmp_path / "hangs"


def test_no_answer(hanging: tuple[Path, Path]) -> None:
    """Is told as such, after the time that was given."""
    folder, _ = hanging

    assert problem_with(folder, 0.5) == "its disk did not answer within 0.5 s"


def test_a_late_answer_is_undone(hanging: tuple[Path, Path]) -> None:
    """Nobody wants the folder any more: once the disk answers, the child takes away what it makes."""
    folder, flag = hanging
    request, again = FolderRequest([folder / "a" / "b"]), FolderRequest([folder / "a" / "c"])
    assert request.answer(0.5) == ""
    request.close()
    flag.unlink()
    assert again.answer(60) == MADE
    again.close()

    assert eventually(lambda: not folder.parent.exists())


def test_ranks_that_give_up_one_after_the_other(tmp_path: Path) -> None:
    """Folders in which another one had made some go too, once that one has given up."""
    folder = tmp_path / "runs"
    first, second = FolderRequest([folder]), FolderRequest([folder / "one"])
    assert first.answer(60) == second.answer(60) == MADE
    third = FolderRequest([folder / "one" / "deep"])
    assert third.answer(60) == MADE
    for request in (first, second, third):
        request.close()

    assert eventually(lambda: not folder.exists())


def test_what_was_kept_stays(hanging: tuple[Path, Path]) -> None:
    """And only what was made goes: not what was there, or what somebody else has put there."""
    folder, flag = hanging
    flag.unlink()
    kept, undone = FolderRequest([folder / "a"]), FolderRequest([folder / "b", folder / "c" / "d"])
    assert kept.answer(60) == MADE
    kept.keep()
    assert undone.answer(60) == MADE
    (folder / "c" / "theirs").write_text("")
    undone.close()

    assert eventually(lambda: not (folder / "b").exists() and not (folder / "c" / "d").exists())
    assert (folder / "a").is_dir()
    assert (folder / "c" / "theirs").exists()


def test_a_parent_that_is_killed_leaves_no_folder(tmp_path: Path) -> None:
    """Between its asking and its recording."""
    program = (
        "import sys, time; from pathlib import Path; from torchlens_perf.recorder.folder_request import FolderRequest\n"
        "request = FolderRequest([Path(sys.argv[1])]); print(request.answer(60), flush=True); time.sleep(600)\n"
    )
    folder = tmp_path / "runs" / "one"
    parent = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "made\n"
    assert folder.is_dir()
    parent.send_signal(signal.SIGKILL)
    parent.wait()

    assert eventually(lambda: not (tmp_path / "runs").exists())
