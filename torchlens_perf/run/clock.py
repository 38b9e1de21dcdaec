"""Read the host's clock, and the device's progress from the header of a ring file."""

from __future__ import annotations

import time
from typing import NamedTuple

from torchlens_perf.run.ring import DEVICE_MARK, RingReader, lookup_name

_IS_END = 1 << 8
_HALF = 32


class Anchor(NamedTuple):
    """One instant on a monotonic clock and on the wall clock, with the uncertainty of the pair."""

    monotonic_ns: int
    unix_ns: int
    error_ns: int

    @property
    def offset_ns(self) -> int:
        """Return the number of ns to add to a monotonic time to get Unix time."""
        return self.unix_ns - self.monotonic_ns


class HostClock:
    """Step clock that reads CLOCK_MONOTONIC. A mark is a time in nanoseconds."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        return begin, end - begin

    def anchor(self) -> Anchor:
        """Return the anchor with the smallest uncertainty of five attempts.

        Each attempt reads the wall clock between two readings of the monotonic clock.
        """
        best = Anchor(0, 0, 1 << 62)
        for _ in range(5):
            before = time.monotonic_ns()
            unix_ns = time.time_ns()
            after = time.monotonic_ns()
            if after - before < best.error_ns:
                best = Anchor((before + after) // 2, unix_ns, after - before)
        return best


class DeviceMark(NamedTuple):
    """The last mark in the command stream that a device had reached at the last poll."""

    step: int
    """Step of the mark."""
    place: int
    """Number of the mark within the step; 0 is the start of the step."""
    kind: int
    """Kind of the span that the mark starts or ends, a ring.Kind; 0 if not known."""
    name_id: int
    is_end: bool
    """True if the mark is the end of the span, False if it is the start."""
    since_ns: int
    """Time of the poll that first found the device at this mark."""
    looked_ns: int
    """Time of the last poll."""


def read_device_mark(reader: RingReader) -> tuple[DeviceMark, str] | None:
    """Return the device's last mark and the name of its span; None before the first poll.

    The training process may update the mark during the call, so the values may be inconsistent.
    """
    since_ns, where, mark, looked_ns = map(reader.read_counter, DEVICE_MARK)
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
    return found, lookup_name(reader.names(), found.name_id)
