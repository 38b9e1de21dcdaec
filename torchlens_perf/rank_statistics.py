"""What is known of one rank: sketches over the whole run, and a history of windows that does not grow with it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens_perf.device_statistics import DeviceStatistics
from torchlens_perf.memory_statistics import MemoryStatistics
from torchlens_perf.records import OWN_PARTS, PARTS, StepTable
from torchlens_perf.ring import Flag, Kind, name_of
from torchlens_perf.sketch import Sketch
from torchlens_perf.step_mix import StepMix
from torchlens_perf.step_rows import OTHER_WORK

if TYPE_CHECKING:
    import numpy.typing as npt

WARM_UP_STEPS = 3  # allocator, caches, lazy initialisation: counted apart
FIRST_WINDOW_STEPS = 8
MOST_WINDOWS = 512
# What else a step may do that a reader of its time wants to know.
TAGS = int(Flag.CHECKPOINT | Flag.COMPILED | Flag.EVALUATION | Flag.CAPTURED)
# Steps whose modules' times are no part of what a step takes: they evaluate, or are slowed by what is no training.
_UNUSUAL = int(Flag.EVALUATION | Flag.CAPTURED | Flag.COMPILED)
# Steps that are in no window: they do other work than training steps.
_OTHER_WORK = int(Flag.EVALUATION | Flag.SKIPPED | Flag.PROBED | Flag.CAPTURED)
_OWN = [PARTS.index(part) for part in OWN_PARTS]
_CALLS, _FORWARD_PHASES = (int(Kind.MODULE), int(Kind.FORWARD)), (int(Kind.FORWARD), int(Kind.RECOMPUTE))


@dataclasses.dataclass(frozen=True)
class Windows:
    """Medians over consecutive steps, and their work: row i is about steps [first_step[i], first_step[i] + width)."""

    width: int
    first_step: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.float64]
    parts_ns: npt.NDArray[np.float64]
    """Shape [windows, len(PARTS)]."""
    work_sum_ns: npt.NDArray[np.float64]
    """Own time, without that in which the thread was ready and had no CPU: summed, as a mean also shows the slowness
    that is in some steps only. Without the warm-up, and without steps that do other work than the other ranks'."""
    work_steps: npt.NDArray[np.int64]
    """How many steps that sum is over; 0: there is no work to compare."""
    tags: Mapping[int, int]
    """By a window's first step, what else its steps did, as flags of TAGS; also of windows that have no row."""


class _Row(NamedTuple):
    first_step: int
    duration_ns: float
    parts_ns: npt.NDArray[np.float64]
    work_sum_ns: float
    work_steps: int


