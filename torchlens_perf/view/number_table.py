"""The table on checked numbers of each rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table, Value

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Outlier, Report


def build_number_table(report: Report) -> Table | None:
    """Return the checked numbers by rank, next to the slowness of the rank."""
    numbers = report["numbers"]
    if numbers is None:
        return None
    rows = numbers["ranks"]
    wrong = {
        rank: each["since_step"]
        for each in reversed(numbers["wrong"])
        if not each["is_everywhere"]
        for rank in each["ranks"]
    }
    slow = {row["rank"] for row in report["verdicts"] if row["kind"].startswith("straggler")}
    columns = [
        Column("rank", [each["rank"] for each in rows], Quantity.TEXT),
        Column("wrong since step", [wrong.get(each["rank"]) for each in rows], Quantity.TEXT),
        Column("slow", ["yes" if each["rank"] in slow else None for each in rows], Quantity.TEXT),
        Column("parameters checked", [each["parameters"] or NOT_MEASURED for each in rows],
               Quantity.NUMBER, help="Checks of parts of replicated parameters."),
        *_build_value_columns("gradient norm", [each["gradient_norm"] for each in rows]),
        *_build_value_columns("loss", [each["loss"] for each in rows]),
    ]  # fmt: skip
    marked = frozenset(place for place, each in enumerate(rows) if each["rank"] in wrong)
    note = f"The parameters of {numbers['compared']} ranks were compared."
    return Table("numbers", "Checked numbers", columns, marked, 8, note, noun="rank")


def _build_value_columns(name: str, values: list[Outlier | None]) -> list[Column]:
    ratios: list[Value] = [
        NOT_MEASURED if each is None else each["max"] / each["median"]
        if each["max"] is not None and each["median"] else None
        for each in values
    ]  # fmt: skip
    bad: list[Value] = [NOT_MEASURED if each is None else each["not_finite"] for each in values]
    return [
        Column(f"{name} max / median", ratios, Quantity.NUMBER, 0.3, help="Of the newest checks."),
        Column(f"{name} not finite", bad, Quantity.NUMBER, help="Number of checks with NaN or infinity."),
    ]  # fmt: skip
