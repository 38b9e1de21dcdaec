"""Whose device has not come as far as the others', where all hosts have issued everything. Pure.

What a host has issued does not say what its device has done: a kernel that never ends on one rank stops all of them in
the next collective. Two things tell, both without the training thread, which may be blocked:

1. NCCL's thread reports which collectives' kernels have begun. A rank whose kernel has not begun, while others' have,
   has a device that did not come to it.
2. At each step's end a rank has noted the last mark that its device had reached. It is old once the thread is blocked,
   so it is a lower bound; only a device that was looked at again much later, and was at the same mark, stands there.

Where a loop waits for its device in each step, the last look is older than the kernel that hangs, and neither tells.
That the hosts wait for their devices is then all that is known, from their Python stacks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Protocol

STOOD_STEPS = 2.0  # usual steps in which a device that works passes every mark
# Not .cpu() and .to(): a checkpoint may stand in them for long, copy after copy, while nothing is wrong.
_WAITS = re.compile(r"\.(item|tolist|synchronize)\(|(?<![\w.])(float|int|bool)\(")


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePlace:
    """The last mark that a rank's device had reached at its training thread's last look."""

    step: int
    place: int
    """Which of the step's marks; 0: its beginning."""
    mark: str
    """For people: "the beginning of the forward pass"; "" where it is not known."""
    stood_s: float
    """How long it was seen there, from the first look to the last one."""
    kind: int = 0
    """Of the span whose mark it is; 0: not known."""
    is_end: bool = False
    """Of that span; else it is its beginning."""


class RankProgress(Protocol):
    """The part of hang.Progress that is looked at here, which says what it means."""

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
    """What the devices tell."""

    kind: str
    """kernel (of `group` and `sequence`, has not begun), mark (not reached), level (all stand at the same mark), or
    unknown (the hosts were blocked before they could look)."""
    ranks: tuple[int, ...] = ()
    """Whose devices have not come as far as the others'; none for level and unknown."""
    group: str = ""
    sequence: int = -1
    places: Mapping[int, DevicePlace] = dataclasses.field(default_factory=dict)
    """By rank, for mark and level."""
    waits_in: str = ""
    """For unknown: where the hosts wait for their devices; "": they do not, in one line, or were not asked."""
    asked: tuple[int, ...] = ()
    """The ranks whose stacks tell that; the others are in the same place."""


def compare_devices(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Of these ranks, whose hosts stand still. None where they have no device, as far as is known."""
    found = _kernels_not_begun(ranks) or _marks_not_reached(ranks)
    if found is None and any(each.device is not None for each in ranks.values()):
        asked = {rank: each.waits_in for rank, each in ranks.items() if each.waits_in is not None}
        places = set(asked.values())
        together = places.pop() if len(places) == 1 else ""
        return DeviceFinding("unknown", waits_in=together, asked=tuple(sorted(asked)))
    return found


def is_device_wait(source: str) -> bool:
    """Whether a line of Python, in which a process with a device has stood for long, waits for that device."""
    return _WAITS.search(source) is not None


def _kernels_not_begun(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """As with what was issued: who is behind in some group and ahead in none. Only groups in which all have issued the
    same, and where all ranks' begins are reported."""
    behind: dict[int, tuple[str, int]] = {}
    ahead: set[int] = set()
    for group in sorted({group for each in ranks.values() for group in each.began}):
        users = {rank: each for rank, each in ranks.items() if each.issued.get(group, -1) >= 0}
        begun = {rank: each.began.get(group, -1) for rank, each in users.items()}
        low = min(begun.values(), default=-1)
        if low < 0 or len({each.issued[group] for each in users.values()}) > 1:
            continue
        if low < max(begun.values()):
            behind |= {rank: (group, low + 1) for rank, last in begun.items() if last == low and rank not in behind}
            ahead |= {rank for rank, last in begun.items() if last > low}
    named = sorted(behind.keys() - ahead)
    if not named:
        return None
    group, sequence = behind[named[0]]
    return DeviceFinding("kernel", tuple(rank for rank in named if behind[rank] == (group, sequence)), group, sequence)


def _marks_not_reached(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Those that stand, where all others have come further: others' places are lower bounds, theirs are exact."""
    places = {rank: each.device for rank, each in ranks.items() if each.device is not None}
    if len(places) < max(2, len(ranks)):
        return None
    low = min((place.step, place.place) for place in places.values())
    there = tuple(sorted(rank for rank, place in places.items() if (place.step, place.place) == low))
    if not all(_stands(ranks[rank]) for rank in there):
        return None
    if len(there) == len(ranks):
        return DeviceFinding("level", places=places)
    return DeviceFinding("mark", there, places=places)


def _stands(each: RankProgress) -> bool:
    return each.device is not None and 0 < STOOD_STEPS * each.usual_step_s <= each.device.stood_s
