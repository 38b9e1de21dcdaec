"""Statistics over a rank's whole run, with a limited number of windows of steps. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.device import DeviceStatistics
from torchlens_perf.analysis.statistics.host_gaps import find_host_gaps, name_gap
from torchlens_perf.analysis.statistics.memory import MemoryStatistics
from torchlens_perf.analysis.statistics.module_cost import ModuleCost
from torchlens_perf.analysis.statistics.operators import OperatorStatistics
from torchlens_perf.analysis.statistics.stack_samples import StackSample, find_parts
from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.analysis.statistics.step_mix import MEASURED, StepMix, classify_steps
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Flag, Kind, lookup_name
from torchlens_perf.run.sketch import Sketch, add_each, add_to_sketches

# The first steps are counted separately: allocator, caches and lazy initialization make them slow.
WARM_UP_STEPS = 3
FIRST_WINDOW_STEPS = 8
MAX_WINDOWS = 512
# Flags of work that may explain to the user why a step took so long.
TAGS = int(Flag.CHECKPOINT | Flag.COMPILED | Flag.EVALUATION | Flag.CAPTURED)
# Steps with these flags are left out of the mean module times.
_UNUSUAL = int(Flag.EVALUATION | Flag.CAPTURED | Flag.COMPILED | Flag.STOPPED)
# Steps with these flags are left out of all windows, because they do more than train.
_OTHER_WORK = int(Flag.EVALUATION | Flag.SKIPPED | Flag.SAMPLED | Flag.CAPTURED | Flag.STOPPED)
# Number of ranges of DurationRangeSums per doubling of duration. Each bin of step_mix
# lies completely within one range.
_LENGTHS_PER_DOUBLING = 2
_MAX_LENGTHS = 24
_LENGTH_BITS = 8
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1
# Times without a CPU are stored as [] if they are below this fraction of a window's mean step.
_LITTLE_LACK = 0.02
_NAMED = (int(Kind.MODULE_BACKWARD), int(Kind.SECTION))
_OF_DEVICE = (int(Kind.DEVICE), int(Kind.SKETCH), int(Kind.MERGED))
_PHASES = tuple(
    map(int, (Kind.DATA, Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT))
)
_ON_OTHER_THREADS = {Kind.DATA: "data", Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
_CALLS = (int(Kind.MODULE), int(Kind.FORWARD))
_FORWARD_PHASES = (int(Kind.FORWARD), int(Kind.RECOMPUTE))


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of consecutive steps. Row i covers steps [first_step[i], first_step[i] + width).

    Times are means over the middle half, by duration, of the steps of a window.
    """

    width: int
    first_step: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.float64]
    parts_ns: npt.NDArray[np.float64]
    """Shape [windows, len(PARTS)]."""
    work_sum_ns: npt.NDArray[np.float64]
    """Sum of the steps' own time, without time in which the thread was runnable but not scheduled.
    The warm-up and steps with OTHER_WORK are excluded.

    Its mean, unlike the mean over the middle half, also shows slowness in only some of the steps.
    """
    work_steps: npt.NDArray[np.int64]
    """Number of steps in `work_sum_ns`; 0 if there is no work to compare."""
    start_ns: npt.NDArray[np.int64]
    """Start of the first step by the CLOCK_MONOTONIC of the rank's node."""
    lack_ns: Mapping[int, Sequence[float]]
    """For a window's first step, the time in each part in which the thread was runnable but not
    scheduled.

    The value is [] if the time is negligible. Windows in which it was not measured are missing.
    """
    tags: Mapping[int, int]
    """For a window's first step, the flags of its steps that are in TAGS."""
    warm_from: int | None
    """First step after the warm-up; None before the first step."""


_NONE = np.zeros(0)
_NO_STEPS = _NONE.astype(np.int64)
NO_WINDOWS = Windows(
    FIRST_WINDOW_STEPS, _NO_STEPS, _NONE, _NONE, _NONE, _NO_STEPS, _NO_STEPS, {}, {}, None
)


