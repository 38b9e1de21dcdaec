"""Whole steps: the most telling one of all as a time line, and its collectives with who waited for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration
from torchlens_perf.view.html import figure, section
from torchlens_perf.view.markup import Element

if TYPE_CHECKING:
    from torchlens_perf.page.contents import Contents, RankTrace, StepTraceRow

_MAX_COLLECTIVES = 24
_MAX_STEPS = 64


def step(contents: Contents) -> Element | None:
    traces = contents["traces"]
    if not traces["steps"]:
        return None
    shown = traces["steps"][0]
    return section(
        "step",
        "One step",
        figure("step", "Time line of one step", _words(shown)),
    )


def _words(shown: StepTraceRow) -> str:
    """Who was waited for, and how long, in this step."""
    blocked: dict[int, dict[str, float]] = {}
    for each in shown["collectives"]:
        if each["last_rank"] is not None and not each["asynchronous"]:
            waits = blocked.setdefault(each["last_rank"], {})
            for rank, wait in each["wait_us"].items():
                waits[rank] = waits.get(rank, 0.0) + (wait or 0.0)
    longest = max(shown["ranks"], key=lambda trace: trace["duration_us"])
    text = f"Step {shown['step']} takes {duration(longest['duration_us'] / 1e6)} on rank {longest['rank']}"
    if blocked:
        last = max(blocked, key=lambda each: max(blocked[each].values()))
        waiter = max(blocked[last], key=lambda rank: blocked[last][rank])
        waited = duration(blocked[last][waiter] / 1e6)
        text += f"; rank {waiter} waits {waited} for rank {last}"
    elif len(shown["ranks"]) > 1:
        blocked_us = {trace["rank"]: _blocked_us(trace) for trace in shown["ranks"]}
        order = sorted(blocked_us, key=lambda rank: blocked_us[rank])
        most_us, least_us = blocked_us[order[-1]], blocked_us[order[0]]
        if most_us:
            text += f"; rank {order[-1]} has the longest comm wait, {duration(most_us / 1e6)}"
            text += f", rank {order[0]} the shortest, {duration(least_us / 1e6)}" if least_us else ""
    return f"{text}."


def _blocked_us(trace: RankTrace) -> float:
    """In its waits on the training thread, which lie in no other wait."""
    rows = [row for row in trace["rows"] if row["lane"] == "host"]
    return sum(
        duration_us
        for row in rows
        for kind, duration_us in zip(row["kind"], row["duration_us"], strict=True)
        if kind == "wait"
    )
