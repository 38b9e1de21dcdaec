"""The verdict on step times that grow over the run. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.verdicts.verdict import Evidence, Verdict

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Facts

_MIN_CHANGE = 0.25
"""Smallest growth of the step time from the first to the last third of the run."""
_MIN_CHANGE_WITHOUT_CPUS = 1.0
"""Smallest growth if ranks lack CPUs. The load of the machine may cause a smaller growth."""


class GrowthEvidence(Evidence, frozen=True, tag="growing_steps"):
    """Evidence on step times that grow over the run. Times are medians over windows."""

    first_third_s: float
    last_third_s: float
    later_is_slower: float
    """Share of all pairs of windows in which steps of the later window take longer."""

    @property
    def change(self) -> float:
        return self.last_third_s / self.first_third_s - 1

    def describe(self, verdict: Verdict) -> str:
        first, last = format_duration(self.first_third_s), format_duration(self.last_third_s)
        return (
            f"The step time of the whole job grew by {format_percent(self.change)} over the run:"
            f" {first} in the first third, {last} in the last."
        )


def build_growth_verdicts(report: Facts, *, short_of_cpus: bool) -> list[Verdict]:
    """Return a verdict if the step time of the whole job grew gradually; else []."""
    trend, history = report["steps"]["trend"], report["history"]
    min_change = _MIN_CHANGE_WITHOUT_CPUS if short_of_cpus else _MIN_CHANGE
    if trend is None or history is None:
        return []
    if not trend["is_gradual"] or trend["change"] < min_change:
        return []
    means_s = history["median_s"]
    later = [after > before for before, after in itertools.combinations(means_s, 2)]
    first_s, last_s = trend["first_third_p50_s"], trend["last_third_p50_s"]
    cost_s = sum(max(0.0, each - first_s) for each in means_s) / len(means_s)
    action = "see what grows with the step (an episode, a sequence, a list that is never emptied)."
    return [
        Verdict(
            kind="growing_steps",
            cost_s_per_step=cost_s,
            cost_share=cost_s * len(means_s) / sum(means_s),
            confidence=0.8,
            action=action,
            evidence=GrowthEvidence(first_s, last_s, sum(later) / len(later)),
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
