"""A rank that stops for good is named while the job stands still, and no longer named once it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_ranks import LiveRanks
from tests.support.otlp_receiver import wait_for
from tests.support.processes import slowdown

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 3
NOTICED_S = 15.0  # on a quiet machine; nothing is said before ten seconds without a step
STARTED_S = 90.0


def hang(report: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict of a hang, if there is one."""
    return next((verdict for verdict in report["verdicts"] if verdict["kind"] == "hang"), None)


def steps(least: int) -> Callable[[dict[str, Any]], bool]:
    """Whether all ranks have made so many."""
    return lambda report: len(report["ranks"]) == RANKS and all(rank["steps"] >= least for rank in report["ranks"])


@pytest.mark.long
def test_stopped_rank(tmp_path: Path) -> None:
    """SIGSTOP: within 15 s a verdict names the rank; after SIGCONT it is gone, and steps are made again."""
    with LiveRanks(tmp_path, RANKS) as job:
        job.wait_for(steps(40), STARTED_S)
        assert hang(job.report()) is None
        pid = job.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        found = job.wait_for(hang, NOTICED_S * slowdown())
        command = [sys.executable, "-m", "torchlens_perf", "report", "--json", str(job.run_directory().path)]
        shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        os.kill(pid, signal.SIGCONT)
        made = max(rank["steps"] for rank in job.report()["ranks"])
        job.wait_for(lambda report: hang(report) is None and steps(made + 20)(report), STARTED_S)
        after = job.wait_for(lambda report: report["verdicts"][-1], STARTED_S)

    assert found["rank"] == 1
    assert (found["evidence"]["kind"], found["evidence"]["ranks"]) == ("stopped", [1])
    assert found["evidence"]["waiting"] == [0, 2]
    assert "stopped by a signal" in found["text"]
    assert hang(shown) is not None
    assert shown["verdicts"] == [hang(shown)]
    assert (after["kind"], after["rank"], after["evidence"]["went_on"]) == ("hang_ended", 1, True)
    assert after["held"]["until"] > after["held"]["since"] == found["held"]["since"]


def test_rank_that_is_stuck(tmp_path: Path) -> None:
    """A rank that sleeps in a section of its own is named with that section; those that wait for it are not. When
    somebody has killed the job, the report still begins with that."""
    with LiveRanks(tmp_path, RANKS, HANG_RANK="2", HANG_AFTER="40") as job:
        job.wait_for(steps(40), STARTED_S)
        found = job.wait_for(hang, NOTICED_S * slowdown())
        for pid in job.rank_pids().values():
            os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not job.report()["run"]["live"], 30)
        after = job.report()["verdicts"][0]

    assert found["rank"] == 2
    assert (found["evidence"]["kind"], found["evidence"]["ranks"]) == ("missing", [2])
    assert found["evidence"]["waiting"] == [0, 1]
    assert "stuck here" in found["text"]
    assert found["held"]["since_step"] == found["evidence"]["step"]
    assert (after["kind"], after["rank"], after["evidence"]["went_on"]) == ("hang_ended", 2, False)
    assert f"The job hung in step {found['evidence']['step']} for " in after["text"]
    assert "stuck here" in after["text"]
    assert after["held"]["since"] == found["held"]["since"] is not None
