"""The table on trainings that a process makes one after the other. Pure."""

from __future__ import annotations

from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import build_headline, fact_text
from torchlens_perf.view.specs import Column, Quantity, Table

# Facts that other columns show.
_STEPS = ("steps", "seen")


def build_training_table(report: Report) -> Table | None:
    """Return each training with its model, steps, typical step and first verdict."""
    rows = report["trainings"]
    columns = [
        Column("training", [str(each["number"]) for each in rows], Quantity.TEXT),
        Column("model", [each["model"] for each in rows], Quantity.TEXT, 0.2),
        Column("steps", [format_step_range(each["first_step"], each["last_step"] + 1) for each in rows],
               Quantity.TEXT),
        Column("typical step", [each["typical_s"] for each in rows]),
        Column("total", [each["total_s"] for each in rows], optional=0.3),
        Column("verdict", [_describe(each["verdict"], report) for each in rows], Quantity.TEXT),
    ]  # fmt: skip
    shown = next((each for each in rows if each["is_shown"]), None)
    note = (
        f"All times and verdicts are on training {shown['number']}, which took the most time."
        if shown is not None
        else ""
    )
    return Table("trainings", "Trainings of this process", columns, first=8, note=note,
                 noun="training")  # fmt: skip


def _describe(verdict: Verdict | None, report: Report) -> str | None:
    if verdict is None:
        return None
    found = build_headline(verdict, report)
    facts = [fact_text(*each) for each in found.facts if each[0] not in _STEPS]
    return ", ".join(filter(None, [" ".join([found.status, *facts]), found.cost]))
