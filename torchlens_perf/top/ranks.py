"""The report's table of ranks, slowest first, with each rank's difference from other ranks.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.run.grouping import group_values
from torchlens_perf.top.text import BLOCKS, build_difference_column, draw_bar, select_rows
from torchlens_perf.verdicts.kinds import BAD
from torchlens_perf.verdicts.stragglers.excess import excess_over_others
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.view.rank_tables import build_device_table, build_rank_table
from torchlens_perf.view.specs import Column, Quantity, Table, Value, columns_if
from torchlens_perf.view.theme import FULL_EXCESS

if TYPE_CHECKING:
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import Report

# Widths in terminal columns.
_BAR, _HISTORY, _INSIDE = 12, 16, 40
_MIN_SHOWN = 0.005


def build_rank_list(view: View, *, by_number: bool = False) -> tuple[Table, list[int]]:
    """Return a table of all ranks with data, and the rank of each row.

    Ranks in a verdict are first.
    """
    report = view.report
    if report is None:
        return Table("ranks", "Ranks", []), []
    bad = {
        rank
        for row, of in zip(report["verdicts"], view.headlines, strict=True)
        if of.severity == BAD
        for rank in row.ranks
    }
    table = (build_device_table if report["run"]["judged_by"] == DEVICE else build_rank_table)(
        report
    )
    table = table or Table("ranks", "Ranks", [], noun="rank")
    every = [rank["rank"] for rank in report["ranks"]]
    titled = (column.values for column in table.columns if column.title == "rank")
    known = next(titled, every if table.columns else ())
    missing = sorted(set(every).difference(known))
    ranks = [*(rank for rank in known if isinstance(rank, int)), *missing]
    columns = [Column("rank", ranks, Quantity.TEXT)]
    for column in (each for each in table.columns if each.title != "rank"):
        # Missing ranks have no typical step yet.
        blank = len(missing) * [None]
        marks = [*column.marks, *len(missing) * [""]] if column.marks else ()
        columns.append(dataclasses.replace(column, values=[*column.values, *blank], marks=marks))
        if column.title == "compute" and len(ranks) > 1:
            columns += _excess_columns(ranks, columns[-1], view.populations, report)
    if any(row.kind in ("hang", "died", "failed") for row in report["verdicts"]):
        columns[1:1] = _open_span_columns(ranks, report)
    rows = range(len(ranks))
    order = sorted(rows, key=lambda row: ranks[row] if by_number else (ranks[row] not in bad, row))
    slow = frozenset(row for row in rows if ranks[row] in bad)
    found = dataclasses.replace(table, columns=columns, slow=slow, first=None)
    return select_rows(found, order), [ranks[row] for row in order]


def _excess_columns(
    ranks: Sequence[int], compute: Column, populations: Mapping[int, str], report: Report
) -> list[Column]:
    """Return columns of excess compute time in a typical step and over the run.

    A rank can be slow only for a while.
    """
    excess, heat = _excess_over_others(ranks, compute.values, populations), report["heat"]
    windows = {row["rank"]: row["excess"] for row in heat["ranks"]} if heat is not None else {}
    latest = [
        next((share for share in windows.get(rank, ())[:-3:-1] if share is not None), None)
        for rank in ranks
    ]
    shown = [share if share is not None and share >= _MIN_SHOWN else None for share in latest]
    bars = [draw_bar(min(1.0, (share or 0.0) / FULL_EXCESS) * _BAR) for share in shown]
    history = [draw_blocks(windows.get(rank, ()), _HISTORY) for rank in ranks]
    help_ = "Excess of compute time over the median of the other ranks that do the same work"
    columns = [
        build_difference_column(
            "vs others", excess, compute.unit_of, f"{help_}, in a typical step."
        ),
        Column(
            "latest excess",
            shown,
            Quantity.CHANGE,
            0.04,
            f"{help_}, as a share of it, in the latest window.",
        ),
        # Without an excess, as in a hang, this column would be blank.
        *columns_if(
            any(bars),
            Column(
                " " * _BAR,
                bars,
                Quantity.TEXT,
                0.05,
                f"The same; a full bar is {FULL_EXCESS:.0%} or more.",
            ),
        ),
        Column(
            "over the run",
            history,
            Quantity.TEXT,
            0.35,
            f"{help_}; a full block is {FULL_EXCESS:.0%} or more.",
        ),
    ]
    return columns if windows else columns[:1]


def _excess_over_others(
    ranks: Sequence[int], compute: Sequence[Value], populations: Mapping[int, str]
) -> list[float | None]:
    rows_of = group_values(
        (populations.get(rank), row)
        for row, (rank, seconds) in enumerate(zip(ranks, compute, strict=True))
        if isinstance(seconds, float)
    )
    found: list[float | None] = [None] * len(ranks)
    for rows in rows_of.values():
        if len(rows) > 1:
            above = excess_over_others(np.array([[compute[row]] for row in rows], float))
            for row, seconds in zip(rows, above[:, 0].tolist(), strict=True):
                found[row] = seconds
    return found


def draw_blocks(excess: Sequence[float | None], width: int) -> str:
    """Return a line of blocks: shares of excess compute time in windows over the run."""
    found, together = "", max(1, -(-len(excess) // max(1, width)))
    for first in range(0, len(excess), together):
        values = [value for value in excess[first : first + together] if value is not None]
        share = min(1.0, max(0.0, sum(values) / len(values)) / FULL_EXCESS) if values else 0.0
        found += BLOCKS[1 + round(7 * share)] if values else " "
    return found


def _open_span_columns(ranks: Sequence[int], report: Report) -> list[Column]:
    """Return the open spans of each rank, now or at the time when it died."""
    of = {
        rank["rank"]: (rank["now"].inside if rank["now"] else rank["inside"])[-2:]
        for rank in report["ranks"]
    }
    inside = [" > ".join(of[rank])[:_INSIDE] or "not timed" for rank in ranks]
    return [Column("inside", inside, Quantity.TEXT, 0.02)] if any(of.values()) else []
