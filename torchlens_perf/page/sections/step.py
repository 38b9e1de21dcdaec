"""Whole steps: the most telling one of all as a time line, and its collectives with who waited for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import amount, duration
from torchlens_perf.page.markup import Element, name, tag
from torchlens_perf.page.sections.section import details, figure, section, table

if TYPE_CHECKING:
    from torchlens_perf.page.contents import CollectiveJoined, Contents, RankTrace, StepTraceRow

_MAX_COLLECTIVES = 24
_MAX_STEPS = 64


def step(contents: Contents) -> Element | None:
    traces = contents["traces"]
    if not traces["steps"]:
        return None
    shown = traces["steps"][0]
    return section(
        "step",
        "One step, all ranks",
        figure("step", "Time line of one step", _words(shown)),
        _collectives(shown),
        _ranks(shown),
        _all_steps(traces["steps"]),
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


def _collectives(shown: StepTraceRow) -> Element | None:
    rows = []
    for each in shown["collectives"][:_MAX_COLLECTIVES]:
        waits = {rank: wait for rank, wait in each["wait_us"].items() if wait is not None}
        most = max(waits, key=lambda rank: waits[rank], default=None)
        arrivals = [arrival for arrival in each["arrival_us"].values() if arrival is not None]
        rows.append(
            [
                f"{each['name']}",
                name(each["group"], 24),
                str(each["number"]),
                amount(each["bytes"], "B") if each["bytes"] is not None else "-",
                str(each["last_rank"]) if each["last_rank"] is not None else "not known",
                duration(max(arrivals) / 1e6) if arrivals else "not known",
                f"{duration(waits[most] / 1e6)} (rank {most})" if most is not None and waits[most] > 0 else "none",
                "yes" if each["asynchronous"] else "no",
            ]
        )
    if not rows:
        return None
    longest = "longest wait of those shown" if shown["ranks_left_out"] else "longest wait"
    headers = [
        "collective",
        "group",
        "number",
        "bytes",
        "last to arrive",
        "after the first rank",
        longest,
        "asynchronous",
    ]
    caption = f"Collectives of step {shown['step']} that were joined over its ranks, in the order of their ends"
    count = len(shown["collectives"])
    note = f"{len(rows)} of {count}; " if len(rows) < count else ""
    note += "after the first rank: how much later the last rank arrived. The wait of an asynchronous collective is how "
    note += "much earlier a rank issued it."
    made = [table(caption, headers, rows, texts=(0, 1)), tag("p", note, class_="note")]
    return tag("div", made, class_="of-first-step")


def _ranks(shown: StepTraceRow) -> Element:
    rows = []
    for trace in shown["ranks"]:
        waited = [_wait_of(each, trace["rank"]) for each in shown["collectives"] if not each["asynchronous"]]
        known = [wait for wait in waited if wait is not None]
        spans = sum(len(row["kind"]) for row in trace["rows"])
        begin = trace["offset_us"]
        rows.append(
            [
                str(trace["rank"]),
                "not known" if begin is None else duration(begin / 1e6),
                duration(trace["duration_us"] / 1e6),
                duration(sum(known) / 1e6) if known else "-",
                str(sum(each["last_rank"] == trace["rank"] for each in shown["collectives"])),
                str(spans),
            ]
        )
    headers = ["rank", "start after the first rank", "step", "wait in joined collectives", "last to arrive in", "spans"]
    caption = f"Step {shown['step']} by rank"
    made = details("The step as a table", table(caption, headers, rows, texts=()))
    made.set("class", "of-first-step")
    return made


def _wait_of(each: CollectiveJoined, rank: int) -> float | None:
    return each["wait_us"].get(str(rank))


def _all_steps(steps: list[StepTraceRow]) -> Element:
    rows = [
        [
            str(each["step"]),
            each["why"],
            duration(max(trace["duration_us"] for trace in each["ranks"]) / 1e6),
            str(len(each["ranks"])),
            str(len(each["collectives"])),
        ]
        for each in steps[:_MAX_STEPS]
    ]
    headers = ["step", "why", "longest rank", "ranks", "collectives joined"]
    return details(
        f"All {len(steps)} steps that this page holds whole",
        table("With scripts, the time line above shows any of them", headers, rows, texts=(1,)),
    )
