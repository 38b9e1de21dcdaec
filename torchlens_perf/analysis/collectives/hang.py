"""Find the ranks that block a job that no longer finishes steps, and the code they are in.

The functions are pure and use no file, process or clock. `words/hang.py` writes the texts. The
rules are applied in this order:

1. A hang is only reported if no rank has finished a step for `limit_s`. While all ranks still write
   records, as in an evaluation, there is no hang.
2. A process that died, is stopped or is in a debugger is blamed, whichever collectives it has
   issued. A collective cannot end without one of its processes. A node that stopped reporting at
   the time of the last step is blamed, too. The state of other ranks is a consequence.
3. If ranks issued different operations, sizes or data types under the same sequence number of a
   group, a mismatch is reported.
4. Otherwise sequence numbers are compared. In each group, all ranks wait for the ranks that are
   furthest behind. A rank that is behind in at least one group and ahead in no group does not wait
   for others, so it is blamed. If every rank that is behind in one group is ahead in another group,
   the ranks wait for each other in a cycle.
5. Otherwise all ranks have entered all collectives. Ranks whose devices are behind are blamed
   (device_progress.py). If no device is behind, no rank is blamed. The reason may be the network, a
   device, hosts that wait for devices in an unknown state, or a pause of all ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torchlens_perf.analysis.collectives.device_progress import (
    DeviceFinding,
    RankProgress,
    compare_devices,
)
from torchlens_perf.analysis.collectives.semantics import SizeRule, semantics_of
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.ring import CAPTURING

_Value = TypeVar("_Value", str, int, tuple[str, ...])
MIN_S = 10.0
# A step that takes this many times the usual step time is a hang. NCCL's watchdog ends a job after
# 600 s, and a larger multiple would leave little of that time.
FACTOR = 5.0
# Limit while the usual step time is not known: half of the 600 s of NCCL's watchdog. Building a
# model, compiling and loading data take minutes, and not equally long on all ranks.
FIRST_STEPS_S = 300.0
# Time that is added to the limit while a rank writes a capture. All other ranks wait for this rank.
CAPTURE_S = 120.0
# Age of a node's last report from which the node counts as silent. Nodes report their progress
# every second or two.
SILENT_S = 5.0
# Name of the span of Work.wait and wait_tensor.
WAIT = "wait"
_STOPPED = ("stopped", "traced")
ENDED = ("dead", "closed")
# Innermost spans of a rank that may wait in a collective. DDP's reducer waits in C++, inside the
# backward pass.
_COMMUNICATING = (WAIT, "backward")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one group. `operation` is "" if not known."""

    group: str
    sequence: int
    operation: str = ""


