"""What the device's allocator reported of one rank: how full, how fragmented, how often it started over. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from torchlens_perf.run.memory_readings import LIMIT
from torchlens_perf.run.ring import Kind, name_of

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_READINGS = 256
# Growth is reported from this many readings on, without the first part of them, in which caches fill. This share of
# their differences must be increases, and the growth must fill the device within this many times the steps made so far.
_MIN_READINGS = 24
_SETTLING_SHARE = 0.25
_INCREASES_SHARE = 0.9
_MAX_RUNS = 10


class MemoryReading(NamedTuple):
    """The allocator at the end of one step. None: not measured, or lost."""

    step: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_bytes: int | None = None
    """In blocks that are free and cannot be given back, as another part of their segment is in use."""
    peak_bytes: int | None = None
    """Most allocated since the user last reset the allocator's peaks."""
    limit_bytes: int | None = None
    """What the process may take of the device."""
    alloc_retries: int | None = None
    """How often cudaMalloc failed and the cache was given back, since the first reading."""
    ooms: int | None = None
    """How often that did not help, since the process began."""


class Growth(TypedDict):
    """Memory that grows from step to step."""

    bytes_per_step: float
    since_step: int
    until_step: int
    """The readings that show the growth cover these steps; it may have begun earlier."""
    above_bytes: int
    """By how much more is allocated inside of a step than at its end."""
    full_at_step: int
    """In which step the device would be full."""


