"""Tests that the final report begins with a rank that stalled for a while, if the stall cost most."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import SCRIPTS, run_warm
from torchlens_perf.analysis.collectives.hang import MIN_S

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, STALL_STEP = 120, 60


def first_verdicts(folder: Path, stall_s: float) -> tuple[dict[str, Any], str]:
    """Run two ranks, of which rank 1 sleeps once. Return the report and its text."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(SCRIPTS / "train_ranks.py"),
    ]  # fmt: skip
    told = {
        "STEPS": str(STEPS), "HANG_RANK": "1", "HANG_AFTER": str(STALL_STEP), "HANG_S": str(stall_s),
        "GLOO_SOCKET_IFNAME": "lo", "TORCHLENS_PERF_DIR": str(folder),
        "TORCHLENS_PERF_EXIT_TIMEOUT_S": "60",
    }  # fmt: skip
    done = run_warm(command, folder, 300, **told)
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in folder.iterdir() if (path / "nodes").is_dir()]
    report = [sys.executable, "-m", "torchlens_perf", "report"]
    text, found = (run_warm([*report, *more, str(run)], folder).stdout for more in ([], ["--json"]))
    return json.loads(found), text


@pytest.mark.long  # On a busy machine, long steps may cost more.
def test_ended_hang_with_the_highest_cost_is_the_first_verdict(tmp_path: Path) -> None:
    """The verdict has the hang's rank, step, cost and stack. No other verdict is about this step."""
    report, text = first_verdicts(tmp_path, MIN_S + 20)
    verdict = report["verdicts"][0]

    assert (verdict["kind"], verdict["rank"], verdict["since_step"]) == (
        "hang_ended",
        1,
        STALL_STEP,
    )
    assert verdict["lost_s"] > MIN_S
    hung_s = report["goodput"]["classes"]["hang"]["seconds"]
    assert hung_s == pytest.approx(verdict["lost_s"])
    assert verdict["text"].startswith(f"The job hung in step {STALL_STEP} for ")
    assert ", and then continued: " in verdict["text"]
    assert "stuck here" in verdict["text"]
    assert verdict["evidence"]["stacks"]
    # On a busy machine another rank may be slow for a while, but the hang is not reported twice.
    earlier = text.partition("earlier in this run")[2]
    assert "hung" not in earlier
    assert "did not enter" not in earlier
    long = [
        row["evidence"]["long"]["steps"]
        for row in report["verdicts"]
        if row["kind"] == "long_steps"
    ]
    assert [STALL_STEP] not in long


@pytest.mark.long
def test_stall_shorter_than_a_hang_is_reported_with_its_rank(tmp_path: Path) -> None:
    report, _ = first_verdicts(tmp_path, 4.0)
    verdict = next(
        row
        for row in report["verdicts"]
        if row["kind"] == "long_steps" and STALL_STEP in row["evidence"]["long"]["steps"]
    )

    assert verdict["rank"] == 1
    assert verdict["evidence"]["long"]["steps"] == [STALL_STEP]
    assert f"Step {STALL_STEP}: " in verdict["text"]
    assert "waited" in verdict["text"]
    assert "for rank 1" in verdict["text"]
