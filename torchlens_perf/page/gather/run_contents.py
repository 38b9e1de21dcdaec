"""Gather all data of a page from a run directory, within a size budget. Start with contents()."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING

from torchlens_perf.page.contents import (
    SCHEMA,
    Contents,
    Series,
    SlowTime,
    StepMatrices,
    StepTraces,
)
from torchlens_perf.page.gather.device_grid import device_grid
from torchlens_perf.page.gather.hardware_series import hardware_series, rank_series, within
from torchlens_perf.page.gather.step_choice import chosen_ranks, chosen_steps
from torchlens_perf.page.gather.step_matrices import (
    begin_unix_ns,
    slow_times,
    step_grid,
    step_matrices,
)
from torchlens_perf.page.gather.thinning import size_bytes, thinned_grid, thinned_report
from torchlens_perf.page.gather.whole_steps import whole_steps
from torchlens_perf.report import report_json
from torchlens_perf.report.run_report import report_and_states
from torchlens_perf.store.segments import find_kept_step_range
from torchlens_perf.verdicts.latest_attempt import latest_attempt
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.version import VERSION
from torchlens_perf.view.headline import headlines
from torchlens_perf.view.tables import tables

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.node_state import NodeState, ProcessState
    from torchlens_perf.verdicts.words.report import Report

# With static charts and the chart library, a page is then smaller than 3 MB.
DEFAULT_BUDGET_BYTES = 1_200_000
# Maximal shares of the budget. Steps shown span by span get the rest.
_REPORT, _MATRICES, _SERIES = 0.25, 0.45, 0.12
# If the report exceeds its share, the matrices' share applies to the remaining budget times this
# factor.
_REMAINDER_FACTOR = 1.5


def contents(run: RunDirectory, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> Contents:
    """Return the data of a live or finished run's page.

    budget_bytes: approximate limit of its size as JSON.

    Raise RunStoreError like run_report(). Not for training processes, and not thread-safe.
    """
    report, states = report_and_states(run)
    processes, node_of, slow, uncomparable = _ranks_of(states)
    notes: list[str] = []
    plain: Report = report_json.plain(report)
    ranks = chosen_ranks(plain, slow, node_of)
    named = _named_ranks(plain, slow)
    shown = thinned_report(
        {**plain, "heat": None}, {*named, *ranks}, int(_REPORT * budget_bytes), notes
    )
    begin_ns = begin_unix_ns(processes)
    grid = step_grid(run, processes, notes)
    matrices: StepMatrices | None = None
    series: list[Series] = hardware_series(run, processes, node_of, ranks, begin_ns, notes)
    traces: StepTraces = {"names": [], "steps": []}
    if grid is not None:
        room = int(
            _MATRICES * min(budget_bytes, _REMAINDER_FACTOR * (budget_bytes - size_bytes(shown)))
        )
        own = plain["steps"]["own_time"]
        hidden = own is not None and own["is_hidden"]
        grid.device = device_grid(run, processes, node_of, grid.empty(), notes, hidden=hidden)
        grid, fitting = thinned_grid(
            grid, lambda of: step_matrices(of, processes, slow), room, notes
        )
        matrices = fitting
        series += rank_series(grid, fitting["columns"], processes, ranks)
    series = within(series, int(_SERIES * budget_bytes), notes)
    if grid is not None:
        left = budget_bytes - sum(map(size_bytes, (shown, matrices, series)))
        kept = find_kept_step_range(run, {node_of[rank] for rank in ranks})
        steps = chosen_steps(grid, slow, int(grid.warm_from.max(initial=0)), kept)
        traces = whole_steps(
            run, processes, node_of, ranks, steps, uncomparable, left, notes, with_others=True
        )
    return {
        "schema": SCHEMA,
        "report": plain,
        "thinned_report": shown,
        "steps": matrices,
        "traces": traces,
        "telemetry": series,
        "headlines": headlines(report, str(run.path)),
        "tables": tables(report),
        "thinned": {"budget_bytes": budget_bytes, "sentences": notes},
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": VERSION,
    }


def one_step(run: RunDirectory, step: int) -> StepTraces:
    """Return one step, of the ranks that the page shows, for a live page.

    Without records the result has no steps.

    Raise RunStoreError like run_report().
    """
    report, states = report_and_states(run)
    processes, node_of, slow, uncomparable = _ranks_of(states)
    ranks = chosen_ranks(report_json.plain(report), slow, node_of)
    asked = [(step, "asked for")]
    return whole_steps(
        run, processes, node_of, ranks, asked, uncomparable, math.inf, notes=[], with_others=False
    )


def _ranks_of(
    states: list[NodeState],
) -> tuple[dict[int, ProcessState], dict[int, str], list[SlowTime], set[str]]:
    """Return processes and nodes by rank, slow times, and groups whose sequence numbers differ
    between ranks.
    """
    processes = latest_attempt(states)
    node_by_key = {key: state.host for state in states for key in state.processes}
    node_of = {rank: node_by_key[each.identity.key] for rank, each in processes.items()}
    findings = max(
        (state.findings for state in states), key=lambda each: each.compared, default=NOTHING
    )
    uncomparable = {name for state in states for name in state.join.uncomparable_groups()}
    return processes, node_of, slow_times(findings), uncomparable


def _named_ranks(report: Report, slow: list[SlowTime]) -> set[int]:
    """Return the ranks that verdicts and slow times are about."""
    named = {verdict["rank"] for verdict in report["verdicts"]} | {each["rank"] for each in slow}
    return {rank for rank in named if rank is not None}
