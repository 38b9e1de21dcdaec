"""The report's tables of device memory: how full each rank's is, and what held it where it ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from torchlens_perf.report.oom_words import place
from torchlens_perf.report.quantities import amount, percent, printable
from torchlens_perf.report.tables import Column, FittingTable, new_table

_MOST_RANKS = 16
_MOST_PLACES = 5
_FRAGMENTED = "fragm."


def memory_table(ranks: Sequence[dict[str, Any]]) -> FittingTable:
    """Per rank; of many, those with most reserved. ranks: the report's, some with a device's memory."""
    told = [rank for rank in ranks if rank["memory"]["device"]]
    shown = sorted(told, key=lambda rank: -(rank["memory"]["device"]["reserved_bytes"] or 0))[:_MOST_RANKS]
    shown.sort(key=lambda rank: rank["rank"])
    devices = [rank["memory"]["device"] for rank in shown]

    def column(header: str, field: str, worth: float) -> Column:
        return Column(header, [_bytes(device[field]) for device in devices], worth)

    columns = [
        Column("rank", [str(rank["rank"]) for rank in shown], left=True),
        column("allocated", "allocated_bytes", 9),
        column("reserved", "reserved_bytes", 9),
        column("peak", "most_allocated_bytes", 0.9),
        column("of", "limit_bytes", 0.6),
        Column(_FRAGMENTED, [_share(device["fragmentation"]) for device in devices], 0.8),
        Column("retries", [_count(device["alloc_retries"]) for device in devices], 0.7),
    ]

    def notes(headers: Sequence[str]) -> list[str]:
        lines = [f"the {len(shown)} of {len(told)} ranks with most reserved"] * (len(told) > len(shown))
        age = max((device["age_steps"] or 0 for device in devices), default=0)
        lines.append(
            f"at the end of a step, up to {age} steps ago; peak: most allocated at any time, as torch counts it"
        )
        if any(device["peak_resets"] for device in devices):
            lines.append("the job resets the allocator's peak: between readings there may have been a higher one")
        if _FRAGMENTED in headers:
            lines.append("fragm.: of what is reserved, free and not to be given back")
        return lines

    return FittingTable("device memory per rank", columns, notes)


def oom_table(oom: dict[str, Any]) -> Table:
    """The largest groups of live blocks when memory ran out. oom: the evidence of the verdict."""
    rows = oom["table"]["rows"]
    with_history = bool(oom["table"]["history_events"])
    title = f"what held the memory of rank {oom['rank']}"
    table = new_table("asked for at", "bytes", "blocks", *["new"] * with_history, title=title)
    for row in rows[:_MOST_PLACES]:
        new = [_count(row["new_blocks"])] * with_history
        table.add_row(printable(place(row)), amount(row["bytes"], "B"), str(row["blocks"]), *new)
    lines = [f"{oom['file']} has all"]
    if with_history:
        lines.append(f"new: allocated within the last {oom['table']['history_events']} allocations and frees")
    table.caption = "\n".join(lines)
    return table


def _bytes(count: int | None) -> str:
    return "-" if count is None else amount(count, "B")


def _share(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)