class WindowHistory:
    """Windows of `width` steps. When there are too many, neighbours are merged and the width doubles.

    Windows are aligned to multiples of the width, so those of different ranks are about the same steps.
    """

    def __init__(self) -> None:
        self.width = FIRST_WINDOW_STEPS
        self._rows: list[_Row] = []
        self._tags: dict[int, int] = {}
        self._warm_from: int | None = None  # the first step that is no warm-up
        # Of the window in progress: step, duration, parts, work; NaN where the work is not compared.
        self._steps: list[tuple[int, int, npt.NDArray[np.int64], float]] = []

    def add(self, table: StepTable) -> None:
        """Adds steps, in order."""
        if not len(table):
            return
        if self._warm_from is None:
            self._warm_from = int(table.step[0]) + WARM_UP_STEPS
        compared = (table.flags & _OTHER_WORK) == 0
        uncompared_work = ((table.flags & OTHER_WORK) != 0) | (table.step < self._warm_from)
        work_ns = np.where(uncompared_work, np.nan, _work_ns(table))
        for step, duration_ns, parts_ns, step_work_ns, good in zip(
            table.step.tolist(), table.duration_ns.tolist(), table.parts_ns, work_ns.tolist(), compared.tolist(),
            strict=True,
        ):  # fmt: skip
            if self._steps and step // self.width != self._steps[0][0] // self.width:
                self._close_window()
            if good:
                self._steps.append((step, duration_ns, parts_ns, step_work_ns))
        tagged = (table.flags & TAGS) != 0
        for step, flags in zip(table.step[tagged].tolist(), table.flags[tagged].tolist(), strict=True):
            first = step // self.width * self.width
            self._tags[first] = self._tags.get(first, 0) | (flags & TAGS)
        while len(self._tags) > MOST_WINDOWS:
            self._merge_neighbours()

    def windows(self) -> Windows:
        """The history, with the window in progress as its last row if it has half its steps."""
        rows = list(self._rows)
        if 2 * len(self._steps) >= self.width or (self._steps and not rows):
            _append(rows, self._row())
        return Windows(
            width=self.width,
            first_step=np.array([row.first_step for row in rows], np.int64),
            duration_ns=np.array([row.duration_ns for row in rows], np.float64),
            parts_ns=np.array([row.parts_ns for row in rows], np.float64).reshape(len(rows), len(PARTS)),
            work_sum_ns=np.array([row.work_sum_ns for row in rows], np.float64),
            work_steps=np.array([row.work_steps for row in rows], np.int64),
            tags=dict(self._tags),
        )

    def _row(self) -> _Row:
        durations = np.array([step[1] for step in self._steps])
        parts = np.array([step[2] for step in self._steps])
        work = [step[3] for step in self._steps if step[3] == step[3]]
        first = self._steps[0][0] // self.width * self.width
        return _Row(first, float(np.median(durations)), np.median(parts, axis=0), sum(work), len(work))

    def _close_window(self) -> None:
        if 2 * len(self._steps) >= self.width:
            _append(self._rows, self._row())
        self._steps.clear()
        if len(self._rows) > MOST_WINDOWS:
            self._merge_neighbours()

    def _merge_neighbours(self) -> None:
        self.width *= 2
        merged: list[_Row] = []
        for row in self._rows:
            _append(merged, row._replace(first_step=row.first_step // self.width * self.width))
        self._rows = merged
        tags: dict[int, int] = {}
        for step, flags in self._tags.items():
            first = step // self.width * self.width
            tags[first] = tags.get(first, 0) | flags
        self._tags = tags

    def to_json(self) -> dict[str, Any]:
        """A value for from_json(). The window in progress begins anew on the other side."""
        windows = self.windows()
        return {
            "width": self.width,
            "first_step": windows.first_step.tolist(),
            "duration_ns": windows.duration_ns.tolist(),
            "parts_ns": windows.parts_ns.tolist(),
            "work_sum_ns": windows.work_sum_ns.tolist(),
            "work_steps": windows.work_steps.tolist(),
            "tags": list(self._tags.items()),
            "warm_from": self._warm_from,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WindowHistory:
        """The history that to_json() wrote."""
        history = cls()
        history.width = int(value["width"])
        columns = ("first_step", "duration_ns", "parts_ns", "work_sum_ns", "work_steps")
        history._rows = [
            _Row(int(first), float(duration), np.array(parts, np.float64), float(work), int(steps))
            for first, duration, parts, work, steps in zip(*(value[column] for column in columns), strict=True)
        ]
        history._tags = {int(first): int(flags) for first, flags in value["tags"]}
        history._warm_from = value["warm_from"]
        return history


def _append(rows: list[_Row], row: _Row) -> None:
    """Adds a row, or merges it into the last one if that is about the same steps."""
    if not rows or rows[-1].first_step != row.first_step:
        rows.append(row)
        return
    last = rows[-1]
    rows[-1] = _Row(
        row.first_step,
        (last.duration_ns + row.duration_ns) / 2,
        (last.parts_ns + row.parts_ns) / 2,
        last.work_sum_ns + row.work_sum_ns,
        last.work_steps + row.work_steps,
    )


def _work_ns(table: StepTable) -> npt.NDArray[np.float64]:
    """Own time of each step, without the part of it in which the thread was ready and had no CPU, where measured."""
    own = table.parts_ns[:, _OWN]
    ready = np.where(table.ready_ns[:, :1] >= 0, table.ready_ns[:, _OWN], 0)
    work: npt.NDArray[np.float64] = (own - np.minimum(ready, own)).sum(axis=1).astype(np.float64)
    return work


def _by_kind_and_name(records: npt.NDArray[np.void]) -> Iterator[tuple[int, int, npt.NDArray[np.void]]]:
    """The records of each kind and name id."""
    if not len(records):
        return
    keys = records["kind"].astype(np.int64) << 32 | records["name_id"]
    order = np.argsort(keys, kind="stable")
    unique, starts = np.unique(keys[order], return_index=True)
    for key, rows in zip(unique.tolist(), np.split(order, starts[1:]), strict=True):
        yield key >> 32, key & 0xFFFFFFFF, records[rows]


@dataclasses.dataclass
class CollectiveCount:
    """One operation on one group."""

    sketch: Sketch = dataclasses.field(default_factory=Sketch)
    bytes: int = 0


class RankStatistics:
    """Everything counted about one process of one rank. Fed with its records in sequence order."""

    def __init__(self) -> None:
        self.records = 0
        self.lost = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.counted_steps = 0
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self.warm_up = Sketch()
        self.step = Sketch()
        self.own = Sketch()
        self.work = Sketch()  # own time without that in which the thread was ready and had no CPU, where that is known
        self.parts = {part: Sketch() for part in PARTS}
        self.mix = StepMix()
        self.usual_steps = 0  # that the modules' times are of
        self.usual_forward_ns = 0  # the forward phase of those
        self.modules: dict[str, Sketch] = {}
        self.module_backwards: dict[str, Sketch] = {}
        self.sections: dict[str, Sketch] = {}
        self.collectives: dict[str, CollectiveCount] = {}
        self.memory_bytes = 0
        self.memory_most_bytes = 0
        self.micro_steps = 1
        self.flags_seen = 0
        self.history = WindowHistory()
        self.device = DeviceStatistics()
        self.memory = MemoryStatistics()

    def add(self, records: npt.NDArray[np.void], steps: StepTable, names: list[str], lost: int) -> None:
        """Counts whole steps: their records, and the table that assemble_steps() made of them."""
        self.records += len(records)
        self.lost += lost
        if len(steps):
            self._add_steps(steps)
        warm = self.first_step is not None and records["step"] >= self.first_step + WARM_UP_STEPS
        self._add_named(records[warm], names)
        self._add_modules(records, steps, names)
        self.device.add(records[warm], names)
        self.memory.add(records, names)

    def _add_steps(self, table: StepTable) -> None:
        if self.first_step is None:
            self.first_step = int(table.step[0])
            self.started_ns = int(table.start_ns[0])
        self.last_step = int(table.step[-1])
        self.ended_ns = int(table.start_ns[-1] + table.duration_ns[-1])
        self.counted_steps += len(table)
        warm = table.step >= self.first_step + WARM_UP_STEPS
        self.warm_up.add(table.duration_ns[~warm])
        self.step.add(table.duration_ns[warm])
        self.own.add(table.own_ns[warm])
        measured = warm & (table.ready_ns[:, 0] >= 0)
        self.work.add(_work_ns(table)[measured].astype(np.int64))
        for index, part in enumerate(PARTS):
            self.parts[part].add(table.parts_ns[warm, index])
        self.mix.add(table.where(warm))
        self.memory_bytes = int(table.memory_bytes[-1])
        self.memory_most_bytes = max(self.memory_most_bytes, int(table.memory_bytes.max()))
        self.micro_steps = int(np.median(table.micro_steps))
        self.flags_seen |= int(np.bitwise_or.reduce(table.flags))
        self.history.add(table)

    def _add_modules(self, records: npt.NDArray[np.void], steps: StepTable, names: list[str]) -> None:
        """Own times of the modules that forward passes of usual steps call: what the forward phase is made of."""
        usual = (steps.flags & _UNUSUAL) == 0
        if self.first_step is not None:
            usual &= steps.step >= self.first_step + WARM_UP_STEPS
        self.usual_steps += int(usual.sum())
        calls = np.isin(records["kind"], _CALLS) & ((records["flags"] & Flag.OTHER_THREAD) == 0)
        calls[calls] = np.isin(records["step"][calls], steps.step[usual])
        # A call is recorded after those inside of it: the next phase of its kind is the one that it is in.
        phases = np.flatnonzero(
            np.isin(records["kind"], _FORWARD_PHASES) & ((records["flags"] & Flag.OTHER_THREAD) == 0)
        )
        inside = np.searchsorted(phases, np.flatnonzero(calls))
        kinds = np.append(records["kind"][phases], Kind.FORWARD)[inside]
        rows = np.flatnonzero(calls)[kinds == Kind.FORWARD]
        passes = records[rows][records["kind"][rows] == Kind.FORWARD]
        self.usual_forward_ns += int((passes["duration_ns"] - passes["phase_ns"]).sum())
        for _, name_id, own in _by_kind_and_name(records[rows]):
            own_ns = own["duration_ns"] - own["nested_ns"]
            self.modules.setdefault(name_of(names, name_id).removeprefix("forward "), Sketch()).add(own_ns)

    def _add_named(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        for kind, name_id, its in _by_kind_and_name(records):
            name, durations_ns = name_of(names, name_id), its["duration_ns"]
            if kind == Kind.MODULE_BACKWARD:
                self.module_backwards.setdefault(name, Sketch()).add(durations_ns)
            elif kind == Kind.SECTION:
                self.sections.setdefault(name, Sketch()).add(durations_ns)
            elif kind == Kind.COLLECTIVE:
                count = self.collectives.setdefault(name, CollectiveCount())
                count.sketch.add(durations_ns)
                count.bytes += int(its["value0"].sum())

    def module_shares(self) -> dict[str, float]:
        """Own forward time of each module, as a share of the forward phase, in usual steps."""
        if not self.usual_forward_ns:
            return {}
        return {name: sketch.sum_ns / self.usual_forward_ns for name, sketch in self.modules.items()}

    @property
    def coverage(self) -> float:
        """Share of the steps from the first to the last that were seen whole."""
        if self.first_step is None or self.last_step is None:
            return 0.0
        return self.counted_steps / (self.last_step - self.first_step + 1)

    def modules_ns(self) -> dict[str, float]:
        """Mean own forward time of each module in a usual step; empty until a step counts."""
        steps = self.usual_steps
        return {name: sketch.sum_ns / steps for name, sketch in self.modules.items()} if steps else {}

    def to_json(self) -> dict[str, Any]:
        """A value for from_json()."""
        value: dict[str, Any] = {field: getattr(self, field) for field in _PLAIN_FIELDS}
        for field in _SKETCHES:
            value[field] = getattr(self, field).to_json()
        for field in _SKETCH_TABLES:
            value[field] = {name: sketch.to_json() for name, sketch in getattr(self, field).items()}
        value["collectives"] = {
            name: {"bytes": count.bytes, "sketch": count.sketch.to_json()} for name, count in self.collectives.items()
        }
        value["history"] = self.history.to_json()
        value["mix"] = self.mix.to_json()
        value["device"] = self.device.to_json()
        value["memory"] = self.memory.to_json()
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankStatistics:
        """The statistics that to_json() wrote, at a step boundary."""
        statistics = cls()
        for field in _PLAIN_FIELDS:
            setattr(statistics, field, value[field])
        for field in _SKETCHES:
            setattr(statistics, field, Sketch.from_json(value[field]))
        for field in _SKETCH_TABLES:
            loaded = {name: Sketch.from_json(sketch) for name, sketch in value[field].items()}
            getattr(statistics, field).update(loaded)
        for name, count in value["collectives"].items():
            statistics.collectives[name] = CollectiveCount(Sketch.from_json(count["sketch"]), int(count["bytes"]))
        statistics.history = WindowHistory.from_json(value["history"])
        statistics.mix = StepMix.from_json(value["mix"])
        statistics.device = DeviceStatistics.from_json(value["device"])
        if "memory" in value:  # of an older run there is none
            statistics.memory = MemoryStatistics.from_json(value["memory"])
        return statistics


_PLAIN_FIELDS = (
    "records", "lost", "first_step", "last_step", "counted_steps", "started_ns", "ended_ns", "memory_bytes",
    "memory_most_bytes", "micro_steps", "flags_seen", "usual_steps",
    "usual_forward_ns",
)  # fmt: skip
_SKETCHES = ("warm_up", "step", "own", "work")
_SKETCH_TABLES = ("parts", "modules", "module_backwards", "sections")
