"""Verdicts on earlier parts of the run, and sentences on the period of a verdict. Pure."""

from __future__ import annotations

import datetime

from torchlens_perf.analysis.statistics.quantities import (
    format_count,
    format_duration,
    format_percent,
)
from torchlens_perf.run.verdicts import format_step_range
from torchlens_perf.verdicts.kinds import NOT_COMPUTING_KINDS, past_kind
from torchlens_perf.verdicts.verdict import (
    Evidence,
    Period,
    Verdict,
)
from torchlens_perf.verdicts.words.bottleneck import TimeShare, action_against
from torchlens_perf.verdicts.words.evidence import LIMITS
from torchlens_perf.verdicts.words.phases import within_sentence
from torchlens_perf.verdicts.words.report import Facts


class RunPartEvidence(Evidence, frozen=True, tag="run_part"):
    """Evidence on a part of the run that was limited by something else than the rest.

    Times are seconds per step, as means over the ranks.
    """

    kinds = (*LIMITS, *map(past_kind, NOT_COMPUTING_KINDS))
    step_s: float
    spent_s: float
    """Time of the limit in this part of the run, such as data loading."""
    what: str
    """The limit in words."""
    rest_s: float
    """Time of the limit in the rest of the run; for computing, the time of a step there."""
    everywhere: bool
    """True if rest_s was measured in all of the rest."""

    def describe(self, verdict: Verdict) -> list[str]:
        held, spent = verdict.held, format_duration(self.spent_s)
        assert held is not None
        assert held.since_step is not None
        share = format_percent(self.spent_s / self.step_s)
        takes = f"{share} ({spent}) of a step of {format_duration(self.step_s)}"
        rest = format_duration(self.rest_s) if self.rest_s else "none"
        if verdict.kind == "compute_bound":
            rest = f"a step took {rest}"
        elif not self.everywhere:
            rest = f"where it was measured, {rest}"
        if held.until_step is not None:
            when = format_step_range(held.since_step, held.until_step)
            return [
                f"{self.what} took {takes} {when}; in the rest of the run, {rest}.",
                "It is over: no action is needed unless it returns.",
            ]
        what = within_sentence(self.what)
        return [f"Since step {held.since_step}, {what} takes {takes}; before, {rest}."]


def build_run_part_verdict(
    use: TimeShare, evidence: RunPartEvidence, held: Period, report: Facts
) -> Verdict:
    """Return a verdict on the limit of the steps of a part of the run. held: the part."""
    lasts, computes = held.until_step is None, use.kind == "compute_bound"
    return Verdict(
        kind=use.kind if lasts else past_kind(use.kind),
        phase=use.phase,
        cost_s_per_step=0.0 if computes else evidence.spent_s,
        cost_share=0.0 if computes else evidence.spent_s / evidence.step_s,
        since_step=held.since_step,
        confidence=0.8,
        advice=use.advice,
        action=action_against(use, report) if lasts else "",
        held=held,
        evidence=evidence,
    )


def describe_period(held: Period | None, started: str | None) -> str:
    """Return the end of a sentence on the period of a verdict, with its windows; "" if not known.

    started: start time of the run.
    """
    if held is None or held.since_step is None:
        return ""
    steps = format_step_range(held.since_step, held.until_step)
    times = [format_time_of_day(each, started) for each in (held.since, held.until) if each]
    lasts = held.until_step is None
    at = f" ({' to '.join(times)})" if times and (lasts or len(times) == 2) else ""
    if not held.windows_judged:
        return f"{steps}{at}."
    # The windows before the period count, too.
    windows = format_count(held.windows_judged, "judged window")
    some = f"{held.windows_held} of the run's {windows} of {held.window_steps} steps"
    return f"in {some}, {steps}{at}."


def format_time_of_day(at: str, started: str | None) -> str:
    """Return an ISO timestamp in the local time zone, such as "03:12:05 CET".

    The date is added if it is not the date on which the run started.
    """
    moment = datetime.datetime.fromisoformat(at).astimezone()
    began = None if started is None else datetime.datetime.fromisoformat(started).astimezone()
    is_first_day = began is not None and began.date() == moment.date()
    return f"{moment:%H:%M:%S %Z}" if is_first_day else f"{moment:%Y-%m-%d %H:%M:%S %Z}"
