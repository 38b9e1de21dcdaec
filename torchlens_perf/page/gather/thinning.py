"""Reduce the data of a page that would become too large, and describe each reduction."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torchlens_perf.page.gather.step_grid import StepGrid
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.rank_tables import compute_s

_MAX_MODULES = 64
_FEWEST_RANKS = 16
_T = TypeVar("_T")


def json_size_bytes(value: Any) -> int:
    """Return the approximate size of a value as JSON in the page."""
    return len(json.dumps(value, separators=(",", ":")))


def widen_grid(
    grid: StepGrid, made_of: Callable[[StepGrid], _T], budget_bytes: int, notes: list[str]
) -> tuple[StepGrid, _T]:
    """Widen the grid's windows until its data fits the budget. Return the grid and the data."""
    made = made_of(grid)
    narrow = grid.width
    while (size := json_size_bytes(made)) > budget_bytes and len(grid.flags) > 1:
        # Doubling the width halves the size. Skip widths that cannot fit, since each attempt takes
        # seconds.
        for _ in range(max(1, int(math.log2(size / max(1, budget_bytes))))):
            grid = grid.widened() if len(grid.flags) > 1 else grid
        made = made_of(grid)
    if grid.width > 1:
        mean = f"Each column of the charts by step is the mean of {grid.width} steps"
        why = "to keep the page small" if grid.width > narrow else "because the run has many steps"
        notes.append(f"{mean}, {why}.")
    return grid, made


def trim_report(
    report: Report, named: Collection[int], budget_bytes: int, notes: list[str]
) -> Report:
    """Return the report with all verdicts and the most important rows. named: ranks to keep."""
    if json_size_bytes(report) <= budget_bytes:
        return report
    modules = report["modules"]
    if len(modules) > _MAX_MODULES:
        report = {**report, "modules": modules[:_MAX_MODULES]}
        notes.append(
            f"Only the {_MAX_MODULES} modules that take most time are shown, of {len(modules)}"
            " modules."
        )
    ranks = report["ranks"]
    count = len(ranks)
    by_compute = sorted(ranks, key=lambda each: -compute_s(each))
    while json_size_bytes(report) > budget_bytes and count > _FEWEST_RANKS:
        count = max(_FEWEST_RANKS, count // 2)
        every = max(1, 2 * len(ranks) // count)
        order = [
            *sorted(named),
            *(each["rank"] for each in (*by_compute[: count // 2], *ranks[::every], *by_compute)),
        ]
        kept = set(list(dict.fromkeys(order))[: max(count, len(set(named)))])
        report = _keep_ranks(report, kept)
    if len(report["ranks"]) < len(ranks):
        notes.append(
            f"Charts can select only {len(report['ranks'])} of {len(ranks)} ranks: reported ranks,"
            " the slowest ranks and an even sample. Verdicts, tables and the heat map contain all"
            " ranks."
        )
    return report


def _keep_ranks(report: Report, kept: Collection[int]) -> Report:
    names = {str(rank) for rank in kept}

    def keep_row_ranks(row: Any) -> Any:
        # Sentences on a collective quote the numbers of its slowest rank.
        shown = {*names, str(row.get("slowest_rank"))}
        return {
            key: (
                {rank: each for rank, each in value.items() if rank in shown}
                if key in ("by_rank", "backward_by_rank", "device_own_by_rank")
                and isinstance(value, Mapping)
                else value
            )
            for key, value in row.items()
        }

    return {
        **report,
        "ranks": [rank for rank in report["ranks"] if rank["rank"] in kept],
        "modules": [keep_row_ranks(row) for row in report["modules"]],
        "sections": [keep_row_ranks(row) for row in report["sections"]],
        "device_sections": [keep_row_ranks(row) for row in report["device_sections"]],
        "collectives": [keep_row_ranks(row) for row in report["collectives"]],
    }
