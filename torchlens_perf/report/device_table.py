"""The report's table of device times: what the device did in a step, and whether it waited for the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchlens_perf.report.quantities import duration, duration_or_dash, percent
from torchlens_perf.report.tables import Column, FittingTable

_MOST_RANKS = 16
_PHASES = ("forward", "recompute", "backward", "optimizer")
_BEHIND, _CAUGHT_UP = "behind", "caught up"


def device_table(ranks: Sequence[dict[str, Any]]) -> FittingTable:
    """Per rank; of many, those whose devices take longest for a step. ranks: the report's, some with device times."""
    timed = [rank for rank in ranks if rank["device"]]
    shown = sorted(timed, key=lambda rank: -rank["device"]["step_s"]["p50_s"])[:_MOST_RANKS]
    shown.sort(key=lambda rank: rank["rank"])
    columns = [
        Column("rank", [str(rank["rank"]) for rank in shown], left=True),
        Column("step", [duration(rank["device"]["step_s"]["p50_s"]) for rank in shown]),
    ]
    for phase in _PHASES:
        if any(phase in rank["device"]["phases"] for rank in shown):
            columns.append(Column(phase, [_phase(rank, phase) for rank in shown], 0.5))
    behind = [duration_or_dash(rank["device"]["behind_s"]["p50_s"]) for rank in shown]
    columns.append(Column(_BEHIND, behind, 0.7))
    shares = [rank["device"]["caught_up"] for rank in shown]
    columns.append(Column(_CAUGHT_UP, ["-" if share is None else percent(share) for share in shares], 0.8))

    def notes(headers: Sequence[str]) -> list[str]:
        lines = [f"the {len(shown)} of {len(timed)} ranks whose devices take longest"] * (len(timed) > len(shown))
        lines.append(f"by {' and '.join(sorted({str(rank['device']['clock']) for rank in shown}))}; phases: a step")
        if _BEHIND in headers:
            lines.append("behind: how long after the host the device ended a forward or backward pass, p50")
        if _CAUGHT_UP in headers:
            lines.append("caught up: passes at whose end the device had no work left, as it waits for launches")
        return lines

    return FittingTable("device time per step and rank", columns, notes)


def _phase(rank: dict[str, Any], phase: str) -> str:
    times = rank["device"]["phases"].get(phase)
    return "-" if times is None else duration(times["s_per_step"])
