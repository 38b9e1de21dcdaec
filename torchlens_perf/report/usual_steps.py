"""Lost time and predicted gains in the report, from the newest recorded steps of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.run_windows import align_windows
from torchlens_perf.analysis.statistics.step_bins import OTHER_WORK
from torchlens_perf.analysis.statistics.time_account import TimeAccount
from torchlens_perf.diagnosis.actions.job import Job
from torchlens_perf.diagnosis.actions.table import choose_actions
from torchlens_perf.diagnosis.facts.trainings import shown_processes
from torchlens_perf.diagnosis.lost_time import begin_of_present, classify_time, mean_step_s
from torchlens_perf.diagnosis.step_times import (
    MIN_ROWS,
    StepTimes,
    are_pipelined,
)
from torchlens_perf.diagnosis.what_if import Replay, predict_standard_changes
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.loader_period import move_hidden_data_waits
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, make_error_collector, map_texts
from torchlens_perf.verdicts.judged_windows import with_hidden_data_waits
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE, HOST
from torchlens_perf.verdicts.words.device_pace import replays_graphs
from torchlens_perf.verdicts.words.report import Facts, LostTime, Report

Floats = npt.NDArray[np.float64]


_MOST_STEPS = 1024
_MOST_RANK_STEPS = 1 << 18
_UNUSUAL = OTHER_WORK | int(Flag.COLLECTED)
_PARTS = tuple(f"{part}_ns" for part in PARTS)
_READY = tuple(f"{part}_ready_ns" for part in PARTS)
_COLUMNS = (*_PARTS, *_READY, "flags", "workload")
_FLAGS, _WORKLOAD = _COLUMNS.index("flags"), _COLUMNS.index("workload")


def add_lost_time(run: RunDirectory, report: Report, states: Sequence[NodeState]) -> None:
    """Add classes of time, predicted gains and precise actions, if all ranks have made enough steps."""
    times = read_usual_steps(run, report, states)
    if times is None:
        return
    changes, drift = predict_standard_changes(times, report, report["verdicts"])
    classes = classify_time(times, report, report["verdicts"])
    report["lost_time"] = LostTime(
        first_step=int(times.steps[0]),
        last_step=int(times.steps[-1]) + times.width - 1,
        rows=len(times.steps),
        step_s=mean_step_s(times, report["steps"]),
        classes=classes,
        changes=changes,
        drift_share=drift,
    )
    choose_actions(build_job(report, states, times))


def build_job(report: Report, states: Sequence[NodeState], times: StepTimes) -> Job:
    """Return the facts that rules for actions look at."""
    processes = shown_processes(states)
    sharing = Counter((each.identity.host, each.facts.training.cpus) for each in processes.values())
    return Job(
        report,
        processes[min(processes)].facts.training,
        Replay(times, report, report["verdicts"]),
        max(sharing.values()),
        times.correlate_workload(),
    )


def read_usual_steps(
    run: RunDirectory, report: Report, states: Sequence[NodeState]
) -> StepTimes | None:
    """Return the newest steps that all ranks have made; None with fewer than MIN_ROWS.

    Steps before the ranks became slow that are slow now are left out, if enough steps remain.
    """
    times = _read_newest_steps(run, report, states)
    return None if times is None else times.select_since(begin_of_present(report["verdicts"]))


def _read_newest_steps(
    run: RunDirectory, facts: Facts, states: Sequence[NodeState]
) -> StepTimes | None:
    """Return the newest steps that all ranks have made; None with fewer than MIN_ROWS.

    By the hosts' clocks, rows are single steps. By the devices' clocks, rows are the windows that
    are judged, and None is returned if the devices' clocks hide what their hosts do, or if steps
    replay CUDA graphs, whose phases are not timed.
    """
    processes = shown_processes(states)
    clocks = {each.judged_by for each in processes.values()}
    if clocks == {DEVICE}:
        own = facts["steps"]["own_time"]
        unknown = (own is not None and own["is_hidden"]) or replays_graphs(facts)
        return None if unknown else _read_windows(processes)
    if clocks != {HOST}:
        return None
    ranks = sorted(processes)
    last = min(each.statistics.last_step or 0 for each in processes.values())
    most = max(MIN_ROWS, min(_MOST_STEPS, _MOST_RANK_STEPS // len(ranks)))
    begin = max(each.statistics.first_step or 0 for each in processes.values()) + WARM_UP_STEPS
    first = max(begin, last - most + 1)
    if last - first + 1 < MIN_ROWS:
        return None
    values = _read_columns(run, processes, ranks, first, last, facts["quality"]["notes"])
    flags = np.nan_to_num(values[..., _FLAGS]).astype(np.int64)
    usual = np.isfinite(values[..., 0]).all(axis=0)
    usual &= (np.bitwise_or.reduce(flags, axis=0) & _UNUSUAL) == 0
    if usual.sum() < MIN_ROWS:
        return None
    return StepTimes(
        ranks=tuple(ranks),
        populations=tuple(processes[rank].placement.population for rank in ranks),
        steps=first + np.flatnonzero(usual),
        width=1,
        account=TimeAccount.from_parts(
            move_hidden_data_waits(
                values[:, usual, : len(_PARTS)],
                np.array([processes[rank].facts.loader_period_ns for rank in ranks]),
            ),
            values[:, usual, len(_PARTS) : len(_PARTS) + len(_READY)],
        ),
        workload=values[:, usual, _WORKLOAD],
        pipelined=are_pipelined(each.placement for each in processes.values()),
    )


def _read_windows(processes: Mapping[int, ProcessState]) -> StepTimes | None:
    windows = {rank: each.judged_windows() for rank, each in processes.items()}
    last = max(each.statistics.last_step or 0 for each in processes.values())
    grid = align_windows(windows, last)
    if grid is None or len(grid.ranks) < len(processes):
        return None
    whole = np.isfinite(grid.duration_ns).all(axis=0)
    whole &= grid.first_steps > max(each.statistics.first_step or 0 for each in processes.values())
    if whole.sum() < MIN_ROWS:
        return None
    return StepTimes(
        grid.ranks,
        tuple(processes[rank].placement.population for rank in grid.ranks),
        grid.first_steps[whole],
        grid.width,
        TimeAccount.from_parts(
            with_hidden_data_waits(grid, processes).parts_ns[:, whole], grid.lack_ns[:, whole]
        ),
        pipelined=are_pipelined(each.placement for each in processes.values()),
    )


def _read_columns(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    ranks: Sequence[int],
    first: int,
    last: int,
    notes: list[str],
) -> Floats:
    """Return the columns of these steps: [ranks, steps, columns]. NaN: missing."""
    row_of = {processes[rank].identity.key: row for row, rank in enumerate(ranks)}
    values = np.full((len(ranks), last - first + 1, len(_COLUMNS)), np.nan)

    def place(file: ParquetFile) -> None:
        extremes = file.read_column_range("step")
        if extremes is not None and (extremes[1] < first or extremes[0] > last):
            return
        table = file.read_table(("process", "step", *_COLUMNS))
        row = map_texts(table.column("process"), row_of, -1)
        step = table.column("step").to_numpy() - first
        wanted = (row >= 0) & (step >= 0) & (step <= last - first)
        columns = [table.column(name).to_numpy().astype(np.float64) for name in _COLUMNS]
        values[row[wanted], step[wanted]] = np.stack(columns, axis=1)[wanted]

    list(ParquetFolder(run.steps, unreadable=make_error_collector(notes)).read_each(place))
    return values
