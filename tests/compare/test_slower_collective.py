"""A collective that transfers more is named by a comparison of recorded runs of two gloo ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.live_ranks import LiveRanks
from tests.support.processes import SCRIPTS, wait_for_sidecar
from torchlens_perf.compare.comparison import ComparedRun, build_comparison, read_compared_run
from torchlens_perf.compare.measures import DETAILS, Kind

pytestmark = [pytest.mark.distributed, pytest.mark.long]
RUNS = 5


def record(folder: Path, megabytes: float) -> ComparedRun:
    folder.mkdir()
    script = str(SCRIPTS / "reduce_ranks.py")
    with LiveRanks(folder, 2, script=script, MEGABYTES=str(megabytes)) as job:
        run = job.run_directory()
        deadline_s = time.monotonic() + 90
        # The last report is written when all ranks have ended.
        while not (run.path / "report.txt").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        wait_for_sidecar(run)
    return read_compared_run(run.path)


def test_collective_that_transfers_more_is_named_first(tmp_path: Path) -> None:
    sides: tuple[list[ComparedRun], list[ComparedRun]] = ([], [])
    for number in range(RUNS):
        for side, megabytes in zip(sides, (1, 16), strict=True):
            side.append(record(tmp_path / f"{number}-{megabytes}", megabytes))
    found = build_comparison(*sides)
    (measure, change), *_ = found.list_changed(*DETAILS)
    assert measure.kind is Kind.COLLECTIVE
    assert measure.name.startswith("allreduce float32")
    assert change.after > 3 * change.before
