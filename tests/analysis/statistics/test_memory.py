"""Statistics of the device allocator: readings, growth, and signals for a diagnosis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.support.saved import save_and_load
from torchlens_perf.analysis.statistics.memory import (
    MAX_READINGS,
    MemoryReading,
    MemoryStatistics,
    compute_memory_signals,
    find_newest_reading,
)
from torchlens_perf.run.ring import Kind, record_dtype

GB, MB = 1 << 30, 1 << 20
NAMES = [
    "(other)",
    "allocated",
    "reserved",
    "inactive",
    "alloc_retries",
    "ooms",
    "limit",
    "unknown",
]
LIMIT = 80 * GB


def records(step: int, **values: int | tuple[int, int]) -> np.ndarray:
    """Return the records of one reading. Values are pairs such as (current, peak)."""
    made = np.zeros(len(values), record_dtype())
    for record, (name, value) in zip(made, values.items(), strict=True):
        now, most = value if isinstance(value, tuple) else (value, 0)
        record["kind"], record["name_id"], record["step"] = Kind.MEMORY, NAMES.index(name), step
        record["start_ns"], record["value0"], record["value1"] = 1000 * step, now, most
    return made


def statistics_of(readings: Sequence[np.ndarray]) -> MemoryStatistics:
    statistics = MemoryStatistics()
    for each in readings:
        statistics.add_records(each, NAMES)
    return statistics


def filled(allocated: Sequence[float], every: int = 16) -> MemoryStatistics:
    """Return one reading for `every` steps, with the given allocations at the ends of steps."""
    return statistics_of(
        [
            records(every * i, allocated=(int(value), int(value)), limit=LIMIT)
            for i, value in enumerate(allocated)
        ]
    )


def test_memory_records_with_one_timestamp_are_merged_to_one_reading() -> None:
    """Lost or unmeasured values are None, not 0."""
    whole = records(
        16,
        allocated=(3 * GB, 5 * GB),
        reserved=(6 * GB, 7 * GB),
        inactive=(GB, GB),
        alloc_retries=2,
        ooms=1,
        limit=LIMIT,
    )
    partial = records(32, reserved=(8 * GB, 9 * GB), unknown=4)
    statistics = statistics_of([np.concatenate([whole, partial])])

    assert statistics.readings == [
        MemoryReading(16, 3 * GB, 6 * GB, GB, 5 * GB, LIMIT, 0, 1),
        MemoryReading(32, None, 8 * GB, None, None, None, None, None),
    ]
    assert (statistics.peak_allocated_bytes, statistics.peak_reserved_bytes) == (5 * GB, 9 * GB)
    newest = find_newest_reading(np.concatenate([partial, whole]), NAMES)
    assert newest is not None
    # Exporters compute increases themselves, so the reading has the allocator's own count.
    assert (newest.step, newest.alloc_retries) == (16, 2)
    assert find_newest_reading(partial[:0], NAMES) is None


def test_retries_are_counted_from_the_first_reading() -> None:
    """If the user resets the counter, counting continues from 0."""
    counts = [5, 5, 9, 0, 2]
    statistics = statistics_of([records(i, alloc_retries=count) for i, count in enumerate(counts)])
    assert [reading.alloc_retries for reading in statistics.readings] == [0, 0, 4, 4, 6]


def test_decreased_peak_is_a_reset_and_the_peak_of_the_run_stays() -> None:
    """Only users reset a peak."""
    peaks = [GB, 3 * GB, 3 * GB, 2 * GB, 4 * GB, GB]
    statistics = statistics_of([records(i, allocated=(GB, peak)) for i, peak in enumerate(peaks)])
    assert statistics.peak_resets == 2
    assert statistics.peak_allocated_bytes == 4 * GB


def test_readings_of_a_long_run_are_thinned_out_evenly() -> None:
    """The newest reading stays. Saving and loading the statistics in between changes nothing."""
    statistics = MemoryStatistics()
    for i in range(3000):
        statistics.add_records(records(i, allocated=(i, i)), NAMES)
        assert len(statistics.readings) <= MAX_READINGS
        assert statistics.last_reading == statistics.readings[-1]
        assert statistics.readings[-1].step == i
        if i == 1234:
            statistics = save_and_load(statistics)
    steps = [reading.step for reading in statistics.readings]
    assert statistics.count == 3000
    assert steps[0] == 0
    assert {b - a for a, b in itertools.pairwise(steps[:-1])} == {16}
    assert len(steps) > MAX_READINGS / 3


def test_steady_growth_of_memory_is_found_despite_noise() -> None:
    """A list grows by 8 MB a step. Caches fill at the start, and the batch size varies."""
    noise = np.random.default_rng(0).normal(0, 20 * MB, 200)
    allocated = [10 * GB + min(i, 10) * GB + 16 * i * 8 * MB + noise[i] for i in range(200)]
    growth = filled(allocated).estimate_growth()

    assert growth is not None
    assert growth["bytes_per_step"] == pytest.approx(8 * MB, rel=0.05)
    assert growth["since_step"] == 16 * 50
    assert growth["full_at_step"] == pytest.approx((LIMIT - 20 * GB) / (8 * MB), rel=0.05)


@pytest.mark.parametrize(
    ("peaks", "above"),
    [
        (lambda now: [value + 12 * GB for value in now], 12 * GB),
        # The peak of earlier steps does not grow, so steps need no more memory than before.
        (lambda now: [now[-1] + 5 * GB] * len(now), 5 * GB),
        (lambda now: [value + (9 if i == 150 else 4) * GB for i, value in enumerate(now)], 9 * GB),
        # The peak was reset.
        (lambda now: [value + (30 if i < 20 else 4) * GB for i, value in enumerate(now)], 4 * GB),
    ],
)
def test_time_until_memory_is_full_is_computed_from_peaks_within_steps(
    peaks: Callable[[list[int]], list[int]], above: int
) -> None:
    """More memory is allocated in the middle of a step than at its end."""
    allocated = [10 * GB + i * 16 * 8 * MB for i in range(200)]
    statistics = statistics_of(
        [
            records(16 * i, allocated=(now, peak), limit=LIMIT)
            for i, (now, peak) in enumerate(zip(allocated, peaks(allocated), strict=True))
        ]
    )
    growth = statistics.estimate_growth()

    assert growth is not None
    assert (growth["since_step"], growth["until_step"], growth["above_bytes"]) == (
        800,
        16 * 199,
        above,
    )
    assert growth["full_at_step"] == pytest.approx((LIMIT - 10 * GB - above) / (8 * MB), rel=0.01)


@pytest.mark.parametrize(
    "allocated",
    [
        [10 * GB] * 200,
        [10 * GB + i % 2 * GB for i in range(200)],
        [10 * GB + i % 40 * GB for i in range(200)],
        [10 * GB + np.sin(i / 30) * GB for i in range(200)],
        [10 * GB + i * 1000 for i in range(200)],
        [10 * GB + i * 100 * MB for i in range(20)],
        [60 * GB - i * 100 * MB for i in range(200)],
    ],
    ids=[
        "flat",
        "alternating",
        "sawtooth",
        "slow wave",
        "harmless",
        "too early to say",
        "shrinking",
    ],
)
def test_uncertain_or_very_slow_growth_of_memory_is_not_reported(allocated: list[float]) -> None:
    """At a slow rate, the device would not be full for a very long time."""
    assert filled(allocated).estimate_growth() is None


def reading(step: int, **values: int) -> MemoryReading:
    return MemoryReading(step, **values)


def test_memory_signals_are_retries_fragmentation_and_largest_use() -> None:
    """Retries are per step since the last reading before the interval.

    Fragmentation is the median.
    """
    readings = [
        reading(0, reserved_bytes=10, inactive_bytes=9, limit_bytes=100, alloc_retries=0),
        reading(16, reserved_bytes=40, inactive_bytes=4, limit_bytes=100, alloc_retries=2),
        reading(32, reserved_bytes=80, inactive_bytes=40, limit_bytes=100, alloc_retries=4),
        reading(48, reserved_bytes=50, inactive_bytes=10, limit_bytes=100, alloc_retries=10),
        reading(64, reserved_bytes=99, inactive_bytes=99, limit_bytes=100, alloc_retries=99),
    ]
    assert compute_memory_signals(readings, 10, 50) == {
        "alloc_retries_per_step": pytest.approx(10 / 48),
        "fragmentation_share": pytest.approx(0.2),
        "memory_used_share": pytest.approx(0.8),
    }


def test_memory_signals_that_were_not_measured_are_missing() -> None:
    """No reading exists, or the allocator has no such counter. The signals are not 0."""
    one = reading(20, reserved_bytes=50, limit_bytes=100, alloc_retries=7)
    assert compute_memory_signals([], 0, 100) == {}
    assert compute_memory_signals([one], 30, 100) == {}
    assert compute_memory_signals([one], 0, 100) == {"memory_used_share": 0.5}
    assert compute_memory_signals([one, reading(40, alloc_retries=7)], 30, 100) == {
        "alloc_retries_per_step": 0.0
    }
    assert compute_memory_signals([reading(40, reserved_bytes=0, inactive_bytes=0)], 30, 100) == {}
