"""Wrong numbers planted in a real job over gloo are named with their rank and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.live_ranks import LiveRanks
from tests.support.processes import SCRIPTS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = str(SCRIPTS / "train_wrong_numbers.py")
AT_STEP = 80


def train(folder: Path, fault: str, ranks: int = 3, at_step: int = AT_STEP) -> dict[str, Any]:
    """Return the report after 400 steps, or as soon as wrong numbers are found."""

    def wanted(report: dict[str, Any]) -> Any:
        numbers, key = report["numbers"], "outliers" if fault == "spike" else "wrong"
        found = bool(numbers and numbers[key]) if fault else report["steps"]["count"] > 400
        return report if found else None

    environment = {"FAULT": fault, "AT_STEP": str(at_step), "RANK_WITH_FAULT": "1"}
    with LiveRanks(folder, ranks, script=SCRIPT, **environment) as live:
        found: dict[str, Any] = live.wait_for(wanted, 200)
    return found


def test_flipped_bit_names_rank_parameter_and_step(tmp_path: Path) -> None:
    report = train(tmp_path, "flip")
    verdict = report["verdicts"][0]

    assert (verdict["kind"], verdict["rank"]) == ("wrong_numbers", 1)
    assert AT_STEP <= verdict["since_step"] <= 1000
    assert verdict["text"].startswith("Rank 1 has other parameters than the other ranks")
    assert report["numbers"]["wrong"][0]["names"] == ["2.weight"]
    agreed = report["numbers"]["wrong"][0]["agreed_step"]
    assert agreed is None or agreed < AT_STEP


def test_loss_that_is_not_a_number_names_rank_and_step(tmp_path: Path) -> None:
    """One step later, all ranks have received it, but rank 1 had it first."""
    report = train(tmp_path, "loss", ranks=2)
    verdicts = [each for each in report["verdicts"] if each["kind"] == "wrong_numbers"]

    assert [(each["rank"], each["since_step"]) for each in verdicts] == [(1, AT_STEP)]
    assert "loss that is NaN or infinite" in verdicts[0]["text"]


def test_loss_far_above_usual_names_rank_and_step(tmp_path: Path) -> None:
    report = train(tmp_path, "spike", ranks=2, at_step=400)
    verdicts = [each for each in report["verdicts"] if each["kind"] == "number_outlier"]

    assert [(each["rank"], each["since_step"]) for each in verdicts] == [(1, 400)]
    assert_numbers_are_checked(report, ranks=2)


@pytest.mark.long  # The run with a single high loss also has no wrong numbers.
def test_clean_run_has_no_wrong_numbers(tmp_path: Path) -> None:
    report = train(tmp_path, "")

    assert report["numbers"]["outliers"] == []
    assert_numbers_are_checked(report, ranks=3)


def assert_numbers_are_checked(report: dict[str, Any], ranks: int) -> None:
    """Assert that the numbers of all ranks were compared, and that none is wrong."""
    numbers = report["numbers"]
    assert (numbers["wrong"], numbers["compared"]) == ([], ranks)
    for rank in numbers["ranks"]:
        assert rank["loss"]["count"] > 380
        assert rank["parameters"] >= 5
        assert rank["gradient_norm"]["count"] >= 5
    assert not [each for each in report["quality"]["notes"] if "not checked" in each]
