"""Tests of the verdict on ranks that ended normally after different numbers of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.report.test_schema import BASE, HOST, state_of
from tests.support.reports import checked
from torchlens_perf.report.build import build_report
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.node_state import NodeState, ProcessState


def uneven(*states: ProcessState) -> list[dict[str, Any]]:
    """Return the verdicts on uneven steps of the report on some ranks."""
    node = NodeState(HOST, {state.identity.key: state for state in states})
    verdicts = checked(build_report("run", [node]))["verdicts"]
    return [each for each in verdicts if each.kind == "uneven_steps"]


def rank(number: int, steps: int, world: int = 3, **flags: int) -> ProcessState:
    return state_of(number, world, [{**BASE, **flags}] * steps)


def test_ranks_whose_data_ended_first_are_named() -> None:
    """The steps that the other ranks made without these ranks are visible."""
    (found,) = uneven(rank(0, 40), rank(1, 70), rank(2, 40))

    assert found.sentence.startswith(
        "Ranks 0,2 ended normally after 40 steps, but rank 1 made 70: from step 40 on"
    )
    assert (found.evidence.ranks, found.evidence.fewest, found.evidence.most) == (
        (0, 2),
        40,
        70,
    )


def long_steps(at: Sequence[int], most: int = 70, flags: int = 0) -> list[list[int]]:
    """Return the steps in the verdicts on long steps of a run in which rank 0 ended at step 40."""
    longer = {**BASE, "communication": 60.0, "flags": flags}
    steps = [longer if step in at else BASE for step in range(most)]
    states = [state_of(0, 2, steps[:40]), state_of(1, 2, steps)]
    node = NodeState(HOST, {state.identity.key: state for state in states})
    verdicts = checked(build_report("run", [node]))["verdicts"]
    assert any(each.kind == "uneven_steps" for each in verdicts) is (most > 41)
    return [each.evidence.long["steps"] for each in verdicts if each.kind == "long_steps"]


@pytest.mark.parametrize(
    ("at", "shown"),
    [
        ([45, 52, 60, 66], False),
        (range(40, 70, 3), False),
        ([40], False),
        ([20, 45, 60], True),
        (range(6, 70, 3), True),
        (range(6, 70, 4), True),
    ],
)
def test_long_steps_after_a_rank_has_ended_are_not_reported_twice(
    at: Sequence[int], shown: bool
) -> None:
    assert bool(long_steps(at)) is shown


def test_long_steps_with_a_known_reason_are_reported_beside_uneven_steps() -> None:
    assert long_steps([45, 52, 60, 66], flags=Flag.CHECKPOINT)


HEALTHY: dict[str, Callable[[], tuple[ProcessState, ...]]] = {
    "equal": lambda: (rank(0, 70), rank(1, 70), rank(2, 70)),
    "a step was in progress": lambda: (rank(0, 70), rank(1, 71), rank(2, 71)),
    "less than a percent": lambda: (rank(0, 300), rank(1, 302), rank(2, 302)),
    "rank 0 evaluates": lambda: (
        rank(0, 90, flags=Flag.EVALUATION), rank(1, 70), rank(2, 70),
    ),
    "servers": lambda: tuple(rank(n, 40 + 30 * n, flags=Flag.INFERENCE) for n in range(3)),
    "a rank is missing": lambda: (rank(0, 40), rank(1, 70)),
    "a rank died": lambda: (
        dataclasses.replace(rank(0, 40), ended="died"), rank(1, 70), rank(2, 70),
    ),
    "a rank still runs": lambda: (
        dataclasses.replace(rank(1, 70), ended=""), rank(0, 40), rank(2, 70),
    ),
    "other models": lambda: tuple(
        dataclasses.replace(rank(n, 40 + 30 * n), facts=RankFacts(model=f"model {n}"))
        for n in range(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY)
def test_ranks_that_need_not_make_equally_many_steps_are_not_named(case: str) -> None:
    assert uneven(*HEALTHY[case]()) == []