class _WindowRows(NamedTuple):
    """Rows of windows, as columns. Rows as objects would take three times the memory."""

    first_step: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.float64]
    parts_ns: npt.NDArray[np.float64]
    work_sum_ns: npt.NDArray[np.float64]
    work_steps: npt.NDArray[np.int64]
    start_ns: npt.NDArray[np.int64]
    lack_ns: npt.NDArray[np.float64]
    """NaN in windows in which it was not measured."""

    def append(self, later: _WindowRows) -> _WindowRows:
        """Return the rows of both. Rows that cover the same steps are merged."""
        columns = map(np.concatenate, zip(self, later, strict=True))
        return _WindowRows._make(columns).merge_equal()

    def merge_equal(self) -> _WindowRows:
        """Merge neighbors that cover the same steps."""
        starts = np.flatnonzero(np.diff(self.first_step, prepend=-1))
        if len(starts) == len(self.first_step):
            return self
        known = (~np.isnan(self.lack_ns[:, 0])).astype(np.float64)

        def sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.asarray(np.add.reduceat(values, starts, axis=0))

        counts, counts_known = sums(np.ones(len(known))), sums(known)
        lack_ns = sums(np.where(known[:, None], self.lack_ns, 0.0))
        return _WindowRows(
            self.first_step[starts],
            sums(self.duration_ns) / counts,
            sums(self.parts_ns) / counts[:, None],
            sums(self.work_sum_ns),
            sums(self.work_steps),
            self.start_ns[starts],
            lack_ns / np.where(counts_known, counts_known, np.nan)[:, None],
        )


