"""A run in a notebook cell: the verdicts, two small charts, and the key figures of the run.

Untrusted notebooks, GitHub and notebook viewers remove scripts and style sheets. The cell is
therefore plain HTML with few inline styles and charts as images, without class, id, script, frame
or link. The text uses the colours of the notebook's theme. Status and charts have those of the page.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
from collections.abc import Sequence

from torchlens_perf.analysis.statistics.quantities import format_duration, format_duration_or_dash
from torchlens_perf.errors import printable
from torchlens_perf.page.sections.section import ranks_by_prominence
from torchlens_perf.page.small_charts import build_image, draw_parts_chart, draw_step_chart
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.verdicts import Summary, Verdict
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.verdicts.words.run_state import describe_ranks, describe_run_state
from torchlens_perf.view.headline import Headline, build_headlines, choose_headline
from torchlens_perf.view.html import build_details, build_verdict_line
from torchlens_perf.view.markup import Element, tag, to_html
from torchlens_perf.view.rank_tables import parts_by_rank
from torchlens_perf.view.specs import sanitize_line
from torchlens_perf.view.step_words import describe_overhead, describe_steps
from torchlens_perf.view.terminal import render_full
from torchlens_perf.view.theme import SEVERITIES

MAX_BYTES = 64 << 10
"""Largest size of the HTML.

A notebook file stores every output, and a live cell is updated once a second.
"""
_MAX_VERDICTS, _MAX_NOTES, _MAX_CHARACTERS = 6, 8, 600
_ATTRIBUTES = ("alt", "open", "src", "style")
_CHIP = (
    "background-color: {}; color: #ffffff; padding: 0px 8px; border-radius: 4px; font-size: 12px"
)
"""Style of the status, with a colour of its own that is readable in light and dark notebooks."""


def results_from_run(run: RunDirectory) -> str:
    """Return a run's results from its state files. Raise RunStoreError if none can be read."""
    report, page = load_report(run), run.report.with_suffix(".html")
    return results_as_json(
        report,
        str(run.path),
        render_full(report, str(run.path), columns=0, color=False),
        str(page) if page.exists() else "",
    )


def results_as_json(report: Report, run_dir: str, text: str, page: str = "") -> str:
    """Return the results of a watch (results/ask.py) as JSON with text, HTML and a summary.

    text: the report without colours. page: path of the run's page; "" without one.
    """
    summary = dataclasses.asdict(_build_summary(report, run_dir))
    return json.dumps(
        {"text": text, "html": build_cell(report, run_dir), "summary": summary, "page": page},
        allow_nan=False,
    )


def build_cell(report: Report, run_dir: str) -> str:
    """Return the HTML of a notebook cell, at most MAX_BYTES long."""
    run = report["run"]
    program = f"{run['program']}, " if run["program"] else ""
    title = f"{program}run {run['id']}: {describe_ranks(run)}, {describe_run_state(run)}"
    found = build_headlines(report, run_dir)
    first = choose_headline(found)
    shown = sorted(found, key=lambda each: (each is not first, each.is_over))[:_MAX_VERDICTS]
    over = [_build_verdict(each, is_open=False) for each in shown if each.is_over]
    made = tag(
        "div",
        tag("p", tag("b", "torchlens_perf"), f" {title}"),
        [_build_verdict(each, is_open=each is first) for each in shown if not each.is_over],
        build_details(f"Earlier in this run ({len(over)})", over) if over else None,
        [tag("p", build_image(svg, says)) for svg, says in _draw_charts(report)],
        _build_numbers_table(report),
        _build_notes(report["quality"]["notes"]),
        tag("p", "Page: ", tag("code", f"torchlens-perf serve {shlex.quote(run_dir)}")),
        tag("p", tag("small", f"as of {_utc_now_text()}; run directory: {run_dir}")),
        style="font-family: system-ui, sans-serif",
    )
    for each in made.iter():
        each.text = sanitize_line(each.text or "", _MAX_CHARACTERS)
        each.tail = sanitize_line(each.tail or "", _MAX_CHARACTERS)
        each.attrib = {name: value for name, value in each.attrib.items() if name in _ATTRIBUTES}
    return to_html(made)


