"""Find ranks whose device is behind although all hosts have issued the same operations. Pure.

The operations that a host has issued do not show the progress of its device. A kernel that never
ends on one rank stops all devices at the next collective. Two sources show the device's progress
even if the training thread is blocked:

1. NCCL's thread reports which collectives' kernels have started. If a rank's kernel has not started
   while other ranks' kernels have, the rank's device has not reached that collective.
2. At each step's end, a rank polls its device and records the last mark (start or end of a timed
   span) that the device has reached. The record of a blocked thread is old, so its mark is a lower
   bound. A device only counts as stuck if a much later poll found it at the same mark.

Neither the reports of NCCL nor the polls help if the training loop waits for its device in each
step, because the last poll is older than the hanging kernel. Python stacks then show that the hosts
wait for their devices, but not which device is stuck.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

# A device that stays at one mark for longer than this multiple of the usual step time is stuck.
STOOD_STEPS = 2.0
# Calls that wait for the device. .cpu() and .to() are left out, because a normal checkpoint may
# spend a long time in such copies.
_WAITS = re.compile(r"\.(item|tolist|synchronize)\(|(?<![\w.])(float|int|bool)\(")


@dataclasses.dataclass(frozen=True, slots=True)
class LastDeviceMark:
    """The last mark that a rank's device had reached when its training thread last polled it."""

    step: int
    place: int
    """Index of the mark in the step; 0 is the start of the step."""
    mark: str
    """Description of the mark, such as "the beginning of the forward pass"; "" if not known."""
    stood_s: float
    """Time in seconds from the first to the last poll that found the device at this mark."""
    kind: int = 0
    """`ring.Kind` of the span that the mark starts or ends; 0 if not known."""
    is_end: bool = False
    """True if the mark is the end of the span, False if it is the start."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankProgress:
    """State of one rank at one time."""

    rank: int
    host: str
    step: int
    """Index of the current step."""
    since_step_s: float
    """Seconds since the rank's last step ended, or since recording started. The value grows after
    the rank has ended, but not while its node is silent.
    """
    report_age_s: float
    """Age of this state in seconds, which grows while the rank's node is silent."""
    usual_step_s: float
    """Median step time in seconds; 0 if unknown, as in the first steps."""
    issued: Mapping[str, int]
    """For each group, the sequence number of the last collective that the rank issued.

    A collective counts as issued when the rank enters it. A group that is missing or has -1 has no
    collective so far. Point-to-point operations are not included, because their sequence numbers
    are not comparable between ranks.
    """
    inside: tuple[str, ...]
    """Names of the open spans, outermost first. The span of the step is left out."""
    state: str
    """"running", "stopped", "traced", "uninterruptible", "dead", "closed" or "unknown"."""
    operations: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    """For each group, known names of its last collectives, such as {57: "allreduce"}."""
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For each group, bytes of the last collective that the rank issued, where known."""
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For each group, data type of the last collective that the rank issued, where it has one."""
    since_mark_s: float | None = None
    """Seconds from the rank's last record to this report; None if not known."""
    all_groups: bool = True
    """True if `issued` has all groups of the rank. False if the ring's table of groups was full, or
    if ranks began to count a group's collectives at different operations.
    """
    began: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """For each group, the sequence number of the last collective whose kernel has started on the
    device. Groups that do not report kernels are missing.
    """
    device: LastDeviceMark | None = None
    """Last mark that the device is known to have reached; None if no device is timed."""
    passes: int = 0
    """Number of forward passes since the last step, if there was no backward pass; else 0."""
    waits_in: str | None = None
    """Line of code in which the host waits for its device; "" for no wait; None if not known."""

    @property
    def evaluates(self) -> bool:
        """True if the rank makes forward passes only. A single one may belong to training."""
        return self.passes > 1

    @property
    def quiet_s(self) -> float:
        """Seconds since the last record, or since the last step if no record is known."""
        return self.since_step_s if self.since_mark_s is None else self.since_mark_s


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFinding:
    """Result of comparing the progress of the ranks' devices."""

    kind: str
    """One of four kinds:

    - kernel: the kernel of `group` and `sequence` has not started.
    - mark: the devices of `ranks` have not passed a mark that all other devices have passed.
    - level: all devices are stuck at the same mark.
    - unknown: the hosts were blocked before they could poll their devices.
    """
    ranks: tuple[int, ...] = ()
    """Ranks whose devices are behind; empty for `level` and `unknown`."""
    group: str = ""
    sequence: int = -1
    places: Mapping[int, LastDeviceMark] = dataclasses.field(default_factory=dict)
    """For `mark` and `level`: the last mark of each rank's device."""
    waits_in: str = ""
    """For `unknown`: the line of code in which all hosts wait; "" if the lines differ."""
    asked: tuple[int, ...] = ()
    """Ranks whose Python stacks were read. All other ranks have the same open spans."""


def compare_devices(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Compare the progress of the devices of ranks whose hosts are all stuck.

    Return None if the progress of no device is known.
    """
    found = _find_kernels_behind(ranks) or _find_devices_behind(ranks)
    if found is None and any(each.device is not None for each in ranks.values()):
        asked = {rank: each.waits_in for rank, each in ranks.items() if each.waits_in is not None}
        places = set(asked.values())
        together = places.pop() if len(places) == 1 else ""
        return DeviceFinding("unknown", waits_in=together, asked=tuple(sorted(asked)))
    return found


def waits_for_device(source: str) -> bool:
    """Return True if this line of code waits until the device has finished its work."""
    return _WAITS.search(source) is not None


def _find_kernels_behind(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Find ranks whose kernels are behind in at least one group and ahead in no group.

    A group is only compared if all of its ranks have issued the same operations and report when
    kernels start.
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


def _find_devices_behind(ranks: Mapping[int, RankProgress]) -> DeviceFinding | None:
    """Find stuck devices that are behind all other devices.

    The last mark of a stuck device is exact. For any other device, the last mark is a lower bound.
    """
    places = {rank: each.device for rank, each in ranks.items() if each.device is not None}
    if len(places) < max(2, len(ranks)):
        return None
    low = min((place.step, place.place) for place in places.values())
    there = tuple(
        sorted(rank for rank, place in places.items() if (place.step, place.place) == low)
    )
    if not all(
        0 < STOOD_STEPS * ranks[rank].usual_step_s <= places[rank].stood_s for rank in there
    ):
        return None
    if len(there) == len(ranks):
        return DeviceFinding("level", places=places)
    return DeviceFinding("mark", there, places=places)