class _StepColumns(NamedTuple):
    """Consecutive steps of one window, as columns."""

    step: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.int64]
    parts_ns: npt.NDArray[np.int64]
    work_ns: npt.NDArray[np.float64]
    """Own time of the steps; NaN for steps that are not compared."""
    start_ns: npt.NDArray[np.int64]
    ready_ns: npt.NDArray[np.int64]

    def change(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> _StepColumns:
        return _StepColumns._make(map(change, self))

    def select(self, chosen: npt.NDArray[np.bool_ | np.int64] | slice) -> _StepColumns:
        return self.change(lambda column: column[chosen])


class WindowHistory:
    """A growing list of windows of `width` steps.

    When the list exceeds MAX_WINDOWS, neighboring windows are merged and the width doubles.

    Windows start at multiples of the width, so windows of different ranks cover the same steps.
    """

    def __init__(self, earlier: Windows = NO_WINDOWS) -> None:
        """Continue earlier windows.

        The last window of `earlier`, which was in progress, is not continued.
        """
        self.width = earlier.width
        parts_ns = earlier.parts_ns.reshape(-1, len(PARTS))
        lack_ns = np.full(parts_ns.shape, np.nan)
        for row, first_step in enumerate(earlier.first_step.tolist()):
            known = expand_lack_ns(earlier.lack_ns.get(first_step))
            lack_ns[row] = np.nan if known is None else known
        self._rows = _WindowRows(
            earlier.first_step, earlier.duration_ns, parts_ns, earlier.work_sum_ns, earlier.work_steps,
            earlier.start_ns, lack_ns,
        )  # fmt: skip
        self._tags = dict(earlier.tags)
        self._warm_from = earlier.warm_from
        # Steps of the window in progress.
        self._steps: list[_StepColumns] = []

    def add_steps(self, table: StepTable) -> None:
        """Add steps, in order."""
        if not len(table):
            return
        if self._warm_from is None:
            self._warm_from = int(table.step[0]) + WARM_UP_STEPS
        compared = (table.flags & _OTHER_WORK) == 0
        uncompared_work = ((table.flags & OTHER_WORK) != 0) | (table.step < self._warm_from)
        work_ns = np.where(uncompared_work, np.nan, table.work_ns)
        steps = _StepColumns(
            table.step, table.duration_ns, table.parts_ns, work_ns, table.start_ns, table.ready_ns
        )
        steps = steps.select(compared)
        begin = 0
        while begin < len(steps.step):
            self._advance_to_step(int(steps.step[begin]))
            # Adding complete windows may change the width.
            count = self.width * self._count_complete_windows(steps, begin)
            if count and not self._steps:
                # Adding complete windows at once is faster than one by one.
                whole = steps.select(slice(begin, begin + count)).change(
                    lambda column: column.reshape(-1, self.width, *column.shape[1:])
                )
                self._append_rows(_make_rows(whole, self.width))
            else:
                # First step of the next window.
                end = (int(steps.step[begin]) // self.width + 1) * self.width
                count = max(1, int(np.searchsorted(steps.step[begin:], end)))
                # Copy the steps, because a view would keep all steps in memory.
                self._steps.append(steps.select(slice(begin, begin + count)).change(np.copy))
            begin += count
        self._advance_to_step(int(table.step[-1]))
        tagged = (table.flags & TAGS) != 0
        for step, flags in zip(
            table.step[tagged].tolist(), table.flags[tagged].tolist(), strict=True
        ):
            first = step // self.width * self.width
            self._tags[first] = self._tags.get(first, 0) | (flags & TAGS)
        while len(self._tags) > MAX_WINDOWS:
            self._merge_neighbors()

    def to_windows(self) -> Windows:
        """Return all windows.

        The window in progress is included if at least half of its steps have ended.
        """
        rows = self._rows
        if 2 * self._step_count >= self.width or (self._steps and not len(rows.first_step)):
            rows = rows.append(self._make_row())
        lacks = zip(rows.first_step.tolist(), rows.lack_ns, strict=True)
        return Windows(
            self.width,
            *rows[:-1],
            lack_ns={
                first_step: lack_ns.tolist() if lack_ns.any() else []
                for first_step, lack_ns in lacks
                if not np.isnan(lack_ns[0])
            },
            tags=dict(self._tags),
            warm_from=self._warm_from,
        )

    def _advance_to_step(self, step: int) -> None:
        """Close the window in progress if `step` is not in this window."""
        if self._steps and step // self.width != self._first_step // self.width:
            if 2 * self._step_count >= self.width:
                self._append_rows(self._make_row())
            self._steps.clear()

    def _count_complete_windows(self, steps: _StepColumns, begin: int) -> int:
        """Return how many windows from `begin` on have all of their steps, up to MAX_WINDOWS."""
        most = min(
            (len(steps.step) - begin) // self.width, MAX_WINDOWS + 1 - len(self._rows.first_step)
        )
        if most <= 0 or steps.step[begin] % self.width:
            return 0
        firsts = steps.step[begin : begin + most * self.width : self.width]
        lasts = steps.step[begin + self.width - 1 : begin + most * self.width : self.width]
        expected = steps.step[begin] + self.width * np.arange(most)
        complete = (firsts == expected) & (lasts == expected + self.width - 1)
        return most if complete.all() else int(complete.argmin())

    def _append_rows(self, rows: _WindowRows) -> None:
        self._rows = self._rows.append(rows)
        if len(self._rows.first_step) > MAX_WINDOWS:
            self._merge_neighbors()

    @property
    def _first_step(self) -> int:
        return int(self._steps[0].step[0])

    @property
    def _step_count(self) -> int:
        return sum(len(steps.step) for steps in self._steps)

    def _make_row(self) -> _WindowRows:
        several = len(self._steps) > 1
        steps = (
            _StepColumns(*map(np.concatenate, zip(*self._steps, strict=True)))
            if several
            else self._steps[0]
        )
        return _make_rows(steps.change(lambda column: column[None]), self.width)

    def _merge_neighbors(self) -> None:
        self.width *= 2
        first_step = self._rows.first_step // self.width * self.width
        self._rows = self._rows._replace(first_step=first_step).merge_equal()
        tags: dict[int, int] = {}
        for step, flags in self._tags.items():
            first = step // self.width * self.width
            tags[first] = tags.get(first, 0) | flags
        self._tags = tags


def _make_rows(windows: _StepColumns, width: int) -> _WindowRows:
    """Return the rows of windows with equal numbers of steps. Columns: [windows, steps, ...]."""
    count = windows.step.shape[1]
    # Use the same mean as for the typical step. Waits for a CPU occur in different phases of
    # different steps, so each phase's median would be zero.
    middle = np.argsort(windows.duration_ns, axis=1, kind="stable")[
        :, count // 4 : count - count // 4
    ]
    durations_ns = np.take_along_axis(windows.duration_ns, middle, 1).mean(axis=1)
    parts_ns = np.take_along_axis(windows.parts_ns, middle[..., None], 1).mean(axis=1)
    ready_ns = np.take_along_axis(windows.ready_ns, middle[..., None], 1)
    measured = ready_ns[..., 0] >= 0
    lacks_ns = np.where(measured[..., None], ready_ns, 0).sum(axis=1)
    lacks_ns = np.minimum(lacks_ns / np.maximum(measured.sum(axis=1), 1)[:, None], parts_ns)
    lacks_ns[lacks_ns.sum(axis=1) < np.maximum(1.0, _LITTLE_LACK * durations_ns)] = 0.0
    lacks_ns[2 * measured.sum(axis=1) < measured.shape[1]] = np.nan
    compared = ~np.isnan(windows.work_ns)
    return _WindowRows(
        windows.step[:, 0] // width * width,
        durations_ns,
        parts_ns,
        np.where(compared, windows.work_ns, 0.0).sum(axis=1),
        compared.sum(axis=1),
        windows.start_ns[:, 0].copy(),
        lacks_ns,
    )


def expand_lack_ns(
    lack_ns: Sequence[float] | npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float64] | None:
    """Expand a value of Windows.lack_ns to one number per part; None if it was not measured."""
    if lack_ns is None:
        return None
    return np.asarray(lack_ns, np.float64) if len(lack_ns) else np.zeros(len(PARTS))


def _group_by_kind_and_name(
    kinds: npt.NDArray[np.uint8], name_ids: npt.NDArray[np.uint32]
) -> tuple[list[tuple[int, int]], npt.NDArray[np.int64], list[int]]:
    """Group records by kind and name.

    Return the kind and name id of each group, an order of the records in which groups are
    consecutive, and the start of each group in this order.
    """
    keys = kinds.astype(np.int64) << 32 | name_ids
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return [(key >> 32, key & 0xFFFFFFFF) for key in keys[starts].tolist()], order, starts.tolist()


def _duration_range(duration_ns: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.floor(np.log2(np.maximum(duration_ns, 1)) * _LENGTHS_PER_DOUBLING).astype(int)


def _sum_by_place_and_name(
    places: npt.NDArray[np.int64],
    name_ids: npt.NDArray[np.integer[Any]],
    values_ns: npt.NDArray[np.int64],
) -> Iterator[tuple[int, int, int]]:
    """Yield each pair of place and name id that occurs, with the sum of its values."""
    keys, index = np.unique(
        places.astype(np.int64) << 32 | name_ids.astype(np.int64), return_inverse=True
    )
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, index, values_ns)
    for key, sum_ns in zip(keys.tolist(), sums.tolist(), strict=True):
        yield key >> 32, key & 0xFFFFFFFF, sum_ns


def _sum_by_index(
    index: npt.NDArray[np.int64], values_ns: npt.NDArray[np.int64], length: int
) -> list[int]:
    """Return the sum of the values of each index below `length`.

    The sums are exact below 2**53 ns, which is a hundred days.
    """
    sums_ns = np.bincount(index, weights=values_ns, minlength=length)
    return sums_ns.astype(np.int64).tolist()


def _mask_kinds(kinds: npt.NDArray[np.uint8], *wanted: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the kinds that are wanted."""
    is_wanted = np.zeros(256, np.bool_)
    is_wanted[list(wanted)] = True
    return is_wanted[kinds]


def _select_of_steps(
    records: npt.NDArray[np.void], rows: npt.NDArray[np.int64], table: StepTable
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return those of the rows whose steps are in the table, and the steps' places in the table."""
    steps = records["step"][rows]
    at = np.searchsorted(table.step, steps)
    inside = at < len(table)
    inside[inside] = table.step[at[inside]] == steps[inside]
    return (rows, at) if inside.all() else (rows[inside], at[inside])


def _section_times_ns(
    records: npt.NDArray[np.void], table: StepTable, names: list[str]
) -> npt.NDArray[np.int64]:
    """Return each step's time in the sections of step_mix.MEASURED whose flags occur."""
    found = np.zeros((len(table), len(MEASURED)), np.int64)
    for column, (flag, name) in enumerate(MEASURED.items()):
        if name in names and (table.flags & flag).any():
            is_section = (records["kind"] == Kind.SECTION) & (
                records["name_id"] == names.index(name)
            )
            sections = records[is_section & np.isin(records["step"], table.step)]
            np.add.at(
                found[:, column],
                np.searchsorted(table.step, sections["step"]),
                sections["duration_ns"],
            )
    return found


@dataclasses.dataclass
class DurationRangeSums:
    """Sums over steps of similar duration. Times in ns."""

    steps: int = 0
    forward_ns: int = 0
    """Forward time of the steps whose modules were timed."""
    modules: dict[str, int] = field(default_factory=dict)
    """Own forward time of each module in the same steps."""
    sections: dict[str, int] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    """Time between the phases, see host_gaps.py."""
    lines: dict[str, int] = field(default_factory=dict)
    """Number of stack samples in each part and line, see stack_samples.find_parts()."""

    @property
    def gaps_s_per_step(self) -> dict[str, float]:
        return {gap: sum_ns / self.steps / 1e9 for gap, sum_ns in self.gaps.items()}

    def merge(self, other: DurationRangeSums) -> None:
        self.steps += other.steps
        self.forward_ns += other.forward_ns
        for mine, theirs in (
            (self.modules, other.modules),
            (self.sections, other.sections),
            (self.gaps, other.gaps),
            (self.lines, other.lines),
        ):
            for name, sum_ns in theirs.items():
                mine[name] = mine.get(name, 0) + sum_ns


@dataclasses.dataclass
class RankStatistics:
    """All statistics of one process of one rank. Records must be added in sequence order."""

    records: int = 0
    lost: int = 0
    first_step: int | None = None
    last_step: int | None = None
    counted_steps: int = 0
    started_ns: int | None = None
    ended_ns: int | None = None
    warm_up: Sketch = field(default_factory=Sketch)
    warm_up_parts_ns: dict[str, int] = field(default_factory=dict)
    """Sum over the warm-up steps of each part's time, as far as it was measured."""
    step: Sketch = field(default_factory=Sketch)
    own: Sketch = field(default_factory=Sketch)
    work: Sketch = field(default_factory=Sketch)
    """Own time of steps without the time in which the thread was runnable but not scheduled. Steps
    in which that was not measured are left out.
    """
    parts: dict[str, Sketch] = field(default_factory=lambda: {part: Sketch() for part in PARTS})
    mix: StepMix = field(default_factory=StepMix)
    by_length: dict[int, DurationRangeSums] = field(default_factory=dict)
    """Sums over steps of similar duration. The key has the index of the duration's range in its
    lowest 8 bits, and the flags of _UNUSUAL above.

    Module and section times of the typical step are computed from some of these sums only, so one
    very long step does not dominate them.
    """
    usual_steps: int = 0
    """Number of steps after the warm-up without flags of _UNUSUAL."""
    untimed_steps: int = 0
    """Number of usual steps in which the calls of modules were not timed."""
    modules: dict[str, Sketch] = field(default_factory=dict)
    """Own times of the timed calls in usual steps."""
    module_cost: ModuleCost = field(default_factory=ModuleCost)
    module_backwards: dict[str, Sketch] = field(default_factory=dict)
    sections: dict[str, Sketch] = field(default_factory=dict)
    section_hosts: dict[str, Sketch] = field(default_factory=dict)
    """For each section, the time of host code outside all phases, in usual steps."""
    other_threads_ns: dict[str, int] = field(default_factory=dict)
    """Time of phases on other threads than the training thread, in all steps after the warm-up."""
    memory_bytes: int = 0
    memory_max_bytes: int = 0
    micro_steps: int = 1
    flags_seen: int = 0
    history: WindowHistory = field(default_factory=WindowHistory)
    device_history: WindowHistory = field(default_factory=WindowHistory)
    """Windows by the device's clock, if the rank is judged by its device."""
    device_mix: StepMix = field(default_factory=StepMix)
    """Bins of steps by the device's clock, which does not count the host's waits for the device."""
    device: DeviceStatistics = field(default_factory=DeviceStatistics)
    memory: MemoryStatistics = field(default_factory=MemoryStatistics)
    operators: OperatorStatistics = field(default_factory=OperatorStatistics)

    def add_records(
        self,
        records: npt.NDArray[np.void],
        steps: StepTable,
        names: list[str],
        lost: int,
        samples: Sequence[StackSample] = (),
    ) -> None:
        """Add the records of complete steps. steps: the result of assemble_steps().

        samples: samples of the stack, of which those in other steps are ignored.
        """
        self.records += len(records)
        self.lost += lost
        if len(steps):
            self._add_steps(steps, _section_times_ns(records, steps, names))
        warm = records[:0]
        if self.first_step is not None:
            is_warm = records["step"] >= self.first_step + WARM_UP_STEPS
            # Usually all steps are after the warm-up, so avoid the slow copy.
            warm = records if is_warm.all() else records[is_warm]
        kinds = np.ascontiguousarray(records["kind"])
        present = set(np.flatnonzero(np.bincount(kinds)).tolist())
        if not present.isdisjoint(_NAMED):
            self._add_named_sections(warm, names)
        self._add_other_threads(warm)
        self._add_duration_ranges(records, kinds, steps, names, samples)
        if Kind.SECTION in present:
            self._add_section_host_times(records, kinds, steps, names)
        if not present.isdisjoint(_OF_DEVICE):
            self.device.add_records(warm, names)
        if Kind.MEMORY in present:
            self.memory.add_records(records, names)
        self.operators.add_records(
            records if Kind.OPERATORS in present else records[:0], steps, names
        )

    def _add_steps(self, table: StepTable, measured_ns: npt.NDArray[np.int64]) -> None:
        if self.first_step is None:
            self.first_step = int(table.step[0])
            self.started_ns = int(table.start_ns[0])
        self.last_step = int(table.step[-1])
        self.ended_ns = int(table.start_ns[-1] + table.duration_ns[-1])
        self.counted_steps += len(table)
        warm = table.step >= self.first_step + WARM_UP_STEPS
        parts_ns = table.parts_ns[~warm]
        # Until a model is found, its forward pass is not told from host code.
        parts_ns[parts_ns[:, PARTS.index("forward")] == 0, PARTS.index("host")] = 0
        for part, part_ns in zip(PARTS, parts_ns.sum(axis=0).tolist(), strict=True):
            self.warm_up_parts_ns[part] = self.warm_up_parts_ns.get(part, 0) + part_ns
        with_lack = warm & (table.ready_ns[:, 0] >= 0)
        add_each(
            [
                (self.warm_up, table.duration_ns[~warm]),
                (self.step, table.duration_ns[warm]),
                (self.own, table.own_ns[warm]),
                (self.work, table.work_ns[with_lack]),
                *zip(map(self.parts.__getitem__, PARTS), table.parts_ns[warm].T, strict=True),
            ]
        )
        after_warm_up = table if warm.all() else table.select_rows(warm)
        self.mix.add_steps(after_warm_up, measured_ns[warm])
        self.module_cost.add_steps(after_warm_up)
        self.memory_bytes = int(table.memory_bytes[-1])
        self.memory_max_bytes = max(self.memory_max_bytes, int(table.memory_bytes.max()))
        self.micro_steps = int(np.median(table.micro_steps))
        self.flags_seen |= int(np.bitwise_or.reduce(table.flags))
        self.history.add_steps(table)

    def _mask_usual_steps(self, steps: StepTable) -> npt.NDArray[np.bool_]:
        usual = (steps.flags & _UNUSUAL) == 0
        if self.first_step is not None:
            usual &= steps.step >= self.first_step + WARM_UP_STEPS
        return np.asarray(usual)

    def _add_section_host_times(
        self,
        records: npt.NDArray[np.void],
        kinds: npt.NDArray[np.uint8],
        steps: StepTable,
        names: list[str],
    ) -> None:
        """Add the time of host code in sections.

        Phases inside sections, and sections inside phases, do not count.
        """
        here = (records["flags"] & Flag.OTHER_THREAD) == 0
        rows = np.flatnonzero((kinds == Kind.SECTION) & here)
        usual = self._mask_usual_steps(steps)
        rows = rows[np.isin(records["step"][rows], steps.step[usual])]
        if not len(rows):
            return
        # A phase that encloses a section is recorded after the section, but starts before it.
        phases = np.flatnonzero(np.isin(kinds, _PHASES) & here)
        began_ns = np.minimum.accumulate(records["start_ns"][phases][::-1])[::-1]
        began_ns = np.append(began_ns, np.iinfo(np.int64).max)[np.searchsorted(phases, rows)]
        rows = rows[began_ns > records["start_ns"][rows]]
        host_ns = (records["duration_ns"][rows] - records["phase_ns"][rows]).clip(min=0)
        places = np.searchsorted(steps.step, records["step"][rows])
        keys, inverse = np.unique(
            records["name_id"][rows].astype(np.int64) << 32 | places.astype(np.int64),
            return_inverse=True,
        )
        of_step = np.bincount(inverse, weights=host_ns, minlength=len(keys)).astype(np.int64)
        # A section that crosses a step's end, or that is nested in itself, counts at most the
        # step's host time.
        of_step = np.minimum(of_step, steps.parts_ns[keys & 0xFFFFFFFF, PARTS.index("host")])
        for name_id in np.unique(keys >> 32).tolist():
            sketch = self.section_hosts.setdefault(lookup_name(names, name_id), Sketch())
            sketch.add(of_step[keys >> 32 == name_id])

    def median_section_host_ns(self, name: str) -> float:
        """Return the median over all usual steps of a section's time in host code.

        Steps without the section count as zero.
        """
        found = self.section_hosts.get(name)
        if found is None or not self.usual_steps or 2 * found.count <= self.usual_steps:
            return 0.0
        without = max(0, self.usual_steps - found.count)
        return found.quantile_ns((0.5 * self.usual_steps - without) / found.count)

    def _add_duration_ranges(
        self,
        records: npt.NDArray[np.void],
        kinds: npt.NDArray[np.uint8],
        steps: StepTable,
        names: list[str],
        samples: Sequence[StackSample],
    ) -> None:
        """Add sums by step duration, and the calls of modules in usual steps."""
        if self.first_step is None or not len(steps):
            return
        warm = steps.step >= self.first_step + WARM_UP_STEPS
        steps = steps if warm.all() else steps.select_rows(warm)
        lengths = _duration_range(steps.duration_ns) | (steps.flags & _UNUSUAL) << _LENGTH_BITS
        found, of_step = np.unique(lengths, return_inverse=True)
        new = [
            DurationRangeSums(count)
            for count in np.bincount(of_step, minlength=len(found)).tolist()
        ]
        usual, timed = self._mask_usual_steps(steps), (steps.flags & Flag.WITHOUT_MODULES) == 0
        self.usual_steps += int(usual.sum())
        self.untimed_steps += int((usual & ~timed).sum())
        timed_steps = steps if timed.all() else steps.select_rows(timed)
        self._add_modules(records, kinds, timed_steps, names, of_step[timed], new)
        rows, at = _select_of_steps(records, np.flatnonzero(kinds == Kind.SECTION), steps)
        for place, name_id, sum_ns in _sum_by_place_and_name(
            of_step[at], records["name_id"][rows], records["duration_ns"][rows]
        ):
            new[place].sections[lookup_name(names, name_id)] = sum_ns
        gaps = find_host_gaps(records, kinds, steps)
        for place, key, sum_ns in _sum_by_place_and_name(
            of_step[gaps.at], gaps.key, gaps.duration_ns
        ):
            new[place].gaps[name_gap(key)] = sum_ns
        for step, line in find_parts(samples, records, names, steps, gaps):
            new[of_step[step]].merge(DurationRangeSums(lines={line: 1}))
        for length, sums in zip(found.tolist(), new, strict=True):
            self.by_length.setdefault(length, DurationRangeSums()).merge(sums)
        while len(self.by_length) > _MAX_LENGTHS:
            del self.by_length[min(self.by_length, key=lambda each: self.by_length[each].steps)]

    def _add_modules(
        self,
        records: npt.NDArray[np.void],
        kinds: npt.NDArray[np.uint8],
        steps: StepTable,
        names: list[str],
        of_step: npt.NDArray[np.int64],
        new: list[DurationRangeSums],
    ) -> None:
        """Add the own times of modules called in the forward pass.

        Own times of all modules add up to the time of the forward phase.

        steps: steps whose modules were timed. of_step: index in `new` of each step.
        """
        here = (records["flags"] & Flag.OTHER_THREAD) == 0
        # A phase is recorded after the calls inside it, so the next phase after a call encloses the
        # call.
        rows = np.flatnonzero(_mask_kinds(kinds, *_CALLS) & here)
        phases = np.flatnonzero(_mask_kinds(kinds, *_FORWARD_PHASES) & here)
        of_phase = np.append(kinds[phases], Kind.FORWARD)[np.searchsorted(phases, rows)]
        rows, at = _select_of_steps(records, rows[of_phase == Kind.FORWARD], steps)
        if not len(rows):
            return
        durations_ns = records["duration_ns"][rows]
        passes = kinds[rows] == Kind.FORWARD
        forward_ns = durations_ns[passes] - records["phase_ns"][rows[passes]]
        for place, sum_ns in enumerate(_sum_by_index(of_step[at[passes]], forward_ns, len(new))):
            new[place].forward_ns = sum_ns
        # Sort the calls by module. Short integers are sorted fastest.
        name_ids = records["name_id"][rows]
        short = name_ids.astype(np.uint16) if name_ids.max() < 1 << 16 else name_ids
        order = np.argsort(short, kind="stable")
        name_ids, places = name_ids[order], of_step[at[order]]
        own_ns = (durations_ns - records["nested_ns"][rows])[order]
        starts = np.flatnonzero(np.diff(name_ids, prepend=name_ids[0] ^ 1))
        called = [
            lookup_name(names, name_id).removeprefix("forward ")
            for name_id in name_ids[starts].tolist()
        ]
        module = np.repeat(np.arange(len(called)), np.diff([*starts, len(rows)]))
        index = places * len(called) + module
        calls = np.bincount(index, minlength=len(new) * len(called))
        sums_ns = _sum_by_index(index, own_ns, len(calls))
        for each in np.flatnonzero(calls).tolist():
            place, number = divmod(each, len(called))
            modules, name = new[place].modules, called[number]
            modules[name] = modules.get(name, 0) + sums_ns[each]
        usual = (steps.flags[at[order]] & _UNUSUAL) == 0
        if not usual.all():
            own_ns, module = own_ns[usual], module[usual]
            starts = np.flatnonzero(np.diff(module, prepend=-1))
        add_to_sketches(
            [
                self.modules.setdefault(called[number], Sketch())
                for number in module[starts].tolist()
            ],
            own_ns,
            starts.tolist(),
        )

    def _add_other_threads(self, records: npt.NDArray[np.void]) -> None:
        there = records[(records["flags"] & Flag.OTHER_THREAD) != 0]
        for kind, phase in _ON_OTHER_THREADS.items() if len(there) else ():
            spans = there[there["kind"] == kind]
            if len(spans):
                own_ns = int((spans["duration_ns"] - spans["phase_ns"]).sum())
                self.other_threads_ns[phase] = self.other_threads_ns.get(phase, 0) + own_ns

    def _add_named_sections(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        rows = np.flatnonzero(np.isin(records["kind"], _NAMED))
        if not len(rows):
            return
        found, order, starts = _group_by_kind_and_name(
            records["kind"][rows], records["name_id"][rows]
        )
        sketches = [
            (self.sections if kind == Kind.SECTION else self.module_backwards).setdefault(
                lookup_name(names, name_id), Sketch()
            )
            for kind, name_id in found
        ]
        add_to_sketches(sketches, records["duration_ns"][rows[order]], starts)

    def sums_of_typical_steps(self) -> DurationRangeSums:
        """Return the sums over steps of about the same duration as the typical step."""
        typical, whole = classify_steps([self.mix]).typical, DurationRangeSums()
        if typical is None:
            return whole
        first, last = _duration_range(np.array(typical.range_ns)).tolist()
        for length, sums in self.by_length.items():
            if (
                length >> _LENGTH_BITS == typical.flags & _UNUSUAL
                and first <= length & _LENGTH_MASK <= last
            ):
                whole.merge(sums)
        return whole

    @property
    def coverage(self) -> float:
        """Fraction of the steps from the first to the last that were recorded completely."""
        if self.first_step is None or self.last_step is None:
            return 0.0
        return self.counted_steps / (self.last_step - self.first_step + 1)

    @property
    def module_steps(self) -> int:
        """Number of usual steps in which the calls of modules were timed."""
        return self.usual_steps - self.untimed_steps

    def mean_module_times_ns(self) -> dict[str, float]:
        """Return each module's mean own forward time per timed step; empty without such steps."""
        steps = self.module_steps
        return (
            {name: sketch.sum_ns / steps for name, sketch in self.modules.items()} if steps else {}
        )
