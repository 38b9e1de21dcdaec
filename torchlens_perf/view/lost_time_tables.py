"""Tables on lost time: the critical path of a step, and predicted gains of changes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.verdicts.words.report import PathClass, PredictedChange, Report
from torchlens_perf.view.specs import Column, Quantity, Table
from torchlens_perf.view.theme import PARTS

_MIN_SHARE = 0.005
"""Smaller classes are left out."""
_NAMES = {
    "data": "data loading",
    "communication": "exposed communication",
    "imbalance": "imbalance of computing",
}


def build_critical_path_table(report: Report) -> Table | None:
    """Return the classes of time on the critical path: slow ranks first, then the largest."""
    lost = report["lost_time"]
    if lost is None:
        return None
    named = [each for each in lost.classes if each.share >= _MIN_SHARE]
    # A short table ends after a few rows, which must not hide what the verdict is about.
    rows = sorted(named, key=lambda each: not each.ranks)
    columns = [
        Column("critical path", [_class_name(each) for each in rows], Quantity.TEXT),
        Column("per step", [each.s_per_step for each in rows], help="Mean over all steps."),
        Column("share of step", [each.share for each in rows], Quantity.SHARE),
    ]
    title = (
        f"Critical path of a mean step, steps {lost.first_step} to {lost.last_step}"
        f" ({format_duration(lost.step_s)})"
    )
    return Table("critical_path", title, columns, first=8, noun="part",
                 ranged="per step")  # fmt: skip


def build_change_table(report: Report) -> Table | None:
    """Return the predicted gains of the most valuable single changes."""
    return (
        None
        if (lost := report["lost_time"]) is None
        else build_gain_table(lost.changes, lost.step_s)
    )


def build_gain_table(
    changes: Sequence[PredictedChange], step_s: float, key: str = "changes", of: str = "step"
) -> Table:
    """Return a table of predicted gains, in the unit of the step. of: "step" or "iteration"."""
    columns = [
        Column("what if", [each.change for each in changes], Quantity.TEXT),
        Column(f"gain per {of}", [each.gain_s for each in changes], unit_of=step_s),
        Column("at least", [each.low_s for each in changes], unit_of=step_s),
        Column("at most", [each.high_s for each in changes], unit_of=step_s),
        Column(f"share of {of}", [each.share for each in changes], Quantity.CHANGE),
    ]
    return Table(
        key,
        "Predicted gains of changes" if of == "step" else f"What would shorten an {of}",
        columns,
        note="Each change alone: gains may overlap, so they do not add up." * (len(changes) > 1),
        noun="change",
    )


def _class_name(each: PathClass) -> str:
    if each.ranks:
        # "17,700" would be a number.
        return f"slow {format_rank_list(each.ranks)}".replace(",", ", ")
    return _NAMES.get(each.name) or (PARTS[each.name].name if each.name in PARTS else each.name)
