"""The verdict on step times that grow over the run. Pure."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.report import Facts

_MIN_CHANGE = 0.25
"""Smallest growth of the step time from the first to the last third of the run."""


class GrowthEvidence(Evidence, frozen=True, tag="growing_steps"):
    """Evidence on step times that grow over the run. Times are medians over windows, without waits
    for a CPU."""

    first_third_s: float
    last_third_s: float
    waits_for_cpu: bool
    """True if ranks wait for CPUs in much of a typical step."""

    @property
    def change(self) -> float:
        return self.last_third_s / self.first_third_s - 1

    def describe(self, verdict: Verdict) -> list[str]:
        first, last = format_duration(self.first_third_s), format_duration(self.last_third_s)
        without = ", without CPU contention," * self.waits_for_cpu
        return [
            f"The step time of the whole job{without} grew by {format_percent(self.change)} over the"
            f" run: {first} in the first third, {last} in the last."
        ]


def build_growth_verdicts(report: Facts, *, short_of_cpus: bool) -> list[Verdict]:
    """Return a verdict if the step time of the whole job grew gradually; else []."""
    steps, trend = report["steps"], report["steps"]["trend"]
    if trend is None or not trend["is_gradual"] or trend["change"] < _MIN_CHANGE:
        return []
    return [
        Verdict(
            kind="growing_steps",
            cost_s_per_step=trend["more_s"],
            cost_share=trend["more_s"] / steps["mean_s"] if steps["mean_s"] else None,
            confidence=0.8,
            action="see what grows with the step (an episode, a sequence, a list that is never emptied).",
            evidence=GrowthEvidence(
                trend["first_third_p50_s"],
                trend["last_third_p50_s"],
                short_of_cpus and steps["by"] != DEVICE,
            ),
        )
    ]


def is_explained_by_growth(report: Facts, verdict: Verdict) -> bool:
    """Return True for a verdict on long steps without another reason if most of these steps are in
    the last third of the run."""
    history, long = report["history"], verdict.evidence.long
    if history is None or long is None or long["kinds"] or long["period"]:
        return False
    first, last = history["first_steps"][0], history["first_steps"][-1] + history["width"]
    in_last_third = [step >= last - (last - first) / 3 for step in long["steps"]]
    return 2 * sum(in_last_third) > len(in_last_third)
