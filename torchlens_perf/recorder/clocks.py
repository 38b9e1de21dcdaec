"""Select the clock of a rank's marks: the host's, or the device's once torch uses a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchlens_perf.run.clock import HostClock

# Maximum time of recording a mark that is counted as overhead. A mark costs about a microsecond. A
# longer call waits for space in the device's queue, as the job's next launch would.
LONGEST_MARK_NS = 100_000
MAX_UNREAD_STEPS = 256
"""Number of steps after which a time that the device has not reported is dropped."""
CollectiveListener = Callable[[int, int], None]
"""Function that receives the marks before and after a collective on the caller's stream.
"""


class Clock(Protocol):
    """Records marks, whose times are read later. No method may block or synchronize a device."""

    def mark(self) -> int | None:
        """Mark the current instant.

        Return the mark for span(), or None if no mark can be recorded now.
        """

    def span(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return (start in ns of CLOCK_MONOTONIC, duration in ns by this clock) between two marks.

        Return None until the device has reported both marks.
        """


class StallMarks(Protocol):
    """Records marks around the device's waits for communication (cuda/stalls.py)."""

    def begin(self, name_id: int) -> int | None:
        """Mark the start of a wait. Return the mark, or None within another wait."""

    def end(self) -> int | None:
        """Mark the end of the wait. Return the mark, or None if the wait goes on."""

    def begin_collective(self) -> Callable[[], None] | None:
        """Mark the start of a synchronous collective. Return the function that marks its end."""

    def begin_backward_tail(self, name_id: int) -> int | None:
        """Mark the end of the computation of a backward pass."""

    def end_backward_tail(self, *, raised: bool = False, is_known: bool = True) -> None:
        """Mark the end of a backward pass. is_known: False if its tail may have no start."""


class Clocks:
    """The current clocks of one watch.

    Hooks read the attributes often, some at every collective. Used on the training thread.
    """

    def __init__(self) -> None:
        self.host = HostClock()
        self.current: Clock = self.host
        self.stalls: StallMarks | None = None
        """Recorder of the device's waits, or None while `current` is the host's clock."""
        self.collective_listener: CollectiveListener | None = None
        """Receiver of marks around synchronous collectives, if no other source reports their
        times."""

    def use_clock(self, clock: Clock | None, stalls: StallMarks | None = None) -> None:
        """Record later marks with this clock, or with the host's clock if `clock` is None."""
        self.current, self.stalls = clock or self.host, stalls

    def set_collective_listener(self, listener: CollectiveListener | None) -> None:
        self.collective_listener = listener
