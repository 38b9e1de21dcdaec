"""Reduce data where a page would become too large, and add a sentence on each reduction. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torchlens_perf.view.rank_tables import compute_s

if TYPE_CHECKING:
    from torchlens_perf.page.gather.step_grid import StepGrid
    from torchlens_perf.verdicts.words.report import Report

_MAX_MODULES = 64
_FEWEST_RANKS = 16
_T = TypeVar("_T")


def size_bytes(value: Any) -> int:
    """Return the approximate size of a value as JSON in the page."""
    return len(json.dumps(value, separators=(",", ":")))


def thinned_grid(
    grid: StepGrid, made_of: Callable[[StepGrid], _T], budget_bytes: int, notes: list[str]
) -> tuple[StepGrid, _T]:
    """Widen the grid's windows until the data made from it fits the budget.

    Return the grid and this data.
    """
    made = made_of(grid)
    narrow = grid.width
    while (size := size_bytes(made)) > budget_bytes and len(grid.flags) > 1:
        # Doubling the width halves the size. Widths that cannot fit are skipped, since each attempt
        # takes seconds.
        for _ in range(max(1, int(math.log2(size / max(1, budget_bytes))))):
            grid = grid.widened() if len(grid.flags) > 1 else grid
        made = made_of(grid)
    if grid.width > 1:
        why = (
            "to keep the page small"
            if grid.width > narrow
            else "as there are too many steps to show each"
        )
        notes.append(f"Columns of ranks by steps are means over {grid.width} steps, {why}.")
    return grid, made


def thinned_report(
    report: Report, named: Collection[int], budget_bytes: int, notes: list[str]
) -> Report:
    """Return the report with its most important rows and all verdicts.

    named: ranks that must stay.
    """
    if size_bytes(report) <= budget_bytes:
        return report
    modules = report["modules"]
    if len(modules) > _MAX_MODULES:
        report = {**report, "modules": modules[:_MAX_MODULES]}
        notes.append(
            f"Of {len(modules)} modules, the {_MAX_MODULES} that take most time are shown."
        )
    ranks = report["ranks"]
    count = len(ranks)
    by_compute = sorted(ranks, key=lambda each: -compute_s(each))
    while size_bytes(report) > budget_bytes and count > _FEWEST_RANKS:
        count = max(_FEWEST_RANKS, count // 2)
        every = max(1, 2 * len(ranks) // count)
        order = [
            *sorted(named),
            *(each["rank"] for each in (*by_compute[: count // 2], *ranks[::every], *by_compute)),
        ]
        kept = set(list(dict.fromkeys(order))[: max(count, len(set(named)))])
        report = _of_ranks(report, kept)
    if len(report["ranks"]) < len(ranks):
        notes.append(
            f"Interaction with ranks is limited to {len(report['ranks'])} of {len(ranks)}: reported"
            " ranks, the slowest ranks and an even sample. Verdicts, tables and the heat map have"
            " all ranks."
        )
    return report


def _of_ranks(report: Report, kept: Collection[int]) -> Report:
    names = {str(rank) for rank in kept}

    def only(row: Any) -> Any:
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
        "modules": [only(row) for row in report["modules"]],
        "sections": [only(row) for row in report["sections"]],
        "device_sections": [only(row) for row in report["device_sections"]],
        "collectives": [only(row) for row in report["collectives"]],
    }
