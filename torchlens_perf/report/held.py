"""Since when each verdict of the report has held, in how many windows of the run; and what held for a part of it only.

Slow ranks have their episodes. What limits the step is looked up in the windows of all ranks. Hangs, slow links and
imbalances were noted by the sidecar when they were found (alerts/history.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.words import over
from torchlens_perf.analysis.words.evidence import (
    OVER,
    WASTE,
    DeviceStepEvidence,
    LongSteps,
    NobodySlowEvidence,
    PastEvidence,
    PastStragglerEvidence,
    StragglerEvidence,
    TypicalStepEvidence,
    Verdict,
)
from torchlens_perf.analysis.words.hang import HangEvidence
from torchlens_perf.report.judged_windows import JudgedWindows, Stretch
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from torchlens_perf.analysis.alerts.history import History, Noted
    from torchlens_perf.analysis.stragglers.detector import Findings
    from torchlens_perf.analysis.words.report import Held
    from torchlens_perf.report.judged_windows import Columns

_MIN_WINDOWS = 4  # that something must last for to be named beside the run as a whole
_CLEARLY = 1.5  # times what it takes in the rest of the run
_TAGS = {
    "capture": Flag.CAPTURED, "compilation": Flag.COMPILED, "evaluation": Flag.EVALUATION, "saving": Flag.CHECKPOINT,
}  # fmt: skip
Row = tuple[Verdict, "Held | None"]


@dataclasses.dataclass(frozen=True)
class RunSoFar:
    """What is known of the course of a run."""

    windows: JudgedWindows | None
    findings: Findings
    history: History
    step_time: Callable[[int, int | None], str | None]
    """When a step began, in UTC; of which rank, if that is here."""
    time: Callable[[int], str]
    """Nanoseconds of UTC as text."""
    first_step: int
    last_step: int | None
    live: bool

    def rows(self, verdicts: Sequence[Verdict]) -> list[Row]:
        """All of the report's verdicts with since when each has held, the most important first.

        verdicts: those on the run as a whole, of which what is over comes last. A hang that the run ended in is first.
        """
        whole = [(each, self._of_whole(each)) for each in verdicts]
        stretches = self._stretches(verdicts)
        noted = self._noted_before({each.kind for each in verdicts})
        last = [row for row in noted if isinstance(row[0].evidence, PastEvidence) and row[0].evidence.went_on is False]
        over_by_now = [row for row in whole if isinstance(row[0].evidence, PastStragglerEvidence)]
        over_by_now += [row for row in stretches if row[0].kind.endswith(OVER)]
        over_by_now += [row for row in noted if row not in last]
        holds = [row for row in (*whole, *stretches) if row not in over_by_now]
        return [*last, *holds, *over_by_now]

    # -- verdicts on the run as a whole

    def _of_whole(self, verdict: Verdict) -> Held | None:
        """None where it cannot be known."""
        evidence = verdict.evidence
        if isinstance(evidence, StragglerEvidence):
            return self._episode(verdict.rank, None)
        if isinstance(evidence, PastStragglerEvidence):
            return self._episode(verdict.rank, evidence.until_step)
        if isinstance(evidence, HangEvidence):
            noted = self.history.holds("hang", evidence.step)
            return self._from_to(evidence.step, None) if noted is None else self._noted(noted)
        if isinstance(evidence, dict) and "time_unix_ns" in evidence:
            return {**self._from_to(evidence["step"], None), "since": self.time(evidence["time_unix_ns"])}
        if isinstance(evidence, dict) and "kinds" in evidence:
            return self._long_steps(evidence)
        if isinstance(evidence, NobodySlowEvidence):
            return self._nobody_slow()
        found = None
        if self.windows is not None and isinstance(evidence, TypicalStepEvidence | DeviceStepEvidence):
            found = self.windows.limited_by(verdict.kind)
        elif self.windows is not None and verdict.kind == "imbalance":
            found = self.windows.out_of_balance()
        if found is not None:
            return self._stretch(found)
        noted = self.history.holds(verdict.kind)
        return None if noted is None else self._noted(noted)

    def _episode(self, rank: int | None, until: int | None) -> Held | None:
        """until: its until_step."""
        of_rank = (each for each in self.findings.episodes if each.rank == rank)
        episode = next((each for each in of_rank if each.until_step == until), None)
        if episode is None:
            return None
        since = 0 if episode.from_start else episode.since_step
        if self.windows is None:
            return self._from_to(since, until, rank)
        judged = self.windows.compared_with_others(episode.rank)
        return self._from_to(since, until, rank, self.windows.covered(episode) & judged, judged)

    def _nobody_slow(self) -> Held | None:
        """Since the last episode, or from the start."""
        if self.windows is None:
            return None
        ends = [each.until_step for each in self.findings.episodes if each.until_step is not None]
        since, judged = max(ends, default=self.first_step), self.windows.anybody_compared
        later = self.windows.windows.covered(since, None)
        return self._from_to(since, None, None, judged & later & ~self.windows.anybody_slow, judged)

    def _long_steps(self, long: LongSteps) -> Held | None:
        """Of steps that did something which windows know of: in how many windows there were some."""
        if self.windows is None or not long["kinds"] or long["kinds"][0] not in _TAGS:
            return None
        tagged = self.windows.tagged(_TAGS[long["kinds"][0]])
        if not tagged.any():
            return None
        windows = self.windows.windows
        since, last = windows.first_steps[np.flatnonzero(tagged)[[0, -1]]].tolist()
        until: int | None = last + windows.width
        if tagged[-1] or (long["period"] and last + windows.width + 2 * long["period"] > windows.last_step):
            until = None
        return self._from_to(max(self.first_step, since), until, None, tagged, np.ones(len(windows), bool))

    # -- what held for a part of the run

    def _stretches(self, verdicts: Sequence[Verdict]) -> list[Row]:
        """Parts of the run whose steps something else limits than the rest, where it is known what limits the whole."""
        if not any(isinstance(each.evidence, TypicalStepEvidence | DeviceStepEvidence) for each in verdicts):
            return []
        found = [self._stretch_of(kind) for kind in WASTE if kind not in {each.kind for each in verdicts}]
        return [row for row in found if row is not None]

    def _stretch_of(self, kind: str) -> Row | None:
        if self.windows is None:
            return None
        found = self.windows.limited_by(kind)
        if found is None or found.inside.sum() < _MIN_WINDOWS:
            return None
        columns = list(zip(self.windows.spent, found.inside.tolist(), found.judged.tolist(), strict=True))
        inside = [each for each, in_it, _ in columns if each is not None and in_it]
        rest = [each for each, in_it, judged in columns if each is not None and judged and not in_it]
        use_s, rest_s = (_mean([each.wait(kind).seconds for each in some]) for some in (inside, rest))
        if not rest or use_s < _CLEARLY * rest_s:
            return None
        held, step_s = self._stretch(found), _mean([each.step_s for each in inside])
        use = dataclasses.replace(inside[0].wait(kind), seconds=use_s)
        assert held["since_step"] is not None
        return over.stretch(use, step_s, rest_s, held["since_step"], held["until_step"]), held

    def _noted_before(self, shown: set[str]) -> list[Row]:
        """What the sidecar has noted and is over, the newest first; also what stood when the run ended and is not
        found any more. shown: kinds of verdicts."""
        past = [each for each in self.history.noted[::-1] if each.is_over or (not self.live and each.kind not in shown)]
        return [(self._over(each), self._noted(each)) for each in past]

    def _over(self, noted: Noted) -> Verdict:
        if noted.kind != "hang" or noted.since_step is None:
            return over.no_longer(noted.kind, noted.text, noted.ranks, noted.since_step)
        went_on = None if self.last_step is None else self.last_step >= noted.since_step
        return over.hang_over(noted.since_step, noted.text, noted.ranks, noted.duration_s, went_on=went_on)

    # -- as the report has it

    def _stretch(self, found: Stretch) -> Held:
        return self._from_to(max(self.first_step, found.since_step), found.until_step, None, found.held, found.judged)

    def _noted(self, noted: Noted) -> Held:
        until = None if noted.until_unix_ns is None else self.time(noted.until_unix_ns)
        return _held(noted.since_step, noted.until_step, self.time(noted.since_unix_ns), until)

    def _from_to(
        self,
        since: int,
        until: int | None,
        rank: int | None = None,
        held: Columns | None = None,
        judged: Columns | None = None,
    ) -> Held:
        """rank: whose steps tell the time. held, judged: windows, where they know of it."""
        until_time = None if until is None else self.step_time(until, rank)
        value = _held(since, until, self.step_time(since, rank), until_time)
        if self.windows is not None and held is not None and judged is not None:
            value["windows_held"], value["windows_judged"] = int(held.sum()), int(judged.sum())
            value["window_steps"] = self.windows.windows.width
        return value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _held(since_step: int | None, until_step: int | None, since: str | None, until: str | None) -> Held:
    return {
        "since_step": since_step, "until_step": until_step, "windows_held": None, "windows_judged": None,
        "window_steps": None, "since": since, "until": until,
    }  # fmt: skip
