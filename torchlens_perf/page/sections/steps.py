"""Step times: how they are spread, how they went, and which steps take longer for what reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.page.sections.section import tables_of
from torchlens_perf.view.html import figure, section
from torchlens_perf.view.markup import Element

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Report

_QUANTILES = (("p50", "p50_s"), ("p95", "p95_s"), ("p99", "p99_s"), ("longest", "max_s"), ("mean", "mean_s"))


def steps(contents: Contents) -> Element | None:
    report = contents["report"]
    if contents["steps"] is None:
        return None
    shown = figure("steps", "Step time over the run", _words(report))
    return section("steps", "Step time", shown)


def outliers(contents: Contents) -> Element | None:
    """Return the section of steps that take longer than the typical one; None where there are none."""
    found = tables_of(contents, "outlier_steps")
    return section("outliers", "Outlier steps", found) if found else None


def _words(report: Report) -> str:
    found = report["steps"]
    unit = "forward passes" if found["inference"] else "steps"
    if found["p50_s"] is None:
        return f"{found['count']} {unit}, all of them warm-up."
    text = f"{found['count']} {unit}: p50 {duration(found['p50_s'])}"
    if found["p95_s"] is not None and found["max_s"] is not None:
        text += f", p95 {duration(found['p95_s'])}, longest {duration(found['max_s'])}"
    trend = found["trend"]
    if trend is not None:
        change = trend["change"]
        word = "steady" if abs(change) < 0.03 else "slower" if change > 0 else "faster"
        text += f"; {word} over the run ({change:+.1%})"
    return f"{text}."
