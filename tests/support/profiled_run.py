"""A recorded run of gloo ranks, and the profiles that torch.profiler made of some of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.live_ranks import LiveRanks
from tests.support.processes import SCRIPTS, wait_for_sidecar
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import BY_USER, Request
from torchlens_perf.run.directory import RunDirectory

ACTIVE = 12
"""Steps of a profile."""
CAPTURED = range(36, 39)
"""Steps of the run that a capture of rank 1 contains, if there are two ranks."""


class ProfiledRun(NamedTuple):
    run: RunDirectory
    profiles: list[Path]
    """The file of each rank."""


def record_profiled_run(folder: Path, ranks: int) -> ProfiledRun:
    """Run profile_ranks.py, with a capture of rank 1 if there are two ranks."""
    with LiveRanks(folder, ranks, script=str(SCRIPTS / "profile_ranks.py")) as job:
        run = job.run_directory()
        job.wait_for(lambda report: len(report["ranks"]) == ranks, 90)
        if ranks > 1:
            request = Request("one", BY_USER, time.time(), 0, (1,), CAPTURED.start, len(CAPTURED))
            capture_files.submit_request(run.captures, request)
            _wait(capture_files.rank_folder(run.captures, "one", 1).exists)
            (folder / "go").touch()
            # The sidecar compresses the trace and then writes the outcome.
            _wait(lambda: capture_files.read_outcome(run.captures, request, 1) is not None)
        wait_for_sidecar(run)
    return ProfiledRun(run, [folder / f"rank-{rank}.json" for rank in range(ranks)])


def _wait(wanted: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not wanted():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
