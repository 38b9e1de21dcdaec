"""Data quality, and what recording cost: what these numbers are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, duration, steps_whole
from torchlens_perf.page.markup import Element, tag
from torchlens_perf.page.matrix import LOG_STEP
from torchlens_perf.page.sections.section import section, table

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents
    from torchlens_perf.verdicts.words.report import Report


def overhead_words(report: Report) -> str:
    """What this tool cost this very run."""
    share = report["quality"]["overhead_share"]
    return "not measured" if share is None else f"{share:.2%} of the steps' time"


def quality(contents: Contents) -> Element:
    report = contents["report"]
    found = report["quality"]
    tool_s = [rank["phases"]["tool"]["mean_s"] for rank in report["ranks"] if "tool" in rank["phases"]]
    hooks = [["of it, own hooks in a step, mean over ranks", duration(sum(tool_s) / len(tool_s))]] if tool_s else []
    rows = [
        ["records", str(found["records"])],
        ["records lost", str(found["lost"])],
        ["on the worst rank", steps_whole(found["coverage"], any_step=report["steps"]["count"] > 0)],
        ["cost of recording in the training process", overhead_words(report)],
        *hooks,
        ["processor time of the sidecars", duration(found["sidecar_cpu_s"])],
    ]
    notes = found["notes"]
    thinned = contents["thinned"]["sentences"]
    budget = amount(contents["thinned"]["budget_bytes"], "B")
    return section(
        "quality",
        "Data quality and cost",
        table("What these numbers are worth, and what they cost", ["measure", "value"], rows),
        tag("h3", "Notes") if notes else None,
        tag("ul", [tag("li", each) for each in notes]) if notes else None,
        tag("h3", "Left out of this page"),
        tag("ul", [tag("li", each) for each in thinned]) if thinned else tag("p", "Nothing."),
        tag(
            "p",
            f"The data in this page are kept below {budget}. Durations in matrices are exact to {LOG_STEP / 2:.1%}; "
            "tables are as in the report. The run directory has all.",
            class_="note",
        ),
    )
