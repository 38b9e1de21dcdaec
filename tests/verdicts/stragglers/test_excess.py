"""Statistics of the straggler detector, compared with simple algorithms and known distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.analysis.statistics.robust import fast_median
from torchlens_perf.verdicts.stragglers.excess import (
    CLIP,
    detection_threshold,
    estimate_noise,
    excess_over_others,
    find_change_point,
    find_recovery,
    find_strongest_intervals,
    is_persistent,
    limit_stalls,
    persistence_threshold,
    subtract_workload_effect,
)

LEAST = 12


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


class TestExcess:
    def test_excess_of_two_ranks_has_opposite_signs(self) -> None:
        assert excess_over_others(np.array([[5.0, 1.0], [2.0, 4.0]])).tolist() == [
            [3.0, -3.0],
            [-3.0, 3.0],
        ]

    def test_few_ranks_are_compared_with_the_median_of_the_others(self) -> None:
        assert excess_over_others(np.array([[1.0], [2.0], [30.0]])).ravel().tolist() == [
            -15.0,
            -13.5,
            28.5,
        ]

    @given(
        ranks=st.integers(2, 40),
        seed=st.integers(0, 999),
        kind=st.sampled_from([np.float32, np.float64]),
    )
    def test_excess_equals_that_computed_with_numpys_median(
        self, ranks: int, seed: int, kind: type
    ) -> None:
        """Values may be equal. Many ranks are compared with the median of all."""
        values = np.round(2 * normal(ranks, 6, seed=seed)).astype(kind)
        values[:, :3] += normal(ranks, 3, seed=seed + 1).astype(kind)
        usual = [
            np.median(values if ranks > 16 else np.delete(values, rank, axis=0), axis=0)
            for rank in range(ranks)
        ]
        found = excess_over_others(values)

        assert found.dtype == kind
        assert (found == values - np.stack(usual)).all()
        assert (fast_median(values, 1) == np.median(values, axis=1)).all()

    @given(ranks=st.integers(2, 40), seed=st.integers(0, 999))
    def test_change_of_all_ranks_is_no_excess(self, ranks: int, seed: int) -> None:
        values = normal(ranks, 5, seed=seed)
        shifted = values + np.array([0, 10, -3, 1e3, 5])

        np.testing.assert_allclose(
            excess_over_others(shifted), excess_over_others(values), atol=1e-9
        )

    @pytest.mark.parametrize("ranks", [3, 16, 17, 40])
    def test_only_the_slow_rank_has_excess(self, ranks: int) -> None:
        values = np.ones((ranks, 3))
        values[1] += 7
        found = excess_over_others(values)

        assert found[1].tolist() == [7.0] * 3
        assert np.delete(found, 1, axis=0).max() == (0 if ranks > 3 else -3.5)


class TestNoise:
    @pytest.mark.parametrize("ranks", [2, 8, 300, 3000])
    def test_noise_of_normal_values_is_their_standard_deviation(self, ranks: int) -> None:
        assert estimate_noise(50 * normal(ranks, 256)) == pytest.approx(50, rel=0.25)

    def test_noise_excludes_lasting_excess_and_stalls_and_one_noisy_rank(self) -> None:
        calm = estimate_noise(50 * normal(8, 256))
        for change in (
            lambda values: values[3].__iadd__(1e4),
            lambda values: values[3, 100:].__iadd__(1e4),
            lambda values: values[:, ::23].__iadd__(1e6),
            lambda values: values[3, ::3].__iadd__(1e4),
            lambda values: values[3].__imul__(100),
        ):
            values = 50 * normal(8, 256)
            change(values)
            assert estimate_noise(values) < 1.6 * calm

    def test_noise_is_higher_for_correlated_bins(self) -> None:
        values = 50 * normal(4, 256)
        for row in range(1, 256):
            values[:, row] += 0.7 * values[:, row - 1]
        apart = np.diff(values, axis=1).std() / np.sqrt(2)

        assert estimate_noise(values) > 1.7 * apart

    def test_noise_of_few_bins_is_not_lower_on_average(self) -> None:
        few = np.mean([estimate_noise(50 * normal(2, 12, seed=seed)) for seed in range(200)])

        assert 60 < few < 90

    def test_noise_is_at_least_one_nanosecond(self) -> None:
        assert estimate_noise(np.zeros((4, 50))) == 1.0
        assert estimate_noise(np.zeros((4, 1))) == 1.0


@given(rows=st.integers(1, 40), seed=st.integers(0, 999), least=st.integers(1, 15))
def test_strongest_interval_equals_that_of_a_full_search(rows: int, seed: int, least: int) -> None:
    """An interval ends at the newest bin and has at least `least` bins."""
    deviations = 3 * normal(3, rows, seed=seed)
    found = find_strongest_intervals(deviations, least)

    for rank in range(3):
        clipped = np.clip(deviations[rank], -CLIP, CLIP)
        strengths = {
            start: clipped[start:].sum() / np.sqrt(rows - start)
            for start in range(rows - least + 1)
        }
        if not strengths:
            assert found.z_score[rank] == -np.inf
            continue
        assert found.z_score[rank] == pytest.approx(max(strengths.values()))
        assert strengths[int(found.start[rank])] == pytest.approx(max(strengths.values()))


class TestThreshold:
    @pytest.mark.parametrize("ranks", [2, 64])
    def test_scores_of_normal_values_stay_below_the_threshold(self, ranks: int) -> None:
        """The highest score in a hundred jobs is at least half of the threshold."""
        strongest = [
            find_strongest_intervals(normal(ranks, 256, seed=seed), LEAST).z_score.max()
            for seed in range(100)
        ]

        assert max(strongest) < detection_threshold(ranks)
        assert max(strongest) > detection_threshold(ranks) / 2

    def test_threshold_grows_slowly_with_the_number_of_ranks(self) -> None:
        assert (
            detection_threshold(2)
            < detection_threshold(64)
            < detection_threshold(16384)
            < 1.5 * detection_threshold(2)
        )
        assert persistence_threshold(2) < persistence_threshold(16384) < detection_threshold(16384)

    def test_score_of_a_single_value_never_reaches_the_threshold(self) -> None:
        deviations = np.zeros((2, 64))
        deviations[0, -LEAST] = 1e9

        assert find_strongest_intervals(deviations, LEAST).z_score[0] < detection_threshold(2) / 3


class TestChangePoint:
    @pytest.mark.parametrize("at", [0, 1, 30, 59])
    def test_change_point_is_exact_without_noise(self, at: int) -> None:
        series = np.where(np.arange(60) >= at, 10.0, 0.0)
        assert find_change_point(series, 10.0) == at

    def test_change_point_is_within_a_few_bins_under_noise(self) -> None:
        """The noise is half of the excess, and a giant stall comes before it."""
        errors = []
        for seed in range(100):
            series = 5 * normal(100, seed=seed) + np.where(np.arange(100) >= 60, 10.0, 0.0)
            series[20] += 1e6
            errors.append(abs(find_change_point(series, 10.0) - 60))

        assert np.median(errors) <= 2
        assert max(errors) <= 12


class TestOverSince:
    def test_slowness_ends_after_enough_bins_without_excess(self) -> None:
        slow = np.arange(60) < 40
        assert find_recovery(slow, 0.95, LEAST) == 40
        assert find_recovery(slow[:45], 0.95, LEAST) is None
        assert find_recovery(np.ones(60, bool), 1.0, LEAST) is None

    def test_short_pause_does_not_end_intermittent_slowness(self) -> None:
        """The rank is slow in two of seven bins. A pause of fifty bins ends the episode."""
        slow = np.arange(300) % 7 < 2
        for gap, over in ((12, None), (50, 250)):
            series = slow.copy()
            series[300 - gap :] = False
            found = find_recovery(series, 2 / 7, LEAST)
            assert found == over if over is None else abs((found or 0) - over) <= 5

    def test_too_few_bins_without_excess_do_not_end_slowness(self) -> None:
        assert find_recovery(np.zeros(LEAST - 1, bool), 0.95, LEAST) is None


class TestIsPersistent:
    def test_steady_excess_is_persistent(self) -> None:
        assert is_persistent(10 + normal(40), 1.0, 3.0)
        assert is_persistent(10 + normal(40), 1.0, 3.0, strict=True)

    def test_few_long_stalls_are_not_persistent(self) -> None:
        series = normal(40)
        series[[5, 17, 33]] += 1000
        assert series.mean() > 50
        assert not is_persistent(series, 1.0, 3.0)

    def test_excess_with_a_stall_in_each_quarter_is_persistent(self) -> None:
        series = 3 + normal(40)
        series[[5, 15, 25, 35]] += 1000
        assert is_persistent(series, 1.0, 3.0)

    def test_excess_with_one_low_quarter_is_persistent_and_with_two_is_not(self) -> None:
        """A quarter below zero counts as the end of slowness."""
        for quarters, loose, strict in (
            ([10, 10, 10, 10], True, True),
            ([10, 10, 1, 10], True, False),
            ([10, 1, 1, 10], False, False),
            ([10, 10, 10, -1], False, False),
            ([10, 10, 10, 4], True, False),
        ):
            series = np.repeat(np.array(quarters, float), 12) + 0.1 * normal(48)
            assert is_persistent(series, 1.0, 1.0) == loose, quarters
            assert is_persistent(series, 1.0, 1.0, strict=True) == strict, quarters


class TestStalls:
    def test_single_stalls_are_reduced_to_the_largest_other_value(self) -> None:
        series = normal(48)
        with_stalls = series.copy()
        with_stalls[[3, 17, 40]] = [50, 1e9, 300]
        cut = limit_stalls(with_stalls, 1.0)

        others = np.delete(series, [3, 17, 40])
        assert np.delete(cut, [3, 17, 40]).tolist() == others.tolist()
        assert cut[[3, 17, 40]].tolist() == [others.max()] * 3

    def test_frequent_large_values_are_not_reduced_like_stalls(self) -> None:
        """Noise, heavy tails and short series are not changed either."""
        often = normal(48)
        often[::10] += 1000
        for series in (
            often,
            normal(48),
            3 * normal(64, seed=2),
            np.array([1e9]),
            np.full(20, 7.0),
            np.zeros(0),
        ):
            assert (limit_stalls(series, 1.0) == series).all()


class TestWorkload:
    def rows(self, ranks: int = 4) -> tuple[np.ndarray, np.ndarray]:
        """Return an excess that mostly depends on the workload, by 1000 ns a token, and the
        tokens.
        """
        tokens = 4096 + 400 * normal(ranks, 100)
        return excess_over_others(1000 * tokens + 20_000 * normal(ranks, 100, seed=1)), tokens

    def test_excess_explained_by_workload_is_subtracted(self) -> None:
        excess, tokens = self.rows()
        left = subtract_workload_effect(excess, tokens, 48)

        assert estimate_noise(left) < estimate_noise(excess) / 8
        assert abs(np.corrcoef(left.ravel(), excess_over_others(tokens).ravel())[0, 1]) < 0.4

    def test_excess_that_workload_does_not_explain_is_kept(self) -> None:
        excess, tokens = self.rows()
        excess[2] += 300_000
        left = subtract_workload_effect(excess, tokens, 48)

        assert left[2].mean() == pytest.approx(300_000, rel=0.2)
        assert abs(left[1].mean()) < 60_000

    def test_excess_of_a_lasting_larger_workload_is_kept(self) -> None:
        """Only the excess of a few bins with larger workload is subtracted."""
        for rows, stays in ((60, True), (20, False)):
            tokens = 4096 + 100 * normal(4, 200)
            tokens[1, -rows:] += 1500
            excess = excess_over_others(1000 * tokens + 20_000 * normal(4, 200, seed=1))
            left = subtract_workload_effect(excess, tokens, 48)

            assert (left[1, -rows + 5 :] == excess[1, -rows + 5 :]).all() == stays
            assert (left[0] != excess[0]).all()
            assert (left[1, : -rows - 10] != excess[1, : -rows - 10]).all()

    def test_excess_of_bins_without_workload_is_unchanged(self) -> None:
        excess, tokens = self.rows()
        gaps = tokens.copy()
        gaps[0, [3, 50]], gaps[2, 99] = np.nan, np.nan
        left, whole = (
            subtract_workload_effect(excess, gaps, 48),
            subtract_workload_effect(excess, tokens, 48),
        )
        untold = np.isin(np.arange(100), [3, 50, 99])

        assert (left[:, untold] == excess[:, untold]).all()
        np.testing.assert_allclose(left[:, ~untold], whole[:, ~untold], atol=60_000)
        assert estimate_noise(left[:, ~untold]) < estimate_noise(excess) / 8

    def test_excess_is_unchanged_if_workload_explains_nothing(self) -> None:
        """The workload is unknown, constant, unrelated, or makes a rank faster."""
        excess, tokens = self.rows()
        unknown = tokens.copy()
        unknown[0, :60] = np.nan  # Unknown in most bins.
        for workload in (
            unknown,
            np.full_like(tokens, 7.0),
            4096 + 400 * normal(4, 100, seed=5),
            -tokens,
        ):
            assert (subtract_workload_effect(excess, workload, 48) == excess).all()
