"""Verdicts on earlier parts of the run, and sentences on the period of a verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.verdicts.verdict import OVER, WORTH_A_LINE, Period, Verdict
from torchlens_perf.verdicts.words.bottleneck import TimeShare, action_against
from torchlens_perf.verdicts.words.evidence import PastEvidence, RunPartEvidence
from torchlens_perf.verdicts.words.hang import OpenHang

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Facts


def build_run_part_verdict(
    use: TimeShare,
    step_s: float,
    rest_s: float,
    held: Period,
    report: Facts,
    *,
    everywhere: bool = True,
) -> Verdict:
    """Return a verdict on what limited the steps of a part of the run.

    held: the part. use: the limit, with its time per step in this part of the run. rest_s: the
    limit's time per step in the rest of the run. everywhere: True if rest_s was measured in all of
    the rest.
    """
    since_step, until_step = held.since_step, held.until_step
    assert since_step is not None
    share = use.seconds / step_s
    takes = f"{format_percent(share)} ({format_duration(use.seconds)}) of a step of {format_duration(step_s)}"
    rest = f"{'' if everywhere else 'where it was measured, '}{format_duration(rest_s)}"
    action = ""
    if until_step is None:
        action = action_against(use, report)
        what = use.what[0].lower() + use.what[1:]
        text = f"Since step {since_step}, {what} takes {takes}; before, {rest}."
    else:
        text = (
            f"{use.what} took {takes} {format_step_range(since_step, until_step)}; in the rest of the"
            f" run, {rest}."
        )
    kind = use.kind if until_step is None else f"{use.kind}{OVER}"
    return Verdict(
        kind=kind,
        phase=use.phase,
        cost_s_per_step=use.seconds,
        cost_share=share,
        since_step=since_step,
        confidence=0.8,
        text=text,
        advice=use.advice,
        action=action,
        held=held,
        evidence=RunPartEvidence(step_s, use.seconds, rest_s),
    )


def build_compute_verdict(
    computing: TimeShare, step_s: float, before_s: float, held: Period, report: Facts
) -> Verdict:
    """Return a verdict that computing limits the newest steps, but did not limit earlier steps.

    before_s: mean duration of an earlier step.
    """
    share = computing.seconds / step_s
    text = (
        f"Since step {held.since_step}, computing takes {format_percent(share)} ({format_duration(computing.seconds)})"
        f" of a step of {format_duration(step_s)}; before, a step took {format_duration(before_s)}."
    )
    return Verdict(
        kind=computing.kind,
        phase=computing.phase,
        cost_s_per_step=0.0,
        cost_share=0.0,
        since_step=held.since_step,
        confidence=0.8,
        text=text,
        advice=computing.advice,
        action=action_against(computing, report),
        held=held,
        evidence=RunPartEvidence(step_s, computing.seconds, 0.0),
    )


def build_ended_hang_verdict(
    hang: OpenHang, *, went_on: bool | None, steps: int, total_s: float
) -> Verdict:
    """Return a verdict on a hang that has ended.

    went_on: True if later steps were finished. steps, total_s: number and time of all steps of the
    run.
    """
    lost_s = hang.since_s
    lasted = f" for {format_duration(lost_s)}" if lost_s else ""
    then = {True: ", and went on", False: ", and ended in it", None: ""}[went_on]
    share = lost_s / max(total_s, lost_s) if lost_s else 0.0
    cost = (
        f": {format_percent(share)} of all step time" if went_on and share >= WORTH_A_LINE else ""
    )
    text = f"The job hung in step {hang.step}{lasted}{then}{cost}. {hang.finding}".rstrip()
    return Verdict(
        kind=f"hang{OVER}",
        rank=hang.ranks[0] if hang.ranks else None,
        cost_s_per_step=lost_s / max(1, steps),
        cost_share=share,
        since_step=hang.step,
        confidence=0.9,
        text=text,
        action=hang.action if went_on is False or cost else "",
        evidence=PastEvidence(hang.ranks, hang.since_s, went_on, hang.stacks),
    )


def build_ended_verdict(
    kind: str, text: str, ranks: Sequence[int], since_step: int | None
) -> Verdict:
    """Return a verdict on a finding that has ended. text: the newest sentence on the finding."""
    return Verdict(
        kind=f"{kind}{OVER}",
        since_step=since_step,
        confidence=0.5,
        text=f"No longer: {text}",
        evidence=PastEvidence(tuple(ranks), None, None, {}),
    )


def describe_period(held: Period | None, started: str | None) -> str:
    """Return a sentence on the period of a verdict, with its windows; "" if not known.

    started: start time of the run.
    """
    if held is None or held.since_step is None:
        return ""
    steps = format_step_range(held.since_step, held.until_step)
    times = [_time_of_day(each, started) for each in (held.since, held.until) if each is not None]
    lasts = held.until_step is None
    at = f" ({' to '.join(times)} UTC)" if times and (lasts or len(times) == 2) else ""
    if not held.windows_judged:
        return f"Held {steps}{at}."
    windows = format_count(held.windows_judged, "window")
    some = f"{held.windows_held} of {windows} of {held.window_steps} steps"
    return f"Held in {some}, {steps}{at}."


def _time_of_day(at: str, started: str | None) -> str:
    """Return the time of day of an ISO timestamp.

    The date is added if it is not the date on which the run started.
    """
    day, _, clock = at.partition("T")
    seconds = clock[:8]
    return seconds if started is not None and started.startswith(day) else f"{day} {seconds}"
