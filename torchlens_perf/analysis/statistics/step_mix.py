"""What a run's steps are like: what a typical one takes, and which ones take longer, how often, where, at what cost.

Steps are counted by what else they did (evaluated, saved, compiled ...) and by how long they took, in bins of a few
percent, each with its mean parts. That merges by addition, over time and over ranks, and does not grow with the run.

A mean over all steps would be decided by one evaluation, and medians of the parts do not add up to the median step. So
the typical step is the mean of the middle half, by duration, of those steps that are alike: as steady as a median, and
its parts add up. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Flag

_BINS_PER_DOUBLING = 16  # 4.4 % wide
_MAX_BINS = 400
_MAX_STEPS = 8  # of a bin, whose numbers are kept
_GAP = 1.25  # steps that are so much longer than all shorter ones are another class
_LONG = 1.5  # and so are those beyond the others' spread that take so much longer than the typical one
_SPREADS = 3.0  # between the quartiles
_REGULAR = 0.75  # of the distances between long steps: what they share is their period
# What else a step may do; several at once have all of their names. What matters little does not count beside others.
_KINDS = {
    Flag.CAPTURED: "capture",
    Flag.COMPILED: "compilation",
    Flag.EVALUATION: "evaluation",
    Flag.CHECKPOINT: "saving",
    Flag.SKIPPED: "skipped update",
    Flag.INFERENCE: "inference",
}
_LITTLE_KINDS = {Flag.COLLECTED: "garbage collection", Flag.SAMPLED: "sampled backward pass"}
_MASK, _LITTLE_MASK = (int(np.bitwise_or.reduce([int(flag) for flag in kinds])) for kinds in (_KINDS, _LITTLE_KINDS))
_NAMES = {**_KINDS, **_LITTLE_KINDS}
LACK_OF_CPU = "cpu"
"""What takes longer where the thread is ready and no CPU is free, in whichever part."""
_BASES = (0, int(Flag.INFERENCE))  # steps that do nothing else


@dataclasses.dataclass
class Bin:
    """Steps of about one duration. Sums, in ns."""

    count: int = 0
    duration_ns: float = 0.0
    parts_ns: npt.NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(len(PARTS)))
    measured: int = 0
    """How many of them recorded the time in which their thread was ready and had no CPU."""
    ready_ns: npt.NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(len(PARTS)))
    """That time, in each part."""
    steps: list[int] = dataclasses.field(default_factory=list)
    """The numbers of the newest."""

    def merge(self, other: Bin) -> None:
        self.count += other.count
        self.duration_ns += other.duration_ns
        self.parts_ns = self.parts_ns + other.parts_ns
        self.measured += other.measured
        self.ready_ns = self.ready_ns + other.ready_ns
        self.steps = sorted({*self.steps, *other.steps})[-_MAX_STEPS:]


@dataclasses.dataclass
class StepMix:
    """The steps of one rank, or of several. One thread."""

    per_doubling: int = _BINS_PER_DOUBLING
    bins: dict[int, Bin] = dataclasses.field(default_factory=dict)
    """By flags in the upper and duration in the lower 32 bits."""

    def add(self, table: StepTable) -> None:
        if not len(table):
            return
        flags = np.where(table.flags & _MASK, table.flags & _MASK, table.flags & _LITTLE_MASK)
        place = np.floor(np.log2(np.maximum(table.duration_ns, 1)) * self.per_doubling).astype(np.int64)
        keys = flags << 32 | place
        order = np.argsort(keys, kind="stable")
        unique, starts = np.unique(keys[order], return_index=True)
        for key, rows in zip(unique.tolist(), np.split(order, starts[1:]), strict=True):
            measured = rows[table.ready_ns[rows, 0] >= 0]
            new = Bin(
                len(rows),
                float(table.duration_ns[rows].sum()),
                table.parts_ns[rows].sum(axis=0).astype(np.float64),
                len(measured),
                np.minimum(table.ready_ns[measured], table.parts_ns[measured]).sum(axis=0).astype(np.float64),
                table.step[rows[-_MAX_STEPS:]].tolist(),
            )
            self.bins.setdefault(key, Bin()).merge(new)
        self._thin()

    def merge(self, other: StepMix) -> None:
        coarsest = min(self.per_doubling, other.per_doubling)
        self._coarsen(coarsest)
        self._add_bins(other.bins, coarsest, other.per_doubling)
        self._thin()

    def _add_bins(self, bins: Mapping[int, Bin], per_doubling: int, before: int) -> None:
        for key, each in bins.items():
            coarser = key >> 32 << 32 | (key & 0xFFFFFFFF) * per_doubling // before
            self.bins.setdefault(coarser, Bin()).merge(each)

    def _thin(self) -> None:
        while len(self.bins) > _MAX_BINS and self.per_doubling > 1:
            self._coarsen(self.per_doubling // 2)

    def _coarsen(self, per_doubling: int) -> None:
        if per_doubling >= self.per_doubling:
            return
        bins, self.bins, before = self.bins, {}, self.per_doubling
        self.per_doubling = per_doubling
        self._add_bins(bins, per_doubling, before)

    def __bool__(self) -> bool:
        return bool(self.bins)

    def by_flags(self) -> dict[int, list[Bin]]:
        """The bins of each kind of steps, the shortest first."""
        found: dict[int, list[Bin]] = {}
        for key in sorted(self.bins):
            found.setdefault(key >> 32, []).append(self.bins[key])
        return found


@dataclasses.dataclass(frozen=True)
class TypicalStep:
    """The mean of the middle half of the steps that are alike. Times in ns."""

    count: int
    """How many are alike."""
    duration_ns: float
    parts_ns: Mapping[str, float]
    """They add up to the duration."""
    ready_ns: Mapping[str, float] | None
    """Of each part, in which its thread was ready and had no CPU; None where that was not measured."""


@dataclasses.dataclass(frozen=True)
class LongSteps:
    """Steps of one class that take longer than the typical one. Times in ns."""

    kinds: tuple[str, ...]
    """What else they do; () where that is not recorded."""
    part: str
    """The part of the step that takes the most longer, or LACK_OF_CPU."""
    count: int
    """Of one rank."""
    more_ns: float
    """How much longer one of them takes, on average."""
    total_ns: float
    """How much longer all of them take together, on a rank."""
    steps: tuple[int, ...]
    """The numbers of the newest."""
    period: int | None
    """Every how many steps there is one; None where they come irregularly."""


@dataclasses.dataclass(frozen=True)
class StepClasses:
    """All steps of a rank, or of several, as classes. Counts and times are of one rank: the mean over the ranks."""

    count: int
    total_ns: float
    typical: TypicalStep | None
    """None where there is no step."""
    long: tuple[LongSteps, ...]
    """The costliest first."""


def classify(mixes: Sequence[StepMix]) -> StepClasses:
    """The classes of all these ranks' steps together."""
    merged, ranks = StepMix(), sum(bool(mix) for mix in mixes)
    for mix in mixes:
        merged.merge(mix)
    kinds = merged.by_flags()
    everything = [each for bins in kinds.values() for each in bins]
    if not everything:
        return StepClasses(0, 0.0, None, ())
    counts = {flags: sum(each.count for each in bins) for flags, bins in kinds.items()}
    base = max(counts, key=lambda flags: (flags in _BASES, counts[flags]))
    alike, longer = _alike(kinds.pop(base))
    typical = _typical(alike)
    groups: dict[tuple[tuple[str, ...], str], list[Bin]] = {}
    for flags, bins in kinds.items():
        names = tuple(name for flag, name in _NAMES.items() if flags & ~base & flag)
        groups.setdefault((names, _longest_part(bins, typical)), []).extend(bins)
    for each in longer:
        part = _longest_part([each], typical)
        groups.setdefault(_cause(each, part, groups) or ((), part), []).append(each)
    long = [_long_steps(*key, bins, typical, ranks) for key, bins in groups.items()]
    long = [each for each in long if each.more_ns > (_GAP - 1) * typical.duration_ns]
    return StepClasses(
        count=round(sum(each.count for each in everything) / ranks),
        total_ns=sum(each.duration_ns for each in everything) / ranks,
        typical=dataclasses.replace(typical, count=round(typical.count / ranks)),
        long=tuple(sorted(long, key=lambda each: -each.total_ns)),
    )


