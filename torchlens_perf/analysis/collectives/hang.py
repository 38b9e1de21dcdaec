"""No rank makes a step any more: whom the others wait for, in which collective, and what those were inside of.

Pure: values in, a finding out; it knows no file, no process and no clock. `words/hang.py` puts it into words.
The rules, in this order:

1. Nothing is said before no rank has made a step for `limit_s`, nor while all ranks still leave marks (an evaluation).
2. A process that died, is stopped or is held by a debugger is named, whatever it has issued: a collective that it
   has entered cannot end without it. So is a node that fell silent when the steps ended. What the others do follows.
3. Ranks that issued different operations under the same number of a group are named: their order does not match.
4. Else sequence numbers are compared. In a group, all others wait for those that are furthest behind. A rank that is
   behind somewhere and ahead nowhere waits for nobody: it is named. If every rank that is behind is ahead elsewhere,
   they wait for each other in a cycle.
5. Else everybody has entered everything. Ranks whose devices have not come as far as the others' are named
   (device_progress.py); else no rank is blamed: network or device, hosts that wait for devices of which nothing is
   known, or a pause that all ranks make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torchlens_perf.analysis.collectives.device_progress import DeviceFinding, DevicePlace, compare_devices
from torchlens_perf.run.ring import CAPTURING

MIN_S = 10.0
FACTOR = 5.0  # times the usual step: more would leave little of the 600 s after which NCCL's watchdog ends a job
# Without a usual time: building, compiling and loading take minutes, unequal on the ranks. Half of those 600 s.
FIRST_STEPS_S = 300.0
CAPTURE_S = 120.0  # that writing a capture may take: all ranks wait for the one that writes
SILENT_S = 5.0  # of a node that reports its progress every second or two
WAIT = "wait"  # the span of Work.wait and wait_tensor
_STOPPED = ("stopped", "traced")
ENDED = ("dead", "closed")
_COMMUNICATING = (WAIT, "backward")  # DDP's reducer waits in C++, inside the backward pass


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What is known of one rank at one instant."""

    rank: int
    host: str
    step: int
    """Index of the step in progress."""
    since_step_s: float
    """How long ago its last step ended, or recording began. Goes on after a rank has ended, but not in a silence."""
    report_age_s: float
    """How long ago this was reported: 0 for a rank of this node; grows for a node that is silent."""
    usual_step_s: float
    """Its usual step time (median); 0 if unknown, as in the first steps."""
    issued: Mapping[str, int]
    """By group: sequence number of the last collective that it issued (counted when it enters, not when it returns);
    absent or -1: none. No point-to-point operations: ranks issue different ones, their numbers do not compare."""
    inside: tuple[str, ...]
    """Names of its open spans, outermost first, without the step itself."""
    state: str
    """Of its process: "running", "stopped", "traced", "uninterruptible", "dead", "closed" (its watch) or "unknown"."""
    operations: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    """By group: what its last collectives are, where known, as {57: "allreduce"}."""
    since_mark_s: float | None = None
    """Time from the last record to this report. None: not known, then only steps count."""
    all_groups: bool = True
    """Whether `issued` holds all groups that it has used; False where the ring's table of groups was full, or the ranks
    count a group's collectives from different places."""
    began: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """As `issued`, of the last one whose kernel has begun on the device; absent: nobody tells."""
    device: DevicePlace | None = None
    """How far its device was at the last look; None: it has none, or it is not timed."""
    waits_in: str | None = None
    """Where its host waits for its device, by its Python stack; "": nowhere. None: not known."""

    @property
    def quiet_s(self) -> float:
        """How long it has done nothing that is recorded."""
        return self.since_step_s if self.since_mark_s is None else self.since_mark_s


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one group; operation is "" where it is not known."""

    group: str
    sequence: int
    operation: str = ""


@dataclasses.dataclass(frozen=True)
class BlockingRank:
    """A rank that the others wait for."""

    progress: Progress
    problem: str
    """dead, stopped, traced, silent (its node), closed, busy (it leaves marks), device (behind others'), or stuck."""
    missing: Collective | None
    """The first collective that it has not entered and others have; None: it has entered all."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """No step for too long, and why."""

    kind: str
    """dead, stopped, silent (a node), missing (in a collective), busy (missing, but at work), uneven (the missing have
    ended), device (not as far as others', where all have entered), mismatch (of order or operations), together (all
    have entered: network or device), blocked (all are in the same place, where their hosts wait for their devices),
    unheard (all ranks that report have entered, and nothing is known of the others), apart (no collective shows who
    waits for whom), alone (one is stuck, others go on or have ended), or pause (all are in the same place)."""
    since_s: float
    """For so long no rank, but those that are moving, has made a step."""
    usual_s: float
    """The usual step time; 0: not known yet."""
    step: int
    """The step in progress, of the rank that is furthest."""
    blocking: tuple[BlockingRank, ...]
    waiting: tuple[int, ...]
    """Ranks that wait: in `collective`, where there is one."""
    collective: Collective | None
    """What they wait in: not entered by a blocking rank; for `together`, entered by all."""
    cycle: tuple[tuple[int, Collective], ...]
    """For `mismatch` of order: each rank waits there for the next one, and the last for the first."""
    operations: Mapping[str, tuple[int, ...]]
    """For `mismatch` of operations: what ranks issued as `collective`."""
    places: Mapping[tuple[str, ...], tuple[int, ...]]
    """By open spans, outermost first: the living ranks in there."""
    asleep: tuple[int, ...]
    """Living ranks in uninterruptible sleep: in storage or a driver."""
    unheard: tuple[int, ...]
    """Members of a group, or of the run, without any recent state to judge by."""
    moving: tuple[int, ...]
    """Ranks that do make steps; all else is about the others."""
    ended: tuple[int, ...]
    """Ranks whose recording ended, normally or not."""
    look_at: tuple[int, ...]
    """Living ranks whose Python stacks are worth reading, the most informative first."""
    key: Hashable
    """The same for the same finding: report each key once. It changes with every step made. Only a pause or a busy rank
    keeps it, and has a new one whenever it is twice as long: a checkpoint of always 40 s is not reported each time."""

    devices: DeviceFinding | None = None
    """What the devices tell, where all have entered everything; None: there are none, or they were not asked."""

    @property
    def alarm(self) -> bool:
        """Whether somebody must act; else this may well be how the job works."""
        return self.kind not in ("pause", "busy")


@dataclasses.dataclass(frozen=True)
class _Front:
    """A collective that some members of its group have entered and others have not."""

    collective: Collective
    behind: frozenset[int]  # the furthest behind
    ahead: frozenset[int]  # alive: who has ended waits for nobody


def limit_s(progress: Iterable[Progress], factor: float = FACTOR) -> float:
    """How long no step is too long: max(10 s, factor times the usual step of the slowest rank).

    Without a usual step FIRST_STEPS_S, unless a process has died or is stopped: that needs no patience.
    """
    ranks = list(progress)
    usual_s = max((each.usual_step_s for each in ranks), default=0.0)
    if usual_s <= 0 and not any(each.state in ("dead", *_STOPPED) for each in ranks):
        return FIRST_STEPS_S
    return max(MIN_S, factor * usual_s)


def find_hang(
    progress: Mapping[int, Progress], groups: Mapping[str, tuple[int, ...]], *, silent_s: float = SILENT_S
) -> Hang | None:
    """Why no step is made, or None while that is not too long.

    progress: by rank, all ranks of the run's last attempt. groups: members by group name; for a group that is missing,
    the ranks that have used it. silent_s: how old the progress can be that a living node
    reported.
    """
    ranks = [progress[rank] for rank in sorted(progress)]
    limit = limit_s(ranks)
    if any(CAPTURING in each.inside and each.state not in (*ENDED, *_STOPPED) for each in ranks):
        limit += CAPTURE_S
    live = {each.rank: each for each in ranks if each.state not in ENDED and each.report_age_s <= silent_s}
    still = {each.rank for each in live.values() if each.since_step_s > limit and each.quiet_s > limit}
    if not still:
        return None
    moving = tuple(each.rank for each in live.values() if each.since_step_s <= limit)
    if moving:
        # Some may be about to stand still too, and show more then. A rank without an open span may have no work.
        stuck = [live[rank] for rank in still]
        if any(live[rank].since_step_s > limit / 2 for rank in moving) or not any(
            each.inside or each.state in _STOPPED for each in stuck
        ):
            return None
        live = {rank: each for rank, each in live.items() if rank not in moving}
    since_s = min(each.since_step_s for each in live.values())
    # Of what ended or fell silent long before the steps did, the job went on without the one, and we without the other.
    last_sign_s = {each.rank: each.report_age_s + (each.since_step_s if each.state in ENDED else 0.0) for each in ranks}
    patience_s = {each.rank: limit if each.state in ENDED else silent_s for each in ranks}
    known = {
        each.rank: each
        for each in ranks
        if each.rank not in moving and (each.rank in live or last_sign_s[each.rank] <= since_s + patience_s[each.rank])
    }
    members = {rank for group in groups.values() for rank in group} | progress.keys()
    ended = {each.rank for each in ranks if each.state in ENDED}
    unheard = tuple(sorted(members - known.keys() - ended - set(moving)))
    return _Case(ranks, live, known, still, moving, unheard, limit, _fronts(known, groups)).judge()


def _fronts(known: Mapping[int, Progress], groups: Mapping[str, tuple[int, ...]]) -> list[_Front]:
    found = []
    for group in sorted({group for each in known.values() for group in each.issued} | groups.keys()):
        members = groups.get(group) or [rank for rank, each in known.items() if each.issued.get(group, -1) >= 0]
        levels = {
            rank: known[rank].issued.get(group, -1)
            for rank in members
            if rank in known and (known[rank].all_groups or group in known[rank].issued)
        }
        low = min(levels.values(), default=-1)
        ahead = frozenset(rank for rank, level in levels.items() if level > low and known[rank].state not in ENDED)
        if ahead:
            collective = _named(group, low + 1, (known[rank] for rank in ahead))
            found.append(_Front(collective, frozenset(rank for rank in levels if levels[rank] == low), ahead))
    return found


def _named(group: str, sequence: int, ranks: Iterable[Progress]) -> Collective:
    """With what the ranks call it, where they agree."""
    names = {each.operations.get(group, {}).get(sequence, "") for each in ranks} - {""}
    return Collective(group, sequence, names.pop() if len(names) == 1 else "")


def _open_where(each: Progress) -> tuple[str, ...]:
    """Where it waits is said by the collective; what it was inside of, by the spans around that."""
    return each.inside[:-1] if each.inside[-1:] == (WAIT,) else each.inside


@dataclasses.dataclass(frozen=True)
class _Case:
    """A stand-still, and what is known of the ranks."""

    ranks: list[Progress]
    live: dict[int, Progress]  # alive, reported recently, and not moving
    known: dict[int, Progress]  # all that may have a part in it
    still: set[int]  # no mark either
    moving: tuple[int, ...]
    unheard: tuple[int, ...]
    limit: float
    fronts: list[_Front]

    @property
    def since_s(self) -> float:
        return min(each.since_step_s for each in self.live.values())

    def judge(self) -> Hang:
        broken = [each for each in self.known.values() if self._problem(each) in ("dead", *_STOPPED, "silent")]
        if broken:
            problems = {self._problem(each) for each in broken}
            kind = "dead" if "dead" in problems else "stopped" if problems & set(_STOPPED) else "silent"
            return self._blame(kind, broken)
        mismatch = self._mismatched_operations()
        if mismatch:
            return mismatch
        ahead = frozenset(rank for front in self.fronts for rank in front.ahead)
        behind = frozenset(rank for front in self.fronts for rank in front.behind) - ahead
        missing = [self.known[rank] for rank in sorted(behind)]
        if missing:
            problems = {self._problem(each) for each in missing}
            kind = "missing" if "stuck" in problems else "busy" if "busy" in problems else "uneven"
            return self._blame(kind, missing)
        return self._cycle() if self.fronts else self._all_entered()

    def _problem(self, each: Progress) -> str:
        if each.state in ENDED or each.state in _STOPPED:
            return each.state
        if each.rank not in self.live:
            # Had it stood still before it fell silent, it would have reported that.
            return "silent" if each.since_step_s <= self.limit else "stuck"
        return "stuck" if each.rank in self.still else "busy"

    def _blame(self, kind: str, blocking: list[Progress]) -> Hang:
        ranks = {each.rank for each in blocking}
        live = self.live.keys() - ranks
        # The group in which most wait for them stands for all.
        fronts = [front for front in self.fronts if front.behind & ranks and front.ahead & live]
        main = max(fronts, key=lambda front: (len(front.ahead & live), front.collective.group), default=None)
        return self._hang(kind, blocking, main.ahead & live if main else live, main.collective if main else None)

    def _mismatched_operations(self) -> Hang | None:
        """The first number of a group under which ranks issued different operations."""
        for group in sorted({group for each in self.known.values() for group in each.operations}):
            issued: dict[int, dict[str, list[int]]] = {}
            for rank, each in self.known.items():
                for sequence, operation in each.operations.get(group, {}).items():
                    issued.setdefault(sequence, {}).setdefault(operation, []).append(rank)
            for sequence in sorted(issued):
                if len(issued[sequence]) > 1:
                    operations = {name: tuple(ranks) for name, ranks in sorted(issued[sequence].items())}
                    look = [ranks[0] for ranks in sorted(operations.values(), key=len)]
                    where = Collective(group, sequence)
                    return self._hang("mismatch", [], self.live, where, operations=operations, look=look)
        return None

    def _cycle(self) -> Hang:
        """Every rank that is behind is ahead elsewhere: following who waits for whom comes back to a rank."""
        rank, path = min(self.fronts[0].ahead), dict[int, Collective]()
        while rank not in path:
            front = next(front for front in self.fronts if rank in front.ahead)
            path[rank] = front.collective
            rank = min(front.behind)
        entries = list(path.items())
        cycle = entries[list(path).index(rank) :]
        waiting = self.live.keys() & {rank for front in self.fronts for rank in front.ahead}
        return self._hang("mismatch", [], waiting, cycle=tuple(cycle), look=[rank for rank, _ in cycle])

    def _all_entered(self) -> Hang:
        """No collective has been entered by some and not by others."""
        ranks, devices = list(self.live), compare_devices(self.live)
        if devices is not None and devices.ranks:
            return self._device(devices)
        if len(ranks) == 1 and (self.moving or (len(self.ranks) > 1 and not self.unheard)):
            return self._hang("alone", list(self.live.values()))
        talking = {each.rank for each in self.live.values() if each.inside and each.inside[-1] in _COMMUNICATING}
        if len(talking) == len(ranks) and (len(ranks) > 1 or self.unheard):
            kind = "unheard" if self.unheard else "together"
            return self._hang(kind, [], ranks, self._last_collective(), look=ranks, devices=devices)
        if devices is not None and devices.kind == "level":  # what they were given to do has not been done
            return self._hang("together", [], ranks, self._last_collective(), look=ranks, devices=devices)
        if len({each.inside[:1] for each in self.live.values()}) == 1 and not self.unheard:
            kind = "blocked" if devices is not None and devices.waits_in else "pause"
            return self._hang(kind, [], ranks if kind == "blocked" else (), look=ranks, devices=devices)
        # Who does not wait, and is where fewest are, is looked at first.
        crowd = {place: len(there) for place, there in self._places().items()}
        odd = sorted(self.live.values(), key=lambda each: (each.rank in talking, crowd[_open_where(each)], each.rank))
        return self._hang("apart", [], talking, look=[each.rank for each in odd])

    def _device(self, devices: DeviceFinding) -> Hang:
        others = [each for rank, each in self.live.items() if rank not in devices.ranks]
        where = self._last_collective()
        if devices.kind == "kernel":
            where = _named(devices.group, devices.sequence, self.live.values())
        blocking = [self.live[rank] for rank in devices.ranks]
        return self._hang("device", blocking, [each.rank for each in others], where, devices=devices)

    def _last_collective(self) -> Collective | None:
        """The last one of the group that most ranks use."""
        users: dict[str, list[Progress]] = {}
        for each in self.live.values():
            for group, sequence in each.issued.items():
                if sequence >= 0:
                    users.setdefault(group, []).append(each)
        if not users:
            return None
        group = max(users, key=lambda name: (len(users[name]), name))
        return _named(group, users[group][0].issued[group], users[group])

    def _places(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        places: dict[tuple[str, ...], list[int]] = {}
        for each in self.live.values():
            places.setdefault(_open_where(each), []).append(each.rank)
        return {place: tuple(ranks) for place, ranks in places.items()}

    def _blocking_rank(self, each: Progress, problem: str = "") -> BlockingRank:
        mine = (front for front in self.fronts if each.rank in front.behind)
        main = max(mine, key=lambda front: (len(front.ahead), front.collective.group), default=None)
        return BlockingRank(each, problem or self._problem(each), main.collective if main else None)

    def _hang(
        self, kind: str, blocking: list[Progress], waiting: Iterable[int] = (), collective: Collective | None = None,
        cycle: tuple[tuple[int, Collective], ...] = (), operations: Mapping[str, tuple[int, ...]] | None = None,
        look: Sequence[int] = (), devices: DeviceFinding | None = None,
    ) -> Hang:  # fmt: skip
        step = max(each.step for each in self.live.values())
        ranks = tuple(each.rank for each in blocking)
        key: tuple[Hashable, ...] = (kind, step, ranks, collective, cycle)
        if kind in ("pause", "busy"):
            outermost = frozenset(each.inside[:1] for each in blocking or self.live.values())
            key = (kind, ranks, outermost, int(self.since_s / self.limit).bit_length())
        return Hang(
            kind=kind,
            since_s=self.since_s,
            usual_s=max(each.usual_step_s for each in self.ranks),
            step=step,
            blocking=tuple(self._blocking_rank(each, kind if kind == "device" else "") for each in blocking),
            waiting=tuple(sorted(waiting)),
            collective=collective,
            cycle=cycle,
            operations=operations or {},
            places=self._places(),
            asleep=tuple(each.rank for each in self.live.values() if each.state == "uninterruptible"),
            unheard=self.unheard,
            moving=self.moving,
            ended=tuple(each.rank for each in self.ranks if each.state in ENDED),
            look_at=tuple(rank for rank in ranks or look if rank in self.live),
            key=key,
            devices=devices,
        )
