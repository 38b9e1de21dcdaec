"""The report's table of ranks: where each one's step goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text

from torchlens_perf.records import PARTS
from torchlens_perf.report.quantities import amount, duration_or_dash, printable
from torchlens_perf.report.tables import Column, FittingTable

_MOST_RANKS = 16
_BAR_LETTERS = 16
_BAR, _OWN, _WORK = "share of the step", "own", "work"
_HEADERS = {"communication": "wait", "recompute": "recomp."}
_LETTERS = {
    "data": "d", "forward": "f", "recompute": "r", "backward": "b", "optimizer": "o", "communication": "w", "host": "h",
}  # fmt: skip
_STYLES = {
    "data": "yellow", "forward": "green", "recompute": "magenta", "backward": "blue", "optimizer": "cyan",
    "communication": "dim", "host": "red",
}  # fmt: skip


def rank_table(report: dict[str, Any]) -> FittingTable:
    """Medians per step of each rank; of many, those with the most own time."""
    ranks = report["ranks"]
    if len(ranks) > _MOST_RANKS:
        slowest = sorted(ranks, key=lambda rank: -(rank["own_s"]["p50_s"] or 0.0))[:_MOST_RANKS]
        ranks = sorted(slowest, key=lambda rank: rank["rank"])
    parts = [part for part in PARTS if any(part in rank["phases"] for rank in report["ranks"]) and part != "tool"]
    several_hosts = len({rank["host"] for rank in report["ranks"]}) > 1

    def column(
        header: str, worth: float, cell: Callable[[dict[str, Any]], str | Text], *, left: bool = False
    ) -> Column:
        return Column(header, [cell(rank) for rank in ranks], worth, left)

    columns = [
        column("rank", 9, lambda rank: _label(rank, several_hosts=several_hosts), left=True),
        column("step", 9, lambda rank: duration_or_dash(rank["step_s"]["p50_s"])),
        column(_OWN, 0.8, lambda rank: duration_or_dash(rank["own_s"]["p50_s"])),
    ]
    if any(rank["work_s"] for rank in report["ranks"]):
        columns.append(column(_WORK, 0.9, lambda rank: duration_or_dash(rank["work_s"] and rank["work_s"]["p50_s"])))
    for part in parts:
        shares = [rank["phases"][part]["share"] for rank in ranks if part in rank["phases"]]
        columns.append(_phase_column(part, ranks, 0.3 + max(shares, default=0.0)))
    columns.append(column("memory", 0.1, _memory))
    columns.append(column(_BAR, 0.2, lambda rank: _bar(rank["phases"], parts), left=True))
    suspect = next((verdict["rank"] for verdict in report["verdicts"] if verdict["kind"] == "straggler"), None)
    bold = next((row for row, rank in enumerate(ranks) if rank["rank"] == suspect), None)

    def notes(headers: Sequence[str]) -> list[str]:
        legend = "own: without waiting" if _OWN in headers else ""
        if _WORK in headers:
            legend += "; work: without lack of a CPU too" if legend else "work: without waiting and lack of a CPU"
        if _BAR in headers:
            letters = ", ".join(f"{_LETTERS[part]} {_HEADERS.get(part, part)}" for part in parts)
            legend += f"; {letters}" if legend else letters
        count = len(report["ranks"])
        few = f"the {len(ranks)} of {count} ranks with the most own time; --json has all" * (count > len(ranks))
        return [line for line in (few, legend) if line]

    return FittingTable("median per step and rank", columns, notes, bold)


def _label(rank: dict[str, Any], *, several_hosts: bool) -> str:
    host = f" {printable(rank['host'])}" if several_hosts else ""
    return f"{rank['rank']}{host}{' died' if rank['state'] == 'died' else ''}"


def _phase_column(part: str, ranks: Sequence[dict[str, Any]], worth: float) -> Column:
    values = [rank["phases"].get(part) for rank in ranks]
    cells = [duration_or_dash(value and value["p50_s"]) for value in values]
    return Column(_HEADERS.get(part, part), cells, worth)


def _memory(rank: dict[str, Any]) -> str:
    most = rank["memory"]["max_bytes"]
    return "-" if most is None else amount(most, "B")


def _bar(phases: dict[str, Any], parts: list[str]) -> Text:
    """One letter for each sixteenth of the step's time."""
    bar, filled, total = Text(), 0, 0.0
    for part in parts:
        total += phases.get(part, {"share": 0.0})["share"]
        letters = max(0, round(total * _BAR_LETTERS) - filled)
        filled += letters
        bar.append(_LETTERS[part] * letters, style=_STYLES[part])
    return bar
