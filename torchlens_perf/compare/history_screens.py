"""A history as a headline, a table, JSON and a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchlens_perf.analysis.statistics.quantities import format_change, format_duration
from torchlens_perf.compare.history import MIN_COMPARED, History, HistoryChange
from torchlens_perf.compare.measures import (
    COMMIT,
    PEAK_MEMORY,
    STEP,
    Kind,
    Measure,
    list_differences,
)
from torchlens_perf.page.document.html import build_static_document
from torchlens_perf.page.document.write import write_page_file
from torchlens_perf.page.small_charts import build_image, draw_step_chart
from torchlens_perf.view.goodput_table import build_job_table
from torchlens_perf.view.headline import Headline
from torchlens_perf.view.html import build_section, build_table, build_verdict_card
from torchlens_perf.view.markup import tag
from torchlens_perf.view.specs import Column, Quantity, Table
from torchlens_perf.view.theme import BAD, GOOD, NEUTRAL, PARTS

if TYPE_CHECKING:
    from pathlib import Path

    from torchlens_perf.verdicts.words.report import StepHistory
    from torchlens_perf.view.markup import Element

_SHOWN_ROWS = 60
_MAX_PARTS = 5


def build_headline(found: History) -> Headline:
    """Return the newest change, or a statement that the step did not change."""
    if not found.changes:
        status, severity, sentence = (
            "SAME",
            GOOD,
            f"No change of the step in {len(found.runs)} runs.",
        )
        if len(found.runs) < MIN_COMPARED:
            status, severity, sentence = "CANNOT SAY", NEUTRAL, "There are too few runs."
    else:
        newest = found.changes[-1]
        step = newest.comparison.step
        status, severity = ("SLOWER", BAD) if step.difference > 0 else ("FASTER", GOOD)
        sentence = _describe_change(newest)
    return Headline(
        kind="history", status=status, severity=severity, facts=(), cost_s_per_step=None,
        cost_share=None, sentence=sentence, cause="", action="", command="", is_over=False,
    )  # fmt: skip


def _describe_change(change: HistoryChange) -> str:
    step = change.comparison.step
    parts = [
        f"{measure.name} {format_change(part.difference / step.before)}"
        for measure, part in change.comparison.list_changed(Kind.PART)[:2]
    ]
    of_step = f", of which {' and '.join(parts)} of the step" if parts else ""
    return (
        f"Since run {change.first.run.run_id}, a typical step takes {format_duration(step.after)} instead"
        f" of {format_duration(step.before)}: {format_change(step.share)}{of_step}."
        f" {_describe_settings(change)}"
    )


def _describe_settings(change: HistoryChange) -> str:
    """Return what changed with the step, or that nothing recorded did."""
    if change.changed_settings:
        return f"Changed with it: {', '.join(change.changed_settings)}."
    recorded = change.first.settings.keys() & change.last_before.settings.keys()
    if not recorded:
        return "The commit and settings of these runs were not recorded."
    commit = "" if COMMIT in recorded else "; the commit was not recorded"
    return f"No recorded setting changed with it{commit}."


def list_changes(found: History) -> list[tuple[str, str]]:
    """Return labelled sentences on the earlier changes, the newest first."""
    return [("earlier", _describe_change(each)) for each in reversed(found.changes[:-1])]


def build_tables(found: History) -> list[Table]:
    """Return the table of runs and that of the jobs' goodput. Tables without rows are left out."""
    return [each for each in (build_run_table(found), build_job_table(found.jobs)) if each.rows]


def build_run_table(found: History) -> Table:
    """Return a row per run: start, step, rate, the largest parts, and memory. The newest is first."""
    runs = list(reversed(found.runs))
    parts = {
        part.name: [run.values.get(Measure(Kind.PART, part.name)) for run in runs]
        for part in PARTS.values()
    }
    largest = sorted(parts, key=lambda name: -sum(value or 0.0 for value in parts[name]))
    unit_s = max((run.values[STEP] for run in runs), default=0.0)
    differences = [
        ", ".join(list_differences(before.report, run.report))
        for run, before in zip(runs, [*runs[1:], *runs[-1:]], strict=True)
    ]
    columns = [
        Column("run", [run.run.run_id for run in runs], Quantity.TEXT),
        Column(
            "started", [(run.report["run"]["started"] or "")[:16] for run in runs], Quantity.TEXT
        ),
        Column(COMMIT, [run.settings.get(COMMIT) for run in runs], Quantity.TEXT, optional=0.5),
        Column("changed settings", differences, Quantity.TEXT, optional=4),
        Column("ranks", [run.report["run"]["world_size"] for run in runs], Quantity.NUMBER),
        Column("steps", [run.report["steps"]["made"] for run in runs], Quantity.NUMBER, optional=3),
        Column("step", [run.values[STEP] for run in runs], unit_of=unit_s),
        *(
            Column(name, parts[name], optional=1 + at, unit_of=unit_s)
            for at, name in enumerate(largest[:_MAX_PARTS])
        ),
        Column(
            "peak memory",
            [run.values.get(PEAK_MEMORY) for run in runs],
            Quantity.BYTES,
            optional=2,
        ),
    ]
    changed = {change.first.run.run_id for change in found.changes}
    slow = frozenset(at for at, run in enumerate(runs) if run.run.run_id in changed)
    return Table("runs", "Runs", columns, slow, _SHOWN_ROWS, noun="run")


def _draw_runs(found: History) -> Element:
    """Return a chart of the typical step of each run, with the changes marked."""
    steps_s = [run.values[STEP] for run in found.runs]
    history: StepHistory = {
        "width": 1, "first_steps": [*range(1, len(steps_s) + 1)], "median_s": steps_s,
        "fastest_s": steps_s, "slowest_s": steps_s,
    }  # fmt: skip
    changes = [found.runs.index(change.first) + 1 for change in found.changes]
    return build_image(*draw_step_chart(history, of_runs=True, changes=changes))


def to_dictionary(found: History) -> dict[str, Any]:
    """Return the history as JSON types: values of each run in seconds or bytes, and the changes."""
    return {
        "schema": 1,
        "runs": [
            {
                "run_dir": str(run.run.path),
                "id": run.run.run_id,
                "started": run.report["run"]["started"],
                "world_size": run.report["run"]["world_size"],
                "settings": run.settings,
                "values": [
                    {"kind": each.kind.name.lower(), "name": each.name, "value": value}
                    for each, value in run.values.items()
                ],
            }
            for run in found.runs
        ],
        "changes": [
            {
                "first_run": change.first.run.run_id,
                "before_s": change.comparison.step.before,
                "after_s": change.comparison.step.after,
                "share": change.comparison.step.share,
                "changed_settings": change.changed_settings,
                "sentence": _describe_change(change),
            }
            for change in found.changes
        ],
        "jobs": found.jobs,
        "notes": list(found.notes),
    }


def write_history_page(found: History, path: Path) -> None:
    """Write the history as a page without scripts. Raise RunStoreError if that fails."""
    lines = [tag("li", text) for _, text in list_changes(found)]
    lines += [tag("li", note) for note in found.notes]
    chart = [_draw_runs(found)] if found.runs else []
    elements = [
        build_section("verdicts", "History", build_verdict_card(build_headline(found), "history")),
        *([build_section("chart", "Steps", *chart)] if chart else []),
        *(build_section(each.key, each.title, build_table(each)) for each in build_tables(found)),
        *([build_section("notes", "Notes", tag("ul", lines))] if lines else []),
    ]
    write_page_file(path, build_static_document("history · torchlens_perf", elements))
