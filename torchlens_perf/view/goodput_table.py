"""Table of a job's time by class: goodput and what is lost. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_percent,
    format_rounded,
    format_run_duration,
)
from torchlens_perf.diagnosis.goodput import CLASSES
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.verdicts.words.report_goodput import Goodput
from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table, Value, columns_if


def build_goodput_table(report: Report) -> Table | None:
    """Return a row for each class that has time, in a fixed order."""
    goodput = report["goodput"]
    if goodput is None:
        return None
    classes = goodput.classes
    names = [name for name, each in classes.items() if each.seconds != 0.0]
    rows = [classes[name] for name in names]
    columns = [
        Column("time", [CLASSES[name] for name in names], Quantity.TEXT),
        Column("duration", _known(each.seconds for each in rows), help="Mean over the ranks."),
        Column("share of run", _known(each.share for each in rows), Quantity.SHARE),
        Column(
            "rank time" if report["run"]["device"] is None else "device time",
            _known(each.device_hours and 3600 * each.device_hours for each in rows),
            optional=0.6,
        ),
        *columns_if(
            goodput.cost is not None,
            Column("cost", _known(each.cost for each in rows), Quantity.NUMBER),
        ),
    ]
    cost = "" if goodput.cost is None else f", cost {format_rounded(goodput.cost)}"
    share = format_percent(classes["productive"].share or 0.0)
    title = f"Goodput ({share} of {format_run_duration(goodput.wall_s)}{cost})"
    return Table("goodput", title, columns, note=_describe_job(goodput), noun="part")


def _known(values: Iterable[float | None]) -> list[Value]:
    return [NOT_MEASURED if value is None else value for value in values]


def _describe_job(goodput: Goodput) -> str:
    """Return sentences on restarts and energy."""
    found = []
    lost, count = goodput.lost_steps, len(goodput.attempts)
    if count > 1:
        known = "an unknown number of steps" if lost is None else format_count(lost, "step")
        by = f" (by {goodput.lost_steps_from})" if goodput.lost_steps_from else ""
        found.append(f"{count} attempts, which made {known} again{by}.")
    per_step, per_token = goodput.energy_j_per_step, goodput.energy_j_per_token
    if per_step is not None:
        each = "" if per_token is None else f", {format_rounded(per_token)} J per token"
        found.append(f"Energy: {format_rounded(per_step)} J per step{each}.")
    return " ".join(found)