@dataclasses.dataclass
class MemoryStatistics:
    """Readings of the whole run, thinned out as it gets longer. Fed with MEMORY records in their order."""

    readings: list[MemoryReading] = dataclasses.field(default_factory=list)
    """At most MAX_READINGS, the newest always among them."""
    count: int = 0
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_resets: int = 0
    """How often the peak was lower than before: somebody has reset it."""
    _every: int = 1
    """Of how many readings one is kept."""
    _alloc_retries: int | None = None
    """As the allocator counts, in the last reading."""

    @property
    def last(self) -> MemoryReading | None:
        return self.readings[-1] if self.readings else None

    def add(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        """Counts the MEMORY records among these."""
        for reading, peak_reserved_bytes in _readings(records, names):
            self._add(reading._replace(alloc_retries=self._retries(reading.alloc_retries)), peak_reserved_bytes)

    def _add(self, reading: MemoryReading, peak_reserved_bytes: int | None) -> None:
        before = self.last
        if before is not None and (reading.peak_bytes or 0) < (before.peak_bytes or 0) and reading.peak_bytes:
            self.peak_resets += 1
        self.peak_allocated_bytes = _most(self.peak_allocated_bytes, reading.peak_bytes)
        self.peak_reserved_bytes = _most(self.peak_reserved_bytes, peak_reserved_bytes)
        if before is not None and (self.count - 1) % self._every:
            self.readings.pop()  # was only kept as the newest one
        self.readings.append(reading)
        self.count += 1
        if len(self.readings) > MAX_READINGS:
            self.readings = self.readings[::2]  # an odd number: the newest stays
            self._every *= 2

    def _retries(self, counted: int | None) -> int | None:
        """Since the first reading. Where the user has reset the counter, it begins at 0 again."""
        before, self._alloc_retries = self._alloc_retries, counted if counted is not None else self._alloc_retries
        if counted is None:
            return None
        if before is None:
            return 0
        known = next((each.alloc_retries for each in reversed(self.readings) if each.alloc_retries is not None), 0)
        return known + (counted - before if counted >= before else counted)

    def growth(self) -> Growth | None:
        """How fast what is allocated at the ends of steps grows; None where that is not beyond doubt, or harmless."""
        known = [(r.step, r.allocated_bytes) for r in self.readings if r.allocated_bytes is not None]
        known = known[int(len(known) * _SETTLING_SHARE) :]
        limit = self.last.limit_bytes if self.last is not None else None
        if len(known) < _MIN_READINGS or not limit:
            return None
        steps, allocated = np.array(known, np.float64).T
        third = len(steps) // 3
        comes_back = allocated[-third:].min() <= allocated[:third].max()
        if comes_back or (np.diff(allocated) > 0).mean() < _INCREASES_SHARE:
            return None
        i, j = np.triu_indices(len(steps), 1)
        per_step = float(np.median((allocated[j] - allocated[i]) / (steps[j] - steps[i])))  # Theil and Sen's slope
        above = self._above_bytes(int(steps[0]))
        left = max(0.0, limit - allocated[-1] - above) / per_step if per_step > 0 else float("inf")
        if left > _MAX_RUNS * (steps[-1] + 1):
            return None
        return Growth(
            bytes_per_step=per_step,
            since_step=int(steps[0]),
            until_step=int(steps[-1]),
            above_bytes=above,
            full_at_step=int(steps[-1] + left),
        )

    def _above_bytes(self, since_step: int) -> int:
        """How much more steps had allocated at their peaks than at their ends.

        A peak that differs from the reading's before it was reached in between; one that stays may be of long ago, and
        is no more than a bound.
        """
        known = [each for each in self.readings if None not in (each.peak_bytes, each.allocated_bytes)]
        above = [(each.peak_bytes or 0) - (each.allocated_bytes or 0) for each in known]
        new = [
            above[i]
            for i in range(1, len(known))
            if known[i].step >= since_step and known[i].peak_bytes != known[i - 1].peak_bytes
        ]
        return max([0, *(new or above[-1:])])


def newest_reading(records: npt.NDArray[np.void], names: list[str]) -> MemoryReading | None:
    """The last one among these records, its retries as the allocator counts them."""
    return next((reading for reading, _ in reversed(_readings(records, names))), None)


def _readings(records: npt.NDArray[np.void], names: list[str]) -> list[tuple[MemoryReading, int | None]]:
    """The readings that these records hold, in their order, each with the most that was reserved until then."""
    found = records[records["kind"] == Kind.MEMORY]
    by_time: dict[int, dict[str, np.void]] = {}
    for record in found:
        by_time.setdefault(int(record["start_ns"]), {})[name_of(names, int(record["name_id"]))] = record
    return [_reading(of_one) for of_one in by_time.values()]


def _reading(records: dict[str, np.void]) -> tuple[MemoryReading, int | None]:
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


def _most(before: int | None, now: int | None) -> int | None:
    return max((value for value in (before, now) if value is not None), default=None)


def memory_signals(readings: Sequence[MemoryReading], first_step: int, last_step: int) -> dict[str, float]:
    """What may explain why a rank was slow in these steps; a key that is missing was not measured there.

    readings: MemoryStatistics.readings of the rank. alloc_retries_per_step: each makes the allocator give its cache
    back and wait for the device. fragmentation_share: of what is reserved, free and not to be given back; median.
    memory_used_share: reserved, of what the process may take; most.
    """
    inside = [reading for reading in readings if first_step <= reading.step <= last_step]
    before = [reading for reading in readings if reading.step < first_step]
    signals: dict[str, float] = {}
    counted = [(r.step, r.alloc_retries) for r in (*before[-1:], *inside) if r.alloc_retries is not None]
    if inside and len(counted) > 1:
        (step, retries), (until, retries_then) = counted[0], counted[-1]
        signals["alloc_retries_per_step"] = (retries_then - retries) / (until - step)
    fragmentation = _shares((reading.inactive_bytes, reading.reserved_bytes) for reading in inside)
    if fragmentation:
        signals["fragmentation_share"] = float(np.median(fragmentation))
    used = _shares((reading.reserved_bytes, reading.limit_bytes) for reading in inside)
    if used:
        signals["memory_used_share"] = max(used)
    return signals


def _shares(pairs: Iterable[tuple[int | None, int | None]]) -> list[float]:
    return [part / whole for part, whole in pairs if part is not None and whole]
