"""Divide steps into classes: typical steps, and steps that take longer or shorter. Pure.

Steps are counted in bins by duration, each a few percent wide. Steps that also evaluate, save or
compile have bins of their own. A bin has the sums of its steps' parts. Bins of different ranks and
times are merged by addition, and their number does not grow with the run.

A single evaluation would dominate a mean over all steps, and the medians of the parts do not add up
to the median step. The typical step is therefore the mean of the middle half, by duration, of the
largest class of similar steps. This mean is as stable as a median, and its parts add up.

Every step is in exactly one class: the typical class, or a class of longer or shorter steps. The
counts and times of the classes add up to those of all steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.time_account import CPU, TimeAccount
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.records import OWN_PARTS, PARTS, WITHOUT_GRADIENTS, StepTable
from torchlens_perf.run.ring import Flag

_BINS_PER_DOUBLING = 16  # 4.4 % wide
_MAX_BINS = 400
# Number of step indexes that a bin stores.
_MAX_STEPS = 8
# A class starts at steps that are at least this many times as long as all shorter steps.
_GAP = 1.25
# A class also starts at steps that are this many times as long as the typical step, and longer than
# the spread of the typical class allows.
_LONG = 1.5
# Allowed spread above the upper quartile, in multiples of the interquartile range.
_SPREADS = 3.0
# The typical class is the shortest one that has at least this fraction of the largest class's
# steps. Ratios in regular loops (1/2, 2/3, 3/4, 1) are not close to this value, so one step more or
# less does not change the typical class.
_COMPARABLE = 0.7
# Steps of one class differ from the typical step by similar times. The ratio of the largest to the
# smallest difference is at most _SIMILAR, or _RANGE if no gap of _SIZE_GAP divides the steps.
_SIMILAR, _RANGE, _SIZE_GAP = 2.0, 4.0, 1.5
# A group of stray steps is joined to a class that has at least this many times as many steps.
_FEW = 4
# Longer steps do other work if their additional time runs for at least this fraction of the share for
# which the typical step's time runs.
_MIN_WORK = 0.5
# Steps are periodic if at least this fraction of the distances between them is equal.
_REGULAR = 0.75
# Fewest steps of an unknown kind that are called periodic.
_MIN_PERIODIC = 4
LACK_OF_CPU = CPU
"""Name of the part for time in which the thread was runnable but not scheduled."""
STOPPED = "stopped process"
# Names of work that only some steps do. A step with several flags has several names.
_KINDS = {
    Flag.STOPPED: STOPPED,
    Flag.CAPTURED: "capture",
    Flag.COMPILED: "compilation",
    Flag.EVALUATED: "evaluation",
    Flag.EVALUATION: WITHOUT_GRADIENTS,
    Flag.CHECKPOINT: "saving",
    Flag.SKIPPED: "skipped update",
    Flag.INFERENCE: "inference",
}
# Flags that are only used for steps without any of the flags above.
_LITTLE_KINDS = {Flag.COLLECTED: "garbage collection", Flag.SAMPLED: "sampled backward pass"}
_MASK, _LITTLE_MASK = (
    int(np.bitwise_or.reduce([int(flag) for flag in kinds])) for kinds in (_KINDS, _LITTLE_KINDS)
)
_NAMES = {**_KINDS, **_LITTLE_KINDS}
# Flags of steps that do no work except training or inference.
_BASES = (0, int(Flag.INFERENCE))
# The parts of a step in which each kind of work takes time. The work is only reported as a cause if
# the step's extra time is in one of these parts, running or waiting for a CPU: what ran is the cause.
_FORWARD_WORK = frozenset({"data", "forward", "host", "communication"})
_WORKS_IN: Mapping[str, frozenset[str]] = {
    "compilation": frozenset({"forward", "recompute", "backward", "optimizer", "host"}),
    "evaluation": _FORWARD_WORK,
    WITHOUT_GRADIENTS: _FORWARD_WORK,
    "saving": frozenset({"host", "communication"}),
    "skipped update": frozenset(),
    "garbage collection": frozenset(OWN_PARTS),
    "sampled backward pass": frozenset({"backward", "recompute"}),
}
# Largest extra time that sampling a backward pass may cause, in multiples of a typical backward
# pass.
_MAX_SAMPLING = 3.0
MEASURED = {Flag.COLLECTED: "python gc", Flag.CHECKPOINT: "torch.save"}
"""For each flag, the name of the section that measures the flag's work."""
# For each measured cause, its column in MEASURED and the smallest fraction of the extra time that
# it must take. The fraction for saving is small, because torch.save() is only a part of saving.
_EXPLAINS = {"garbage collection": (0, 0.5), "saving": (1, 0.25)}


