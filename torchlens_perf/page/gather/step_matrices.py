"""Read each rank's steps from files, in batches, into matrices for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.page.contents import Columns, Place, SlowTime, StepMatrices
from torchlens_perf.page.gather.step_grid import QUANTILES, Batch, StepGrid
from torchlens_perf.page.matrix import encoded
from torchlens_perf.report.heat import TAGS
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, add_errors_to, map_texts
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
    "own_ns",
    "ready_ns",
    "memory_bytes",
    "flags",
    *_PARTS,
)
# Run directories of earlier versions lack this column.
_WORK = "work_ns"
_NO_WORK = "Recorded by an earlier version: time shown as work may include waiting for a CPU."
_FLAGS = {**TAGS, "garbage collection": Flag.COLLECTED}


def begin_unix_ns(processes: Mapping[int, ProcessState]) -> int:
    """Return the start of the run's first step; 0 if no step was made."""
    starts = ((each.statistics.started_ns, each.anchor.offset_ns) for each in processes.values())
    return min((start + offset for start, offset in starts if start is not None), default=0)


def step_grid(
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
    begin_ns = begin_unix_ns(processes)
    begins = {each.identity.key: begin_ns - each.anchor.offset_ns for each in processes.values()}

    def add(file: ParquetFile) -> None:
        work = _WORK if _WORK in file.names else "own_ns"
        if work != _WORK and _NO_WORK not in notes:
            notes.append(_NO_WORK)
        for batch in file.read_batches(dict.fromkeys([*_COLUMNS, work])):
            grid.add(_batch(batch, work, row_of, begins))

    for _ in ParquetFolder(run.steps, unreadable=add_errors_to(notes)).read_each(add):
        pass
    return grid if grid.steps.any() else None


def _batch(rows: Any, work: str, row_of: Mapping[str, int], begin_ns: Mapping[str, int]) -> Batch:
    """Return the rows that belong to these processes.

    row_of: the grid's row, by process key. begin_ns: the start of the run by the process's clock,
    by process key.
    """
    row = map_texts(rows.column("process"), row_of, -1)
    ours = row >= 0

    def numbers(name: str) -> npt.NDArray[np.int64]:
        known = rows.column(name).fill_null(-1)
        found: npt.NDArray[np.int64] = known.to_numpy(zero_copy_only=False)[ours].astype(np.int64)
        return found

    return Batch(
        row=row[ours],
        step=numbers("step"),
        start_ns=numbers("start_ns") - map_texts(rows.column("process"), begin_ns, 0)[ours],
        duration_ns=numbers("duration_ns"),
        work_ns=numbers(work),
        parts_ns=np.stack([numbers(name) for name in _PARTS], axis=1),
        ready_ns=numbers("ready_ns"),
        memory_bytes=numbers("memory_bytes"),
        flags=numbers("flags"),
    )


def step_matrices(
    grid: StepGrid, processes: Mapping[int, ProcessState], slow: list[SlowTime]
) -> StepMatrices:
    """Return the grid as data of the page."""
    ranks = sorted(processes)
    work = _work_s(
        grid, [row for row, rank in enumerate(ranks) if processes[rank].judged_by == DEVICE]
    )
    device_parts = {} if grid.device is None else _mean_parts_s(grid.device)
    others = _others_s(work, [processes[rank].place.population for rank in ranks])
    return {
        "columns": _columns(grid),
        "places": [_place(rank, processes[rank]) for rank in ranks],
        "is_compared": bool(np.isfinite(others).any()),
        "step": encoded(_mean_s(grid.step_ns, grid.steps)),
        "bands": {
            **{name: _rounded(grid.quantile_s(share)) for name, share in QUANTILES.items()},  # type: ignore[typeddict-item]
            "max_s": _rounded(grid.longest_ns / 1e9),
        },
        "slow": slow,
        "work": encoded(work),
        "others": encoded(others),
        "parts": {part: encoded(values) for part, values in _mean_parts_s(grid).items()},
        "device_parts": {part: encoded(values) for part, values in device_parts.items()},
        "memory_bytes": _memory(grid),
    }


def _work_s(grid: StepGrid, by_device: list[int]) -> Floats:
    """Return the mean work of comparable steps, shape [ranks, columns].

    by_device: rows to take from the device's clock.
    """
    sums, counts = grid.work_ns.copy(), grid.compared.copy()
    if grid.device is not None:
        sums[by_device], counts[by_device] = (
            grid.device.work_ns[by_device],
            grid.device.compared[by_device],
        )
    return _mean_s(sums, counts)


def _others_s(work: Floats, populations: Sequence[str]) -> Floats:
    """Return the median work of the other ranks in each rank's population, shape [ranks,
    columns].
    """
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


def _columns(grid: StepGrid) -> Columns:
    starts = np.where(np.isfinite(grid.start_ns), grid.start_ns, np.nan)
    some = grid.steps.any(axis=0)
    started_s = np.full(starts.shape[1], np.nan)
    started_s[some] = np.nanmedian(starts[:, some], axis=0) / 1e9
    return {
        "width": grid.width,
        "first_steps": grid.first_steps.tolist(),
        "started_s": _rounded(started_s),
        "flags": [
            [name for name, flag in _FLAGS.items() if found & flag] for found in grid.flags.tolist()
        ],
    }


def _place(rank: int, process: ProcessState) -> Place:
    placement = process.place
    return {
        "rank": rank,
        "host": process.identity.host,
        "local_rank": process.identity.local_rank,
        "mesh": dict(placement.coordinates),
    }


def slow_times(findings: Findings) -> list[SlowTime]:
    """Return the times in which ranks were reported as slow, earliest first."""
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


def _memory(grid: StepGrid) -> list[list[int | None]] | None:
    """Return peak memory in at most MAX_MEMORY_COLUMNS groups of steps.

    Values of 0 or -1 were not measured.
    """
    if (grid.memory_bytes <= 0).all():
        return None
    together = -(-grid.memory_bytes.shape[1] // MAX_MEMORY_COLUMNS)
    padding = -grid.memory_bytes.shape[1] % together
    padded = np.pad(grid.memory_bytes, ((0, 0), (0, padding)), constant_values=-1)
    most = padded.reshape(len(padded), -1, together).max(axis=2)
    return [[value if value > 0 else None for value in row] for row in most.tolist()]


def _rounded(values: Floats | Sequence[float]) -> list[float | None]:
    """Return the values rounded to six digits, with None for NaN."""
    return [
        float(f"{value:.6g}") if value == value else None
        for value in np.asarray(values, np.float64).tolist()
    ]
