"""Files of a run are removed or renamed while the job runs: training goes on, messages are true.

The sidecars are real.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recorder.test_late_report import WRITING, sidecar_of, watched
from tests.support.failing_calls import library
from tests.support.processes import ROOT, read_by_hand, report, run
from torchlens_perf.recorder import sidecar
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock, is_writer_running
from torchlens_perf.watching import Watch

REMOVED = "was removed or renamed while the run recorded"


def eventually(is_true: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 30
    while not is_true() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return is_true()


def ring_of(watch: Watch) -> Path:
    """Return the path of this rank's ring file in shared memory."""
    assert watch.run_dir is not None
    (ring,) = filter(is_writer_running, RunDirectory(watch.run_dir).local_rings())
    return ring


def start_to_read(watch: Watch) -> int:
    """Let the sidecar read the ring, and return its pid."""
    pid = sidecar_of(watch)
    assert not watch.summary().missing
    return pid


@pytest.mark.parametrize("removed", ["ring", "ring and registration", "folder"])
def test_ring_that_is_removed_before_it_is_read_is_named(
    removed: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar ends at once, although the job runs."""
    rings: list[Path] = []
    ensure_running = sidecar.ensure_running

    def remove_and_start(run: RunDirectory, *arguments: object) -> bool:
        for ring in filter(is_writer_running, run.local_rings()):
            rings.append(ring)
            gone = {"ring": ring.name, "ring and registration": "*.r*", "folder": "*"}[removed]
            for path in ring.parent.glob(gone):
                path.unlink()
        return ensure_running(run, *arguments)

    monkeypatch.setattr(sidecar, "ensure_running", remove_and_start)
    with watched(tmp_path) as watch:
        assert eventually(lambda: find_sidecar_lock(watch.run_dir.name) is None)
    printed = capfd.readouterr().err
    value = report(RunDirectory(watch.run_dir))

    assert printed == (
        f"torchlens_perf: there is no report: {rings[0]} {REMOVED}. Records that the sidecar had"
        f" not read are lost. Next: torchlens-perf report {watch.run_dir}\n"
    )
    assert value["verdicts"][0].kind == "no_steps"
    assert re.search("No rank's records were read: .*removed", value["verdicts"][0].text)


@pytest.mark.parametrize("removed", ["ring", "folder", "folder just before the end"])
def test_records_of_an_opened_ring_survive_its_removal(removed: str, tmp_path: Path) -> None:
    """No second sidecar replaces the one that has the ring open."""
    with watched(tmp_path) as watch:
        pid = start_to_read(watch)
        ring = ring_of(watch)
        if removed == "ring":
            ring.unlink()
        else:
            shutil.rmtree(ring.parent)
        if removed == "folder":
            assert eventually(ring.parent.exists)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())

    value = report(RunDirectory(watch.run_dir))
    assert [(rank["steps"], rank["state"]) for rank in value["ranks"]] == [(20, "closed")]
    assert value["quality"]["lost"] == 0
    assert "20 steps" in (watch.run_dir / "report.txt").read_text()


@pytest.mark.parametrize("what", ["run", "nodes", "renamed run", "renamed parent"])
def test_message_names_the_folder_of_the_run_that_was_removed(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar ends, and the records are kept until the next watch."""
    monkeypatch.setenv("TORCHLENS_PERF_EXIT_TIMEOUT_S", "60")
    folder = tmp_path / "runs"
    with watched(folder) as watch:
        pid = start_to_read(watch)
        run = RunDirectory(watch.run_dir)
        removed = run.nodes if what == "nodes" else run.path
        if what == "renamed parent":
            folder.rename(tmp_path / "moved")
        elif what == "renamed run":
            run.path.rename(tmp_path / "moved")
        else:
            shutil.rmtree(removed)
    printed = capfd.readouterr().err
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())

    # A slow machine says first that the program waits.
    printed = re.sub(rf"^{WRITING}.*\n", "", printed)
    assert printed.startswith(f"torchlens_perf: no report: {removed} {REMOVED}")
    assert "No such file" not in printed
    assert run.path.exists() == (what == "nodes")


@pytest.mark.parametrize("what", ["rings", "run"])
def test_ring_that_is_removed_from_the_run_directory_is_named(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with watched(tmp_path, sidecar=False) as watch:
        run = RunDirectory(watch.run_dir)
        if not list(run.rings.glob("*.ring")):
            pytest.skip("the disk of the temporary directory is not used for rings")
        shutil.rmtree(run.rings if what == "rings" else run.path)
    printed = capfd.readouterr().err

    assert re.fullmatch(
        rf"torchlens_perf: there is no report: {re.escape(str(run.rings))}/.*\.ring {REMOVED}\."
        r" If it was renamed: torchlens-perf sidecar NEW_RUN_DIRECTORY\n",
        printed,
    )


@pytest.mark.parametrize("when", ["during the run", "after the run"])
def test_run_directory_with_rings_can_be_renamed(when: str, tmp_path: Path) -> None:
    with watched(tmp_path, sidecar=False) as watch:
        moved = RunDirectory(tmp_path / "moved")
        if when == "during the run":
            os.rename(watch.run_dir, moved.path)
    if when == "after the run":
        os.rename(watch.run_dir, moved.path)
    if not moved.rings.exists():
        pytest.skip("the disk of the temporary directory is not used for rings")
    read_by_hand(moved.path, tmp_path)

    assert [rank["steps"] for rank in report(moved)["ranks"]] == [20]


# From the end of training on, each look at this rank's ring file fails, and the sidecar was killed.
DISK_FAILS = """
import errno, os, signal, sys
from pathlib import Path
from tests.jobs.test_removed_folders import eventually, ring_of, start_to_read
from tests.recorder.test_late_report import watched
from tests.support.failing_calls import EACH, FailingCalls

with watched(Path(sys.argv[1])) as watch:
    sidecar = start_to_read(watch)
    os.kill(sidecar, signal.SIGKILL)
    assert eventually(lambda: not Path(f"/proc/{sidecar}").exists())
    FailingCalls().arm([str(ring_of(watch))], EACH, errno.EIO)
"""


@pytest.mark.long
def test_ring_on_a_failing_disk_is_not_said_to_be_removed(tmp_path: Path) -> None:
    """A new sidecar reads it and reports."""
    done = run(
        [sys.executable, "-c", DISK_FAILS, str(tmp_path)], ROOT, LD_PRELOAD=str(library()),
        TORCHLENS_PERF_EXIT_TIMEOUT_S="60",
    )  # fmt: skip

    assert "20 steps" in done.stderr
    assert "removed" not in done.stderr
