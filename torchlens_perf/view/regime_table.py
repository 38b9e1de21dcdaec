"""The table on changes of the usual step time over the run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.view.headline import phase_name
from torchlens_perf.view.specs import Column, Quantity, Table

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Regime, Report

_NAMES = {"change": "sudden change", "drift": "gradual change"}


def build_regime_table(report: Report) -> Table | None:
    """Return the changes of the usual step time, then steps that are periodically longer."""
    rows = report["regimes"]
    if not rows:
        return None
    unit_of = max(max(each["before_s"], each["after_s"]) for each in rows)
    change = [each["after_s"] / each["before_s"] - 1 if each["before_s"] else None for each in rows]
    coincides = [", ".join(each["coincides"]) or None for each in rows]
    columns = [
        Column("step time over the run", [_NAMES.get(each["kind"], each["kind"]) for each in rows],
               Quantity.TEXT),
        Column("steps", [_format_steps(each) for each in rows], Quantity.TEXT),
        Column("before", [each["before_s"] for each in rows], unit_of=unit_of),
        Column("after", [each["after_s"] for each in rows], unit_of=unit_of),
        Column("change", change, Quantity.CHANGE),
        Column("mostly in", [phase_name(each["part"]) or None for each in rows], Quantity.TEXT, 0.3),
        Column("coincides with", coincides, Quantity.TEXT, 0.4),
    ]  # fmt: skip
    history = report["history"]
    note = "" if history is None else f"Steps are exact to windows of {history['width']} steps."
    return Table("regimes", "Changes of the step time", columns, first=8, note=note, noun="change",
                 ranged="after")  # fmt: skip


def _format_steps(each: Regime) -> str:
    if each["period"] is not None:
        return f"every {each['period']} steps"
    if each["since_step"] is None:
        return "has not ended"
    return format_step_range(each["since_step"], each["until_step"])