def _cause(
    waits: Bin, part: str, groups: Mapping[tuple[tuple[str, ...], str], list[Bin]]
) -> tuple[tuple[str, ...], str] | None:
    """Where ranks wait for one that does something else in the same steps, that group."""
    if part != "communication":
        return None
    for key, bins in groups.items():
        if key[0] and 2 * len({step for each in bins for step in each.steps} & set(waits.steps)) > len(waits.steps):
            return key
    return None


def _alike(bins: Sequence[Bin]) -> tuple[list[Bin], list[Bin]]:
    """The bins of the largest class, and those of longer steps."""
    means = [each.duration_ns / each.count for each in bins]
    cuts = [place for place in range(1, len(bins)) if means[place] >= _GAP * means[place - 1]]
    classes = [list(bins[first:last]) for first, last in itertools.pairwise([0, *cuts, len(bins)])]
    largest = max(range(len(classes)), key=lambda index: (sum(each.count for each in classes[index]), -index))
    alike, longer = classes[largest], [each for above in classes[largest + 1 :] for each in above]
    low, middle, high = (_quantile(alike, share) for share in (0.25, 0.5, 0.75))
    fence = max(high + _SPREADS * (high - low), _LONG * middle)
    longer += [each for each in alike if each.duration_ns / each.count > fence]
    return [each for each in alike if each.duration_ns / each.count <= fence], longer


