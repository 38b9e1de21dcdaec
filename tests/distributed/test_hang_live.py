"""Tests that a stopped rank is named while the job hangs, and no longer after it continues."""

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
from tests.support.processes import SCRIPTS, slowdown
from tests.support.servers import wait_for
from torchlens_perf.sidecar.host.stacks import find_py_spy

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RANKS = 3
# Time limit on an idle machine. A hang is reported after ten seconds without a step.
NOTICED_S = 15.0
STARTED_S = 90.0


def hang(report: dict[str, Any], kind: str = "hang") -> dict[str, Any] | None:
    """Return the verdict of a hang, or None."""
    return next((verdict for verdict in report["verdicts"] if verdict["kind"] == kind), None)


def steps(least: int) -> Callable[[dict[str, Any]], bool]:
    """Return a condition that is true once all ranks have made `count` steps."""
    return lambda report: (
        len(report["ranks"]) == RANKS and all(rank["steps"] >= least for rank in report["ranks"])
    )


@pytest.mark.long
def test_stopped_rank_is_named_until_it_continues(tmp_path: Path) -> None:
    """After SIGSTOP a verdict names the rank within 15 s.

    After SIGCONT the verdict ends and steps continue.
    """
    with LiveRanks(tmp_path, RANKS) as job:
        job.wait_for(steps(40), STARTED_S)
        assert hang(job.report()) is None
        pid = job.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        found = job.wait_for(hang, NOTICED_S * slowdown())
        command = [
            sys.executable,
            "-m",
            "torchlens_perf",
            "report",
            "--json",
            str(job.run_directory().path),
        ]
        shown = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
        os.kill(pid, signal.SIGCONT)
        made = max(rank["steps"] for rank in job.report()["ranks"])
        job.wait_for(lambda report: hang(report) is None and steps(made + 20)(report), STARTED_S)
        after = job.wait_for(lambda report: hang(report, "hang_ended"), STARTED_S)

    assert found["rank"] == 1
    assert (found["evidence"]["kind"], found["evidence"]["ranks"]) == ("stopped", [1])
    assert found["evidence"]["waiting"] == [0, 2]
    assert "stopped by a signal" in found["text"]
    assert hang(shown) is not None
    assert shown["verdicts"] == [hang(shown)]
    assert (after["kind"], after["rank"], after["evidence"]["went_on"]) == ("hang_ended", 1, True)
    assert after["held"]["until"] > after["held"]["since"] == found["held"]["since"]


def test_stuck_rank_is_named_with_its_section(tmp_path: Path) -> None:
    """The stuck rank sleeps in a section. Ranks that wait for the stuck rank are not named.

    After the job is killed, the report still begins with this verdict.
    """
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


@pytest.mark.long
@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
def test_missing_barrier_is_shown_with_the_calls_of_both_ranks(tmp_path: Path) -> None:
    """DDP's constructor broadcasts in the same group, so the group has several operations.

    Neither rank is named, and the network is not mentioned.
    """
    lines = (SCRIPTS / "train_ranks.py").read_text().splitlines()
    barrier, backward = (
        next(number for number, line in enumerate(lines, 1) if call in line)
        for call in ("dist.barrier()", "backward()")
    )
    with LiveRanks(tmp_path, 2, BARRIER_RANK="0", HANG_AFTER="40") as job:
        found = job.wait_for(hang, STARTED_S * slowdown())

    assert (found["evidence"]["kind"], found["evidence"]["ranks"]) == ("mismatch", [])
    assert "Rank 0 called barrier, rank 1 called allreduce as" in found["text"]
    first, second = found["evidence"]["places"]
    assert f"rank 0: barrier, train_ranks.py:{barrier} in " in first
    assert f"rank 1: allreduce, inside backward, train_ranks.py:{backward} in " in second
    assert "the calls differ." in found["text"]
    assert found["action"].startswith("let all ranks call the same operations")
    assert "network" not in found["text"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("work", "seen", "action"),
    [
        (
            "EVALUATING_RANK",
            "it made 20 forward passes without a backward pass, as in an evaluation",
            "let all ranks evaluate a part of the data",
        ),
        (
            "SAVING_RANK",
            "it saves a checkpoint, last inside torch.save",
            "look at the storage to which rank 1",
        ),
    ],
)
def test_rank_that_evaluates_or_saves_alone_is_named_with_its_work(
    work: str, seen: str, action: str, tmp_path: Path
) -> None:
    """The other rank waits in the all-reduce of the next step, and is not named."""
    with LiveRanks(tmp_path, 2, HANG_AFTER="40", **{work: "1"}) as job:
        found = job.wait_for(hang, STARTED_S * slowdown())

    assert (found["rank"], found["evidence"]["kind"]) == (1, "missing")
    assert (found["evidence"]["ranks"], found["evidence"]["waiting"]) == ([1], [0])
    assert found["evidence"]["step"] == found["held"]["since_step"] == 40
    assert f"rank 1 ({found['where']['host.name']}) did not enter it: {seen}" in found["text"]
    assert found["action"].startswith(action)
