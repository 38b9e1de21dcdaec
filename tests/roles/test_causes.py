"""Tests of causes: each planted one is the first, and a job without one has none that is large."""

from __future__ import annotations

from typing import Any

import pytest

from tests.roles.tables import job_iterations
from torchlens_perf.roles import causes
from torchlens_perf.roles.causes import Cause, RankStep, find_causes
from torchlens_perf.roles.evidence import build_verdict

PLANTED: dict[str, dict[str, Any]] = {
    causes.LONG_SAMPLES: {"tokens": lambda iteration, sample: 150 if sample == 4 else 30},
    causes.SLOW_ENGINE: {"token_s": lambda engine: 0.025 if engine == "engine-1" else 0.01},
    causes.LOADED_ENGINE: {
        "engine_of": lambda sample: 2 if sample % 2 else sample % 3,
        "queue_s": lambda iteration, sample: 0.4 if sample in (3, 5) else 0.01,
    },
    causes.SLOW_TOOL: {"tool_s": lambda iteration, sample: 0.4},
    causes.SLOW_REWARD: {"reward_s": lambda iteration, sample: 0.4},
    causes.SLOW_WEIGHTS: {"weights_s": 0.5},
    causes.IDLE_ENGINES: {"steps_s": 1.5},
}
SUBJECTS = {causes.SLOW_ENGINE: "engine-1", causes.LOADED_ENGINE: "engine-2"}


def large(found: list[Cause]) -> list[str]:
    return [each.kind for each in found if each.is_large]


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_cause_is_the_only_large_one(kind: str) -> None:
    found = find_causes(job_iterations(**PLANTED[kind]))

    assert large(found) == [kind]
    assert found[0].subject == SUBJECTS.get(kind, found[0].subject)


@pytest.mark.parametrize(
    ("kind", "saved_s"),
    [
        (causes.LONG_SAMPLES, 1.2),
        (causes.SLOW_ENGINE, 0.45),  # Its queue would be shorter, too, but not that of others.
        (causes.LOADED_ENGINE, 0.39),
        (causes.SLOW_TOOL, 0.41),
        (causes.SLOW_REWARD, 0.41),
        (causes.SLOW_WEIGHTS, 0.5),
    ],
)
def test_cost_is_what_each_iteration_would_save(kind: str, saved_s: float) -> None:
    found = find_causes(job_iterations(**PLANTED[kind]))[0]

    assert found.seconds / 5 == pytest.approx(saved_s)


def test_usual_job_has_no_large_cause() -> None:
    found = find_causes(job_iterations(tokens=lambda iteration, sample: 26 + 2 * sample % 9))

    assert not large(found)


@pytest.mark.parametrize(
    "times",
    [
        {"tokens": lambda iteration, sample: 55 if sample == 4 else 30},  # Usual variation.
        {
            # The engine whose samples wait has almost the same load as others.
            "queue_s": lambda iteration, sample: 0.4 if sample in (2, 5) else 0.01,
            "tokens": lambda iteration, sample: 33 if sample in (2, 5) else 30,
        },
        {"token_s": lambda engine: 0.0125 if engine == "engine-1" else 0.01},
        {"steps_s": 0.35},
    ],
)
def test_small_difference_is_no_large_cause(times: dict[str, Any]) -> None:
    """Each costs more than a tenth of the iterations, or nearly."""
    found = find_causes(job_iterations(**times))

    assert found[0].share >= 0.09
    assert not large(found)


def test_long_samples_are_named_with_their_engine() -> None:
    found = find_causes(job_iterations(**PLANTED[causes.LONG_SAMPLES]))[0]

    assert found.iterations == 5
    assert found.samples[0] == causes.LongSample("0-4", "0", "engine-1", 150, 30)


def test_slow_rank_costs_its_excess_over_the_slowest_other_rank() -> None:
    own_s = {"rank 0": 0.05, "rank 1": 0.25, "rank 2": 0.1}
    steps = [
        RankStep(str(batch), rank, step, seconds)
        for batch in range(5)
        for step in range(2)
        for rank, seconds in own_s.items()
    ]
    found = find_causes(job_iterations(steps_s=0.75), steps, steps_per_iteration=3)

    assert (found[0].kind, found[0].subject, found[0].is_large) == (
        causes.SLOW_RANK,
        "rank 1",
        True,
    )
    assert found[0].seconds == pytest.approx(5 * 3 * 0.15)
    assert not [each for each in find_causes(job_iterations()) if each.kind == causes.SLOW_RANK]


def test_few_iterations_show_no_cause() -> None:
    assert not find_causes(job_iterations(iterations=2, **PLANTED[causes.SLOW_TOOL]))


@pytest.mark.parametrize("kind", PLANTED)
def test_verdict_has_numbers_a_sentence_and_an_action(kind: str) -> None:
    iterations = job_iterations(**PLANTED[kind])
    mean_s = sum(each.seconds for each in iterations) / len(iterations)
    verdict = build_verdict(find_causes(iterations)[0], len(iterations), mean_s, 15)

    assert verdict.kind == "slow_iteration"
    assert verdict.evidence.cause == kind
    assert verdict.lost_s == pytest.approx((verdict.cost_s_per_step or 0) * 15)
    assert " shorter" in verdict.text
    assert "{" not in verdict.action
    assert SUBJECTS.get(kind, "") in verdict.text


def test_generations_without_duration_are_no_slow_engine() -> None:
    """Events of a clock that stands still have no time per token."""
    found = find_causes(job_iterations(token_s=lambda engine: 0.0, queue_s=lambda *_: 0.0))

    assert causes.SLOW_ENGINE not in large(found)


BOTH: list[tuple[set[str], dict[str, Any], float]] = [
    (
        {causes.SLOW_TOOL, causes.SLOW_WEIGHTS},
        {"tool_s": lambda iteration, sample: 0.4, "weights_s": 0.5},
        0.41 + 0.5,
    ),
    (
        # The slow tool of one sample hides the slow reward of another one.
        {causes.SLOW_TOOL, causes.SLOW_REWARD},
        {
            "tool_s": lambda iteration, sample: 0.9 if sample == 1 else 0.02,
            "reward_s": lambda iteration, sample: 0.6 if sample == 2 else 0.02,
        },
        0.9 + 0.02 + 0.02,
    ),
]


@pytest.mark.parametrize(("kinds", "times", "together_s"), BOTH)
def test_two_causes_are_named_with_what_both_cost(
    kinds: set[str], times: dict[str, Any], together_s: float
) -> None:
    iterations = job_iterations(**times)
    first, second = (each for each in find_causes(iterations) if each.is_large)

    assert {first.kind, second.kind} == kinds
    assert (first.others, second.others) == ((second.kind,), (first.kind,))
    assert first.together_s == second.together_s == pytest.approx(5 * together_s)
    text = build_verdict(second, 5, sum(each.seconds for each in iterations) / 5, 15).text
    assert f"Both (with {first.kind.replace('_', ' ')}): at most" in text


def test_bounds_contain_the_cost() -> None:
    for kind, times in PLANTED.items():
        found = next(each for each in find_causes(job_iterations(**times)) if each.kind == kind)
        assert 0 <= found.low_s <= found.seconds <= found.high_s