def _build_verdict(headline: Headline, *, is_open: bool) -> Element:
    made, color = build_verdict_line(headline, ""), SEVERITIES[headline.severity].light
    if is_open:
        made.set("open", "")
    made[0][0].set("style", _CHIP.format(color))
    edge = f"border-left: 4px solid {color}; padding-left: 10px; margin: 6px 0px"
    return tag("div", made, style=edge)


def _draw_charts(report: Report) -> list[tuple[str, str]]:
    """Return charts of the step times that verdicts use, each with its alternative text."""
    on_device = report["run"]["judged_by"] == DEVICE
    charts = []
    slow = [
        (each.held.since_step or 0, each.held.until_step or report["steps"]["made"])
        for each in report["verdicts"]
        if each.traits.name == "straggler" and each.held is not None
    ]
    if report["history"] is not None:
        charts.append(
            draw_step_chart(
                report["history"], report["steps"]["made"], slow, " on the device" * on_device
            )
        )
    title = "a step on the device" if on_device else "typical step"
    several = report["run"]["world_size"] > 1
    parts = parts_by_rank(report)
    order = (rank["rank"] for rank in ranks_by_prominence(report))
    bars = draw_parts_chart(
        {rank: parts[rank] for rank in order if rank in parts}, title, labelled=several
    )
    return charts if bars is None else [*charts, bars]


def _build_numbers_table(report: Report) -> Element:
    steps, quality = report["steps"], report["quality"]
    unit = "forward passes" if steps["inference"] else "steps"
    quantiles = {
        "p50": steps["p50_s"],
        "p95": steps["p95_s"],
        "p99": steps["p99_s"],
        "max": steps["max_s"],
    }
    numbers = {
        unit: str(steps["count"]),
        **{name: format_duration_or_dash(value) for name, value in quantiles.items()},
        "overhead": describe_overhead(quality),
        "CPU time of sidecars": format_duration(quality["sidecar_cpu_s"]),
        "lost records": str(quality["lost"]),
    }
    heads = tag("tr", [tag("th", name) for name in numbers])
    values = tag("tr", [tag("td", value) for value in numbers.values()])
    return tag(
        "div",
        tag("table", tag("thead", heads), tag("tbody", values)),
        style="overflow-x: auto",
    )


def _build_notes(notes: Sequence[str]) -> Element | None:
    if not notes:
        return None
    left = len(notes) - _MAX_NOTES
    rest = [f"{left} more: torchlens-perf report"] if left > 0 else []
    rows = [tag("li", each) for each in (*notes[:_MAX_NOTES], *rest)]
    return build_details(f"notes on data quality: {len(notes)}", tag("ul", rows))


def _build_summary(report: Report, run_dir: str) -> Summary:
    run, steps, quality = report["run"], report["steps"], report["quality"]
    return Summary(
        verdicts=tuple(
            Verdict(
                row.kind,
                printable(row.text),
                printable(row.action),
                row.rank,
                row.phase,
                row.cost_s_per_step,
                row.cost_share,
                row.since_step,
            )
            for row in report["verdicts"]
        ),
        run_id=run["id"],
        run_dir=run_dir,
        running=run["live"],
        ranks=run["world_size"],
        steps=steps["count"],
        step_p50_s=steps["p50_s"],
        step_p95_s=steps["p95_s"],
        step_p99_s=steps["p99_s"],
        step_max_s=steps["max_s"],
        overhead_share=quality["overhead_share"],
        overhead_low=quality["overhead_low"],
        overhead_high=quality["overhead_high"],
        module_period=quality["module_period"],
        sidecar_cpu_s=quality["sidecar_cpu_s"],
        records_lost=quality["lost"],
        as_of=_utc_now_text(),
        figures=f"{describe_steps(report)}; overhead {describe_overhead(quality)}",
    )


def _utc_now_text() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
