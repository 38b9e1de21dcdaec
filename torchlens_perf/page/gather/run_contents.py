"""Gather all data of a page from a run directory, within a size budget.

Start reading at gather_contents().
"""

from __future__ import annotations

import datetime
import math

from torchlens_perf.diagnosis.goodput import with_price
from torchlens_perf.page.contents import (
    PageContents,
    SlowPeriod,
    StepMatrices,
    StepTraces,
    TimeSeries,
)
from torchlens_perf.page.gather.device_grid import add_device_steps
from torchlens_perf.page.gather.hardware_series import (
    build_rank_series,
    read_hardware_series,
    trim_series,
)
from torchlens_perf.page.gather.step_choice import choose_ranks, choose_steps
from torchlens_perf.page.gather.step_matrices import (
    build_step_matrices,
    first_step_unix_ns,
    read_step_grid,
    slow_periods,
)
from torchlens_perf.page.gather.thinning import json_size_bytes, trim_report, widen_grid
from torchlens_perf.page.gather.whole_steps import read_whole_steps
from torchlens_perf.report import report_json
from torchlens_perf.report.run_report import load_report_and_states
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.segments import find_kept_step_range
from torchlens_perf.verdicts.latest_attempt import latest_processes
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.version import VERSION
from torchlens_perf.view.headline import build_headlines
from torchlens_perf.view.tables import build_tables

# A page with this much data, static charts and the chart library is smaller than 3 MB.
DEFAULT_BUDGET_BYTES = 1_200_000
# Maximum shares of the budget. The rest is used for steps that are shown span by span.
_REPORT, _MATRICES, _SERIES = 0.25, 0.45, 0.12
# If the report exceeds its share, the matrices' share is that of the remaining budget times this
# factor.
_REMAINDER_FACTOR = 1.5


def gather_contents(
    run: RunDirectory, budget_bytes: int = DEFAULT_BUDGET_BYTES, price: float | None = None
) -> PageContents:
    """Return the data of a live or finished run's page.

    budget_bytes: approximate limit of its size as JSON. price: of an hour of one device.

    Raise RunStoreError like load_report(). This function is not thread-safe and must not run in a
    training process.
    """
    report, states = load_report_and_states(run)
    report["goodput"] = with_price(report["goodput"], price)
    processes, node_of, slow, uncomparable = collect_ranks(states)
    notes: list[str] = []
    plain: Report = report_json.to_json_types(report)
    ranks = choose_ranks(report, slow, node_of)
    kept = {*ranks, *(each["rank"] for each in slow)}
    kept |= {row.rank for row in report["verdicts"] if row.rank is not None}
    shown = trim_report({**plain, "heat": None}, kept, int(_REPORT * budget_bytes), notes)
    begin_ns = first_step_unix_ns(processes)
    grid = read_step_grid(run, processes, notes)
    matrices: StepMatrices | None = None
    series: list[TimeSeries] = read_hardware_series(run, processes, node_of, ranks, begin_ns, notes)
    traces: StepTraces = {"names": [], "steps": []}
    if grid is not None:
        room = int(
            _MATRICES
            * min(budget_bytes, _REMAINDER_FACTOR * (budget_bytes - json_size_bytes(shown)))
        )
        own = plain["steps"]["own_time"]
        hidden = own is not None and own["is_hidden"]
        add_device_steps(run, processes, node_of, grid, notes, hidden=hidden)
        grid, fitting = widen_grid(
            grid, lambda of: build_step_matrices(of, processes, slow), room, notes
        )
        matrices = fitting
        series += build_rank_series(grid, fitting["columns"], processes, ranks)
    series = trim_series(series, int(_SERIES * budget_bytes), notes)
    if grid is not None:
        left = budget_bytes - sum(map(json_size_bytes, (shown, matrices, series)))
        recorded = find_kept_step_range(run, {node_of[rank] for rank in ranks})
        steps = choose_steps(grid, slow, int(grid.warm_from.max(initial=0)), recorded)
        traces = read_whole_steps(
            run, processes, node_of, ranks, steps, uncomparable, left, notes, with_others=True
        )
    return {
        "report": report,
        "thinned_report": shown,
        "steps": matrices,
        "traces": traces,
        "telemetry": series,
        "headlines": build_headlines(report, str(run.path)),
        "tables": build_tables(report),
        "thinned": {"budget_bytes": budget_bytes, "sentences": notes},
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": VERSION,
    }


def gather_step(run: RunDirectory, step: int) -> StepTraces:
    """Return the spans of one step on the ranks that the page shows. Without records, the result
    contains no steps.

    Raise RunStoreError like load_report().
    """
    report, states = load_report_and_states(run)
    processes, node_of, slow, uncomparable = collect_ranks(states)
    ranks = choose_ranks(report, slow, node_of)
    asked = [(step, "asked for")]
    return read_whole_steps(
        run, processes, node_of, ranks, asked, uncomparable, math.inf, notes=[], with_others=False
    )


def collect_ranks(
    states: list[NodeState],
) -> tuple[dict[int, ProcessState], dict[int, str], list[SlowPeriod], set[str]]:
    """Return processes and nodes by rank, slow periods, and groups that cannot be compared."""
    processes = latest_processes(states)
    node_by_key = {key: state.host for state in states for key in state.processes}
    node_of = {rank: node_by_key[each.identity.key] for rank, each in processes.items()}
    findings = max(
        (state.findings for state in states), key=lambda each: each.compared, default=NOTHING
    )
    uncomparable = {name for state in states for name in state.join.uncomparable_groups()}
    return processes, node_of, slow_periods(findings), uncomparable
