"""Tables on the iterations of a job with several roles. Pure."""

from __future__ import annotations

from typing import cast

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.roles.facts import PARTS, RoleReport
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.specs import Column, Quantity, Table


def build_iteration_table(report: Report) -> Table | None:
    """Return what the trainer did and waited for in a mean iteration."""
    found = cast(RoleReport, report).get("iterations")
    return (
        None
        if found is None
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
