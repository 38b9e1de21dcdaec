"""Tests of predicted changes of jobs with known times."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.roles.tables import job_iterations
from torchlens_perf.roles import what_if
from torchlens_perf.roles.causes import IDLE_ENGINES, find_causes
from torchlens_perf.roles.what_if import IterationChange, predict_changes


def changes(**times: Any) -> dict[str, IterationChange]:
    return {each.kind: each for each in predict_changes(job_iterations(**times))}


def test_gain_is_between_its_bounds() -> None:
    found = changes(tokens=lambda iteration, sample: 150 if sample == 4 else 30)

    assert found.keys() == {
        what_if.ONE_MORE, what_if.OVER_SAMPLING, what_if.PARTIAL, what_if.ASYNCHRONOUS
    }  # fmt: skip
    for each in found.values():
        assert 0 <= each.low_s <= each.gain_s <= each.high_s


def test_one_more_engine_takes_samples_that_wait() -> None:
    """Two engines generate three samples each, one after the other, in 0.9 s. The third ones move to
    the new engine, which needs 0.6 s."""
    found = changes(
        engine_of=lambda sample: sample // 3, queue_s=lambda iteration, sample: 0.3 * (sample % 3)
    )

    assert found[what_if.ONE_MORE].gain_s == pytest.approx(0.3)
    assert changes(queue_s=lambda *_: 0.0)[what_if.ONE_MORE].gain_s == 0.0


def test_over_sampling_does_not_wait_for_the_longest_sample() -> None:
    """Engines generate two samples at once, so one more waits for 0.3 s: instead of 150 tokens, the
    last sample has 30 after 30 others."""
    found = changes(tokens=lambda iteration, sample: 150 if sample == 4 else 30)

    assert found[what_if.OVER_SAMPLING].gain_s == pytest.approx(0.9)
    assert found[what_if.OVER_SAMPLING].high_s >= 1.2
    assert found[what_if.OVER_SAMPLING].value == 1


def test_continued_samples_need_their_time_at_least() -> None:
    found = changes(tokens=lambda iteration, sample: 150 if sample == 4 else 30)[what_if.PARTIAL]

    assert found.gain_s < 1.2 <= found.high_s


def test_cut_is_at_the_99th_percentile_of_enough_samples() -> None:
    found = changes(
        iterations=20,
        tokens=lambda iteration, sample: 150 if (iteration, sample) == (7, 4) else 30,
    )[what_if.CUT]

    assert found.value == 30
    assert found.gain_s == pytest.approx(1.2 / 20)
    assert what_if.CUT not in changes(iterations=10)


def test_overlap_gains_what_idle_engines_cost() -> None:
    """One question has one number."""
    iterations = job_iterations(steps_s=1.5)
    idle = next(each for each in find_causes(iterations) if each.kind == IDLE_ENGINES)
    found = next(each for each in predict_changes(iterations) if each.kind == what_if.ASYNCHRONOUS)

    assert found.gain_s == pytest.approx(idle.seconds / len(iterations))


def test_samples_whose_generation_was_not_recorded_are_one_queue() -> None:
    iterations = [
        dataclasses.replace(
            each,
            samples=[
                dataclasses.replace(
                    sample, segments=[part._replace(waiting=True) for part in sample.segments]
                )
                for sample in each.samples
            ],
        )
        for each in job_iterations()
    ]
    found = {each.kind: each for each in predict_changes(iterations)}

    for each in found.values():
        assert 0 <= each.low_s <= each.gain_s <= each.high_s
    assert what_if.OVER_SAMPLING in found


def test_few_iterations_predict_nothing() -> None:
    assert not changes(iterations=2)