@dataclasses.dataclass(frozen=True)
class BlockingRank:
    """A rank that other ranks wait for."""

    progress: RankProgress
    problem: str
    """One of: dead, stopped, traced, silent (its node does not report), closed, busy (it still
    writes records), device (its device is behind), stuck.
    """
    missing: Collective | None
    """The first collective that only other ranks have entered; None for no such collective."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """A period in which ranks finish no step, and its cause."""

    kind: str
    """One of these kinds:

    - dead, stopped: the blocking processes have died or are stopped.
    - silent: a node does not report.
    - missing: blocking ranks have not entered a collective.
    - busy: blocking ranks have not entered a collective, but they still write records.
    - uneven: blocking ranks ended without entering a collective.
    - device: all ranks have entered every collective, but some devices are behind.
    - mismatch: ranks issued collectives in different orders, or different operations.
    - together: all ranks have entered the collective. The cause is the network or a device.
    - blocked: all hosts wait for their devices in the same line of code.
    - unheard: all ranks that report have entered the collective. Other ranks do not report.
    - apart: ranks have different open spans, and no collective shows which ranks wait.
    - alone: one rank is stuck, while others continue or have ended.
    - pause: all ranks have the same outermost open span.
    """
    since_s: float
    """Seconds in which no rank, except those in `moving`, has finished a step."""
    usual_s: float
    """Usual step time in seconds; 0 if not known yet."""
    step: int
    """Current step of the rank that is furthest ahead."""
    blocking: tuple[BlockingRank, ...]
    waiting: tuple[int, ...]
    """Ranks that wait. If `collective` is set, they wait in it."""
    collective: Collective | None
    """The collective in which `waiting` ranks wait and that blocking ranks have not entered."""
    cycle: tuple[tuple[int, Collective], ...]
    """For a mismatch of order: each rank waits for the next rank, and the last for the first."""
    operations: Mapping[str, tuple[int, ...]]
    """For a mismatch of operations: the ranks that issued each operation as `collective`.

    Operations that ranks issued in different orders are joined, such as "allreduce, then barrier".
    """
    places: Mapping[tuple[str, ...], tuple[int, ...]]
    """Living ranks by open spans, outermost first."""
    asleep: tuple[int, ...]
    """Living ranks in uninterruptible sleep, which is usually a wait for storage or a driver."""
    unheard: tuple[int, ...]
    """Members of a group or of the run whose state was not reported recently."""
    moving: tuple[int, ...]
    """Ranks that still finish steps. All other fields leave these ranks out."""
    ended: tuple[int, ...]
    """Ranks whose recording ended, normally or not."""
    look_at: tuple[int, ...]
    """Living ranks whose Python stacks should be read, most informative first."""
    key: Hashable
    """Key that identifies the hang, which is reported once per key. The key contains the current
    step.

    Hangs of the kinds `pause` and `busy` have keys without the step, which change each time the
    hang's duration has doubled. A checkpoint that always takes 40 s is thus reported only once.
    """

    devices: DeviceFinding | None = None
    """Result of comparing the devices; None if they were not compared."""
    difference: str = ""
    """For a mismatch of operations: "operations", "order", "sizes" or "dtypes"; otherwise ""."""

    @property
    def needs_action(self) -> bool:
        """True if the hang needs action. False for kinds that also occur in healthy jobs."""
        return self.kind not in ("pause", "busy")


@dataclasses.dataclass(frozen=True)
class _PartlyEntered:
    """A collective that only some members of its group have entered."""

    collective: Collective
    # The members that have issued the fewest collectives of the group.
    behind: frozenset[int]
    # Members that have entered the collective and have not ended, and therefore wait.
    ahead: frozenset[int]


def hang_limit_s(progress: Iterable[RankProgress], factor: float = FACTOR) -> float:
    """Return the number of seconds without a step that counts as a hang.

    The limit is `factor` times the usual step of the slowest rank, but at least MIN_S.

    While no usual step is known, the limit is FIRST_STEPS_S. If a process has died or is stopped,
    it is MIN_S.
    """
    ranks = list(progress)
    usual_s = max((each.usual_step_s for each in ranks), default=0.0)
    if usual_s <= 0 and not any(each.state in ("dead", *_STOPPED) for each in ranks):
        return FIRST_STEPS_S
    return max(MIN_S, factor * usual_s)


def find_hang(
    progress: Mapping[int, RankProgress],
    groups: Mapping[str, tuple[int, ...]],
    *,
    silent_s: float = SILENT_S,
) -> Hang | None:
    """Find out why the job no longer finishes steps. Return None before the limit is reached.

    - progress: all ranks of the run's last attempt.
    - groups: members by group name. The members of a missing group are the ranks that have used it.
    - silent_s: age of the last report above which a node counts as silent.
    """
    ranks = [progress[rank] for rank in sorted(progress)]
    limit = hang_limit_s(ranks)
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
        # Ranks that still finish steps may stop soon, and their state will then show more. A stuck
        # rank without an open span may simply have no work.
        stuck = [live[rank] for rank in still]
        if any(live[rank].since_step_s > limit / 2 for rank in moving) or not any(
            each.inside or each.state in _STOPPED for each in stuck
        ):
            return None
        live = {rank: each for rank, each in live.items() if rank not in moving}
    since_s = min(each.since_step_s for each in live.values())
    # Ranks that ended long before the last step are left out, because the job continued without
    # them. Nodes that stopped reporting long before the last step are left out, too.
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
    return _HangAnalysis(
        ranks,
        live,
        known,
        still,
        moving,
        unheard,
        limit,
        groups,
        list(_find_partly_entered(known, groups)),
    ).find_cause()


def _find_partly_entered(
    known: Mapping[int, RankProgress], groups: Mapping[str, tuple[int, ...]]
) -> Iterator[_PartlyEntered]:
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
            collective = _make_collective(group, low + 1, (known[rank] for rank in ahead))
            yield _PartlyEntered(
                collective, frozenset(rank for rank in levels if levels[rank] == low), ahead
            )


def _make_collective(group: str, sequence: int, ranks: Iterable[RankProgress]) -> Collective:
    """Return the collective, with its operation if all ranks that know it report the same name."""
    names = {each.operations.get(group, {}).get(sequence, "") for each in ranks} - {""}
    return Collective(group, sequence, names.pop() if len(names) == 1 else "")


def _find_different_calls(
    ranks: Mapping[int, Mapping[int, str]],
) -> tuple[int, dict[str, tuple[int, ...]], str] | None:
    """Return the first sequence number with different operations, their ranks, and the difference.

    ranks: for each rank, the names of its last operations in one group. If the oldest of several
    common operations differs, the ranks began to count at different operations, as after
    point-to-point messages, and nothing is found.
    """
    counts = Counter(sequence for calls in ranks.values() for sequence in calls)
    oldest = max((min(calls) for calls in ranks.values() if calls), default=0)
    common = sorted(each for each, count in counts.items() if count > 1 and each >= oldest)
    for sequence in common:
        names = {rank: calls[sequence] for rank, calls in ranks.items() if sequence in calls}
        if len(set(names.values())) > 1:
            if sequence == common[0] and len(common) > 1 and sequence > 0:
                return None
            orders = {
                rank: tuple(ranks[rank].get(each, "") for each in common if each >= sequence)
                for rank in names
            }
            if len({tuple(sorted(order)) for order in orders.values()}) > 1:
                return sequence, _group_ranks(names), "operations"
            joined = {rank: ", then ".join(order) for rank, order in orders.items()}
            return sequence, _group_ranks(joined), "order"
    return None


def _group_ranks(values: Mapping[int, _Value]) -> dict[_Value, tuple[int, ...]]:
    """Return the ranks with each value."""
    found = group_values((values[rank], rank) for rank in sorted(values))
    return {value: tuple(ranks) for value, ranks in found.items()}


def _spans_without_wait(each: RankProgress) -> tuple[str, ...]:
    """Return the open spans without an innermost wait, which would repeat the collective."""
    return each.inside[:-1] if each.inside[-1:] == (WAIT,) else each.inside


@dataclasses.dataclass(frozen=True)
class _HangAnalysis:
    """The state of the ranks in a hang, from which its cause is determined."""

    ranks: list[RankProgress]
    # Ranks that are alive, reported recently, and are not moving.
    live: dict[int, RankProgress]
    # All ranks that may be involved.
    known: dict[int, RankProgress]
    # Ranks that neither finish steps nor write records.
    still: set[int]
    moving: tuple[int, ...]
    unheard: tuple[int, ...]
    limit: float
    groups: Mapping[str, tuple[int, ...]]
    fronts: list[_PartlyEntered]

    @property
    def since_s(self) -> float:
        return min(each.since_step_s for each in self.live.values())

    def find_cause(self) -> Hang:
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
        mismatch = self._find_mismatched_operations()
        if mismatch:
            return mismatch
        ahead = frozenset(rank for front in self.fronts for rank in front.ahead)
        behind = frozenset(rank for front in self.fronts for rank in front.behind) - ahead
        missing = [self.known[rank] for rank in sorted(behind)]
        if missing:
            problems = {self._problem_of_rank(each) for each in missing}
            kind = "missing" if "stuck" in problems else "busy" if "busy" in problems else "uneven"
            return self._blame_ranks(kind, missing)
        return self._make_wait_cycle() if self.fronts else self._classify_fully_entered()

    def _problem_of_rank(self, each: RankProgress) -> str:
        if each.state in ENDED or each.state in _STOPPED:
            return each.state
        if each.rank not in self.live:
            # The last report of a silent node shows whether the rank was stuck before.
            return "silent" if each.since_step_s <= self.limit else "stuck"
        return "stuck" if each.rank in self.still else "busy"

    def _blame_ranks(self, kind: str, blocking: list[RankProgress]) -> Hang:
        ranks = {each.rank for each in blocking}
        live = self.live.keys() - ranks
        # Report the group in which most ranks wait for the blocking ranks.
        fronts = [front for front in self.fronts if front.behind & ranks and front.ahead & live]
        main = max(
            fronts,
            key=lambda front: (len(front.ahead & live), front.collective.group),
            default=None,
        )
        return self._make_hang(
            kind, blocking, main.ahead & live if main else live, main.collective if main else None
        )

    def _find_mismatched_operations(self) -> Hang | None:
        """Find the first sequence number under which a group's ranks issued different operations,
        or the same operation with different sizes or data types.
        """
        for group in sorted({group for each in self.known.values() for group in each.operations}):
            ranks = {
                rank: self.known[rank].operations.get(group, {})
                for rank in self.groups.get(group) or self.known
                if rank in self.known
            }
            calls = _find_different_calls(ranks)
            if calls is not None:
                return self._make_mismatch(Collective(group, calls[0]), *calls[1:])
            found = self._find_different_tensors(group, ranks)
            if found is not None:
                return self._make_mismatch(*found)
        return None

    def _find_different_tensors(
        self, group: str, ranks: Mapping[int, Mapping[int, str]]
    ) -> tuple[Collective, dict[str, tuple[int, ...]], str] | None:
        """Compare the tensors of the operation in which all ranks of the group wait.

        Return the operation, the ranks by their tensors, and "sizes" or "dtypes".
        """
        there = [
            self.known[rank]
            for rank in ranks
            if rank in self.still and group in self.known[rank].sizes
        ]
        calls = {
            (each.issued[group], ranks[each.rank].get(each.issued[group], "")) for each in there
        }
        if len(calls) != 1:
            return None
        ((sequence, operation),) = calls
        meaning = semantics_of(operation)
        sizes = {each.rank: each.sizes[group] for each in there}
        dtypes = {each.rank: each.dtypes.get(group, "") for each in there}
        of_size, of_dtype = (len(set(values.values())) > 1 for values in (sizes, dtypes))
        of_size &= meaning.equal_bytes and meaning.size is not SizeRule.NONE
        of_dtype &= meaning.equal_dtype and all(dtypes.values())
        if not of_size and not of_dtype:
            return None
        tensors = {
            rank: f" of {size} bytes" * of_size + f" of {dtypes[rank]}" * of_dtype
            for rank, size in sorted(sizes.items(), key=lambda item: item[1])
        }
        found = {f"{operation}{text}": members for text, members in _group_ranks(tensors).items()}
        return Collective(group, sequence, operation), found, "dtypes" if of_dtype else "sizes"

    def _make_mismatch(
        self, where: Collective, operations: dict[str, tuple[int, ...]], difference: str
    ) -> Hang:
        look_at = [ranks[0] for ranks in sorted(operations.values(), key=len)]
        return self._make_hang(
            "mismatch",
            [],
            self.live,
            where,
            operations=operations,
            look_at=look_at,
            difference=difference,
        )

    def _make_wait_cycle(self) -> Hang:
        """Return a hang of kind "mismatch" with the cycle of ranks that wait for each other.

        Every rank that is behind in one group is ahead in another. A path from rank to awaited rank
        therefore leads back to one of its ranks.
        """
        rank, path = min(self.fronts[0].ahead), dict[int, Collective]()
        while rank not in path:
            front = next(front for front in self.fronts if rank in front.ahead)
            path[rank] = front.collective
            rank = min(front.behind)
        cycle = list(path.items())[list(path).index(rank) :]
        waiting = self.live.keys() & {rank for front in self.fronts for rank in front.ahead}
        return self._make_hang(
            "mismatch", [], waiting, cycle=tuple(cycle), look_at=[rank for rank, _ in cycle]
        )

    def _classify_fully_entered(self) -> Hang:
        """Classify a hang in which each collective was entered by all of its members or by none."""
        ranks, devices = list(self.live), compare_devices(self.live)
        if devices is not None and devices.ranks:
            return self._blame_devices(devices)
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
        # All devices are stuck at the same mark.
        if devices is not None and devices.kind == "level":
            return self._make_hang(
                "together", [], ranks, self._last_collective(), look_at=ranks, devices=devices
            )
        if len({each.inside[:1] for each in self.live.values()}) == 1 and not self.unheard:
            kind = "blocked" if devices is not None and devices.waits_in else "pause"
            return self._make_hang(
                kind, [], ranks if kind == "blocked" else (), look_at=ranks, devices=devices
            )
        # Ranks that do not wait are first, and among these, ranks whose open spans few other ranks
        # share.
        crowd = {place: len(there) for place, there in self._ranks_by_open_spans().items()}
        odd = sorted(
            self.live.values(),
            key=lambda each: (each.rank in talking, crowd[_spans_without_wait(each)], each.rank),
        )
        return self._make_hang("apart", [], talking, look_at=[each.rank for each in odd])

    def _blame_devices(self, devices: DeviceFinding) -> Hang:
        others = [each for rank, each in self.live.items() if rank not in devices.ranks]
        where = self._last_collective()
        if devices.kind == "kernel":
            where = _make_collective(devices.group, devices.sequence, self.live.values())
        blocking = [self.live[rank] for rank in devices.ranks]
        return self._make_hang(
            "device", blocking, [each.rank for each in others], where, devices=devices
        )

    def _last_collective(self) -> Collective | None:
        """Return the last collective of the group that most ranks use."""
        users = group_values(
            (group, each)
            for each in self.live.values()
            for group, sequence in each.issued.items()
            if sequence >= 0
        )
        if not users:
            return None
        group = max(users, key=lambda name: (len(users[name]), name))
        return _make_collective(group, users[group][0].issued[group], users[group])

    def _ranks_by_open_spans(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        return _group_ranks({rank: _spans_without_wait(each) for rank, each in self.live.items()})

    def _make_blocking_rank(self, each: RankProgress, problem: str = "") -> BlockingRank:
        mine = (front for front in self.fronts if each.rank in front.behind)
        main = max(mine, key=lambda front: (len(front.ahead), front.collective.group), default=None)
        return BlockingRank(
            each, problem or self._problem_of_rank(each), main.collective if main else None
        )

    def _make_hang(
        self, kind: str, blocking: list[RankProgress], waiting: Iterable[int] = (),
        collective: Collective | None = None, cycle: tuple[tuple[int, Collective], ...] = (),
        operations: Mapping[str, tuple[int, ...]] | None = None, look_at: Sequence[int] = (),
        devices: DeviceFinding | None = None, difference: str = "",
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
                self._make_blocking_rank(each, kind if kind == "device" else "")
                for each in blocking
            ),
            waiting=tuple(sorted(waiting)),
            collective=collective,
            cycle=cycle,
            operations=operations or {},
            places=self._ranks_by_open_spans(),
            asleep=tuple(
                each.rank for each in self.live.values() if each.state == "uninterruptible"
            ),
            unheard=self.unheard,
            moving=self.moving,
            ended=tuple(each.rank for each in self.ranks if each.state in ENDED),
            look_at=tuple(rank for rank in ranks or look_at if rank in self.live),
            key=key,
            devices=devices,
            difference=difference,
        )
