"""Read the steps of all ranks from files, in batches, into the page's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.run_windows import TAG_NAMES
from torchlens_perf.page.contents import MatrixColumns, RankLocation, SlowPeriod, StepMatrices
from torchlens_perf.page.gather.step_grid import QUANTILES, StepBatch, StepGrid
from torchlens_perf.page.matrix import encode_durations
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, make_error_collector, map_texts
from torchlens_perf.verdicts.stragglers.excess import relative_excess
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.node_state import ProcessState
    from torchlens_perf.verdicts.stragglers.findings import Findings

    Floats = npt.NDArray[np.float64]

MAX_MEMORY_COLUMNS = 256
_PARTS = tuple(f"{part}_ns" for part in PARTS)
_COLUMNS = (
    "process",
    "step",
    "start_ns",
    "duration_ns",
    "work_ns",
    "ready_ns",
    "memory_bytes",
    "flags",
    *_PARTS,
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
    ranks = sorted(processes)
    firsts = [processes[rank].statistics.first_step for rank in ranks]
    lasts = [processes[rank].statistics.last_step for rank in ranks]
    known = [
        (first, last)
        for first, last in zip(firsts, lasts, strict=True)
        if first is not None and last is not None
    ]
    if not known:
        return None
    warm_from = np.array([(first or 0) + WARM_UP_STEPS for first in firsts], np.int64)
    grid = StepGrid(
        ranks,
        warm_from,
        min(first for first, _ in known),
        max(last for _, last in known),
        len(PARTS),
    )
    row_of = {processes[rank].identity.key: row for rank, row in grid.row_of.items()}
    begin_ns = first_step_unix_ns(processes)
    begins = {each.identity.key: begin_ns - each.anchor.offset_ns for each in processes.values()}

    def add_file(file: ParquetFile) -> None:
        for batch in file.read_batches(_COLUMNS):
            grid.add(_select_rows(batch, row_of, begins))

    for _ in ParquetFolder(run.steps, unreadable=make_error_collector(notes)).read_each(add_file):
        pass
    return grid if grid.steps.any() else None


def _select_rows(rows: Any, row_of: Mapping[str, int], begin_ns: Mapping[str, int]) -> StepBatch:
    """Return the steps of the processes in `row_of`.

    row_of: the row in the grid, by process key. begin_ns: the start of the run on the process's
    clock, by process key.
    """
    row = map_texts(rows.column("process"), row_of, -1)
    ours = row >= 0

    def column_values(name: str) -> npt.NDArray[np.int64]:
        known = rows.column(name).fill_null(-1)
        found: npt.NDArray[np.int64] = known.to_numpy(zero_copy_only=False)[ours].astype(np.int64)
        return found

    return StepBatch(
        row=row[ours],
        step=column_values("step"),
        start_ns=column_values("start_ns") - map_texts(rows.column("process"), begin_ns, 0)[ours],
        duration_ns=column_values("duration_ns"),
        work_ns=column_values("work_ns"),
        parts_ns=np.stack([column_values(name) for name in _PARTS], axis=1),
        ready_ns=column_values("ready_ns"),
        memory_bytes=column_values("memory_bytes"),
        flags=column_values("flags"),
    )


def build_step_matrices(
    grid: StepGrid, processes: Mapping[int, ProcessState], slow: list[SlowPeriod]
) -> StepMatrices:
    """Return the step times of the grid in the form that the page contains."""
    ranks = sorted(processes)
    work = _mean_work_s(
        grid, [row for row, rank in enumerate(ranks) if processes[rank].judged_by == DEVICE]
    )
    device_parts = {} if grid.device is None else _mean_parts_s(grid.device)
    others = _others_median_s(work, [processes[rank].placement.population for rank in ranks])
    return {
        "columns": _describe_columns(grid),
        "places": [_rank_location(rank, processes[rank]) for rank in ranks],
        "is_compared": bool(np.isfinite(others).any()),
        "step": encode_durations(_mean_s(grid.step_ns, grid.steps)),
        "bands": {
            **{name: _round_values(grid.quantile_s(share)) for name, share in QUANTILES.items()},  # type: ignore[typeddict-item]
            "max_s": _round_values(grid.longest_ns / 1e9),
        },
        "slow": slow,
        "work": encode_durations(work),
        "others": encode_durations(others),
        "parts": {part: encode_durations(values) for part, values in _mean_parts_s(grid).items()},
        "device_parts": {part: encode_durations(values) for part, values in device_parts.items()},
        "memory_bytes": _peak_memory_bytes(grid),
    }


def _mean_work_s(grid: StepGrid, by_device: list[int]) -> Floats:
    """Return the mean work of comparable steps, shape [ranks, columns].

    by_device: rows whose work is measured by the device's clock.
    """
    sums, counts = grid.work_ns.copy(), grid.compared.copy()
    if grid.device is not None:
        sums[by_device], counts[by_device] = (
            grid.device.work_ns[by_device],
            grid.device.compared[by_device],
        )
    return _mean_s(sums, counts)


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


def _mean_parts_s(grid: StepGrid) -> dict[str, Floats]:
    """Return the mean seconds of each part that occurs, shape [ranks, columns]."""
    return {
        part: _mean_s(grid.parts_ns[at], grid.steps)
        for at, part in enumerate(PARTS)
        if grid.parts_ns[at].any()
    }


def _mean_s(sums_ns: Floats, counts: npt.NDArray[np.integer[Any]]) -> Floats:
    """Return means in seconds; NaN where the count is 0."""
    means: Floats = (
        np.divide(sums_ns, counts, out=np.full(sums_ns.shape, np.nan), where=counts > 0) / 1e9
    )
    return means


def _describe_columns(grid: StepGrid) -> MatrixColumns:
    starts = np.where(np.isfinite(grid.start_ns), grid.start_ns, np.nan)
    some = grid.steps.any(axis=0)
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


def _rank_location(rank: int, process: ProcessState) -> RankLocation:
    placement = process.placement
    return {
        "rank": rank,
        "host": process.identity.host,
        "local_rank": process.identity.local_rank,
        "mesh": dict(placement.coordinates),
    }


def slow_periods(findings: Findings) -> list[SlowPeriod]:
    """Return the ranges of steps in which ranks were slow, earliest first."""
    return [
        {
            "rank": each.rank,
            "phase": each.phase,
            "since_step": each.since_step,
            "until_step": each.until_step,
        }
        for each in sorted(
            findings.episodes, key=lambda episode: (episode.since_step, episode.rank)
        )
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
