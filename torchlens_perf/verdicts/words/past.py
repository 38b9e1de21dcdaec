"""Verdicts on earlier parts of the run, and sentences on the period of a verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.run.verdicts import Alert, format_step_range
from torchlens_perf.verdicts.words.evidence import (
    OVER,
    JudgedVerdict,
    PastEvidence,
    RunPartEvidence,
    make_verdict,
)
from torchlens_perf.verdicts.words.order import WORTH_A_LINE, has_ended

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.bottleneck import TimeShare
    from torchlens_perf.verdicts.words.report import Period


def build_run_part_verdict(
    use: TimeShare,
    step_s: float,
    rest_s: float,
    since_step: int,
    until_step: int | None,
    *,
    everywhere: bool = True,
) -> JudgedVerdict:
    """Return a verdict on what limited the steps in range(since_step, until_step).

    until_step: None if the newest steps are still limited. use: the limit, with its time per step
    in this part of the run. rest_s: the limit's time per step in the rest of the run. everywhere:
    True if rest_s was measured in all of the rest.
    """
    share = use.seconds / step_s
    takes = f"{format_percent(share)} ({format_duration(use.seconds)}) of a step of {format_duration(step_s)}"
    rest = f"{'' if everywhere else 'where it was measured, '}{format_duration(rest_s)}"
    action = ""
    if until_step is None:
        action = use.action
        what = use.what[0].lower() + use.what[1:]
        text = f"Since step {since_step}, {what} takes {takes}; before, {rest}."
    else:
        text = (
            f"{use.what} took {takes} {format_step_range(since_step, until_step)}; in the rest of the"
            f" run, {rest}."
        )
    kind = use.kind if until_step is None else f"{use.kind}{OVER}"
    evidence = RunPartEvidence(step_s, use.seconds, rest_s)
    return make_verdict(
        kind, None, use.phase, use.seconds, share, since_step, 0.8, text, action, evidence
    )


def build_compute_verdict(
    computing: TimeShare, step_s: float, before_s: float, since_step: int
) -> JudgedVerdict:
    """Return a verdict that computing limits the newest steps, but did not limit earlier steps.

    before_s: mean duration of an earlier step.
    """
    share = computing.seconds / step_s
    text = (
        f"Since step {since_step}, computing takes {format_percent(share)} ({format_duration(computing.seconds)})"
        f" of a step of {format_duration(step_s)}; before, a step took {format_duration(before_s)}."
    )
    evidence = RunPartEvidence(step_s, computing.seconds, 0.0)
    return make_verdict(
        computing.kind,
        None,
        computing.phase,
        0.0,
        0.0,
        since_step,
        0.8,
        text,
        computing.action,
        evidence,
    )


def build_ended_hang_verdict(
    step: int, last: Alert, found: PastEvidence, *, steps: int, total_s: float
) -> JudgedVerdict:
    """Return a verdict on a hang that has ended.

    last: the newest alert on the hang. steps, total_s: number and time of all steps of the run.
    """
    lost_s, went_on = found.duration_s or 0.0, found.went_on
    lasted = f" for {format_duration(lost_s)}" if lost_s else ""
    then = {True: ", and went on", False: ", and ended in it", None: ""}[went_on]
    finding = last.text.partition(". ")[2]
    share = lost_s / max(total_s, lost_s) if lost_s else 0.0
    cost = (
        f": {format_percent(share)} of all step time" if went_on and share >= WORTH_A_LINE else ""
    )
    text = f"The job hung in step {step}{lasted}{then}{cost}. {finding}".rstrip()
    action = last.next if went_on is False or cost else ""
    rank = found.ranks[0] if found.ranks else None
    return make_verdict(
        f"hang{OVER}", rank, None, lost_s / max(1, steps), share, step, 0.9, text, action, found
    )


def build_ended_verdict(
    kind: str, text: str, ranks: Sequence[int], since_step: int | None
) -> JudgedVerdict:
    """Return a verdict on a finding that has ended. text: the newest sentence on the finding."""
    evidence = PastEvidence(tuple(ranks), None, None, {})
    return make_verdict(
        f"{kind}{OVER}", None, None, None, None, since_step, 0.5, f"No longer: {text}", "", evidence
    )


def describe_period(held: Period | None, started: str | None) -> str:
    """Return a sentence on the period of a verdict, with its windows; "" if not known.

    started: start time of the run.
    """
    if held is None or held["since_step"] is None:
        return ""
    steps, windows = (
        format_step_range(held["since_step"], held["until_step"]),
        held["windows_judged"],
    )
    times = [
        _time_of_day(each, started) for each in (held["since"], held["until"]) if each is not None
    ]
    at = (
        f" ({' to '.join(times)} UTC)" if times and (not has_ended(held) or len(times) == 2) else ""
    )
    if not windows:
        return f"Held {steps}{at}."
    some = f"{held['windows_held']} of {format_count(windows, 'window')} of {held['window_steps']} steps"
    return f"Held in {some}, {steps}{at}."


def _time_of_day(at: str, started: str | None) -> str:
    """Return the time of day of an ISO timestamp.

    The date is added if it is not the date on which the run started.
    """
    day, _, clock = at.partition("T")
    seconds = clock[:8]
    return seconds if started is not None and started.startswith(day) else f"{day} {seconds}"
