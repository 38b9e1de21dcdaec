"""Statistics of the device's memory allocator for one rank. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.memory_readings import LIMIT
from torchlens_perf.run.ring import Kind, lookup_name

MAX_READINGS = 256
# Growth is reported if there are _MIN_READINGS readings after the first fraction of the run
# (_SETTLING_SHARE), in which caches fill. At least _INCREASES_SHARE of the differences between
# readings must be increases. The growth must fill the device within _MAX_RUNS times the number of
# steps so far.
_MIN_READINGS = 24
_SETTLING_SHARE = 0.25
_INCREASES_SHARE = 0.9
_MAX_RUNS = 10


class MemoryReading(NamedTuple):
    """State of the allocator at the end of one step. Values that are missing or lost are None."""

    step: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_bytes: int | None = None
    """Bytes in free blocks of segments that are partly in use and cannot be returned."""
    peak_bytes: int | None = None
    """Peak of the allocated bytes since the user last reset the allocator's peak statistics."""
    limit_bytes: int | None = None
    """Memory that the process may use on the device."""
    alloc_retries: int | None = None
    """Number of failed cudaMalloc calls since the first reading. Each releases the cache."""
    ooms: int | None = None
    """Number of out-of-memory errors since the start of the process."""


class MemoryGrowth(TypedDict):
    """Growth of allocated memory from step to step."""

    bytes_per_step: float
    since_step: int
    until_step: int
    """The growth was measured from `since_step` to `until_step`. It may have started earlier."""
    above_bytes: int
    """Difference between the peak allocation inside a step and the allocation at its end."""
    full_at_step: int
    """Step in which the memory will be full, if it continues to grow."""


