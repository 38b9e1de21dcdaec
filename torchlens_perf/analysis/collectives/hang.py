"""Find out which ranks block a job that finishes no step, and what they were doing.

Pure: it uses no file, process or clock. `words/hang.py` writes the texts. The rules, in this order:

1. A hang is only reported if no rank has finished a step for `limit_s`. While all ranks still write
   records, as in an evaluation, there is no hang.
2. A process that died, is stopped or is in a debugger is blamed, whatever it has issued: a
   collective that it has entered cannot end without it. The same holds for a node that stopped
   reporting when the steps ended. The state of other ranks is a consequence.
3. Ranks that issued different operations under the same number of a group are reported as a
   mismatch of order.
4. Otherwise sequence numbers are compared. In a group, all ranks wait for those that are furthest
   behind. A rank that is behind in some group and ahead in no group does not wait for others, so it
   is blamed. If every rank that is behind is ahead elsewhere, they wait for each other in a cycle.
5. Otherwise all ranks have entered all collectives. Ranks whose devices are behind are blamed
   (device_progress.py). Without such ranks no rank is blamed. The reason is then the network, a
   device, hosts waiting for devices in an unknown state, or a pause of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

from torchlens_perf.analysis.collectives.device_progress import (
    DeviceFinding,
    DevicePlace,
    compare_devices,
)
from torchlens_perf.run.ring import CAPTURING

MIN_S = 10.0
# Multiple of the usual step. A larger one would leave little of the 600 s after which NCCL's
# watchdog ends a job.
FACTOR = 5.0
# Limit without a usual step time, half of those 600 s. Building, compiling and loading take
# minutes, and differ by rank.
FIRST_STEPS_S = 300.0
# Time that writing a capture may take. All ranks wait for the rank that writes.
CAPTURE_S = 120.0
# Nodes report their progress every second or two.
SILENT_S = 5.0
# The span of Work.wait and wait_tensor.
WAIT = "wait"
_STOPPED = ("stopped", "traced")
ENDED = ("dead", "closed")
# DDP's reducer waits in C++, inside of the backward pass.
_COMMUNICATING = (WAIT, "backward")


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """State of one rank at one time."""

    rank: int
    host: str
    step: int
    """Index of the current step."""
    since_step_s: float
    """Seconds since its last step ended, or since recording started. Grows after a rank has ended,
    but not while its node is silent.
    """
    report_age_s: float
    """Seconds since this was reported. 0 for a rank of this node. Grows while its node is silent.
    """
    usual_step_s: float
    """Median step time in seconds; 0 if unknown, as in the first steps."""
    issued: Mapping[str, int]
    """For each group, the sequence number of the last collective that the rank issued.

    Collectives count when they are entered, not when they return. Absent or -1: no collective so
    far. Point-to-point operations are not included, because their numbers are not comparable
    between ranks.
    """
    inside: tuple[str, ...]
    """Names of open spans, outermost first, without the step."""
    state: str
    """State of the process: "running", "stopped", "traced", "uninterruptible", "dead", "closed"
    (the watch ended) or "unknown".
    """
    operations: Mapping[str, Mapping[int, str]] = dataclasses.field(default_factory=dict)
    """For each group, the names of its last collectives as far as known, such as {57: "allreduce"}.
    """
    since_mark_s: float | None = None
    """Seconds from the last record to this report; None if not known. Then only steps count."""
    all_groups: bool = True
    """True if `issued` has all groups of the rank. False if the ring's table of groups was full, or
    if ranks count a group's collectives from different starts.
    """
    began: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Same as `issued`, for the last collective whose kernel has started on the device. Absent: not
    reported.
    """
    device: DevicePlace | None = None
    """Last known mark of the device; None without a device, or if it is not timed."""
    waits_in: str | None = None
    """Line of code in which the host waits for its device, from its Python stack; "" for none; None
    if not known.
    """

    @property
    def quiet_s(self) -> float:
        """Seconds without any record."""
        return self.since_step_s if self.since_mark_s is None else self.since_mark_s


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one group. `operation` is "" if not known."""

    group: str
    sequence: int
    operation: str = ""


@dataclasses.dataclass(frozen=True)
class BlockingRank:
    """A rank that other ranks wait for."""

    progress: Progress
    problem: str
    """One of: dead, stopped, traced, silent (its node), closed, busy (it writes records), device
    (its device is behind), stuck.
    """
    missing: Collective | None
    """The first collective that others have entered and this rank has not; None if it has entered
    all.
    """


@dataclasses.dataclass(frozen=True)
class Hang:
    """A period without steps, and its cause."""

    kind: str
    """Kind of the hang.

    - dead, stopped: state of the blocking processes.
    - silent: a node does not report.
    - missing: blocking ranks have not entered a collective.
    - busy: the same, but they still write records.
    - uneven: the same, but they have ended.
    - device: all have entered, but some devices are behind.
    - mismatch: ranks differ in the order of collectives, or in operations.
    - together: all ranks have entered. The cause is the network or a device.
    - blocked: all hosts are in the same place and wait for their devices.
    - unheard: all reporting ranks have entered. Others do not report.
    - apart: ranks are in different places, and no collective shows which ones wait.
    - alone: one rank is stuck, while others continue or have ended.
    - pause: all ranks are in the same place.
    """
    since_s: float
    """Seconds without a step of any rank that is not in `moving`."""
    usual_s: float
    """Usual step time in seconds; 0 if not known yet."""
    step: int
    """Current step of the rank that is furthest ahead."""
    blocking: tuple[BlockingRank, ...]
    waiting: tuple[int, ...]
    """Ranks that wait, in `collective` if it is set."""
    collective: Collective | None
    """The collective in which they wait. A blocking rank has not entered it; for `together`, all
    ranks have.
    """
    cycle: tuple[tuple[int, Collective], ...]
    """For a mismatch of order: each rank waits in its collective for the next rank, the last one
    for the first.
    """
    operations: Mapping[str, tuple[int, ...]]
    """For a mismatch of operations: the ranks that issued each operation as `collective`."""
    places: Mapping[tuple[str, ...], tuple[int, ...]]
    """Living ranks by open spans, outermost first."""
    asleep: tuple[int, ...]
    """Living ranks in uninterruptible sleep: in storage or a driver."""
    unheard: tuple[int, ...]
    """Members of a group or of the run without recent state."""
    moving: tuple[int, ...]
    """Ranks that still finish steps. The other fields do not cover them."""
    ended: tuple[int, ...]
    """Ranks whose recording ended, normally or not."""
    look_at: tuple[int, ...]
    """Living ranks whose Python stacks should be read, most informative first."""
    key: Hashable
    """Key of the finding, to report each one once. It changes with every step.

    A pause or a busy rank keeps its key over steps, and gets a new one each time its duration has
    doubled. Checkpoints of 40 s are thus not reported each time.
    """

    devices: DeviceFinding | None = None
    """Progress of the devices, if all ranks have entered all collectives; None without devices or
    if not compared.
    """

    @property
    def alarm(self) -> bool:
        """True if action is needed. False if the job may normally behave like this."""
        return self.kind not in ("pause", "busy")


@dataclasses.dataclass(frozen=True)
class _Front:
    """A collective that some members of its group have entered and others have not."""

    collective: Collective
    # The members that are furthest behind.
    behind: frozenset[int]
    # Living members only, because a rank that has ended does not wait.
    ahead: frozenset[int]


def limit_s(progress: Iterable[Progress], factor: float = FACTOR) -> float:
    """Return the number of seconds without a step that counts as a hang.

    It is max(10 s, factor times the usual step of the slowest rank).

    Without a usual step it is FIRST_STEPS_S, unless a process has died or is stopped.
    """
    ranks = list(progress)
    usual_s = max((each.usual_step_s for each in ranks), default=0.0)
    if usual_s <= 0 and not any(each.state in ("dead", *_STOPPED) for each in ranks):
        return FIRST_STEPS_S
    return max(MIN_S, factor * usual_s)


def find_hang(
    progress: Mapping[int, Progress],
    groups: Mapping[str, tuple[int, ...]],
    *,
    silent_s: float = SILENT_S,
) -> Hang | None:
    """Return why no step is finished; None while the limit is not reached.

    progress: all ranks of the run's last attempt. groups: members by group name. For a missing
    group, they are the ranks that have used it. silent_s: age of progress above which a node counts
    as silent.
    """
    ranks = [progress[rank] for rank in sorted(progress)]
    limit = limit_s(ranks)
    if any(CAPTURING in each.inside and each.state not in (*ENDED, *_STOPPED) for each in ranks):
        limit += CAPTURE_S
    live = {
        each.rank: each
        for each in ranks
        if each.state not in ENDED and each.report_age_s <= silent_s
    }
    still = {
        each.rank for each in live.values() if each.since_step_s > limit and each.quiet_s > limit
    }
    if not still:
        return None
    moving = tuple(each.rank for each in live.values() if each.since_step_s <= limit)
    if moving:
        # Ranks that still move may stop soon, and their state will then show more. A stuck rank
        # without an open span may have no work.
        stuck = [live[rank] for rank in still]
        if any(live[rank].since_step_s > limit / 2 for rank in moving) or not any(
            each.inside or each.state in _STOPPED for each in stuck
        ):
            return None
        live = {rank: each for rank, each in live.items() if rank not in moving}
    since_s = min(each.since_step_s for each in live.values())
    # The job continued without ranks that ended long before the last step, and this analysis
    # without nodes that stopped reporting long before it.
    last_sign_s = {
        each.rank: each.report_age_s + (each.since_step_s if each.state in ENDED else 0.0)
        for each in ranks
    }
    patience_s = {each.rank: limit if each.state in ENDED else silent_s for each in ranks}
    known = {
        each.rank: each
        for each in ranks
        if each.rank not in moving
        and (each.rank in live or last_sign_s[each.rank] <= since_s + patience_s[each.rank])
    }
    members = {rank for group in groups.values() for rank in group} | progress.keys()
    ended = {each.rank for each in ranks if each.state in ENDED}
    unheard = tuple(sorted(members - known.keys() - ended - set(moving)))
    return _Case(ranks, live, known, still, moving, unheard, limit, _fronts(known, groups)).judge()


def _fronts(known: Mapping[int, Progress], groups: Mapping[str, tuple[int, ...]]) -> list[_Front]:
    found = []
    for group in sorted(
        {group for each in known.values() for group in each.issued} | groups.keys()
    ):
        members = groups.get(group) or [
            rank for rank, each in known.items() if each.issued.get(group, -1) >= 0
        ]
        levels = {
            rank: known[rank].issued.get(group, -1)
            for rank in members
            if rank in known and (known[rank].all_groups or group in known[rank].issued)
        }
        low = min(levels.values(), default=-1)
        ahead = frozenset(
            rank for rank, level in levels.items() if level > low and known[rank].state not in ENDED
        )
        if ahead:
            collective = _collective_with_name(group, low + 1, (known[rank] for rank in ahead))
            found.append(
                _Front(collective, frozenset(rank for rank in levels if levels[rank] == low), ahead)
            )
    return found


def _collective_with_name(group: str, sequence: int, ranks: Iterable[Progress]) -> Collective:
    """Return the collective, with its name if the ranks agree on it."""
    names = {each.operations.get(group, {}).get(sequence, "") for each in ranks} - {""}
    return Collective(group, sequence, names.pop() if len(names) == 1 else "")


def _open_where(each: Progress) -> tuple[str, ...]:
    """Return the open spans without the wait. The collective shows already where the rank waits."""
    return each.inside[:-1] if each.inside[-1:] == (WAIT,) else each.inside


@dataclasses.dataclass(frozen=True)
class _Case:
    """A hang and the state of the ranks."""

    ranks: list[Progress]
    # Ranks that are alive, reported recently, and are not moving.
    live: dict[int, Progress]
    # All ranks that may be involved.
    known: dict[int, Progress]
    # Ranks that neither finish steps nor write records.
    still: set[int]
    moving: tuple[int, ...]
    unheard: tuple[int, ...]
    limit: float
    fronts: list[_Front]

    @property
    def since_s(self) -> float:
        return min(each.since_step_s for each in self.live.values())

    def judge(self) -> Hang:
        broken = [
            each
            for each in self.known.values()
            if self._problem_of_rank(each) in ("dead", *_STOPPED, "silent")
        ]
        if broken:
            problems = {self._problem_of_rank(each) for each in broken}
            kind = (
                "dead"
                if "dead" in problems
                else "stopped"
                if problems & set(_STOPPED)
                else "silent"
            )
            return self._blame_ranks(kind, broken)
        mismatch = self._mismatched_operations()
        if mismatch:
            return mismatch
        ahead = frozenset(rank for front in self.fronts for rank in front.ahead)
        behind = frozenset(rank for front in self.fronts for rank in front.behind) - ahead
        missing = [self.known[rank] for rank in sorted(behind)]
        if missing:
            problems = {self._problem_of_rank(each) for each in missing}
            kind = "missing" if "stuck" in problems else "busy" if "busy" in problems else "uneven"
            return self._blame_ranks(kind, missing)
        return self._wait_cycle() if self.fronts else self._all_entered()

    def _problem_of_rank(self, each: Progress) -> str:
        if each.state in ENDED or each.state in _STOPPED:
            return each.state
        if each.rank not in self.live:
            # A rank that was stuck before its node fell silent would have reported that.
            return "silent" if each.since_step_s <= self.limit else "stuck"
        return "stuck" if each.rank in self.still else "busy"

    def _blame_ranks(self, kind: str, blocking: list[Progress]) -> Hang:
        ranks = {each.rank for each in blocking}
        live = self.live.keys() - ranks
        # The group in which most ranks wait for the blocking ranks represents all groups.
        fronts = [front for front in self.fronts if front.behind & ranks and front.ahead & live]
        main = max(
            fronts,
            key=lambda front: (len(front.ahead & live), front.collective.group),
            default=None,
        )
        return self._make_hang(
            kind, blocking, main.ahead & live if main else live, main.collective if main else None
        )

    def _mismatched_operations(self) -> Hang | None:
        """Find the first number of a group under which ranks issued different operations."""
        for group in sorted({group for each in self.known.values() for group in each.operations}):
            issued: dict[int, dict[str, list[int]]] = {}
            for rank, each in self.known.items():
                for sequence, operation in each.operations.get(group, {}).items():
                    issued.setdefault(sequence, {}).setdefault(operation, []).append(rank)
            for sequence in sorted(issued):
                if len(issued[sequence]) > 1:
                    operations = {
                        name: tuple(ranks) for name, ranks in sorted(issued[sequence].items())
                    }
                    look_at = [ranks[0] for ranks in sorted(operations.values(), key=len)]
                    where = Collective(group, sequence)
                    return self._make_hang(
                        "mismatch", [], self.live, where, operations=operations, look_at=look_at
                    )
        return None

    def _wait_cycle(self) -> Hang:
        """Return the cycle.

        Every rank that is behind is ahead elsewhere, so following the waits leads back to a rank.
        """
        rank, path = min(self.fronts[0].ahead), dict[int, Collective]()
        while rank not in path:
            front = next(front for front in self.fronts if rank in front.ahead)
            path[rank] = front.collective
            rank = min(front.behind)
        entries = list(path.items())
        cycle = entries[list(path).index(rank) :]
        waiting = self.live.keys() & {rank for front in self.fronts for rank in front.ahead}
        return self._make_hang(
            "mismatch", [], waiting, cycle=tuple(cycle), look_at=[rank for rank, _ in cycle]
        )

    def _all_entered(self) -> Hang:
        """Return the finding if every collective was entered by all of its members or
        by no member.
        """
        ranks, devices = list(self.live), compare_devices(self.live)
        if devices is not None and devices.ranks:
            return self._hang_on_devices(devices)
        if len(ranks) == 1 and (self.moving or (len(self.ranks) > 1 and not self.unheard)):
            return self._make_hang("alone", list(self.live.values()))
        talking = {
            each.rank
            for each in self.live.values()
            if each.inside and each.inside[-1] in _COMMUNICATING
        }
        if len(talking) == len(ranks) and (len(ranks) > 1 or self.unheard):
            kind = "unheard" if self.unheard else "together"
            return self._make_hang(
                kind, [], ranks, self._last_collective(), look_at=ranks, devices=devices
            )
        # The devices have not finished the work that was issued.
        if devices is not None and devices.kind == "level":
            return self._make_hang(
                "together", [], ranks, self._last_collective(), look_at=ranks, devices=devices
            )
        if len({each.inside[:1] for each in self.live.values()}) == 1 and not self.unheard:
            kind = "blocked" if devices is not None and devices.waits_in else "pause"
            return self._make_hang(
                kind, [], ranks if kind == "blocked" else (), look_at=ranks, devices=devices
            )
        # Ranks that do not wait come first, and among them those whose place fewest ranks share.
        crowd = {place: len(there) for place, there in self._ranks_by_place().items()}
        odd = sorted(
            self.live.values(),
            key=lambda each: (each.rank in talking, crowd[_open_where(each)], each.rank),
        )
        return self._make_hang("apart", [], talking, look_at=[each.rank for each in odd])

    def _hang_on_devices(self, devices: DeviceFinding) -> Hang:
        others = [each for rank, each in self.live.items() if rank not in devices.ranks]
        where = self._last_collective()
        if devices.kind == "kernel":
            where = _collective_with_name(devices.group, devices.sequence, self.live.values())
        blocking = [self.live[rank] for rank in devices.ranks]
        return self._make_hang(
            "device", blocking, [each.rank for each in others], where, devices=devices
        )

    def _last_collective(self) -> Collective | None:
        """Return the last collective of the group that most ranks use."""
        users: dict[str, list[Progress]] = {}
        for each in self.live.values():
            for group, sequence in each.issued.items():
                if sequence >= 0:
                    users.setdefault(group, []).append(each)
        if not users:
            return None
        group = max(users, key=lambda name: (len(users[name]), name))
        return _collective_with_name(group, users[group][0].issued[group], users[group])

    def _ranks_by_place(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        places: dict[tuple[str, ...], list[int]] = {}
        for each in self.live.values():
            places.setdefault(_open_where(each), []).append(each.rank)
        return {place: tuple(ranks) for place, ranks in places.items()}

    def _blocking_rank(self, each: Progress, problem: str = "") -> BlockingRank:
        mine = (front for front in self.fronts if each.rank in front.behind)
        main = max(mine, key=lambda front: (len(front.ahead), front.collective.group), default=None)
        return BlockingRank(
            each, problem or self._problem_of_rank(each), main.collective if main else None
        )

    def _make_hang(
        self, kind: str, blocking: list[Progress], waiting: Iterable[int] = (), collective: Collective | None = None,
        cycle: tuple[tuple[int, Collective], ...] = (), operations: Mapping[str, tuple[int, ...]] | None = None,
        look_at: Sequence[int] = (), devices: DeviceFinding | None = None,
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
            blocking=tuple(
                self._blocking_rank(each, kind if kind == "device" else "") for each in blocking
            ),
            waiting=tuple(sorted(waiting)),
            collective=collective,
            cycle=cycle,
            operations=operations or {},
            places=self._ranks_by_place(),
            asleep=tuple(
                each.rank for each in self.live.values() if each.state == "uninterruptible"
            ),
            unheard=self.unheard,
            moving=self.moving,
            ended=tuple(each.rank for each in self.ranks if each.state in ENDED),
            look_at=tuple(rank for rank in ranks or look_at if rank in self.live),
            key=key,
            devices=devices,
        )
