"""A run in a notebook's cell: the verdicts as headlines, two small charts, and the numbers of the run.

A notebook that is not trusted, GitHub and viewers remove scripts and style sheets. The cell is therefore plain HTML
with few inline styles and the charts as images, without class, id, script, frame or link. Text has the colour of the
notebook's theme.
"""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration, duration_or_dash, percent, small_percent
from torchlens_perf.errors import printable
from torchlens_perf.page.small_charts import image, parts_chart, step_chart
from torchlens_perf.report.run_report import run_report
from torchlens_perf.run.verdicts import Summary, Verdict, sentence_and_action
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.run_state import ranks_words, state_words
from torchlens_perf.view.headline import fact_text, headlines, overall
from torchlens_perf.view.rank_tables import step_parts
from torchlens_perf.view.terminal import render
from torchlens_perf.view.theme import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.words.report import Report, VerdictRow
    from torchlens_perf.view.headline import Headline

MAX_BYTES = 64 << 10
"""Of the HTML, whatever is in a run: a notebook keeps each output, and a live one gets it once a second."""
_MAX_VERDICTS, _MAX_NOTES, _MAX_CHARACTERS = 6, 8, 600


def results_of(run: RunDirectory) -> str:
    """results() of what the run's nodes have saved. Raises RunStoreError where there is nothing."""
    report = run_report(run)
    return results(report, str(run.path), render(report, str(run.path), columns=0, color=False))


def results(report: Report, run_dir: str, text: str) -> str:
    """What a watch shows of itself (results/ask.py), as JSON: for people as text and HTML, for programs as a summary.

    text: the report without colours.
    """
    summary = dataclasses.asdict(_summary(report, run_dir))
    return json.dumps({"text": text, "html": cell(report, run_dir), "summary": summary}, allow_nan=False)


def cell(report: Report, run_dir: str) -> str:
    """The HTML of a cell; less than MAX_BYTES."""
    run, steps, quality = report["run"], report["steps"], report["quality"]
    program = f"{run['program']}, " if run["program"] else ""
    title = f"{program}run {run['id']}: {ranks_words(run)}, {state_words(run)}"
    parts = [f"<p><b>torchlens_perf</b>&ensp;{_escaped(title)}</p>"]
    found = headlines(report, run_dir)
    first = overall(found)
    shown = sorted(found, key=lambda each: (each is not first, each.is_over))[:_MAX_VERDICTS]
    parts += [_card(each) if each is first else _line(each) for each in shown]
    named = [verdict["rank"] for verdict in report["verdicts"] if verdict["rank"] is not None]
    parts += [f"<p>{image(svg, says)}</p>" for svg, says in _charts(report, named)]
    unit = "forward passes" if steps["inference"] else "steps"
    quantiles = {"p50": steps["p50_s"], "p95": steps["p95_s"], "p99": steps["p99_s"], "max": steps["max_s"]}
    numbers = {unit: str(steps["count"]), **{name: duration_or_dash(value) for name, value in quantiles.items()}}
    overhead = quality["overhead_share"]
    numbers["overhead"] = "not measured" if overhead is None else f"{small_percent(overhead)} of step time"
    numbers["CPU time of sidecars"] = duration(quality["sidecar_cpu_s"])
    numbers["lost records"] = str(quality["lost"])
    heads = "".join(f"<th>{_escaped(name)}</th>" for name in numbers)
    values = "".join(f"<td>{_escaped(value)}</td>" for value in numbers.values())
    parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{values}</tr></tbody></table>")
    notes = [*quality["notes"][:_MAX_NOTES]]
    if len(quality["notes"]) > len(notes):
        notes.append(f"{len(quality['notes']) - len(notes)} more: torchlens-perf report")
    if notes:
        rows = "".join(f"<li>{_escaped(note)}</li>" for note in notes)
        parts.append(
            f"<details><summary>notes on data quality: {len(quality['notes'])}</summary><ul>{rows}</ul></details>"
        )
    parts.append(f"<p><small>as of {_escaped(_as_of())}; run directory: {_escaped(run_dir)}</small></p>")
    return f"<div>{''.join(parts)}</div>"


def _charts(report: Report, named: Sequence[int]) -> list[tuple[str, str]]:
    """By the devices' clocks, where the steps are."""
    on_device = report["steps"]["by"] == DEVICE
    charts = []
    if report["history"] is not None:
        charts.append(step_chart(report["history"], " on the device" if on_device else ""))
    parts_s = {rank["rank"]: found for rank in report["ranks"] if (found := step_parts(rank, by_device=on_device))}
    bars = parts_chart(parts_s, "a step on the device" if on_device else "typical step", named)
    return charts if bars is None else [*charts, bars]


def _card(headline: Headline) -> str:
    """Return a verdict in full: status and facts, cost, sentence, what to do, command."""
    lines = [_title(headline)]
    cost, share = headline.cost_s_per_step, headline.cost_share
    if cost and share is not None:
        lines.append(f"<b>{duration(cost)}</b> {headline.per_step}, <b>{percent(share)}</b> of step time")
    lines.append(_escaped(headline.sentence))
    if headline.cause:
        lines.append(f"<b>Cause:</b> {_escaped(headline.cause)}")
    if headline.action:
        lines.append(f"<b>Next:</b> {_escaped(headline.action)}")
    if headline.command:
        lines.append(f"<code>{_escaped(headline.command)}</code>")
    return _edged(headline, "<br>".join(lines))


def _line(headline: Headline) -> str:
    """Return a verdict as one line that opens."""
    over = " (over)" if headline.is_over else ""
    cost = f", {_escaped(headline.cost)}" if headline.cost else ""
    action = f"<br><b>Next:</b> {_escaped(headline.action)}" if headline.action else ""
    summary = f"<summary>{_title(headline)}{cost}{over}</summary>"
    return _edged(headline, f"<details>{summary}{_escaped(headline.sentence)}{action}</details>")


def _title(headline: Headline) -> str:
    facts = "".join(f"&ensp;{_escaped(fact_text(*fact))}" for fact in headline.facts)
    return f"<b>{_escaped(headline.status)}</b>{facts}"


def _edged(headline: Headline, text: str) -> str:
    edge = SEVERITIES[headline.severity].light
    return f'<div style="border-left: 4px solid {edge}; padding-left: 10px; margin: 6px 0px">{text}</div>'


def _escaped(text: str) -> str:
    """Inert, on one line and not too long, whoever has written it."""
    text = printable(text)
    return html.escape(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}...")


def _summary(report: Report, run_dir: str) -> Summary:
    run, steps, quality = report["run"], report["steps"], report["quality"]
    return Summary(
        verdicts=tuple(map(_of_row, report["verdicts"])),
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
        sidecar_cpu_s=quality["sidecar_cpu_s"],
        records_lost=quality["lost"],
        as_of=_as_of(),
    )


def _of_row(row: VerdictRow) -> Verdict:
    text, action = map(printable, sentence_and_action(row["text"]))
    return Verdict(
        row["kind"], text, action, row["rank"], row["phase"], row["cost_s_per_step"], row["cost_share"],
        row["since_step"],
    )  # fmt: skip


def _as_of() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