def _quantile(bins: Sequence[Bin], share: float) -> float:
    total, seen = sum(each.count for each in bins), 0
    for each in bins:
        seen += each.count
        if seen >= share * total:
            return each.duration_ns / each.count
    return 0.0


def _typical(bins: Sequence[Bin]) -> TypicalStep:
    total = sum(each.count for each in bins)
    counts = np.array([each.count for each in bins], np.float64)
    ends = np.cumsum(counts)
    inside = np.minimum(ends, 0.75 * total) - np.maximum(ends - counts, 0.25 * total)
    weights = np.maximum(inside, 0.0) / counts

    def mean(sums: Iterable[Any], of: npt.NDArray[np.float64]) -> Any:
        return sum(weight * each for weight, each in zip(weights, sums, strict=True)) / float((weights * of).sum())

    measured = np.array([each.measured for each in bins], np.float64)
    parts_ns = mean((each.parts_ns for each in bins), counts)
    ready_ns = None
    if 2 * float((weights * measured).sum()) >= float((weights * counts).sum()):
        ready_ns = dict(zip(PARTS, mean((each.ready_ns for each in bins), measured).tolist(), strict=True))
    return TypicalStep(
        count=total,
        duration_ns=float(mean((each.duration_ns for each in bins), counts)),
        parts_ns=dict(zip(PARTS, parts_ns.tolist(), strict=True)),
        ready_ns=ready_ns,
    )


def _longest_part(bins: Sequence[Bin], typical: TypicalStep) -> str:
    count = sum(each.count for each in bins)
    more = sum(each.parts_ns for each in bins) / count - np.array([typical.parts_ns[part] for part in PARTS])
    lack_ns = 0.0
    if typical.ready_ns is not None and all(each.measured == each.count for each in bins):
        lack = sum(each.ready_ns for each in bins) / count - np.array([typical.ready_ns[part] for part in PARTS])
        more, lack_ns = more - lack, float(lack.sum())
    largest = int(np.argmax(more))
    return LACK_OF_CPU if lack_ns > more[largest] else PARTS[largest]


def _long_steps(kinds: tuple[str, ...], part: str, bins: Sequence[Bin], typical: TypicalStep, ranks: int) -> LongSteps:
    count = sum(each.count for each in bins)
    total_ns = sum(each.duration_ns for each in bins) - count * typical.duration_ns
    full = [each.steps[0] for each in bins if len(each.steps) >= _MAX_STEPS]  # which may have forgotten older ones
    known = sorted({step for each in bins for step in each.steps if step >= max(full, default=0)})
    return LongSteps(
        kinds, part, max(1, round(count / ranks)), total_ns / count, total_ns / ranks, tuple(known), _period(known)
    )


def _period(steps: Sequence[int]) -> int | None:
    distances = np.diff(steps)
    if len(distances) < 2:
        return None
    usual = int(np.median(distances))
    return usual if usual > 1 and np.mean(np.abs(distances - usual) <= 0.02 * usual) >= _REGULAR else None
