"""Find ranks whose device is behind when all hosts have issued everything. Pure.

The operations that a host has issued do not show the progress of its device. A kernel that never
ends on one rank stops all devices at the next collective. Two sources show that, without the
training thread, which may be blocked:

1. NCCL's thread reports which collectives' kernels have started. If a rank's kernel has not started
   while other ranks' kernels have, the rank's device has not reached that collective. 2. At each
   step's end, a rank records the last mark that its device has reached. For a blocked thread this
   is old, and thus a lower bound. A device only counts as stuck if a much later poll found it at
   the same mark.

In a loop that waits for its device in each step, the last poll is older than the kernel that hangs,
so both sources fail. Python stacks then only show that the hosts wait for their devices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Protocol

# A working device passes every mark within this number of usual steps.
STOOD_STEPS = 2.0
# .cpu() and .to() are not included: a normal checkpoint may spend a long time in them, copy after
# copy.
_WAITS = re.compile(r"\.(item|tolist|synchronize)\(|(?<![\w.])(float|int|bool)\(")


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePlace:
    """The last mark that a rank's device had reached when its training thread last polled it."""

    step: int
    place: int
    """Number of the mark within the step; 0 is the start of the step."""
    mark: str
    """Description such as "the beginning of the forward pass"; "" if not known."""
    stood_s: float
    """Time in seconds from the first to the last poll that found the device at this mark."""
    kind: int = 0
    """Kind of the mark's span; 0 if not known."""
    is_end: bool = False
    """True if the mark is the end of the span, False if it is the start."""


class RankProgress(Protocol):
    """The fields of hang.Progress that this module uses. They are documented there."""

    @property
    def usual_step_s(self) -> float: ...
    @property
    def issued(self) -> Mapping[str, int]: ...
    @property
    def began(self) -> Mapping[str, int]: ...
    @property
    def device(self) -> DevicePlace | None: ...
    @property
    def waits_in(self) -> str | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFinding:
    """Result of comparing devices."""

    kind: str
    """One of four results.

    - kernel: the kernel of `group` and `sequence` has not started.
    - mark: the devices of `ranks` have not passed a mark that others have.
    - level: all devices are stuck at the same mark.
    - unknown: the hosts were blocked before they could poll.
    """
    ranks: tuple[int, ...] = ()
    """Ranks whose devices are behind the others'; empty for level and unknown."""
    group: str = ""
    sequence: int = -1
    places: Mapping[int, DevicePlace] = dataclasses.field(default_factory=dict)
    """Last marks by rank, for mark and level."""
    waits_in: str = ""
    """For unknown: the line of code in which all hosts wait for their devices; "" if there is no
    single one.
    """
    asked: tuple[int, ...] = ()
    """Ranks whose stacks were read. The others are in the same place."""


def compare_devices(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Compare the devices of these ranks, whose hosts are stuck.

    Return None if no device is known.
    """
    found = _kernels_not_begun(ranks) or _marks_not_reached(ranks)
    if found is None and any(each.device is not None for each in ranks.values()):
        asked = {rank: each.waits_in for rank, each in ranks.items() if each.waits_in is not None}
        places = set(asked.values())
        together = places.pop() if len(places) == 1 else ""
        return DeviceFinding("unknown", waits_in=together, asked=tuple(sorted(asked)))
    return found


def is_device_wait(source: str) -> bool:
    """Return True if a long-running line of code waits for the process's device."""
    return _WAITS.search(source) is not None


def _kernels_not_begun(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Find ranks whose kernels are behind in a group and ahead in no group.

    A group only counts if all of its ranks have issued the same operations and report the start of
    kernels.
    """
    behind: dict[int, tuple[str, int]] = {}
    ahead: set[int] = set()
    for group in sorted({group for each in ranks.values() for group in each.began}):
        users = {rank: each for rank, each in ranks.items() if each.issued.get(group, -1) >= 0}
        begun = {rank: each.began.get(group, -1) for rank, each in users.items()}
        low = min(begun.values(), default=-1)
        if low < 0 or len({each.issued[group] for each in users.values()}) > 1:
            continue
        if low < max(begun.values()):
            behind |= {
                rank: (group, low + 1)
                for rank, last in begun.items()
                if last == low and rank not in behind
            }
            ahead |= {rank for rank, last in begun.items() if last > low}
    named = sorted(behind.keys() - ahead)
    if not named:
        return None
    group, sequence = behind[named[0]]
    return DeviceFinding(
        "kernel",
        tuple(rank for rank in named if behind[rank] == (group, sequence)),
        group,
        sequence,
    )


def _marks_not_reached(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Find stuck devices that all others have passed.

    The marks of stuck devices are exact, while the marks of other devices are lower bounds.
    """
    places = {rank: each.device for rank, each in ranks.items() if each.device is not None}
    if len(places) < max(2, len(ranks)):
        return None
    low = min((place.step, place.place) for place in places.values())
    there = tuple(
        sorted(rank for rank, place in places.items() if (place.step, place.place) == low)
    )
    if not all(_is_stuck_at_mark(ranks[rank]) for rank in there):
        return None
    if len(there) == len(ranks):
        return DeviceFinding("level", places=places)
    return DeviceFinding("mark", there, places=places)


def _is_stuck_at_mark(each: RankProgress) -> bool:
    return each.device is not None and 0 < STOOD_STEPS * each.usual_step_s <= each.device.stood_s
