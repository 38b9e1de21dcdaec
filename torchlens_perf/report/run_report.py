"""The report on a run directory: what the command line shows, and what the sidecar writes for rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis import node_state
from torchlens_perf.report.build import build
from torchlens_perf.report.captures import captures
from torchlens_perf.run.directory import RunDirectory

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.report import Report


def run_report(run: RunDirectory) -> Report:
    """The report as its files tell it now. Raises RunStoreError if there are none, or they cannot be read."""
    return build(run.run_id, node_state.load_all(run), captures(run))
