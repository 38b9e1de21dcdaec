"""Convert a rank's records to a step table, and steps to spans. Pure."""

from __future__ import annotations

import functools
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import PARTS, Span, StepTable, StepTrace
from torchlens_perf.run.ring import MICRO_STEPS_MASK, WORKLOAD_SHIFT, Flag, Kind, kind_name


class DeviceColumns(TypedDict):
    """The columns of StepTable that are only filled for steps by the device's clock."""

    issue_ns: npt.NDArray[Any]
    issue_ready_ns: npt.NDArray[Any]
    lag_ns: npt.NDArray[Any]


# Record fields in the order of Span's fields.
_SPAN_COLUMNS = (
    "kind",
    "name_id",
    "step",
    "start_ns",
    "duration_ns",
    "depth",
    "flags",
    "value0",
    "value1",
)
_NO_SPANS = (
    int(Kind.STEP),
    int(Kind.THREAD_TIME),
    int(Kind.SKETCH),
    int(Kind.MERGED),
    int(Kind.MEMORY),
    int(Kind.OPERATORS),
)
_PART_OF_KIND = {
    Kind.DATA: "data",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.OPTIMIZER: "optimizer",
    Kind.WAIT: "communication",
    Kind.CLOSURE: "host",
}


def _part_of_each_kind() -> npt.NDArray[np.int64]:
    parts = np.full(256, -1)
    parts[list(_PART_OF_KIND)] = [PARTS.index(part) for part in _PART_OF_KIND.values()]
    return parts


def assemble_steps(records: npt.NDArray[np.void]) -> StepTable:
    """Build the table of the steps that end in these records of one rank.

    Records must be in sequence order and start with the first record of a step. A phase belongs to
    the step whose end follows the phase. Phases after the end of the last step are left out.
    """
    ends = np.flatnonzero(records["kind"] == Kind.STEP)
    steps = records[ends]
    parts = _part_of_each_kind()[records["kind"]]
    parts[(records["flags"] & Flag.OTHER_THREAD) != 0] = -1
    phases = np.flatnonzero(parts >= 0)
    step_of_phase = np.searchsorted(ends, phases)
    parts_ns = np.zeros((len(ends) + 1, len(PARTS)), np.int64)
    own_ns = records["duration_ns"][phases] - records["phase_ns"][phases]
    np.add.at(parts_ns, (step_of_phase, parts[phases]), own_ns)
    parts_ns = parts_ns[:-1]
    cpu_ns, ready_ns = _thread_times(records, ends)
    # The tool's work before the step's start belongs to the step, but not to its duration.
    inside_ns = np.minimum(steps["phase_ns"], steps["duration_ns"])
    parts_ns[:, PARTS.index("tool")] = np.maximum(inside_ns - parts_ns.sum(axis=1), 0)
    parts_ns[:, PARTS.index("host")] += np.maximum(steps["duration_ns"] - parts_ns.sum(axis=1), 0)
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
        **zero_device_columns(parts_ns, ready_ns),
    )


def zero_device_columns(parts_ns: npt.NDArray[Any], ready_ns: npt.NDArray[Any]) -> DeviceColumns:
    """Return zero columns for steps by the host's clock, shaped like the given columns."""
    return {
        "issue_ns": np.zeros_like(parts_ns),
        "issue_ready_ns": ready_ns,
        "lag_ns": np.zeros_like(parts_ns),
    }


def _thread_times(
    records: npt.NDArray[np.void], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return CPU time, and time runnable but not scheduled, per step and part; -1 if unknown."""
    times = np.flatnonzero(records["kind"] == Kind.THREAD_TIME)
    of_step = np.searchsorted(ends, times)
    inside = of_step < len(ends)
    times, of_step = times[inside], of_step[inside]
    parts = _thread_time_part_of_each_kind()[records["flags"][times] & 0xFF]
    tables = []
    for column in ("value0", "value1"):
        table = np.full((len(ends), len(PARTS)), -1, np.int64)
        table[of_step] = 0
        np.add.at(table, (of_step, parts), records[column][times].astype(np.int64))
        tables.append(table)
    return tables[0], tables[1]


@functools.cache
def _thread_time_part_of_each_kind() -> npt.NDArray[np.int64]:
    """Return the index of the part that the thread times of each kind of phase belong to."""
    parts = _part_of_each_kind()
    parts[parts < 0] = PARTS.index("host")
    return parts


def build_step_traces(
    records: npt.NDArray[np.void],
    names: list[str],
    wanted: set[int],
    later: npt.NDArray[np.void] | None = None,
) -> list[StepTrace]:
    """Build traces, with all spans, of the wanted steps in these records.

    - records: records of complete steps.
    - later: records after these steps, which may contain spans of the steps: collectives may end,
      and device times may arrive, after the end of their step.
    """
    traces = []
    ends = np.flatnonzero(records["kind"] == Kind.STEP)
    if later is not None and wanted:
        records = np.concatenate([records, later])
    spans = np.flatnonzero(~np.isin(records["kind"], _NO_SPANS))
    for end in ends.tolist():
        boundary = records[end]
        if int(boundary["step"]) in wanted:
            of_step = spans[records["step"][spans] == boundary["step"]]
            traces.append(
                StepTrace(
                    step=int(boundary["step"]),
                    start_ns=int(boundary["start_ns"]),
                    duration_ns=int(boundary["duration_ns"]),
                    flags=int(boundary["flags"]),
                    spans=to_spans(records[of_step], names),
                )
            )
    return traces


def count_spans(records: npt.NDArray[np.void], step: int) -> int:
    """Return the number of a step's spans in these records, without the step's own span."""
    of_step = records["kind"][records["step"] == step]
    return int(np.count_nonzero(~np.isin(of_step, _NO_SPANS)))


def to_spans(records: npt.NDArray[np.void], names: list[str]) -> tuple[Span, ...]:
    """Convert records to spans column by column.

    In NumPy, converting a hundred values of one column is as fast as reading one field of a record.
    """
    known = len(names)
    kinds, name_ids, *others = (records[name].tolist() for name in _SPAN_COLUMNS)
    named = [names[name_id] if name_id < known else "" for name_id in name_ids]
    return tuple(map(Span, map(kind_name, kinds), named, *others))
