"""The clock that takes a rank's marks: the host's, or a device's once there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchlens_perf.run.clock import HostClock

# A mark on a device takes a microsecond or so of ours. What takes longer waits for room in the device's queue, as the
# job's next launch would have: that is not ours. The same in native/device.c.
LONGEST_MARK_NS = 100_000
MAX_UNREAD_STEPS = 256
"""Steps after which a time that the device has not reported is given up."""
CollectiveListener = Callable[[int, int], None]
"""Called with the device clock's marks around a collective that ran in its caller's stream, on its thread."""


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
    """Marks for how long the device waits for communication, see hooks/on_device/stalls.py."""

    def begin(self, name_id: int) -> int | None: ...
    def end(self) -> int | None: ...
    def begin_collective(self) -> Callable[[], None] | None: ...
    def begin_tail(self, name_id: int) -> int | None: ...
    def end_tail(self, *, raised: bool = False, is_known: bool = True) -> None: ...


class Clocks:
    """Hooks read the attributes, some at every collective, and set them by the methods. Training thread."""

    def __init__(self) -> None:
        self.host = HostClock()
        self.current: Clock = self.host
        self.stalls: Stalls | None = None
        """Marks what a device waits for, while `current` is a device's clock."""
        self.collective_listener: CollectiveListener | None = None
        """Takes the times of synchronous collectives on a device that nothing else reports."""

    def use(self, clock: Clock | None, stalls: Stalls | None = None) -> None:
        """Take marks by a device's clock from here on; None: by the host's."""
        self.current, self.stalls = clock or self.host, stalls

    def listen_to_collectives(self, listener: CollectiveListener | None) -> None:
        self.collective_listener = listener
