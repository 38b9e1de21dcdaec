"""The history of signals: means over the steps of an interval, for ranks that come and go, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf.verdicts.causes.metrics import METRICS, SLOTS, MetricHistory, named, vector


def told(history: MetricHistory, second: float, step: int, shares: dict[int, float]) -> None:
    """One second's gc_share of some ranks."""
    rows = np.stack([vector({"gc_share": share}) for share in shares.values()])
    history.add(np.array(list(shares)), np.full(len(shares), step), rows, second)


def gc_share(history: MetricHistory, rank: int, since: int, until: int | None = None) -> float:
    return named(history.means([rank], since, until)[rank])["gc_share"]


def test_vector() -> None:
    """What is not measured is no number, and what is beyond a half's range is the largest one."""
    row = vector({"gc_share": 0.25, "major_faults_per_s": 1e6})

    assert named(row) == {"gc_share": 0.25, "major_faults_per_s": 65504.0}
    assert np.isnan(row).sum() == len(METRICS) - 2
    with pytest.raises(KeyError):
        vector({"no such signal": 1.0})


def test_usual_before_of_a_rank_without_signals() -> None:
    """Of a rank of another node whose summaries have no signals yet, nothing is known, and nothing is raised."""
    history = MetricHistory()
    for second in range(10):
        history.add(
            np.array([0, 3]), np.full(2, 10 * second), np.stack([vector({"gc_share": 0.1}), vector({})]), second
        )
    found = history.usual_before(3, 100)

    assert found is not None
    assert np.isnan(found).all()


def test_means_over_steps() -> None:
    """The time in which others were made is left out; where there is no other, it counts."""
    history = MetricHistory()
    for second in range(10):
        told(history, 100.0 + second, 10 * second, {0: 0.0, 3: 0.5 if second >= 5 else 0.25})

    assert gc_share(history, 3, 50) == 0.5
    assert gc_share(history, 3, 0, 50) == 0.25
    assert gc_share(history, 0, 0) == 0.0
    assert gc_share(history, 3, 85) == 0.5  # of its last second, which began with step 90
    assert history.means([7], 0) == {}
    assert history.ranks == [0, 3]


def test_usual_before() -> None:
    """The better quarter of the time before: a fault that began earlier than it was found does not count as usual."""
    history = MetricHistory()
    for second in range(12):
        values = {"gc_share": 0.5 * (second >= 5), "refaults_per_s": 900.0 * (second >= 5)}
        row = vector({**values, "sm_clock_mhz": 1000 if second >= 5 else 2000})
        history.add(np.array([3]), np.array([10 * second]), row[None], float(second))

    found = history.usual_before(3, 100)
    assert found is not None
    assert named(found) == {"gc_share": 0.0, "refaults_per_s": 0.0, "sm_clock_mhz": 2000}
    assert history.usual_before(3, 40) is None  # three seconds without the first
    assert history.usual_before(7, 100) is None


def test_what_was_always_so_is_usual() -> None:
    """A rank that always had it has it as its usual."""
    history = MetricHistory()
    for second in range(12):
        told(history, float(second), 10 * second, {3: 0.5})
    found = history.usual_before(3, 100)

    assert found is not None
    assert named(found) == {"gc_share": 0.5}


def test_many_samples_of_a_second_and_ranks_that_come_later() -> None:
    """All of a second's samples count alike; a rank has the mean of what it told."""
    history = MetricHistory()
    told(history, 0.1, 0, {1: 0.25})
    told(history, 0.2, 1, {1: 0.75})
    told(history, 1.5, 2, {1: 0.5, 2: 1.0})

    assert gc_share(history, 1, 0) == pytest.approx(0.5)
    assert gc_share(history, 2, 0) == 1.0


def test_not_measured_now_and_then() -> None:
    """A second in which a signal was not measured neither counts as 0 nor hides the others."""
    history = MetricHistory()
    told(history, 0.0, 0, {1: 0.5})
    history.add(np.array([1]), np.array([10]), vector({"cpu_wait_share": 0.5})[None], 1.0)
    told(history, 2.0, 20, {1: 0.25})

    assert named(history.means([1], 0)[1]) == {"gc_share": 0.375, "cpu_wait_share": 0.5}


def test_bounded_and_fine_where_it_is_new() -> None:
    """A run of days keeps SLOTS slots; what began minutes ago is told apart from the days before."""
    history, days, slow_since = MetricHistory(), 2 * 86400, 2 * 86400 - 300
    for second in range(0, days, 5):
        told(history, float(second), second, {1: float(second >= slow_since)})

    assert len(history._slots) <= SLOTS
    assert gc_share(history, 1, slow_since) == 1.0
    assert gc_share(history, 1, 0, slow_since) < 0.01
    assert gc_share(history, 1, 0) == pytest.approx(300 / days, rel=0.1)


def test_long_slots_do_not_freeze() -> None:
    """The thousandth sample of a slot counts as much as the first: means are not rounded while they are made."""
    history = MetricHistory()
    for sample in range(4000):
        told(history, 0.5 + sample / 1e5, 0, {1: float(sample >= 2000)})

    assert gc_share(history, 1, 0) == pytest.approx(0.5, abs=0.002)


def test_what_is_measured_rarely() -> None:
    """One sample in five rounds counts once, not for the rounds in between."""
    history = MetricHistory()
    for round_ in range(100):
        values = {"gc_share": 0.1} | ({"link_errors_per_s": float(round_ % 10 == 0)} if round_ % 5 == 0 else {})
        history.add(np.array([1]), np.array([round_]), vector(values)[None], float(round_))

    assert named(history.means([1], 0)[1])["link_errors_per_s"] == 0.5


def test_bursts_before_are_usual() -> None:
    """Errors that came in bursts before are no news: they are held against their mean."""
    history = MetricHistory()
    for second in range(100):
        row = vector({"nvlink_errors_per_s": 3.0 * (second % 20 == 5)})
        history.add(np.array([1]), np.array([10 * second]), row[None], float(second))
    found = history.usual_before(1, 900)

    assert found is not None
    assert named(found)["nvlink_errors_per_s"] == pytest.approx(0.15, rel=0.2)
