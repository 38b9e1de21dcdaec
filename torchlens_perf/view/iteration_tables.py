"""Tables on the iterations of a job with several roles. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.roles.facts import PARTS, find_iterations
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.lost_time_tables import build_gain_table
from torchlens_perf.view.specs import Column, Quantity, Table


def build_iteration_table(report: Report) -> Table | None:
    """Return what the trainer did and waited for in a mean iteration."""
    return (
        None
        if (found := find_iterations(report)) is None
        else Table(
            "iterations",
            f"Iterations of all roles ({found.count} of {format_duration(found.mean_s)} in the mean)",
            [
                Column("critical path", [PARTS[part] for part in found.parts], Quantity.TEXT),
                Column("per iteration", [*found.parts.values()]),
                Column(
                    "share", [each / found.mean_s for each in found.parts.values()], Quantity.SHARE
                ),
            ],
            noun="part",
        )
    )


def build_iteration_change_table(report: Report) -> Table | None:
    """Return the predicted gains of changes of the job."""
    return (
        None
        if (found := find_iterations(report)) is None
        else build_gain_table(found.what_if, found.mean_s, "iteration_changes", "iteration")
    )