@dataclasses.dataclass
class Bin:
    """Sums over steps of similar duration. Times are in ns."""

    count: int = 0
    duration_ns: float = 0.0
    parts_ns: npt.NDArray[np.float64] = dataclasses.field(
        default_factory=lambda: np.zeros(len(PARTS))
    )
    measured: int = 0
    """Number of steps for which `ready_ns` was measured."""
    ready_ns: npt.NDArray[np.float64] = dataclasses.field(
        default_factory=lambda: np.zeros(len(PARTS))
    )
    """Time in each part in which the thread was runnable but not scheduled."""
    steps: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the newest steps."""
    explained: int = 0
    """Number of steps for which `explained_ns` is known."""
    explained_ns: npt.NDArray[np.float64] = dataclasses.field(
        default_factory=lambda: np.zeros(len(MEASURED))
    )
    """Time of the steps in each section of MEASURED."""

    @property
    def account(self) -> TimeAccount:
        """A mean step. Its waits for a CPU are a mean over the steps in which they were measured."""
        lack_ns = self.ready_ns / self.measured if self.measured else np.full(len(PARTS), np.nan)
        return TimeAccount.from_parts(self.parts_ns / self.count, lack_ns)

    def merge(self, other: Bin) -> None:
        self.count += other.count
        self.duration_ns += other.duration_ns
        self.parts_ns = self.parts_ns + other.parts_ns
        self.measured += other.measured
        self.ready_ns = self.ready_ns + other.ready_ns
        self.steps = sorted({*self.steps, *other.steps})[-_MAX_STEPS:]
        self.explained += other.explained
        self.explained_ns = self.explained_ns + other.explained_ns


@dataclasses.dataclass
class StepMix:
    """Bins of the steps of one or several ranks. Use it from one thread only."""

    per_doubling: int = _BINS_PER_DOUBLING
    bins: dict[int, Bin] = dataclasses.field(default_factory=dict)
    """Bins by key: flags in the upper 32 bits, index of the duration in the lower 32 bits."""

    def add_steps(
        self, table: StepTable, explained_ns: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Add steps.

        explained_ns: time of each step in each section of MEASURED, if known.
        """
        if not len(table):
            return
        flags = np.where(table.flags & _MASK, table.flags & _MASK, table.flags & _LITTLE_MASK)
        place = np.floor(np.log2(np.maximum(table.duration_ns, 1)) * self.per_doubling).astype(
            np.int64
        )
        keys = flags << 32 | place
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        parts_ns, measured = table.parts_ns[order], table.ready_ns[order, 0] >= 0
        ready_ns = np.where(measured[:, None], np.minimum(table.ready_ns[order], parts_ns), 0)
        counts = np.diff([*starts, len(keys)])

        def sums(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
            return np.add.reduceat(values, starts, axis=0).astype(np.float64)

        explained = [None] * len(starts) if explained_ns is None else sums(explained_ns[order])
        for key, start, count, duration_ns, of_parts_ns, known, of_ready_ns, of_sections_ns in zip(
            keys[order[starts]].tolist(), starts.tolist(), counts.tolist(), sums(table.duration_ns[order]).tolist(),
            sums(parts_ns), sums(measured.astype(np.int64)).tolist(), sums(ready_ns), explained, strict=True,
        ):  # fmt: skip
            newest = order[max(start, start + count - _MAX_STEPS) : start + count]
            new = Bin(
                count,
                duration_ns,
                of_parts_ns,
                int(known),
                of_ready_ns,
                table.step[newest].tolist(),
            )
            if of_sections_ns is not None:
                new.explained, new.explained_ns = count, of_sections_ns
            self.bins.setdefault(key, Bin()).merge(new)
        self._limit_bins()

    def _limit_bins(self) -> None:
        """Make all bins twice as wide until there are few enough."""
        while len(self.bins) > _MAX_BINS and self.per_doubling > 1:
            self.per_doubling //= 2
            bins, self.bins = self.bins, {}
            for key, each in bins.items():
                wider = key >> 32 << 32 | (key & 0xFFFFFFFF) // 2
                self.bins.setdefault(wider, Bin()).merge(each)

    def __bool__(self) -> bool:
        return bool(self.bins)

    def bins_by_flags(self) -> dict[int, list[Bin]]:
        """Return the bins for each combination of flags, in ascending order of duration."""
        return group_values((key >> 32, self.bins[key]) for key in sorted(self.bins))


@dataclasses.dataclass(frozen=True)
class TypicalStep:
    """Mean over the middle half, by duration, of the steps of the typical class. In ns."""

    count: int
    """Number of steps in the class."""
    account: TimeAccount
    flags: int
    """Flags that all steps in the class have."""
    range_ns: tuple[float, float]
    """Shortest and longest duration of the middle half."""

    @property
    def duration_ns(self) -> float:
        return float(self.account.wall_ns)


@dataclasses.dataclass(frozen=True)
class StepClass:
    """Steps that differ from the typical step by similar times. Times are in ns."""

    kinds: tuple[str, ...]
    """Names of the work that the steps do in addition to training. For longer steps, only work that
    may be the cause; () if no cause is known.
    """
    part: str
    """Part whose time differs most from the typical step, or LACK_OF_CPU."""
    count: int
    """Mean number of steps per rank."""
    duration_ns: float
    """Mean duration."""
    more_ns: float
    """Mean difference from the duration of the typical step; negative for shorter steps."""
    total_ns: float
    """Sum of the differences of all steps, as a mean per rank."""
    steps: tuple[int, ...]
    """Indexes of the newest steps of the class."""
    period: int | None
    """Number of steps from one step of the class to the next; None if irregular."""
    doing: tuple[int, ...] = ()
    """Indexes of the mixes (ranks) that do the work in `kinds`; () if no cause is known."""
    is_awaited: bool = False
    """True if one rank does this work while all other ranks wait in communication."""


@dataclasses.dataclass(frozen=True)
class StepClasses:
    """Classes of all steps of one or several ranks. Counts and times are means over the ranks."""

    count: int
    total_ns: float
    typical: TypicalStep | None
    """The typical step; None if there are no steps."""
    alike_mean_ns: float
    """Mean duration of all steps in the typical step's class."""
    long: tuple[StepClass, ...]
    """Classes of longer steps, most expensive first."""
    short: tuple[StepClass, ...]
    """Classes of shorter steps, most frequent first."""


@dataclasses.dataclass(frozen=True)
class _UnusualBin:
    """A bin of steps that are not in the typical class."""

    mix: int
    bin: Bin
    part: str
    """Part whose time differs most from the typical step, or LACK_OF_CPU."""
    more_ns: float
    """Mean difference between the bin's steps and the typical step of the same rank."""
    size_ns: float
    """Absolute value of `more_ns`, but at least the spread of the typical class."""
    waits: bool = False
    """True if the steps wait for the work of another rank."""


# Bins by kinds, part, and whether the steps take longer. For known kinds the part is "", because
# the same work may take time in several parts.
_Groups = dict[tuple[tuple[str, ...], str, bool], list[_UnusualBin]]


def classify_steps(mixes: Sequence[StepMix]) -> StepClasses:
    """Divide the steps of all ranks into common classes.

    Each step is compared with the typical step of its own rank.
    """
    usual: list[Bin] = []
    # The bins in `usual`, and bins of steps whose additional work takes negligible time.
    alike: list[Bin] = []
    others: _Groups = {}
    ranks, flags = 0, 0
    for place, mix in enumerate(mixes):
        if mix:
            ranks += 1
            flags = _add_bins_of_rank(place, mix, usual, alike, others)
    if not ranks:
        return StepClasses(0, 0.0, None, 0.0, (), ())
    usual.sort(key=mean_duration_ns)
    groups: _Groups = {}
    for (kinds, part, longer), found in others.items():
        for each in found:
            waits = longer and not kinds and part == "communication"
            cause = _find_explaining_group(each.bin, others) if waits else None
            same = each if cause is None else dataclasses.replace(each, waits=True)
            groups.setdefault(cause or (kinds, part, longer), []).append(same)
    everything = [*alike, *(each.bin for found in others.values() for each in found)]
    last = max((step for each in everything for step in each.steps), default=0)
    classes = [
        _make_step_class(kinds, similar, ranks, last)
        for (kinds, _, _), found in groups.items()
        for similar in (
            _join_strays(list(_split_by_size(found))) if kinds else _split_by_size(found)
        )
    ]
    count = round(sum(each.count for each in everything) / ranks)
    return StepClasses(
        count=count,
        total_ns=sum(each.duration_ns for each in everything) / ranks,
        typical=dataclasses.replace(
            _compute_typical_step(usual, flags),
            count=max(0, count - sum(each.count for each in classes)),
        ),
        alike_mean_ns=sum(each.duration_ns for each in alike) / sum(each.count for each in alike),
        long=tuple(
            sorted((each for each in classes if each.more_ns > 0), key=lambda each: -each.total_ns)
        ),
        short=tuple(
            sorted((each for each in classes if each.more_ns <= 0), key=lambda each: -each.count)
        ),
    )


def _add_bins_of_rank(
    place: int, mix: StepMix, all_usual: list[Bin], alike: list[Bin], others: _Groups
) -> int:
    """Add a rank's bins to `all_usual`, `alike` or `others`.

    Return the flags of the rank's typical step.
    """
    by_flags = mix.bins_by_flags()
    counts = {flags: sum(each.count for each in bins) for flags, bins in by_flags.items()}
    base = max(counts, key=lambda flags: (flags in _BASES, counts[flags]))
    shorter, usual, longer = _split_by_duration(by_flags.pop(base))
    typical = _compute_typical_step(usual, base)
    all_usual += usual
    alike += usual
    least_ns = (_GAP - 1) * typical.duration_ns
    spread_ns = max(least_ns, mean_duration_ns(usual[-1]) - typical.duration_ns)

    def to_unusual_bin(each: Bin) -> _UnusualBin:
        more_ns = mean_duration_ns(each) - typical.duration_ns
        return _UnusualBin(
            place,
            each,
            _part_with_most_difference([each], typical),
            more_ns,
            max(abs(more_ns), spread_ns, 1.0),
        )

    for found_bin in (*shorter, *longer):
        each = to_unusual_bin(found_bin)
        others.setdefault(((), each.part, each.more_ns > 0), []).append(each)
    for flags, bins in by_flags.items():
        found = [to_unusual_bin(each) for each in bins]
        below = [each for each in found if each.more_ns < -spread_ns]
        for similar in (
            *_split_by_size(below),
            *_split_by_size([each for each in found if each.more_ns >= -spread_ns]),
        ):
            count = sum(each.bin.count for each in similar)
            more_ns = sum(each.bin.duration_ns for each in similar) / count - typical.duration_ns
            # The additional work of these steps takes negligible time.
            if abs(more_ns) <= least_ns:
                alike += [each.bin for each in similar]
                continue
            members = [each.bin for each in similar]
            worked_in = _part_with_most_difference(members, typical, divided=False)
            kinds = tuple(name for flag, name in _NAMES.items() if flags & ~base & flag)
            if "evaluation" in kinds:
                kinds = tuple(kind for kind in kinds if kind != WITHOUT_GRADIENTS)
            share = count / counts[flags]
            kinds = tuple(
                kind
                for kind in kinds
                if _may_explain(kind, worked_in, more_ns, share, members, typical)
            )
            part = worked_in if kinds else _part_with_most_difference(members, typical)
            similar = [dataclasses.replace(each, part=part) for each in similar]
            others.setdefault((kinds, "" if kinds else part, more_ns > 0), []).extend(similar)
    return base


def _may_explain(
    kind: str, part: str, more_ns: float, share: float, bins: Sequence[Bin], typical: TypicalStep
) -> bool:
    """Return True if this kind of work may explain why steps take `more_ns` longer, or shorter.

    part: the part with the extra time, with its waits for a CPU. share: fraction of the steps with
    this work that take that long.
    """
    if more_ns <= 0:
        return not _WORKS_IN.get(kind)
    if kind in _WORKS_IN and part not in _WORKS_IN[kind]:
        return False
    # Sampling has about the same overhead in all sampled steps.
    if kind == "sampled backward pass":
        return share >= 0.5 and more_ns <= _MAX_SAMPLING * typical.account.sum_ns(["backward"])
    if kind not in _EXPLAINS or any(each.explained < each.count for each in bins):
        return True
    column, least = _EXPLAINS[kind]
    measured_ns = float(sum(each.explained_ns[column] for each in bins)) / sum(
        each.count for each in bins
    )
    # The state was not saved with torch.save(), so its time was not measured.
    return (kind == "saving" and not measured_ns) or measured_ns >= least * more_ns


def _find_explaining_group(waits: Bin, groups: _Groups) -> tuple[tuple[str, ...], str, bool] | None:
    """Return the key of the group of steps that explains most of these waits.

    The group's steps do a known kind of work on a rank for which the other ranks wait.
    """
    for key, found in groups.items():
        steps = {step for each in found for step in each.bin.steps}
        if key[0] and key[2] and 2 * len(steps & set(waits.steps)) > len(waits.steps):
            return key
    return None


def _split_by_size(found: Sequence[_UnusualBin]) -> Iterator[list[_UnusualBin]]:
    """Divide bins at the largest gaps until all bins of a group have similar `size_ns`."""
    pending = [sorted(found, key=lambda each: each.size_ns)] if found else []
    while pending:
        group = pending.pop()
        ratios = [after.size_ns / before.size_ns for before, after in itertools.pairwise(group)]
        whole = group[-1].size_ns / group[0].size_ns
        if whole > _RANGE or (whole > _SIMILAR and max(ratios) >= _SIZE_GAP):
            cut = ratios.index(max(ratios)) + 1
            pending += [group[:cut], group[cut:]]
        else:
            yield group


def _join_strays(groups: list[list[_UnusualBin]]) -> list[list[_UnusualBin]]:
    """Join groups of stray steps, which have the same kinds of work, to the largest group.

    A group is stray if its difference from the typical step is similar to the largest group's and
    its steps are irregular. The steps must also be few, or periodic together with the largest
    group. An evaluation that a busy machine slows down thus stays in the class of evaluations.
    Periodic steps stay a class of their own, such as a longer evaluation in each hundredth step.
    """
    largest = max(groups, key=_count_steps)
    joined, rest = list(largest), []
    for group in groups:
        small, large = sorted((_mean_size_ns(group), _mean_size_ns(largest)))
        few = (
            _FEW * _count_steps(group) <= _count_steps(largest)
            or _find_period(_newest_steps_without_gap([*joined, *group])) is not None
        )
        stray = few and _find_period(_newest_steps_without_gap(group)) is None
        if group is not largest and stray and large <= _RANGE * small:
            joined += group
        elif group is not largest:
            rest.append(group)
    return [joined, *rest]


def _count_steps(found: Sequence[_UnusualBin]) -> int:
    return sum(each.bin.count for each in found)


def _mean_size_ns(found: Sequence[_UnusualBin]) -> float:
    return sum(each.bin.count * each.size_ns for each in found) / _count_steps(found)


def _newest_steps_without_gap(found: Sequence[_UnusualBin]) -> list[int]:
    """Return the indexes of the newest steps, from the first step after which none is missing."""
    # A bin with _MAX_STEPS indexes may have dropped older ones.
    full = [each.bin.steps[0] for each in found if len(each.bin.steps) >= _MAX_STEPS]
    return sorted(
        {step for each in found for step in each.bin.steps if step >= max(full, default=0)}
    )


def mean_duration_ns(of: Bin) -> float:
    """Return the mean duration of a bin's steps."""
    return of.duration_ns / of.count


def _split_by_duration(bins: Sequence[Bin]) -> tuple[list[Bin], list[Bin], list[Bin]]:
    """Return the bins of shorter steps, of the typical class, and of longer steps."""
    means = [mean_duration_ns(each) for each in bins]
    cuts = [place for place in range(1, len(bins)) if means[place] >= _GAP * means[place - 1]]
    classes = [list(bins[first:last]) for first, last in itertools.pairwise([0, *cuts, len(bins)])]
    counts = [sum(each.count for each in one) for one in classes]
    chosen = next(index for index, count in enumerate(counts) if count >= _COMPARABLE * max(counts))
    shorter = [each for below in classes[:chosen] for each in below]
    usual, longer = classes[chosen], [each for above in classes[chosen + 1 :] for each in above]
    low, middle, high = (duration_quantile_ns(usual, share) for share in (0.25, 0.5, 0.75))
    fence = max(high + _SPREADS * (high - low), _LONG * middle)
    longer += [each for each in usual if mean_duration_ns(each) > fence]
    return shorter, [each for each in usual if mean_duration_ns(each) <= fence], longer


def duration_quantile_ns(bins: Sequence[Bin], share: float) -> float:
    """Return the mean duration of the bin that contains a quantile; 0 without steps.

    bins: in ascending order of duration.
    """
    total, seen = sum(each.count for each in bins), 0
    for each in bins:
        seen += each.count
        if seen >= share * total:
            return mean_duration_ns(each)
    return 0.0


def _compute_typical_step(bins: Sequence[Bin], flags: int) -> TypicalStep:
    """Compute the typical step.

    bins: bins of the typical class in ascending order of duration.
    """
    total = sum(each.count for each in bins)
    counts = np.array([each.count for each in bins], np.float64)
    ends = np.cumsum(counts)
    inside = np.minimum(ends, 0.75 * total) - np.maximum(ends - counts, 0.25 * total)
    weights = np.maximum(inside, 0.0) / counts

    def mean(sums: Iterable[Any], of: npt.NDArray[np.float64]) -> Any:
        return sum(weight * each for weight, each in zip(weights, sums, strict=True)) / float(
            (weights * of).sum()
        )

    measured = np.array([each.measured for each in bins], np.float64)
    lack_ns = np.full(len(PARTS), np.nan)
    if 2 * float((weights * measured).sum()) >= float((weights * counts).sum()):
        lack_ns = mean((each.ready_ns for each in bins), measured)
    parts_ns = mean((each.parts_ns for each in bins), counts)
    return TypicalStep(
        count=total,
        account=TimeAccount.from_parts(parts_ns, lack_ns),
        flags=flags,
        range_ns=(
            mean_duration_ns(bins[int(np.argmax(weights > 0))]),
            mean_duration_ns(bins[-1 - int(np.argmax(weights[::-1] > 0))]),
        ),
    )


def sum_time(bins: Iterable[Bin]) -> TimeAccount:
    """Return the account of all steps in these bins. It has waits for a CPU of measured steps only."""
    found, nothing = list(bins), np.zeros(len(PARTS))
    parts_ns = sum((each.parts_ns for each in found), nothing)
    account = TimeAccount.from_parts(parts_ns, sum((each.ready_ns for each in found), nothing))
    is_measured = all(each.measured == each.count for each in found)
    return dataclasses.replace(account, is_measured=np.array(is_measured))


def _part_with_most_difference(
    bins: Sequence[Bin], typical: TypicalStep, *, divided: bool = True
) -> str:
    """Return the part that contributes most to the difference from the typical step.

    divided: False leaves waits for a CPU in their parts.
    """
    whole = Bin()
    for each in bins:
        whole.merge(each)
    own, usual = whole.account, typical.account
    together = _find_largest_difference(own, usual, divided=False)
    # Waits for a CPU are only compared if they were measured in all steps.
    divided = divided and bool(usual.is_measured) and whole.measured == whole.count
    if not divided or _is_other_work(together, own, usual):
        return together
    return _find_largest_difference(own, usual, divided=True)


def _find_largest_difference(own: TimeAccount, usual: TimeAccount, *, divided: bool) -> str:
    usual_ns = usual.uses_ns(divided=divided)
    more_ns = {
        part: own_ns - usual_ns[part] for part, own_ns in own.uses_ns(divided=divided).items()
    }
    sign = 1 if own.wall_ns >= usual.wall_ns else -1
    return max(more_ns, key=lambda part: sign * more_ns[part])


def _is_other_work(part: str, own: TimeAccount, usual: TimeAccount) -> bool:
    """Return True if a part does more work, which therefore also waits longer for a CPU.

    In a part that only waits longer, the time in which it runs does not grow with its whole time.
    """
    whole_ns, waiting_ns = usual.sum_ns([part]), usual.sum_ns([part], [CPU])
    more_ns = own.sum_ns([part]) - whole_ns
    more_waiting_ns = own.sum_ns([part], [CPU]) - waiting_ns
    runs_longer = (more_ns - more_waiting_ns) * whole_ns
    return part in OWN_PARTS and bool(
        more_ns > 0 and runs_longer > _MIN_WORK * more_ns * (whole_ns - waiting_ns)
    )


def _make_step_class(
    kinds: tuple[str, ...], found: Sequence[_UnusualBin], ranks: int, last: int
) -> StepClass:
    """Return the class of these bins. last: index of the newest step of the run."""
    count = _count_steps(found)
    # The communication time of a rank is only reported if no other part differs, because it is
    # usually a wait for another rank.
    parts = sorted({each.part for each in found} - {"communication"}) or ["communication"]
    total_ns = sum(each.bin.count * each.more_ns for each in found)
    known = _newest_steps_without_gap(found)
    # Some irregular steps are equally far apart by chance.
    by_chance = not kinds and len(known) < _MIN_PERIODIC
    doing, waiting = (
        {each.mix for each in found if each.waits is waits} for waits in (False, True)
    )
    return StepClass(
        kinds=kinds,
        part=max(
            parts,
            key=lambda part: sum(
                each.bin.count * abs(each.more_ns) for each in found if each.part == part
            ),
        ),
        count=max(1, round(count / ranks)),
        duration_ns=sum(each.bin.duration_ns for each in found) / count,
        more_ns=total_ns / count,
        total_ns=total_ns / ranks,
        steps=tuple(known),
        period=None if by_chance else find_lasting_period(known, last),
        doing=tuple(sorted(doing)) if kinds else (),
        is_awaited=bool(kinds and waiting) and len(doing) == 1 and len(doing | waiting) == ranks,
    )


def _find_period(steps: Sequence[int]) -> int | None:
    distances = np.diff(steps)
    if len(distances) < 2:
        return None
    usual = int(np.median(distances))
    return (
        usual
        if usual > 1 and np.mean(np.abs(distances - usual) <= 0.02 * usual) >= _REGULAR
        else None
    )


def find_lasting_period(steps: Sequence[int], last: int) -> int | None:
    """Return the period of these steps if they recur until the newest step `last`, else None."""
    period = _find_period(steps)
    lasts = period and len(steps) >= _REGULAR * ((last - steps[0]) // period + 1)
    return period if lasts else None
