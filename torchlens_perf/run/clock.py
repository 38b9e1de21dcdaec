"""The host's clock; and how far a device is, as the training process writes it into the ring's header."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.run.ring import DEVICE_MARK, name_of

if TYPE_CHECKING:
    from torchlens_perf.run.ring import Reader

_IS_END = 1 << 8
_HALF = 32


class Anchor(NamedTuple):
    """The same instant on a monotonic clock and on the wall clock, and how far apart the two readings may be."""

    monotonic_ns: int
    unix_ns: int
    error_ns: int


class HostClock:
    """CLOCK_MONOTONIC: the instant is known as soon as it is marked, and is its own handle."""

    name = "host"

    def mark(self) -> int:
        return time.monotonic_ns()

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        return begin, end - begin

    def anchor(self) -> Anchor:
        """The closest of five readings of the wall clock between two of the monotonic one."""
        best = Anchor(0, 0, 1 << 62)
        for _ in range(5):
            before = time.monotonic_ns()
            unix_ns = time.time_ns()
            after = time.monotonic_ns()
            if after - before < best.error_ns:
                best = Anchor((before + after) // 2, unix_ns, after - before)
        return best


class DeviceMark(NamedTuple):
    """The last mark that a device had reached when the training thread last looked."""

    step: int
    """The step in which that is."""
    place: int
    """Which of the step's marks; 0: the step's beginning."""
    kind: int
    """Of the span whose mark it is, a ring.Kind; 0: not known."""
    name_id: int
    is_end: bool
    """Of the span; else it is its beginning."""
    since_ns: int
    """When it was first seen there."""
    looked_ns: int
    """When it was last looked."""

    def words(self) -> tuple[int, int, int, int]:
        """As they lie in the header."""
        mark = self.kind | (_IS_END if self.is_end else 0) | self.name_id << _HALF
        return self.since_ns, (self.step + 1) | self.place << _HALF, mark, self.looked_ns


def device_mark(reader: Reader) -> tuple[DeviceMark, str] | None:
    """What the header says, and the name of the mark's span; None before the first look. A snapshot."""
    since_ns, where, mark, looked_ns = map(reader.counter, DEVICE_MARK)
    if not where:
        return None
    found = DeviceMark(
        step=(where & 0xFFFFFFFF) - 1,
        place=where >> _HALF,
        kind=mark & 0xFF,
        name_id=mark >> _HALF,
        is_end=bool(mark & _IS_END),
        since_ns=since_ns,
        looked_ns=looked_ns,
    )
    return found, name_of(reader.names(), found.name_id)
