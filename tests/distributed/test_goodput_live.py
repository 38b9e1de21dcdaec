"""Real jobs that fail and continue: lost steps are exact, planted times have their class."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.goodput_job import FORWARD_S
from tests.support.processes import SCRIPTS, only_report, run_warm, torchrun
from torchlens_perf.analysis.collectives.hang import MIN_S

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = str(SCRIPTS / "goodput_job.py")
# torchrun's own store keeps the addresses of the first attempt, with which gloo cannot connect.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
STEPS, FAIL, SAVED = 100, 75, 60
LOST = FAIL - SAVED


def job(folder: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, float]], float]:
    """Run a job whose rank 1 is killed once. Return the report, the times by the clock of rank 1 for
    each attempt, and the job's duration."""
    began_s = time.monotonic()
    command = torchrun("--max-restarts", "1", SCRIPT, "--steps", str(STEPS), *arguments)
    done = run_warm(command, folder, 200, **OWN_STORE)
    lasted_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    lines = (folder / "times-1.jsonl").read_text().splitlines()
    return only_report(folder), [json.loads(line) for line in lines], lasted_s


def seconds(report: dict[str, Any]) -> dict[str, float]:
    return {name: each.seconds for name, each in report["goodput"].classes.items()}


@pytest.fixture(scope="module")
def failed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], list[dict[str, float]], float]:
    folder = tmp_path_factory.mktemp("goodput")
    planted = ("--fail", str(FAIL), "--data", "0.005", "--save", "0.3", "--evaluate", "0.5")
    return job(folder, *planted, "--after", "1.5")


@pytest.mark.long
def test_lost_steps_are_exact_by_the_optimizer_counter(
    failed: tuple[dict[str, Any], list[dict[str, float]], float],
) -> None:
    goodput = failed[0]["goodput"]
    assert [each.steps for each in goodput.attempts] == [FAIL, STEPS - SAVED]
    assert [each.first_step for each in goodput.attempts] == [0, SAVED]
    assert (goodput.lost_steps, goodput.lost_steps_from) == (LOST, "step counter")


@pytest.mark.long
def test_planted_times_are_measured_within_a_tenth(
    failed: tuple[dict[str, Any], list[dict[str, float]], float],
) -> None:
    """The truth is the job's own clock. Lost steps have their share of data loading."""
    report, (first, second), _ = failed
    found = seconds(report)
    kept = 1 - LOST / FAIL

    assert found["data_stall"] == pytest.approx(kept * first["data"] + second["data"], rel=0.1)
    # The job has not tagged its evaluations.
    assert found["without_gradients"] == pytest.approx(
        first["evaluate"] + second["evaluate"], rel=0.1
    )
    # The last checkpoint is saved after the last step.
    saved_s = first["save"] + second["save"] / 2
    assert found["checkpoint"] == pytest.approx(saved_s, rel=0.1)
    step_s = (first["data"] / FAIL) + FORWARD_S
    assert found["lost_work"] > 0.9 * LOST * step_s
    # The checkpoint after the last step and the time after it.
    assert 1.5 < found["idle"] < 4.0
    assert found["productive"] > (STEPS - 6) * FORWARD_S
    assert found["restart"] > 0
    assert found["hang"] == 0


def test_classes_add_up_to_the_wall_clock(
    failed: tuple[dict[str, Any], list[dict[str, float]], float],
) -> None:
    """torchrun starts before the ranks and ends after them."""
    report, _, lasted_s = failed
    found, wall_s = seconds(report), report["goodput"].wall_s

    assert sum(found.values()) == pytest.approx(wall_s, rel=1e-6)
    assert abs(found["other"]) < 0.01 * wall_s
    assert 0.4 * lasted_s < wall_s < lasted_s


@pytest.mark.long
def test_hang_in_which_the_job_fails_is_a_hang_and_not_a_restart(tmp_path: Path) -> None:
    """The finding outlives the attempt. It ends up to a few seconds before the job is killed."""
    hang_s = MIN_S + 15.0
    report, _, _ = job(tmp_path, "--fail", str(FAIL), "--save", "0.05", "--hang", str(hang_s))
    found = seconds(report)
    assert hang_s - 5 < found["hang"] < hang_s + 2
    assert found["restart"] < 15
    assert report["goodput"].lost_steps == LOST


@pytest.mark.long
def test_lost_steps_are_estimated_from_checkpoints_without_a_counter(tmp_path: Path) -> None:
    """SGD counts no steps, so the last step that saved is where training continued."""
    report, _, _ = job(tmp_path, "--optimizer", "SGD", "--fail", str(FAIL), "--save", "0.05")
    goodput = report["goodput"]
    assert [each.first_step for each in goodput.attempts] == [None, None]
    assert goodput.lost_steps_from == "checkpoints"
    assert goodput.lost_steps == pytest.approx(LOST, abs=1)
