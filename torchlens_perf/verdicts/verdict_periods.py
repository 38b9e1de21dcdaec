"""Periods of the report's verdicts, and verdicts on a part of the run.

The period of a verdict is the range of steps in which it was true. A slow rank's period is its
episode. For the limit of the step, such as data loading, the period is found in the windows of all
ranks. For hangs, slow links and imbalances, the sidecar has recorded the period (finding_log.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
from msgspec import structs

from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.analysis.statistics.step_mix import STOPPED
from torchlens_perf.run.records import WITHOUT_GRADIENTS
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.finding_log import Finding, FindingRecords
from torchlens_perf.verdicts.judged_windows import JudgedWindows, RunPart, WindowMask
from torchlens_perf.verdicts.kinds import NOT_COMPUTING_KINDS, past_kind
from torchlens_perf.verdicts.long_steps import LongSteps
from torchlens_perf.verdicts.verdict import (
    Period,
    RunLength,
    Verdict,
)
from torchlens_perf.verdicts.words import past
from torchlens_perf.verdicts.words.bottleneck import StepBreakdown, named_kinds, without_wait
from torchlens_perf.verdicts.words.evidence import PastEvidence
from torchlens_perf.verdicts.words.hang import build_ended_hang_verdict
from torchlens_perf.verdicts.words.report import Facts

# A limit of a part of the run has a verdict if the part has at least this many windows, and if the
# limit takes at least this many times as long as in the rest of the run.
_MIN_WINDOWS = 4
_MIN_RATIO_TO_REST = 1.5
_TAGS = {
    "capture": Flag.CAPTURED, "compilation": Flag.COMPILED, "evaluation": Flag.EVALUATION,
    WITHOUT_GRADIENTS: Flag.EVALUATION, "saving": Flag.CHECKPOINT, STOPPED: Flag.STOPPED,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class VerdictPeriods:
    """Find the periods of verdicts in the windows of a run and in the findings of its sidecar."""

    facts: Facts
    windows: JudgedWindows | None
    """None if the run has no windows."""
    records: FindingRecords
    step_time: Callable[[int, int | None], str | None]
    """A function that returns the UTC time at which a step began. Its second argument is the
    rank."""
    time: Callable[[int], str]
    """A function that formats UTC nanoseconds."""
    first_step: int
    run: RunLength

    def add_periods(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the report's verdicts in order, each with its period and lost time.

        verdicts: the verdicts on the run as a whole. The result also has verdicts on its parts.
        """
        shown = {each.kind for each in verdicts}
        # After the run, findings that were open at its end are included if they have no verdict.
        noted = [
            structs.replace(self._build_past_verdict(each), held=self._period_of_finding(each))
            for each in self.records.findings[::-1]
            if each.kind != "straggler"
            and (each.is_over or (not self.facts["run"]["live"] and each.kind not in shown))
        ]
        hung = {each.since_step for each in noted if each.kind == past_kind("hang")}
        # Long steps that are all steps of hangs have no verdict of their own.
        found = [
            structs.replace(each, held=self._find_period(each))
            for each in verdicts
            if (long := each.evidence.long) is None
            or len(long["steps"]) != long["count"]
            or not hung.issuperset(long["steps"])
        ]
        stretches = self._find_temporary_limits(found)
        if all(each.has_ended for each in stretches):
            # Nothing limits the newest steps more than the typical step of the run.
            found = [
                structs.replace(each, held=None)
                if each.evidence.is_of_run and each.has_ended
                else each
                for each in found
            ]
        # A wait with a separate verdict is not also named by verdicts on the typical step.
        for kind in {each.kind for each in stretches}.intersection(NOT_COMPUTING_KINDS):
            found = [
                without_wait(each, kind)
                for each in found
                if each.kind != kind or not each.evidence.is_factor
            ]
        rows = (
            structs.replace(
                each,
                lost_s=each.evidence.compute_lost_s(each, self.run),
                is_over=each.judge_is_over(),
            )
            for each in (*found, *stretches, *noted)
        )
        return sorted(rows, key=lambda row: row.sort_key)

    # -- verdicts on the run as a whole

    def _find_period(self, verdict: Verdict) -> Period | None:
        """Return the period of a verdict on the whole run; None if it is not known."""
        evidence = verdict.evidence
        if verdict.held is not None:
            return self._period_of_episode(verdict, verdict.held)
        if evidence.failed_at is not None:
            step, unix_ns = evidence.failed_at
            return Period(since_step=step, until_step=None, since=self.time(unix_ns))
        if evidence.long is not None:
            return self._period_of_long_steps(evidence.long)
        if verdict.kind == "none" and not verdict.is_undecided:
            return self._period_without_slow_rank()
        found = None
        if self.windows is not None and evidence.is_of_run:
            found = self.windows.find_part_limited_by(verdict.kind)
        elif self.windows is not None and verdict.kind == "imbalance":
            found = self.windows.find_imbalanced_part()
        if found is not None:
            return self._period_of_run_part(found)
        began = verdict.since_step
        noted = self.records.find_open(verdict.kind, began)
        if noted is not None:
            return self._period_of_finding(noted)
        return (
            self._period_between(began, None)
            if verdict.kind == "hang" and began is not None
            else None
        )

    def _period_of_episode(self, slow: Verdict, episode: Period) -> Period:
        since, until = episode.since_step, episode.until_step
        assert since is not None
        assert slow.rank is not None
        if self.windows is None:
            return self._period_between(since, until, slow.rank)
        judged = self.windows.windows_comparing_rank(slow.rank)
        held = self.windows.windows_of_episode(since, until) & judged
        return self._period_between(since, until, slow.rank, held, judged)

    def _period_without_slow_rank(self) -> Period | None:
        """Return the period since the last slow rank recovered, or since the start."""
        if self.windows is None:
            return None
        ends = [each.until_step or 0 for each in self.windows.findings.slow_before]
        since, judged = max(ends, default=self.first_step), self.windows.compared_windows
        later = self.windows.windows.columns_between(since, None)
        return self._period_between(
            since, None, None, judged & later & ~self.windows.slow_windows, judged
        )

    def _period_of_long_steps(self, long: LongSteps) -> Period | None:
        """Return the period of a class of long steps that recur regularly; None without a tag.

        Windows have tags for what their steps did, such as evaluation. The windows of a class
        without a tag are not known, so the verdict's sentence lists its steps.
        """
        if (
            self.windows is None
            or not long["period"]
            or not long["kinds"]
            or long["kinds"][0] not in _TAGS
        ):
            return None
        tag = _TAGS[long["kinds"][0]]
        tagged = np.array([bool(flags & tag) for flags in self.windows.windows.tags])
        if not tagged.any():
            return None
        windows = self.windows.windows
        since, last = windows.first_steps[np.flatnonzero(tagged)[[0, -1]]].tolist()
        until: int | None = last + windows.width
        if tagged[-1] or last + windows.width + 2 * long["period"] > windows.last_step:
            until = None
        return self._period_between(
            max(self.first_step, since), until, None, tagged, np.ones(len(windows), bool)
        )

    # -- verdicts on a part of the run

    def _find_temporary_limits(self, whole: Sequence[Verdict]) -> list[Verdict]:
        """Return verdicts on parts of the run that were limited by something else than the rest.

        Limits that the verdict on the whole run names are left out, unless that verdict is over.
        """
        typical = next((each for each in whole if each.evidence.is_of_run), None)
        if typical is None:
            return []
        slow = any(each.kind == "straggler" for each in whole)
        is_over = typical.has_ended
        named = {typical.kind} if is_over else named_kinds(typical)
        kinds = [
            kind
            for kind in NOT_COMPUTING_KINDS
            if kind not in named and not (slow and kind == "communication_bound")
        ]
        found = [*filter(None, map(self._find_limit_of_part, kinds))]
        if is_over and all(each.has_ended for each in found):
            found += filter(None, [self._find_limit_of_part("compute_bound")])
        return found

    def _find_limit_of_part(self, kind: str) -> Verdict | None:
        """Return the verdict that one kind of time limits a part of the run; None without a part.

        Computing is a limit only of the newest steps.
        """
        found = None if self.windows is None else self.windows.find_part_limited_by(kind)
        if self.windows is None or found is None or found.inside.sum() < _MIN_WINDOWS:
            return None
        inside = _breakdowns_in(self.windows, found.inside)
        is_computing = kind == inside[0].computing.kind
        # Steps in which a rank was slow also show how long a step took before.
        rest = _breakdowns_in(self.windows, ~found.inside & (found.judged | is_computing))
        everywhere = kind != "lack_of_cpu" or bool(found.judged.all())
        if len(rest) < (1 if everywhere else _MIN_WINDOWS):
            return None
        uses = [each.computing if is_computing else each.wait_of_kind(kind) for each in inside]
        spent_s = fmean([each.seconds for each in uses])
        rest_s = fmean(
            [each.step_s if is_computing else each.wait_of_kind(kind).seconds for each in rest]
        )
        too_small = not is_computing and spent_s < _MIN_RATIO_TO_REST * rest_s
        if too_small or (is_computing and found.until_step is not None):
            return None
        held, step_s = self._period_of_run_part(found), fmean([each.step_s for each in inside])
        what = "Computing" if is_computing else uses[0].what
        evidence = past.RunPartEvidence(step_s, spent_s, what, rest_s, everywhere)
        return past.build_run_part_verdict(uses[0], evidence, held, self.facts)

    def _build_past_verdict(self, noted: Finding) -> Verdict:
        if noted.hang is None:
            return Verdict(
                kind=past_kind(noted.kind),
                since_step=noted.since_step,
                confidence=0.5,
                evidence=PastEvidence(noted.alert.text, ranks=tuple(noted.alert.ranks)),
            )
        step, last = noted.hang.step, self.run.last_step
        # The total time of steps excludes the warm-up, but a run may hang in the warm-up.
        total_s = self.facts["steps"]["total_s"]
        if step < self.first_step + WARM_UP_STEPS:
            total_s += noted.hang.since_s
        return build_ended_hang_verdict(
            noted.hang,
            went_on=None if last is None else last >= step,
            steps=self.run.steps,
            total_s=total_s,
        )

    # -- conversion to the report's type

    def _period_of_run_part(self, found: RunPart) -> Period:
        return self._period_between(
            max(self.first_step, found.since_step), found.until_step, None, found.held, found.judged
        )

    def _period_of_finding(self, noted: Finding) -> Period:
        until = None if noted.until_unix_ns is None else self.time(noted.until_unix_ns)
        return Period(
            since_step=noted.since_step,
            until_step=noted.until_step,
            since=self.time(noted.since_unix_ns),
            until=until,
        )

    def _period_between(
        self,
        since: int,
        until: int | None,
        rank: int | None = None,
        held: WindowMask | None = None,
        judged: WindowMask | None = None,
    ) -> Period:
        """Return the period between two steps.

        rank: the rank whose steps are used for the times. held: windows in which the verdict was
        true. judged: windows in which it could be true or false. `held` and `judged` are None
        without windows.
        """
        period = Period(
            since_step=since,
            until_step=until,
            since=self.step_time(since, rank),
            until=None if until is None else self.step_time(until, rank),
        )
        if self.windows is None or held is None or judged is None:
            return period
        return structs.replace(
            period,
            windows_held=int(held.sum()),
            windows_judged=int(judged.sum()),
            window_steps=self.windows.windows.width,
        )


def _breakdowns_in(windows: JudgedWindows, there: WindowMask) -> list[StepBreakdown]:
    found = zip(windows.breakdowns, there.tolist(), strict=True)
    return [each for each, is_there in found if each is not None and is_there]
