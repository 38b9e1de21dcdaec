"""Periods for which the report's verdicts have held, and verdicts that held for a part of the run
only.

A slow rank's period is its episode. Limits of the step are looked up in the windows of all ranks.
Hangs, slow links and imbalances were recorded by the sidecar when they were found
(verdicts/finding_log.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.step_mix import WITHOUT_GRADIENTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.judged_windows import JudgedWindows, Stretch
from torchlens_perf.verdicts.words import order, over
from torchlens_perf.verdicts.words.bottleneck import computing_action, named_uses, without_use
from torchlens_perf.verdicts.words.evidence import (
    OVER,
    WASTE,
    DeviceStepEvidence,
    Evidence,
    JudgedVerdict,
    LongSteps,
    NobodySlowEvidence,
    PastEvidence,
    StragglerEvidence,
    TypicalStepEvidence,
)
from torchlens_perf.verdicts.words.hang import HangEvidence

if TYPE_CHECKING:
    from torchlens_perf.verdicts.finding_log import Finding, FindingRecords
    from torchlens_perf.verdicts.judged_windows import Columns
    from torchlens_perf.verdicts.stragglers.episodes import Episode
    from torchlens_perf.verdicts.words.report import Facts, Held

# A limit of a part of the run gets a verdict if it lasts for this many windows, and takes this many
# times as long as in the rest of the run.
_MIN_WINDOWS = 4
_MIN_RATIO_TO_REST = 1.5
_TAGS = {
    "capture": Flag.CAPTURED, "compilation": Flag.COMPILED, "evaluation": Flag.EVALUATION,
    WITHOUT_GRADIENTS: Flag.EVALUATION, "saving": Flag.CHECKPOINT,
}  # fmt: skip
_Found = tuple[JudgedVerdict, "Held | None"]


@dataclasses.dataclass(frozen=True)
class VerdictTimes:
    """Periods of verdicts, from the windows of a run and the findings of its sidecar."""

    facts: Facts
    windows: JudgedWindows | None
    """None if the run has no windows."""
    records: FindingRecords
    step_time: Callable[[int, int | None], str | None]
    """Returns the time at which a step began, in UTC. The second argument is the rank."""
    time: Callable[[int], str]
    """Formats UTC nanoseconds."""
    first_step: int
    last_step: int | None

    def rows(self, verdicts: Sequence[JudgedVerdict]) -> list[order.Row]:
        """Return the report's verdicts in order, each with its period and lost time.

        verdicts: the verdicts on the run as a whole.
        """
        noted = self._recorded_before({each.kind for each in verdicts})
        hung = {each.since_step for each, _ in noted if each.kind == f"hang{OVER}"}
        found = [
            (each, self._period_in_whole_run(each))
            for each in verdicts
            if not _are_hangs(each.evidence, hung)
        ]
        stretches = self._other_limits(found)
        # A wait that has a verdict of its own is not also named by the verdict on the typical step.
        for kind in {each.kind for each, _ in stretches}:
            found = [
                (without_use(each, kind) if _is_of_typical_step(each) else each, held)
                for each, held in found
            ]
        found += [*stretches, *noted]
        steps, alike, end = (
            self.facts["steps"]["count"],
            self.facts["steps"]["alike"],
            self.last_step,
        )
        rows = (
            (each, held, order.lost_s(each, held, steps=steps, alike=alike, last_step=end))
            for each, held in found
        )
        return sorted(rows, key=order.key)

    # -- verdicts on the run as a whole

    def _period_in_whole_run(self, verdict: JudgedVerdict) -> Held | None:
        """Return the period of a verdict on the whole run; None if it is not known."""
        evidence = verdict.evidence
        if verdict.episode is not None:
            return self._episode(verdict.episode)
        if isinstance(evidence, HangEvidence):
            noted = self.records.holds("hang", evidence.step)
            return (
                self._from_to(evidence.step, None)
                if noted is None
                else self._recorded_period(noted)
            )
        if isinstance(evidence, dict) and "time_unix_ns" in evidence:
            return {
                **self._from_to(evidence["step"], None),
                "since": self.time(evidence["time_unix_ns"]),
            }
        if isinstance(evidence, dict) and "kinds" in evidence:
            return self._long_steps(evidence)
        if isinstance(evidence, NobodySlowEvidence):
            return self._nobody_slow()
        found = None
        if self.windows is not None and isinstance(
            evidence, TypicalStepEvidence | DeviceStepEvidence
        ):
            found = self.windows.limited_by(verdict.kind)
        elif self.windows is not None and verdict.kind == "imbalance":
            found = self.windows.out_of_balance()
        if found is not None:
            return self._stretch(found)
        noted = self.records.holds(verdict.kind)
        return None if noted is None else self._recorded_period(noted)

    def _episode(self, episode: Episode) -> Held:
        period = episode.since_step, episode.until_step, episode.rank
        if self.windows is None:
            return self._from_to(*period)
        judged = self.windows.compared_with_others(episode.rank)
        return self._from_to(*period, self.windows.covered(episode) & judged, judged)

    def _nobody_slow(self) -> Held | None:
        """Return the period since the last episode, or since the start."""
        if self.windows is None:
            return None
        ends = [each.until_step or 0 for each in self.windows.findings.slow_before]
        since, judged = max(ends, default=self.first_step), self.windows.anybody_compared
        later = self.windows.windows.columns_between(since, None)
        return self._from_to(since, None, None, judged & later & ~self.windows.slow_columns, judged)

    def _long_steps(self, long: LongSteps) -> Held | None:
        """Return the windows with steps of a class that comes regularly, if it has a tag.

        Windows record what a step did and not how long it took. Without a tag they would also count
        the steps of other classes and of the warm-up. The sentence on such a class lists its steps
        instead.
        """
        if (
            self.windows is None
            or not long["period"]
            or not long["kinds"]
            or long["kinds"][0] not in _TAGS
        ):
            return None
        tagged = self.windows.tagged(_TAGS[long["kinds"][0]])
        if not tagged.any():
            return None
        windows = self.windows.windows
        since, last = windows.first_steps[np.flatnonzero(tagged)[[0, -1]]].tolist()
        until: int | None = last + windows.width
        if tagged[-1] or last + windows.width + 2 * long["period"] > windows.last_step:
            until = None
        return self._from_to(
            max(self.first_step, since), until, None, tagged, np.ones(len(windows), bool)
        )

    # -- what held for a part of the run

    def _other_limits(self, whole: Sequence[_Found]) -> list[_Found]:
        """Return the parts of the run with another limit than the run as a whole.

        Limits that the sentence on the whole run names are left out, unless they no longer hold.
        """
        of_run = [row for row in whole if _is_of_typical_step(row[0])]
        if not of_run:
            return []
        (typical, held), slow = (
            of_run[0],
            any(isinstance(each.evidence, StragglerEvidence) for each, _ in whole),
        )
        is_over = order.has_ended(held)
        named = {typical.kind} if is_over else named_uses(typical)
        kinds = [
            kind
            for kind in WASTE
            if kind not in named and not (slow and kind == "communication_bound")
        ]
        found = [row for row in map(self._stretch_of, kinds) if row is not None]
        if is_over and all(order.has_ended(held) for _, held in found):
            found += self._computing_now()
        return found

    def _computing_now(self) -> list[_Found]:
        """Return a verdict that computing limits the newest steps, if something else did before."""
        found = None if self.windows is None else self.windows.limited_by("compute_bound")
        if self.windows is None or found is None or found.until_step is not None:
            return []
        columns = list(zip(self.windows.spent, found.inside.tolist(), strict=True))
        inside = [each for each, in_it in columns if each is not None and in_it]
        rest = [each for each, in_it in columns if each is not None and not in_it]
        held, step_s = self._stretch(found), _mean([each.step_s for each in inside])
        computing_s = _mean([each.computing.seconds for each in inside])
        computing = dataclasses.replace(
            inside[0].computing, seconds=computing_s, action=computing_action(self.facts)
        )
        assert held["since_step"] is not None
        before_s = _mean([each.step_s for each in rest])
        return [(over.computing_now(computing, step_s, before_s, held["since_step"]), held)]

    def _stretch_of(self, kind: str) -> _Found | None:
        if self.windows is None:
            return None
        found = self.windows.limited_by(kind)
        if found is None or found.inside.sum() < _MIN_WINDOWS:
            return None
        columns = list(
            zip(self.windows.spent, found.inside.tolist(), found.judged.tolist(), strict=True)
        )
        inside = [each for each, in_it, _ in columns if each is not None and in_it]
        rest = [
            each for each, in_it, judged in columns if each is not None and judged and not in_it
        ]
        everywhere = kind != "lack_of_cpu" or bool(found.judged.all())
        if not everywhere and len(rest) < _MIN_WINDOWS:
            return None
        use_s, rest_s = (
            _mean([each.wait(kind).seconds for each in some]) for some in (inside, rest)
        )
        if not rest or use_s < _MIN_RATIO_TO_REST * rest_s:
            return None
        held, step_s = self._stretch(found), _mean([each.step_s for each in inside])
        use = dataclasses.replace(inside[0].wait(kind), seconds=use_s)
        assert held["since_step"] is not None
        verdict = over.stretch(
            use, step_s, rest_s, held["since_step"], held["until_step"], everywhere=everywhere
        )
        return verdict, held

    def _recorded_before(self, shown: set[str]) -> list[_Found]:
        """Return the findings of the sidecar that are over, the newest first.

        After the run, these include findings that were open at its end and have no verdict.
        shown: the kinds of the report's verdicts.
        """
        found = [each for each in self.records.findings[::-1] if each.kind != "straggler"]
        past = [
            each
            for each in found
            if each.is_over or (not self.facts["run"]["live"] and each.kind not in shown)
        ]
        return [(self._verdict_on_ended(each), self._recorded_period(each)) for each in past]

    def _verdict_on_ended(self, noted: Finding) -> JudgedVerdict:
        if noted.kind != "hang" or noted.since_step is None:
            return over.no_longer(noted.kind, noted.alert.text, noted.alert.ranks, noted.since_step)
        went_on = None if self.last_step is None else self.last_step >= noted.since_step
        # The time of all steps has no warm-up, in which a run may hang as well.
        total_s = self.facts["steps"]["total_s"]
        if noted.since_step < self.first_step + WARM_UP_STEPS:
            total_s += noted.duration_s or 0.0
        found = PastEvidence(noted.alert.ranks, noted.duration_s, went_on, noted.stacks)
        return over.hang_over(
            noted.since_step,
            noted.alert,
            found,
            steps=self.facts["steps"]["count"],
            total_s=total_s,
        )

    # -- conversion to the report's type

    def _stretch(self, found: Stretch) -> Held:
        return self._from_to(
            max(self.first_step, found.since_step), found.until_step, None, found.held, found.judged
        )

    def _recorded_period(self, noted: Finding) -> Held:
        until = None if noted.until_unix_ns is None else self.time(noted.until_unix_ns)
        return _period(noted.since_step, noted.until_step, self.time(noted.since_unix_ns), until)

    def _from_to(
        self,
        since: int,
        until: int | None,
        rank: int | None = None,
        held: Columns | None = None,
        judged: Columns | None = None,
    ) -> Held:
        """Return the period between two steps.

        rank: the rank whose steps give the times. held, judged: windows, if the verdict can be
        looked up in them.
        """
        until_time = None if until is None else self.step_time(until, rank)
        value = _period(since, until, self.step_time(since, rank), until_time)
        if self.windows is not None and held is not None and judged is not None:
            value["windows_held"], value["windows_judged"] = int(held.sum()), int(judged.sum())
            value["window_steps"] = self.windows.windows.width
        return value


def _is_of_typical_step(verdict: JudgedVerdict) -> bool:
    """Return True for the verdict on the typical step of the whole run."""
    return isinstance(verdict.evidence, TypicalStepEvidence | DeviceStepEvidence)


def _are_hangs(evidence: Evidence, hung: set[int | None]) -> bool:
    """Return True if the evidence is of long steps and the job hung in each of them."""
    if not isinstance(evidence, dict) or "kinds" not in evidence:
        return False
    steps = evidence["steps"]
    return len(steps) == evidence["count"] and hung.issuperset(steps)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _period(
    since_step: int | None, until_step: int | None, since: str | None, until: str | None
) -> Held:
    return {
        "since_step": since_step, "until_step": until_step, "windows_held": None, "windows_judged": None,
        "window_steps": None, "since": since, "until": until,
    }  # fmt: skip
