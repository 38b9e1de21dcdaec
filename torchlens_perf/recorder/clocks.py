"""Clock that takes a rank's marks: the host's, or the device's once a device is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchlens_perf.run.clock import HostClock

# A mark on a device costs about a microsecond. A longer call waits for room in the device's queue,
# as the job's next launch would, so the excess is not overhead. native/device.c uses the same
# limit.
LONGEST_MARK_NS = 100_000
MAX_UNREAD_STEPS = 256
"""Number of steps after which a time that the device has not reported is dropped."""
CollectiveListener = Callable[[int, int], None]
"""Function called with the device marks around a collective that ran in its caller's stream,
on that thread.
"""


class Clock(Protocol):
    """Source of marks, which are read later. No method may block or synchronize a device."""

    name: str

    def mark(self) -> int | None:
        """Mark the current instant.

        Return a handle for span(), or None if the device cannot be marked now.
        """

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return (start in ns of CLOCK_MONOTONIC, duration in ns by this clock) between two marks.

        Return None until the device has reported both marks.
        """


class StallMarks(Protocol):
    """Marks around waits of the device for communication (hooks/on_device/stalls.py)."""

    def begin(self, name_id: int) -> int | None: ...
    def end(self) -> int | None: ...
    def begin_collective(self) -> Callable[[], None] | None: ...
    def begin_tail(self, name_id: int) -> int | None: ...
    def end_tail(self, *, raised: bool = False, is_known: bool = True) -> None: ...


class Clocks:
    """Clocks in use.

    Hooks read the attributes, some at every collective. Used on the training thread.
    """

    def __init__(self) -> None:
        self.host = HostClock()
        self.current: Clock = self.host
        self.stalls: StallMarks | None = None
        """Marks for waits of the device; None while `current` is the host's clock."""
        self.collective_listener: CollectiveListener | None = None
        """Receiver of times of synchronous device collectives that are not reported otherwise."""

    def use_clock(self, clock: Clock | None, stalls: StallMarks | None = None) -> None:
        """Take further marks with a device's clock, or with the host's clock if `clock` is None."""
        self.current, self.stalls = clock or self.host, stalls

    def set_collective_listener(self, listener: CollectiveListener | None) -> None:
        self.collective_listener = listener
