"""The report's table of ranks: where each one's step goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import duration, duration_or_dash, printable
from torchlens_perf.report.tables import Column, FittingTable, in_bytes, note_on_rest, or_dash
from torchlens_perf.run.records import PARTS

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import ArrivedLast, Phase, Rank, Report

_MAX_RANKS = 16
_BAR_LETTERS = 16
_WORTH_A_COLUMN = 0.02  # of the step
_BAR, _OWN, _WORK, _NO_CPU, _LAST = "share of the step", "own", "work", "no CPU", "came last"
_HEADERS = {"communication": "wait", "recompute": "recomp."}
_LETTERS = {
    "data": "d", "forward": "f", "recompute": "r", "backward": "b", "optimizer": "o", "communication": "w", "host": "h",
}  # fmt: skip
_STYLES = {
    "data": "yellow", "forward": "green", "recompute": "magenta", "backward": "blue", "optimizer": "cyan",
    "communication": "dim", "host": "red",
}  # fmt: skip


def rank_table(report: Report, most: int = _MAX_RANKS) -> FittingTable:
    """The typical step of each rank, the slow ones first; of more than `most` ranks, those with the most own time."""
    slow = [row["rank"] for row in report["verdicts"] if row["kind"] == "straggler"]
    by_own = sorted(report["ranks"], key=lambda rank: (rank["rank"] not in slow, -(_typical(rank, "own_s") or 0.0)))
    ranks = sorted(by_own[:most], key=lambda rank: (_place(rank["rank"], slow), rank["rank"]))
    seen = {part for rank in report["ranks"] for part in (*rank["phases"], *rank["not_measured"])}
    parts = [part for part in PARTS if part in seen and part != "tool"]
    several_hosts = len({rank["host"] for rank in report["ranks"]}) > 1

    def column(header: str, worth: float, cell: Callable[[Rank], str | Text], *, left: bool = False) -> Column:
        return Column(header, [cell(rank) for rank in ranks], worth, left)

    columns = [
        column("rank", 9, lambda rank: _label(rank, several_hosts=several_hosts), left=True),
        column("step", 9, lambda rank: duration_or_dash(_typical(rank, "s"))),
        column(_OWN, 0.8, lambda rank: duration_or_dash(_typical(rank, "own_s"))),
    ]
    if any(_typical(rank, "work_s") is not None for rank in report["ranks"]):
        columns.append(column(_WORK, 0.9, lambda rank: duration_or_dash(_typical(rank, "work_s"))))
    if any(_no_cpu_share(rank) >= _WORTH_A_COLUMN for rank in ranks):
        columns.append(column(_NO_CPU, 0.95, lambda rank: duration_or_dash(_no_cpu_s(rank))))
    for part in parts:
        shares = [rank["phases"][part]["share"] for rank in ranks if part in rank["phases"]]
        cells = [_phase(rank, part) for rank in ranks]
        columns.append(Column(_HEADERS.get(part, part), cells, 0.3 + max(shares, default=0.0)))
    columns.append(column("memory", 0.1, lambda rank: or_dash(rank["memory"]["max_bytes"], in_bytes)))
    columns.append(column(_BAR, 0.2, lambda rank: _bar(rank["phases"], parts), left=True))
    if any(rank["arrived_last"] for rank in report["ranks"]):
        columns.append(column(_LAST, 0.85, lambda rank: or_dash(rank["arrived_last"], _last_in)))
    bold = 0 if slow and ranks and ranks[0]["rank"] == slow[0] else None

    def notes(headers: Sequence[str]) -> list[str]:
        legend = ["own: without waiting"] if _OWN in headers else []
        if _WORK in headers:
            legend.append("work: without lack of a CPU too" if legend else "work: without waiting and lack of a CPU")
        if _NO_CPU in headers:
            legend.append("no CPU: ready, and none was free")
        if _LAST in headers:
            legend.append("came last: to how many of the collectives that were joined over ranks")
        if _BAR in headers:
            legend.append(", ".join(f"{_LETTERS[part]} {_HEADERS.get(part, part)}" for part in parts))
        lines = note_on_rest(ranks, report["ranks"], "ranks with the most own time; --json has all")
        if legend:
            lines.append("; ".join(legend))
        for part in sorted({part for rank in report["ranks"] for part in rank["not_measured"]}):
            lines.append(f"{_HEADERS.get(part, part)}: not measured where it says so, and part of backward")
        return lines

    whose = ", by the host, which issues it" if report["run"]["device"] is not None else ""
    return FittingTable(f"typical step of each rank{whose}", columns, notes, bold)


def _place(rank: int, slow: Sequence[int | None]) -> int:
    return slow.index(rank) if rank in slow else len(slow)


def _last_in(arrived: ArrivedLast) -> str:
    return f"{arrived['share']:.0%}"


def _typical(rank: Rank, field: Literal["s", "own_s", "work_s"]) -> float | None:
    return None if rank["typical"] is None else rank["typical"][field]


def _no_cpu_s(rank: Rank) -> float | None:
    lack = rank["typical"] and rank["typical"]["lack_of_cpu"]
    return sum(lack.values()) if lack else None


def _no_cpu_share(rank: Rank) -> float:
    lack_s, step_s = _no_cpu_s(rank), _typical(rank, "s")
    return lack_s / step_s if lack_s and step_s else 0.0


def _label(rank: Rank, *, several_hosts: bool) -> str:
    host = f" {printable(rank['host'])}" if several_hosts else ""
    return f"{rank['rank']}{host}{' died' if rank['state'] == 'died' else ''}"


def _phase(rank: Rank, part: str) -> str:
    value = rank["phases"].get(part)
    if value is not None:
        return duration(value["typical_s"])
    return "not measured" if part in rank["not_measured"] else "-"


def _bar(phases: dict[str, Phase], parts: list[str]) -> Text:
    """One letter for each sixteenth of the step's time."""
    bar, filled, total = Text(), 0, 0.0
    for part in parts:
        total += phases.get(part, {"share": 0.0})["share"]
        letters = max(0, round(total * _BAR_LETTERS) - filled)
        filled += letters
        bar.append(_LETTERS[part] * letters, style=_STYLES[part])
    return bar
