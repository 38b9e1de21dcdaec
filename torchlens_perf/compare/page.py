"""A comparison as one HTML page without scripts, as a file or from the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.compare.comparison import Comparison
from torchlens_perf.compare.screens import (
    build_headline,
    build_notes,
    build_tables,
    describe_times,
    describe_verdict_change,
)
from torchlens_perf.page.document.html import build_static_document
from torchlens_perf.page.document.write import write_page_file
from torchlens_perf.page.small_charts import round_marks
from torchlens_perf.verdicts.kinds import BAD, GOOD, WARNING
from torchlens_perf.view.html import (
    build_figure,
    build_section,
    build_status_chip,
    build_table,
    build_verdict_card,
)
from torchlens_perf.view.markup import Child, Element, tag

_SEVERITIES = {"new": BAD, "gone": GOOD, "changed": WARNING}


def build_body(
    compared: Comparison, names: Mapping[str, Sequence[Child]] | None = None, links: Child = None
) -> Element:
    """Return the page's body: runs, verdicts that changed, the result, the tables and the notes.

    names: replaces the text of cells of the table of runs, by column. links: more for the header.
    """
    head = build_headline(compared)
    runs, step, *tables = build_tables(compared, all_details=True)
    verdicts = [
        tag(
            "article",
            tag("b", each.what.upper(), class_=f"chip {_SEVERITIES[each.what]}"),
            " ",
            tag("span", describe_verdict_change(compared, each)),
            class_=f"verdict {_SEVERITIES[each.what]}",
        )
        for each in compared.verdicts
    ]
    return tag(
        "body",
        tag("header", tag("h1", "Comparison ", build_status_chip(head)), links),
        tag(
            "main",
            build_table(runs, names),
            build_section(
                "verdicts",
                "What changed",
                verdicts or tag("p", "No verdict came, went or changed."),
                build_verdict_card(
                    dataclasses.replace(head, sentence=describe_times(compared)), "comparison"
                ),
            ),
            build_table(step),
            _build_chart(compared),
            map(build_table, tables),
            build_section(
                "notes", "Notes", tag("ul", [tag("li", text) for text in build_notes(compared)])
            ),
        ),
    )


def _build_chart(compared: Comparison) -> Element | None:
    """Return the step times of the first run of each side over each other; None without them."""
    before, after = (side[0].report["history"] for side in (compared.before, compared.after))
    if before is None or after is None:
        return None
    top_s = 1.08 * max(*before["median_s"], *after["median_s"])
    end = max(each["first_steps"][-1] + each["width"] for each in (before, after))
    lines = [
        tag(
            "polyline",
            points=" ".join(
                f"{at} {100 * (1 - median_s / top_s):.2f}"
                for step, median_s in zip(history["first_steps"], history["median_s"], strict=True)
                # Each window of steps is a level.
                for at in (step, step + history["width"])
            ),
            class_=side,
        )
        for side, history in (("before", before), ("after", after))
    ]
    y_axis = [
        [
            tag("line", x2="100%", y1=y, y2=y),
            tag("text", f"{1e3 * seconds:g} ms", x=-6, y=y, dy="0.3em", text_anchor="end"),
        ]
        for seconds in round_marks(top_s, 4)
        for y in [f"{100 * (1 - seconds / top_s):.2f}%"]
    ]
    x_axis = [
        tag(
            "text",
            f"{step:.0f}",
            x=f"{100 * step / end:.2f}%",
            y="100%",
            dy="1.5em",
            text_anchor="middle",
        )
        for step in round_marks(end, 5)
        if step == round(step)
    ]
    legend = [
        tag(
            "li",
            tag("svg", tag("polyline", points="0,6 28,6", class_=side), width=28, height=12),
            f"{side} ({how}): {runs[0].run.run_id}",
        )
        for side, how, runs in (
            ("before", "dashed", compared.before),
            ("after", "solid", compared.after),
        )
    ]
    return build_section(
        "over-time",
        "Step times",
        build_figure(
            None,
            "Medians of the ranks, in the first run of each side",
            tag("ul", legend, class_="legend"),
            tag(
                "svg",
                y_axis,
                tag("text", "step", x=-16, y="100%", dy="1.5em", text_anchor="end"),
                x_axis,
                tag("svg", lines, viewBox=f"0 0 {end} 100", preserveAspectRatio="none"),
                class_="over-time",
                role="img",
                aria_label=f"Step times of two runs, 0 to {format_duration(top_s)}, over {end} steps",
            ),
        ),
    )


def write_comparison_page(compared: Comparison, path: Path) -> None:
    """Write the page. Raise RunStoreError if the file cannot be written."""
    names = [f"{side[0].run.run_id}" for side in (compared.before, compared.after)]
    write_page_file(path, build_static_document(" and ".join(names), build_body(compared)))
