"""Step times by the devices' clocks, computed from records in the same way as for verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.step_bins import concatenate_tables
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.store.reader import make_error_collector
from torchlens_perf.store.segments import iterate_records
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.own_time import compute_own_work_ns

if TYPE_CHECKING:
    from torchlens_perf.page.gather.step_grid import Integers, StepGrid
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.verdicts.node_state import ProcessState

# If all ranks together made more steps, windows are shown instead, since reading a step takes tens
# of microseconds.
MAX_STEPS = 100_000
_KINDS = (
    Kind.STEP, Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT, Kind.RECOMPUTE, Kind.CLOSURE,
    Kind.THREAD_TIME, Kind.DEVICE,
)  # fmt: skip


def add_device_steps(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    grid: StepGrid,
    notes: list[str],
    *,
    hidden: bool,
) -> None:
    """Add the steps of processes that are judged by device times to the grid.

    node_of: each rank's node, as in file names. notes: receives a line for each file that cannot be
    read. hidden: True if devices hide the delays of their hosts. In that case, work can only be
    computed from single steps of all ranks.
    """
    processes = {rank: each for rank, each in processes.items() if each.judged_by == DEVICE}
    if sum(each.statistics.counted_steps for each in processes.values()) > MAX_STEPS:
        for rank, process in processes.items():
            _add_windows(grid, rank, process, hidden=hidden)
        width = max(each.judged_windows().width for each in processes.values())
        notes.append(
            f"Device times are medians over {width} steps, because the run has too many steps to"
            " show each one."
        )
        return
    tables = _read_device_steps(run, processes, node_of, notes)
    populations = group_values((processes[rank].placement.population, rank) for rank in tables)
    for ranks in populations.values():
        own_ns = compute_own_work_ns([tables[rank] for rank in ranks])
        for rank, work_ns in zip(ranks, own_ns, strict=True):
            table = tables[rank]
            _add_steps(grid, rank, table.step, work_ns, table.parts_ns, table.flags)


def _read_device_steps(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    notes: list[str],
) -> dict[int, StepTable]:
    """Return the steps of each process by its device's clock."""
    rank_of = {each.identity.key: rank for rank, each in processes.items()}
    nodes = {key: node_of[rank] for key, rank in rank_of.items()}
    joins = {key: DeviceStepJoin() for key in rank_of}
    found: dict[int, list[StepTable]] = defaultdict(list)
    for key, (records, _) in iterate_records(run, nodes, make_error_collector(notes), _KINDS):
        table = joins[key].add_records(records, assemble_steps(records))
        if len(table):
            found[rank_of[key]].append(table)
    return {rank: concatenate_tables(of_rank) for rank, of_rank in found.items()}


def _add_windows(grid: StepGrid, rank: int, process: ProcessState, *, hidden: bool) -> None:
    """Add one step for each window, or for each column that a wider window covers."""
    windows = process.judged_windows()
    offsets = np.arange(0, windows.width, grid.width)
    at = np.repeat(np.arange(len(windows.first_step)), len(offsets))
    # Use the last step of each window and column, since the first ones may belong to the warm-up.
    last = np.tile(offsets, len(windows.first_step)) + min(windows.width, grid.width) - 1
    step = np.minimum(windows.first_step[at] + last, process.statistics.last_step or 0)
    known = windows.work_steps > 0
    work_ns = np.divide(
        windows.work_sum_ns, windows.work_steps, out=np.zeros(len(known)), where=known
    )
    flags = np.where(known & (not hidden), 0, int(Flag.EVALUATION))
    parts_ns = windows.parts_ns[at].astype(np.int64)
    _add_steps(grid, rank, step, work_ns[at].astype(np.int64), parts_ns, flags[at])


def _add_steps(
    grid: StepGrid,
    rank: int,
    step: Integers,
    work_ns: Integers,
    parts_ns: Integers,
    flags: Integers,
) -> None:
    row = np.full(len(step), grid.row_of[rank])
    parts = {f"{part}_ns": parts_ns[:, at] for at, part in enumerate(PARTS)}
    steps = {"row": row, "step": step, "work_ns": work_ns, "flags": flags, **parts}
    grid.add(steps, DEVICE)
