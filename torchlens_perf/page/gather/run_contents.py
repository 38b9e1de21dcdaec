"""contents(): start here. All that a page shows, from a run directory, within a budget of bytes."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, cast

import msgspec

from torchlens_perf.analysis.stragglers.detector import NOTHING
from torchlens_perf.page.contents import SCHEMA, Contents
from torchlens_perf.page.gather.step_matrices import step_grid, step_matrices
from torchlens_perf.page.matrix import LOG_STEP
from torchlens_perf.report.build import latest_attempt
from torchlens_perf.report.run_report import report_and_states
from torchlens_perf.version import VERSION

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import Report
    from torchlens_perf.run.directory import RunDirectory

DEFAULT_BUDGET_BYTES = 2_000_000


def contents(run: RunDirectory, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> Contents:
    """What the run's page holds, live or finished; as JSON it has at most about so many bytes.

    Raises RunStoreError as run_report(). Any process but a training process; one thread.
    """
    report, states = report_and_states(run)
    processes = latest_attempt(states)
    notes: list[str] = []
    grid = step_grid(run, processes, notes)
    findings = max((state.findings for state in states), key=lambda each: each.compared, default=NOTHING)
    plain = cast("Report", msgspec.to_builtins(report, enc_hook=lambda number: number.item(), str_keys=True))
    return {
        "schema": SCHEMA,
        "report": {**plain, "heat": None},
        "steps": None if grid is None else step_matrices(grid, processes, findings, LOG_STEP),
        "traces": {"names": [], "steps": []},
        "telemetry": [],
        "held": [None for _ in report["verdicts"]],
        "thinned": {"budget_bytes": budget_bytes, "sentences": notes},
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "version": VERSION,
    }
