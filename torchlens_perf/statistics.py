"""Sketches that merge by addition, and the step table that they are filled from. Pure.

A sketch is count, sum, sum of squares, minimum, maximum and an OpenTelemetry-compatible exponential histogram:
base-2, scale 5, so 32 buckets an octave, each 2.2 % wide; a quantile is off by at most 1.1 %. Integers throughout, so
merging in any order gives the same bytes.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.records import PARTS, Span, StepTable, StepTrace
from torchlens_perf.ring import MICRO_STEPS_MASK, WORKLOAD_SHIFT, Flag, Kind

if TYPE_CHECKING:
    import numpy.typing as npt

SCALE = 5
_PER_OCTAVE = 1 << SCALE
LOWEST_OCTAVE, HIGHEST_OCTAVE = 6, 42  # 64 ns to 73 minutes; values outside count in the first and last bucket
BUCKETS = _PER_OCTAVE * (HIGHEST_OCTAVE - LOWEST_OCTAVE)

_NO_SPANS = (int(Kind.STEP), int(Kind.THREAD_TIME))
_PART_OF_KIND = {
    Kind.DATA: "data",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.OPTIMIZER: "optimizer",
    Kind.WAIT: "communication",
}


@functools.cache
def bucket_bounds() -> npt.NDArray[np.int64]:
    """Upper bounds of the buckets: bucket i holds (bound[i-1], bound[i]].

    The largest integer not above 2**(LOWEST_OCTAVE + (i + 1) / 32), exact: by integer roots, because floating-point
    powers are off by one at some bounds.
    """
    bounds = []
    for i in range(BUCKETS):
        octave, part = divmod(i + 1, _PER_OCTAVE)
        # floor(2**(octave + part/32)) is the integer 32nd root of 2**(32*octave + part).
        power = 1 << (_PER_OCTAVE * (LOWEST_OCTAVE + octave) + part)
        root = round(2.0 ** (LOWEST_OCTAVE + octave + part / _PER_OCTAVE))
        while root**_PER_OCTAVE > power:
            root -= 1
        while (root + 1) ** _PER_OCTAVE <= power:
            root += 1
        bounds.append(root)
    return np.array(bounds, np.int64)


class Sketch:
    """The distribution of durations in ns. Grows by add() and merge(); takes the space of its histogram."""

    __slots__ = ("counts", "largest", "smallest", "sum_ns", "sum_squares")

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS, np.int64)
        self.sum_ns = 0
        self.sum_squares = 0
        self.smallest = 0
        self.largest = 0

    @property
    def count(self) -> int:
        """How many values."""
        return int(self.counts.sum())

    def add(self, values_ns: npt.NDArray[np.int64]) -> None:
        """Adds durations; negative ones count as zero."""
        if not len(values_ns):
            return
        values_ns = np.maximum(values_ns, 0)
        empty = not self.counts.any()
        smallest, largest = int(values_ns.min()), int(values_ns.max())
        self.smallest = smallest if empty else min(self.smallest, smallest)
        self.largest = largest if empty else max(self.largest, largest)
        self.sum_ns += int(values_ns.sum())
        self.sum_squares += _sum_of_squares(values_ns)
        buckets = np.minimum(np.searchsorted(bucket_bounds(), values_ns, side="left"), BUCKETS - 1)
        self.counts += np.bincount(buckets, minlength=BUCKETS)

    def merge(self, other: Sketch) -> None:
        """Adds another sketch's values."""
        if not other.counts.any():
            return
        empty = not self.counts.any()
        self.smallest = other.smallest if empty else min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)
        self.sum_ns += other.sum_ns
        self.sum_squares += other.sum_squares
        self.counts = self.counts + other.counts

    def quantile_ns(self, q: float) -> float:
        """The q-quantile, at most 1.1 % off; NaN for an empty sketch."""
        count = self.count
        if not count:
            return math.nan
        wanted = min(count, max(1, math.ceil(q * count)))
        bucket = int(np.searchsorted(np.cumsum(self.counts), wanted))
        upper = float(bucket_bounds()[bucket])
        lower = upper / 2 ** (1 / _PER_OCTAVE)
        return min(max(math.sqrt(lower * upper), self.smallest), self.largest)

    def mean_ns(self) -> float:
        """The mean; NaN for an empty sketch."""
        count = self.count
        return self.sum_ns / count if count else math.nan

    def to_json(self) -> dict[str, Any]:
        """A value for from_json(). Buckets as [first, counts ...]: most are empty."""
        used = np.flatnonzero(self.counts)
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        return {
            "sum_ns": self.sum_ns,
            "sum_squares": self.sum_squares,
            "min_ns": self.smallest,
            "max_ns": self.largest,
            "buckets": [first, *self.counts[first : last + 1].tolist()],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Sketch:
        """The sketch that to_json() wrote."""
        sketch = cls()
        first, *counts = value["buckets"]
        sketch.counts[first : first + len(counts)] = counts
        sketch.sum_ns, sketch.sum_squares = int(value["sum_ns"]), int(value["sum_squares"])
        sketch.smallest, sketch.largest = int(value["min_ns"]), int(value["max_ns"])
        return sketch


def _sum_of_squares(values: npt.NDArray[np.int64]) -> int:
    """Exact: 64-bit squares of durations above 3 s would overflow."""
    high, low = values >> 20, values & 0xFFFFF
    return (int((high * high).sum()) << 40) + (int((high * low).sum()) << 21) + int((low * low).sum())


def _parts_of_kinds() -> npt.NDArray[np.int64]:
    parts = np.full(256, -1)
    for kind, part in _PART_OF_KIND.items():
        parts[kind] = PARTS.index(part)
    return parts


def assemble_steps(records: npt.NDArray[np.void]) -> StepTable:
    """The steps that end in these records of one rank, which are in sequence order and begin with a step's first.

    A phase belongs to the step whose end follows it; phases after the last end are left out.
    """
    ends = np.flatnonzero(records["kind"] == Kind.STEP)
    steps = records[ends]
    parts = _parts_of_kinds()[records["kind"]]
    parts[(records["flags"] & Flag.OTHER_THREAD) != 0] = -1
    phases = np.flatnonzero(parts >= 0)
    step_of_phase = np.searchsorted(ends, phases)
    parts_ns = np.zeros((len(ends) + 1, len(PARTS)), np.int64)
    own_ns = records["duration_ns"][phases] - records["phase_ns"][phases]
    np.add.at(parts_ns, (step_of_phase, parts[phases]), own_ns)
    parts_ns = parts_ns[:-1]
    cpu_ns, ready_ns = _thread_times(records, ends)
    parts_ns[:, PARTS.index("tool")] = np.maximum(steps["phase_ns"] - parts_ns.sum(axis=1), 0)
    parts_ns[:, PARTS.index("host")] = np.maximum(steps["duration_ns"] - parts_ns.sum(axis=1), 0)
    return StepTable(
        step=steps["step"].astype(np.int64),
        start_ns=steps["start_ns"].astype(np.int64),
        duration_ns=steps["duration_ns"].astype(np.int64),
        parts_ns=parts_ns,
        memory_bytes=steps["value0"].astype(np.int64),
        micro_steps=(steps["value1"] & MICRO_STEPS_MASK).astype(np.int64),
        flags=steps["flags"].astype(np.int64),
        workload=(steps["value1"] >> WORKLOAD_SHIFT).astype(np.int64) - 1,
        cpu_ns=cpu_ns,
        ready_ns=ready_ns,
    )


def _thread_times(
    records: npt.NDArray[np.void], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """CPU time and time ready without a CPU, by step and part; -1 in steps that were not measured."""
    times = np.flatnonzero(records["kind"] == Kind.THREAD_TIME)
    of_step = np.searchsorted(ends, times)
    inside = of_step < len(ends)
    times, of_step = times[inside], of_step[inside]
    parts = _parts_of_thread_times()[records["flags"][times] & 0xFF]
    tables = []
    for column in ("value0", "value1"):
        table = np.full((len(ends), len(PARTS)), -1, np.int64)
        table[of_step] = 0
        np.add.at(table, (of_step, parts), records[column][times].astype(np.int64))
        tables.append(table)
    return tables[0], tables[1]


@functools.cache
def _parts_of_thread_times() -> npt.NDArray[np.int64]:
    """The part of each kind of phase; what is in none is the host's."""
    parts = _parts_of_kinds()
    parts[parts < 0] = PARTS.index("host")
    return parts


def step_traces(rank_key: str, records: npt.NDArray[np.void], names: list[str], wanted: set[int]) -> list[StepTrace]:
    """The wanted steps among these records, span by span. `records` holds whole steps.

    A span belongs to the step that its record names: collectives may end, and be recorded, after their step.
    """
    traces = []
    ends = np.flatnonzero(records["kind"] == Kind.STEP)
    spans = np.flatnonzero(~np.isin(records["kind"], _NO_SPANS))
    for end in ends.tolist():
        boundary = records[end]
        if int(boundary["step"]) in wanted:
            of_step = spans[records["step"][spans] == boundary["step"]]
            traces.append(
                StepTrace(
                    rank_key=rank_key,
                    step=int(boundary["step"]),
                    start_ns=int(boundary["start_ns"]),
                    duration_ns=int(boundary["duration_ns"]),
                    flags=int(boundary["flags"]),
                    spans=tuple(to_span(record, names) for record in records[of_step]),
                )
            )
    return traces


def to_span(record: np.void, names: list[str]) -> Span:
    """A record with its name."""
    name_id = int(record["name_id"])
    return Span(
        kind=kind_name(int(record["kind"])),
        name=names[name_id] if name_id < len(names) else "",
        step=int(record["step"]),
        start_ns=int(record["start_ns"]),
        duration_ns=int(record["duration_ns"]),
        depth=int(record["depth"]),
        flags=int(record["flags"]),
        value0=int(record["value0"]),
        value1=int(record["value1"]),
    )


def kind_name(kind: int) -> str:
    """The lower-case name of a record kind; "kind 77" for one of a newer version."""
    return Kind(kind).name.lower() if kind in Kind._value2member_map_ else f"kind {kind}"