@dataclasses.dataclass
class MemoryStatistics:
    """Readings over the whole run. As the run gets longer, fewer of the readings are kept.

    MEMORY records must be added in sequence order.
    """

    readings: list[MemoryReading] = dataclasses.field(default_factory=list)
    """At most MAX_READINGS readings, including the newest."""
    count: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resets: int = 0
    """Number of times that the peak decreased, because the user had reset it."""
    _every: int = 1
    """One in this number of readings is kept."""
    _alloc_retries: int | None = None
    """The allocator's own counter in the last reading."""

    @property
    def last_reading(self) -> MemoryReading | None:
        return self.readings[-1] if self.readings else None

    def add_records(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        """Add the readings in MEMORY records. All other records are ignored."""
        for reading, peak_reserved_bytes in _parse_readings(records, names):
            self._add_reading(
                reading._replace(alloc_retries=self._count_retries(reading.alloc_retries)),
                peak_reserved_bytes,
            )

    def _add_reading(self, reading: MemoryReading, peak_reserved_bytes: int | None) -> None:
        before = self.last_reading
        if (
            before is not None
            and (reading.peak_bytes or 0) < (before.peak_bytes or 0)
            and reading.peak_bytes
        ):
            self.peak_resets += 1
        self.peak_allocated_bytes = _max_of_known(self.peak_allocated_bytes, reading.peak_bytes)
        self.peak_reserved_bytes = _max_of_known(self.peak_reserved_bytes, peak_reserved_bytes)
        if before is not None and (self.count - 1) % self._every:
            # The previous reading was only kept because it was the newest.
            self.readings.pop()
        self.readings.append(reading)
        self.count += 1
        if len(self.readings) > MAX_READINGS:
            # The number of readings is odd here, so the newest reading is kept.
            self.readings = self.readings[::2]
            self._every *= 2

    def _count_retries(self, counted: int | None) -> int | None:
        """Return the number of retries since the first reading.

        `counted` is the allocator's own counter, which the user may reset to 0.
        """
        before = self._alloc_retries
        self._alloc_retries = counted if counted is not None else self._alloc_retries
        if counted is None:
            return None
        if before is None:
            return 0
        known = next(
            (
                each.alloc_retries
                for each in reversed(self.readings)
                if each.alloc_retries is not None
            ),
            0,
        )
        return known + (counted - before if counted >= before else counted)

    def estimate_growth(self) -> MemoryGrowth | None:
        """Estimate the growth of the memory allocated at the ends of steps.

        Return None if the growth is uncertain, or too slow to fill the device.
        """
        known = [
            (r.step, r.allocated_bytes) for r in self.readings if r.allocated_bytes is not None
        ]
        known = known[int(len(known) * _SETTLING_SHARE) :]
        limit = self.last_reading.limit_bytes if self.last_reading is not None else None
        if len(known) < _MIN_READINGS or not limit:
            return None
        steps, allocated = np.array(known, np.float64).T
        third = len(steps) // 3
        comes_back = allocated[-third:].min() <= allocated[:third].max()
        if comes_back or (np.diff(allocated) > 0).mean() < _INCREASES_SHARE:
            return None
        i, j = np.triu_indices(len(steps), 1)
        # Theil-Sen slope.
        per_step = float(np.median((allocated[j] - allocated[i]) / (steps[j] - steps[i])))
        above = self._largest_peak_difference(int(steps[0]))
        left = max(0.0, limit - allocated[-1] - above) / per_step if per_step > 0 else float("inf")
        if left > _MAX_RUNS * (steps[-1] + 1):
            return None
        return MemoryGrowth(
            bytes_per_step=per_step,
            since_step=int(steps[0]),
            until_step=int(steps[-1]),
            above_bytes=above,
            full_at_step=int(steps[-1] + left),
        )

    def _largest_peak_difference(self, since_step: int) -> int:
        """Return the largest difference between a peak and the allocation at the end of the step.

        A peak that differs from the previous reading's is new. An equal peak may be old, so it is
        only used if there are no new peaks.
        """
        known = [
            each for each in self.readings if None not in (each.peak_bytes, each.allocated_bytes)
        ]
        above = [(each.peak_bytes or 0) - (each.allocated_bytes or 0) for each in known]
        new = [
            above[i]
            for i in range(1, len(known))
            if known[i].step >= since_step and known[i].peak_bytes != known[i - 1].peak_bytes
        ]
        return max([0, *(new or above[-1:])])


def find_newest_reading(records: npt.NDArray[np.void], names: list[str]) -> MemoryReading | None:
    """Return the last reading in these records, with the allocator's own counter of retries."""
    return next((reading for reading, _ in reversed(_parse_readings(records, names))), None)


def _parse_readings(
    records: npt.NDArray[np.void], names: list[str]
) -> list[tuple[MemoryReading, int | None]]:
    """Return the readings in these records, each with the peak of the reserved bytes."""
    by_time: dict[int, dict[str, np.void]] = {}
    for record in records[records["kind"] == Kind.MEMORY]:
        by_time.setdefault(int(record["start_ns"]), {})[
            lookup_name(names, int(record["name_id"]))
        ] = record
    return [_parse_reading(of_one) for of_one in by_time.values()]


def _parse_reading(records: dict[str, np.void]) -> tuple[MemoryReading, int | None]:
    def value(name: str, field: str = "value0") -> int | None:
        return int(records[name][field]) if name in records else None

    reading = MemoryReading(
        step=int(next(iter(records.values()))["step"]),
        allocated_bytes=value("allocated"),
        reserved_bytes=value("reserved"),
        inactive_bytes=value("inactive"),
        peak_bytes=value("allocated", "value1"),
        limit_bytes=value(LIMIT),
        alloc_retries=value("alloc_retries"),
        ooms=value("ooms"),
    )
    return reading, value("reserved", "value1")


def _max_of_known(before: int | None, now: int | None) -> int | None:
    return max((value for value in (before, now) if value is not None), default=None)


def compute_memory_signals(
    readings: Sequence[MemoryReading], first_step: int, last_step: int
) -> dict[str, float]:
    """Return values of memory use that may explain why a rank was slow in these steps.

    Values that were not measured are missing.

    readings: MemoryStatistics.readings of the rank.

    - alloc_retries_per_step: number of retries. In each retry, the allocator releases its cache and
      waits for the device.
    - fragmentation_share: median fraction of reserved memory that is free but cannot be returned.
    - memory_used_share: largest reserved memory, as a fraction of the memory that the process may
      use.
    """
    inside = [reading for reading in readings if first_step <= reading.step <= last_step]
    before = [reading for reading in readings if reading.step < first_step]
    signals: dict[str, float] = {}
    counted = [
        (r.step, r.alloc_retries) for r in (*before[-1:], *inside) if r.alloc_retries is not None
    ]
    if inside and len(counted) > 1:
        (step, retries), (until, retries_then) = counted[0], counted[-1]
        signals["alloc_retries_per_step"] = (retries_then - retries) / (until - step)
    fragmentation = _ratios_of_known(
        (reading.inactive_bytes, reading.reserved_bytes) for reading in inside
    )
    if fragmentation:
        signals["fragmentation_share"] = float(np.median(fragmentation))
    used = _ratios_of_known((reading.reserved_bytes, reading.limit_bytes) for reading in inside)
    if used:
        signals["memory_used_share"] = max(used)
    return signals


def _ratios_of_known(pairs: Iterable[tuple[int | None, int | None]]) -> list[float]:
    return [part / whole for part, whole in pairs if part is not None and whole]
