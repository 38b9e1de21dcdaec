"""Ranks with wrong numbers are named, and ranks whose numbers are only missing are not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from torchlens_perf.analysis.statistics.number_checks import NumberChecks
from torchlens_perf.diagnosis.wrong_numbers import find_wrong_numbers
from torchlens_perf.run.ring import GRADIENT_NORM, LOSS, Kind, record_dtype

NAMES = ["(other)", LOSS, GRADIENT_NORM, "weight", "bias"]
GROUP = 77


def checks_of(
    values: dict[str, Iterable[float]] | None = None,
    bits: Iterable[int | None] = (),
    parameters: tuple[str, ...] = ("weight",),
) -> NumberChecks:
    """Return checks of one rank: values of step 0, 1, ..., and hashes of every step."""
    rows = []
    for name, numbers in (values or {}).items():
        for step, number in enumerate(numbers):
            rows.append((step, name, int(np.float64(number).view(np.uint64)), 0))
    for check, found in enumerate(bits):
        if found is not None:
            name = parameters[check % len(parameters)]
            rows.append((check, name, found, check << 32 | GROUP))
    records = np.zeros(len(rows), record_dtype())
    for record, (step, name, value0, value1) in zip(records, rows, strict=True):
        record["kind"], record["step"], record["name_id"] = Kind.NUMBERS, step, NAMES.index(name)
        record["value0"], record["value1"] = value0, value1
    found = NumberChecks()
    found.add_records(records, NAMES)
    return found


def wrong(*ranks: NumberChecks, slow: Iterable[int] = ()) -> list[Any]:
    found = find_wrong_numbers(dict(enumerate(ranks)), set(slow))
    assert found is not None
    return found["wrong"]


def test_nothing_is_reported_without_checks() -> None:
    assert find_wrong_numbers({0: NumberChecks()}, ()) is None
    assert wrong(checks_of({LOSS: [1.0, 2.0]})) == []


def test_rank_that_differs_from_most_ranks_is_named() -> None:
    usual = [1, 2, 3, 4, 5, 6]
    (found,) = wrong(
        checks_of(bits=usual), checks_of(bits=[1, 2, 3, 9, 8, 7]), checks_of(bits=usual), slow=[1]
    )
    assert (found["ranks"], found["since_step"], found["agreed_step"]) == ([1], 3, 2)
    assert (found["count"], found["names"]) == (3, ["weight"])
    assert found["is_certain"]
    assert found["is_slow"]


def test_either_of_two_ranks_may_be_wrong() -> None:
    (found,) = wrong(checks_of(bits=[1, 2, 3]), checks_of(bits=[1, 2, 4]))
    assert (found["ranks"], found["since_step"], found["is_certain"]) == ([0, 1], 2, False)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([[1, 1, 1], [2, 2, 2]], id="never equal"),
        pytest.param([[1, 4, 7], [1, 5, 8], [1, 6, 9]], id="no majority"),
        pytest.param([[1, 2, 3], [1, None, 4], [1, 2, None]], id="two of three ranks checked"),
    ],
)
def test_ranks_that_are_not_known_to_be_replicas_are_not_named(ranks: list[list[int]]) -> None:
    """Their parameters may be averaged rarely, or a check is missing."""
    assert wrong(*(checks_of(bits=each) for each in ranks)) == []


def test_only_ranks_of_one_group_are_compared() -> None:
    other = checks_of(bits=[5, 6, 7])
    other.newest = [each._replace(group=GROUP + 1) for each in other.newest]
    assert wrong(checks_of(bits=[1, 2, 3]), checks_of(bits=[1, 2, 3]), other) == []


def test_first_rank_whose_loss_is_not_finite_is_named() -> None:
    sick = [1.0, 1.0, math.nan, math.nan]
    (found,) = wrong(
        checks_of({LOSS: [1.0, 1.0, 1.0, math.inf]}), checks_of({LOSS: sick}), slow=[0]
    )
    assert (found["what"], found["ranks"], found["since_step"]) == (LOSS, [1], 2)
    assert not found["is_everywhere"]
    assert not found["is_slow"]


def test_rank_is_not_named_if_other_ranks_were_not_checked_then() -> None:
    """Gradients are equal on all ranks, and rank 0 skipped its last checks."""
    (found,) = wrong(
        checks_of({GRADIENT_NORM: [1.0, 1.0]}), checks_of({GRADIENT_NORM: [1.0, 1.0, math.nan]})
    )
    assert found["is_everywhere"]


def test_long_run_keeps_a_bounded_number_of_checks_over_its_whole_time() -> None:
    count = 20_000
    usual, sick = [7] * count, [7] * 3000 + [8] * (count - 3000)
    ranks = [checks_of(bits=each, parameters=("weight", "bias")) for each in (usual, sick, usual)]

    assert all(len(each.earlier) + len(each.newest) <= 256 for each in ranks)
    (found,) = wrong(*ranks)
    assert 3000 <= found["since_step"] <= 3000 + 512
    assert found["agreed_step"] >= 3000 - 512
