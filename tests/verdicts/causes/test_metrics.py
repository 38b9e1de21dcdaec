"""The history of diagnostic signals: means over steps for each rank, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf.verdicts.causes.metrics import (
    METRICS,
    SLOTS,
    MetricHistory,
    encode_signals,
    measured_signals,
)


def told(history: MetricHistory, second: float, step: int, shares: dict[int, float]) -> None:
    """Add one second with the given `gc_share` of some ranks."""
    rows = np.stack([encode_signals({"gc_share": share}) for share in shares.values()])
    history.add_signals(np.array(list(shares)), np.full(len(shares), step), rows, second)


def gc_share(history: MetricHistory, rank: int, since: int, until: int | None = None) -> float:
    return measured_signals(history.mean_signals([rank], since, until)[rank])["gc_share"]


def test_missing_signals_are_stored_as_nan_and_large_ones_clipped() -> None:
    row = encode_signals({"gc_share": 0.25, "major_faults_per_s": 1e6})

    assert measured_signals(row) == {"gc_share": 0.25, "major_faults_per_s": 65504.0}
    assert np.isnan(row).sum() == len(METRICS) - 2
    with pytest.raises(KeyError):
        encode_signals({"no such signal": 1.0})


def test_rank_without_signals_has_no_usual_signals() -> None:
    """The rank is on another node, and its summaries have no signals yet."""
    history = MetricHistory()
    for second in range(10):
        history.add_signals(
            np.array([0, 3]),
            np.full(2, 10 * second),
            np.stack([encode_signals({"gc_share": 0.1}), encode_signals({})]),
            second,
        )
    found = history.usual_signals_before(3, 100)

    assert found is not None
    assert np.isnan(found).all()


def test_means_exclude_time_slots_with_other_steps() -> None:
    """If each time slot also contains steps outside the range, all slots count."""
    history = MetricHistory()
    for second in range(10):
        told(history, 100.0 + second, 10 * second, {0: 0.0, 3: 0.5 if second >= 5 else 0.25})

    assert gc_share(history, 3, 50) == 0.5
    assert gc_share(history, 3, 0, 50) == 0.25
    assert gc_share(history, 0, 0) == 0.0
    # Only the last second counts, which began with step 90, after step 85.
    assert gc_share(history, 3, 85) == 0.5
    assert history.mean_signals([7], 0) == {}
    assert history.ranks == [0, 3]


def test_usual_signals_are_the_better_quartile_before_a_step() -> None:
    """The time between a fault's start and its detection does not count as usual."""
    history = MetricHistory()
    for second in range(12):
        values = {"gc_share": 0.5 * (second >= 5), "refaults_per_s": 900.0 * (second >= 5)}
        row = encode_signals({**values, "sm_clock_mhz": 1000 if second >= 5 else 2000})
        history.add_signals(np.array([3]), np.array([10 * second]), row[None], float(second))

    found = history.usual_signals_before(3, 100)
    assert found is not None
    assert measured_signals(found) == {"gc_share": 0.0, "refaults_per_s": 0.0, "sm_clock_mhz": 2000}
    # The first second does not count, and only three more precede step 40.
    assert history.usual_signals_before(3, 40) is None
    assert history.usual_signals_before(7, 100) is None


def test_signal_that_was_always_high_is_usual() -> None:
    history = MetricHistory()
    for second in range(12):
        told(history, float(second), 10 * second, {3: 0.5})
    found = history.usual_signals_before(3, 100)

    assert found is not None
    assert measured_signals(found) == {"gc_share": 0.5}


def test_samples_of_one_second_have_equal_weight() -> None:
    """A rank that starts later has the mean of its own samples."""
    history = MetricHistory()
    told(history, 0.1, 0, {1: 0.25})
    told(history, 0.2, 1, {1: 0.75})
    told(history, 1.5, 2, {1: 0.5, 2: 1.0})

    assert gc_share(history, 1, 0) == pytest.approx(0.5)
    assert gc_share(history, 2, 0) == 1.0


def test_missing_samples_do_not_change_a_mean() -> None:
    history = MetricHistory()
    told(history, 0.0, 0, {1: 0.5})
    history.add_signals(
        np.array([1]), np.array([10]), encode_signals({"cpu_wait_share": 0.5})[None], 1.0
    )
    told(history, 2.0, 20, {1: 0.25})

    assert measured_signals(history.mean_signals([1], 0)[1]) == {
        "gc_share": 0.375,
        "cpu_wait_share": 0.5,
    }


def test_history_has_at_most_32_slots_and_short_ones_for_recent_time() -> None:
    """In a run of days, a change minutes ago is still separate from earlier days."""
    history, days, slow_since = MetricHistory(), 2 * 86400, 2 * 86400 - 300
    for second in range(0, days, 30):
        told(history, float(second), second, {1: float(second >= slow_since)})

    assert len(history._slots) <= SLOTS
    assert gc_share(history, 1, slow_since) == 1.0
    assert gc_share(history, 1, 0, slow_since) < 0.01
    assert gc_share(history, 1, 0) == pytest.approx(300 / days, rel=0.1)


def test_late_samples_of_a_slot_have_full_weight() -> None:
    """The mean of a time slot is not rounded while samples are added."""
    history = MetricHistory()
    for sample in range(4000):
        told(history, 0.5 + sample / 1e5, 0, {1: float(sample >= 2000)})

    assert gc_share(history, 1, 0) == pytest.approx(0.5, abs=0.002)


def test_signal_sampled_once_in_five_rounds_counts_once() -> None:
    history = MetricHistory()
    for round_ in range(100):
        values = {"gc_share": 0.1} | (
            {"link_errors_per_s": float(round_ % 10 == 0)} if round_ % 5 == 0 else {}
        )
        history.add_signals(
            np.array([1]), np.array([round_]), encode_signals(values)[None], float(round_)
        )

    assert measured_signals(history.mean_signals([1], 0)[1])["link_errors_per_s"] == 0.5


def test_usual_rate_of_error_bursts_is_their_mean() -> None:
    """If errors came in bursts before, another burst is no evidence."""
    history = MetricHistory()
    for second in range(100):
        row = encode_signals({"nvlink_errors_per_s": 3.0 * (second % 20 == 5)})
        history.add_signals(np.array([1]), np.array([10 * second]), row[None], float(second))
    found = history.usual_signals_before(1, 900)

    assert found is not None
    assert measured_signals(found)["nvlink_errors_per_s"] == pytest.approx(0.15, rel=0.2)
