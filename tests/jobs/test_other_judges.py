"""Tests of other tools' rules in the accuracy benchmark, on values small enough to
compute by hand.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.other_judges import (
    below,
    individual_score,
    relative_score,
    slowest_forward,
    slowest_step,
)
from torchlens_perf.run.records import OWN_PARTS


def parts(
    forward: list[list[float]], backward: float = 200.0, optimizer: float = 0.0
) -> np.ndarray:
    """Return [ranks, steps, parts] with the given forward times."""
    made = np.zeros((len(forward), len(forward[0]), len(OWN_PARTS)), np.float32)
    made[:, :, OWN_PARTS.index("forward")] = forward
    made[:, :, OWN_PARTS.index("backward")] = backward
    made[:, :, OWN_PARTS.index("optimizer")] = max(optimizer, 1e-3)
    return made


def test_relative_score_is_the_mean_ratio_of_medians() -> None:
    """Per kernel, the ranks' smallest median is divided by the rank's. Time weights the ratios.

    One long step does not change the medians.
    """
    score = relative_score(parts([[100, 100, 100], [200, 200, 900]]))

    assert score[0] == pytest.approx(1.0)
    assert score[1] == pytest.approx((0.5 * 1300 + 1.0 * 600) / 1900, rel=1e-4)
    assert below(score, 0.75).named == below(score, 0.9).named == {1}
    assert below(score, 0.5).named == frozenset()
    assert below(score, 0.5).first == 1


def test_individual_score_compares_a_rank_with_its_own_best() -> None:
    """A rank that was slow from the start does not have a low score."""
    first, best = individual_score(parts([[100, 100], [300, 300]]), None)
    second, best = individual_score(parts([[200, 200], [300, 300]]), best)
    third, _ = individual_score(parts([[100, 100], [300, 300]]), best)

    assert first == pytest.approx([1, 1])
    assert second == pytest.approx([0.75, 1], rel=1e-4)
    assert third == pytest.approx([1, 1])


def test_rules_for_the_longest_step_always_name_a_rank() -> None:
    """The rules for the longest forward pass and the longest step name a rank even for tiny
    differences.
    """
    assert slowest_forward(parts([[100, 100], [100, 100.01], [100, 100]])).named == {1}
    equal = [
        slowest_step(np.full(20, 1e8), 50, np.random.default_rng(seed)).first for seed in range(200)
    ]
    assert len(set(equal)) > 40
