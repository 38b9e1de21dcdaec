"""Where times come from. The host's clock is here; a device's clock implements the same protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

# A mark on a device takes a microsecond or so of ours. What takes longer waits for room in the device's queue, as the
# job's next launch would have: that is not ours. The same in native/device.c.
LONGEST_MARK_NS = 100_000


class Anchor(NamedTuple):
    """The same instant on a monotonic clock and on the wall clock, and how far apart the two readings may be."""

    monotonic_ns: int
    unix_ns: int
    error_ns: int


class Clock(Protocol):
    """Marks instants on the thread that works, and reads them later. No method may block or synchronize a device."""

    name: str

    def mark(self) -> int | None:
        """Marks now. Returns a handle for span(); None where a device cannot be marked now."""

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        """From one mark to another: start in ns of the host's CLOCK_MONOTONIC, duration in ns by this clock.

        None until the device has reported both marks.
        """


class Stalls(Protocol):
    """Marks for how long the device waits for communication, where a device's clock runs."""

    def begin(self, name_id: int) -> int | None:
        """Before a wait of the calling thread; end() follows. The mark, if a stall begins here."""

    def end(self) -> int | None:
        """After the wait. The mark, if it ended a stall."""

    def begin_collective(self) -> Callable[[], None] | None:
        """Before an operation that runs in the current stream's order; what to call after it, if that is marked."""

    def begin_tail(self, name_id: int) -> int | None:
        """When a backward pass has computed its last gradient, on whichever thread. The mark, if a stall begins."""

    def end_tail(self, *, raised: bool = False) -> None:
        """When a backward pass has ended, on the thread that called it."""


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
