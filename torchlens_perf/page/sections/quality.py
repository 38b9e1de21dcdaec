"""Data quality and the cost of recording."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_coverage,
    format_duration,
)
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.matrix import LOG_STEP
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.html import build_section, build_table
from torchlens_perf.view.markup import Element, tag
from torchlens_perf.view.specs import Column, Quantity, Table
from torchlens_perf.view.step_words import describe_overhead


def build_quality_section(contents: PageContents) -> Element:
    """Return the section with counts of records, notes, and the data that the page leaves out."""
    thinned = contents["thinned"]
    budget = format_bytes(thinned["budget_bytes"], "B")
    bounds = (
        f"Charts contain at most {budget} of data, exact to {LOG_STEP / 2:.1%}. The run directory"
        " contains all records."
    )
    notes, left_out = contents["report"]["quality"]["notes"], thinned["sentences"]
    return build_section(
        "quality",
        "Data quality and cost",
        build_table(_build_figures_table(contents["report"])),
        tag("ul", [tag("li", each) for each in (*notes, *left_out, bounds)]),
    )


def _build_figures_table(report: Report) -> Table:
    found = report["quality"]
    tool_s = [
        rank["phases"]["tool"]["mean_s"] for rank in report["ranks"] if "tool" in rank["phases"]
    ]
    rows = {
        "records": f"{found['records']:,}",
        "lost records": f"{found['lost']:,}",
        "lowest coverage of a rank": format_coverage(
            found["coverage"], any_step=report["steps"]["count"] > 0
        ),
        "overhead in the training process": describe_overhead(found),
        **(
            {"hook time per step (mean)": format_duration(sum(tool_s) / len(tool_s))}
            if tool_s
            else {}
        ),
        "sidecar CPU time": format_duration(found["sidecar_cpu_s"]),
    }
    measures = Column("measure", list(rows), Quantity.TEXT)
    return Table(
        "quality_figures",
        "Records and overhead",
        [measures, Column("value", list(rows.values()), Quantity.TEXT, wraps=True)],
    )
