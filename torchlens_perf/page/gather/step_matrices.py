"""Read the steps of all ranks from files, in batches, into the page's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES
from torchlens_perf.page.contents import MatrixColumns, SlowPeriod, StepMatrices
from torchlens_perf.page.gather.step_grid import (
    QUANTILES,
    StepGrid,
    Steps,
)
from torchlens_perf.page.matrix import encode_durations
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, make_error_collector, map_texts
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.stragglers.excess import relative_excess
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST

Floats = npt.NDArray[np.float64]


MAX_MEMORY_COLUMNS = 256
_COLUMNS = (
    "process",
    "step",
    "start_ns",
    "duration_ns",
    "work_ns",
    "ready_ns",
    "memory_bytes",
    "flags",
    *(f"{part}_ns" for part in PARTS),
)
_FLAGS = {**TAG_NAMES, "garbage collection": Flag.COLLECTED}


def first_step_unix_ns(processes: Mapping[int, ProcessState]) -> int:
    """Return the start of the run's first step as UNIX time; 0 without steps."""
    starts = ((each.statistics.started_ns, each.anchor.offset_ns) for each in processes.values())
    return min((start + offset for start, offset in starts if start is not None), default=0)


def read_step_grid(
    run: RunDirectory, processes: Mapping[int, ProcessState], notes: list[str]
) -> StepGrid | None:
    """Return a grid of the steps of these processes; None if there are no steps.

    notes: receives a line for each unreadable file.
    """
    grid = _empty_grid(processes)
    if grid is None:
        return None
    row_of = {processes[rank].identity.key: row for rank, row in grid.row_of.items()}
    begin_ns = first_step_unix_ns(processes)
    begins = {each.identity.key: begin_ns - each.anchor.offset_ns for each in processes.values()}

    def add_file(file: ParquetFile) -> None:
        for batch in file.read_batches(_COLUMNS):
            grid.add(_select_rows(batch, row_of, begins))

    for _ in ParquetFolder(run.steps, unreadable=make_error_collector(notes)).read_each(add_file):
        pass
    return grid if grid.sum_of("host steps").any() else None


def _empty_grid(processes: Mapping[int, ProcessState]) -> StepGrid | None:
    """Return an empty grid with a row for each process; None if no process has made a step."""
    ranks = sorted(processes)
    statistics = [processes[rank].statistics for rank in ranks]
    firsts = [each.first_step for each in statistics if each.first_step is not None]
    lasts = [each.last_step for each in statistics if each.last_step is not None]
    if not firsts or not lasts:
        return None
    warm_from = np.array([(each.first_step or 0) + WARM_UP_STEPS for each in statistics], np.int64)
    by_device = [rank for rank in ranks if processes[rank].judged_by == DEVICE]
    return StepGrid(ranks, warm_from, min(firsts), max(lasts), by_device)


def _select_rows(rows: Any, row_of: Mapping[str, int], begin_ns: Mapping[str, int]) -> Steps:
    """Return the steps of the processes in `row_of`.

    row_of: the row in the grid, by process key. begin_ns: the start of the run on the process's
    clock, by process key.
    """
    row = map_texts(rows.column("process"), row_of, -1)
    steps = {
        name: rows.column(name).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        for name in _COLUMNS[1:]
    }
    steps["start_ns"] -= map_texts(rows.column("process"), begin_ns, 0)
    steps["row"] = row
    return {name: values[row >= 0] for name, values in steps.items()}


def build_step_matrices(
    grid: StepGrid, processes: Mapping[int, ProcessState], slow: list[SlowPeriod]
) -> StepMatrices:
    """Return the step times of the grid in the form that the page contains."""
    work = grid.mean("work_ns", "compared") / 1e9
    others = _others_median_s(
        work, [process.placement.population for _, process in sorted(processes.items())]
    )
    parts, device_parts = (
        {part: encode_durations(values) for part, values in grid.mean_parts_s(clock).items()}
        for clock in (HOST, DEVICE)
    )
    return {
        "columns": _describe_columns(grid),
        "places": [
            {
                "rank": rank,
                "host": process.identity.host,
                "mesh": dict(process.placement.coordinates),
            }
            for rank, process in sorted(processes.items())
        ],
        "is_compared": bool(np.isfinite(others).any()),
        "step": encode_durations(grid.mean("step_ns", "host steps") / 1e9),
        "bands": {
            **{name: _round_values(grid.quantile_s(share)) for name, share in QUANTILES.items()},
            "max_s": _round_values(grid.longest_ns / 1e9),
        },
        "slow": slow,
        "work": encode_durations(work),
        "others": encode_durations(others),
        "parts": parts,
        "device_parts": device_parts,
        "memory_bytes": _peak_memory_bytes(grid),
    }


def _others_median_s(work: Floats, populations: Sequence[str]) -> Floats:
    """Return, for each rank, the median work of the other ranks in its population."""
    others = np.full(work.shape, np.nan)
    for population in dict.fromkeys(populations):
        rows = [row for row, each in enumerate(populations) if each == population]
        relative = 1 + relative_excess(work[rows])
        others[rows] = np.divide(
            work[rows], relative, out=np.full(relative.shape, np.nan), where=relative > 0
        )
    return others


def _describe_columns(grid: StepGrid) -> MatrixColumns:
    starts = np.where(np.isfinite(grid.start_ns), grid.start_ns, np.nan)
    some = grid.sum_of("host steps").any(axis=0)
    started_s = np.full(starts.shape[1], np.nan)
    started_s[some] = np.nanmedian(starts[:, some], axis=0) / 1e9
    return {
        "width": grid.width,
        "first_steps": grid.first_steps.tolist(),
        "started_s": _round_values(started_s),
        "flags": [
            [name for name, flag in _FLAGS.items() if found & flag] for found in grid.flags.tolist()
        ],
    }


def slow_periods(findings: Findings) -> list[SlowPeriod]:
    """Return the ranges of steps in which ranks were slow: those of ranks that are still slow first,
    then by their cost."""
    label_of = {
        rank: f"{group.name} (ranks {format_ranges(group.ranks)})" * (rank == group.lead.rank)
        for group in findings.groups
        if group.name
        for rank in group.ranks
    }
    return [
        {
            "rank": each.rank,
            "label": ({} if each.is_over else label_of).get(each.rank, f"rank {each.rank}"),
            "phase": each.phase,
            "since_step": each.since_step,
            "until_step": each.until_step,
        }
        for each in findings.episodes
    ]


def _peak_memory_bytes(grid: StepGrid) -> list[list[int | None]] | None:
    """Return the peak memory of each rank in at most MAX_MEMORY_COLUMNS groups of steps.

    Values of 0 or -1 were not measured.
    """
    if (grid.memory_bytes <= 0).all():
        return None
    together = -(-grid.memory_bytes.shape[1] // MAX_MEMORY_COLUMNS)
    padding = -grid.memory_bytes.shape[1] % together
    padded = np.pad(grid.memory_bytes, ((0, 0), (0, padding)), constant_values=-1)
    most = padded.reshape(len(padded), -1, together).max(axis=2)
    return [[value if value > 0 else None for value in row] for row in most.tolist()]


def _round_values(values: Floats | Sequence[float]) -> list[float | None]:
    """Return the values rounded to six digits, with None for NaN."""
    return [
        float(f"{value:.6g}") if value == value else None
        for value in np.asarray(values, np.float64).tolist()
    ]
