"""Step times by the devices' clocks, computed from records in the same way as for verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.step_bins import concatenate_tables
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.page.gather.step_grid import StepBatch, StepGrid
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.store.reader import make_error_collector
from torchlens_perf.store.segments import iterate_records
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.own_time import compute_own_work_ns

if TYPE_CHECKING:
    import numpy.typing as npt

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


def build_device_grid(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    empty: StepGrid,
    notes: list[str],
    *,
    hidden: bool,
) -> StepGrid | None:
    """Return the steps of processes that are judged by device times; None without such processes.

    node_of: each rank's node, as in file names. empty: a grid with rows for all ranks and no data.
    notes: receives a line for each file that cannot be read. hidden: True if devices hide the
    delays of their hosts. In that case, work can only be computed from single steps of all ranks.
    """
    processes = {rank: each for rank, each in processes.items() if each.judged_by == DEVICE}
    if not processes:
        return None
    if sum(each.statistics.counted_steps for each in processes.values()) > MAX_STEPS:
        for rank, process in processes.items():
            empty.add(_batch_from_windows(process, empty.row_of[rank], empty.width, hidden=hidden))
        width = max(each.judged_windows().width for each in processes.values())
        notes.append(
            f"Device times are medians over {width} steps, because the run has too many steps to"
            " show each one."
        )
        return empty
    rank_of = {each.identity.key: rank for rank, each in processes.items()}
    nodes = {each.identity.key: node_of[rank] for rank, each in processes.items()}
    joins = {key: DeviceStepJoin() for key in rank_of}
    found: dict[int, list[StepTable]] = defaultdict(list)
    for key, (records, _) in iterate_records(run, nodes, make_error_collector(notes), _KINDS):
        table = joins[key].add_records(records, assemble_steps(records))
        if len(table):
            found[rank_of[key]].append(table)
    tables = {rank: concatenate_tables(of_rank) for rank, of_rank in found.items()}
    populations: dict[str, list[int]] = defaultdict(list)
    for rank in tables:
        populations[processes[rank].placement.population].append(rank)
    for ranks in populations.values():
        own_ns = compute_own_work_ns([tables[rank] for rank in ranks])
        for rank, work_ns in zip(ranks, own_ns, strict=True):
            empty.add(_batch_from_steps(tables[rank], empty.row_of[rank], work_ns))
    return empty


def _batch_from_steps(table: StepTable, row: int, work_ns: npt.NDArray[np.int64]) -> StepBatch:
    unknown = np.full(len(table), -1)
    return StepBatch(
        row=np.full(len(table), row),
        step=table.step,
        start_ns=table.start_ns,
        duration_ns=table.duration_ns,
        work_ns=work_ns,
        parts_ns=table.parts_ns,
        ready_ns=unknown,
        memory_bytes=unknown,
        flags=table.flags,
    )


def _batch_from_windows(
    process: ProcessState, row: int, column_width: int, *, hidden: bool
) -> StepBatch:
    """Return one step for each window, or for each column that a wider window covers."""
    windows = process.judged_windows()
    offsets = np.arange(0, windows.width, column_width)
    at = np.repeat(np.arange(len(windows.first_step)), len(offsets))
    # Use the last step of each window and column, since the first ones may belong to the warm-up.
    step = (
        windows.first_step[at]
        + np.tile(offsets, len(windows.first_step))
        + min(windows.width, column_width)
        - 1
    )
    known = windows.work_steps > 0
    work_ns = np.divide(
        windows.work_sum_ns, windows.work_steps, out=np.zeros(len(known)), where=known
    )
    unknown = np.full(len(at), -1)
    return StepBatch(
        row=np.full(len(at), row),
        step=np.minimum(step, process.statistics.last_step or 0),
        start_ns=unknown,
        duration_ns=windows.duration_ns[at].astype(np.int64),
        work_ns=work_ns[at].astype(np.int64),
        parts_ns=windows.parts_ns[at].astype(np.int64),
        ready_ns=unknown,
        memory_bytes=unknown,
        flags=np.where(known[at] & (not hidden), 0, int(Flag.EVALUATION)),
    )
