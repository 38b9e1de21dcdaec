"""Alerts: what began and what ended since the last look at the findings, as finished values. Pure.

An alert's id is made from the run, its attempt and what the alert is about, so a sidecar that was started again, and a
replay, raise the same alerts under the same ids.

Ranks that are slow together, as those of a slow node, are one alert: who is called looks at the node, once. Its id is
made from the one that was named first. Those that are named later update it; one that had an alert of its own before
they were known to be together keeps that too. It ends with the last of them. A replay sees a whole run in one
look. So that it raises the same alerts, the steps at which ranks were named decide which were slow together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.alerts.alert import STARTED, UPDATED, Alert, Moment, Slow, no_modules
from torchlens_perf.analysis.causes.straggler_groups import straggler_groups
from torchlens_perf.analysis.stragglers.detector import NOTHING, Findings
from torchlens_perf.analysis.stragglers.placement import Placement
from torchlens_perf.analysis.words.evidence import SlowLinkEvidence, Verdict
from torchlens_perf.analysis.words.hang import OpenHang
from torchlens_perf.analysis.words.stragglers import SlowRankContext, cause_class
from torchlens_perf.run.rank_ranges import ranges

if TYPE_CHECKING:
    from torchlens_perf.analysis.causes.rules import Diagnosis
    from torchlens_perf.analysis.causes.straggler_groups import StragglerGroup
    from torchlens_perf.analysis.stragglers.episodes import Episode

_CLASSES = ("slow_compute", "slow_data", "slow_host", "more_work")
# So long a verdict is missed before it is over: one that is about as large as it must be comes and goes.
_OVER_NS = 60_000_000_000


@dataclasses.dataclass
class OpenVerdict:
    """Another verdict's alert that is open."""

    alert: Alert
    """As it would begin now, by the verdict as it stood last."""
    subjects: list[str]
    """All that it has reported, sorted."""
    seen_ns: int = 0
    """When it stood last."""


@dataclasses.dataclass(frozen=True)
class OpenStraggler:
    """A straggler's alert that is open, without what the findings hold: of its episodes, the keys."""

    about: tuple[int, int]
    kind: str
    name: str
    episodes: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class OpenAlerts:
    """What the saved findings do not hold of the alerts that are open."""

    attempt: int
    stragglers: tuple[OpenStraggler, ...] = ()
    verdicts: tuple[OpenVerdict, ...] = ()
    hang: OpenHang | None = None
    """Also while a sidecar that was started again has not found it anew."""
    alone: str = ""
    """The node that raised them, where it judged its own ranks alone."""


class AlertLog:
    """Which alerts have been raised, and so which are new. One thread."""

    def __init__(
        self,
        run_id: str,
        attempt: int = -1,
        findings: Findings = NOTHING,
        hang: OpenHang | None = None,
        *,
        saved: OpenAlerts | None = None,
    ) -> None:
        """What an earlier sidecar of the node has saved, and raised alerts for; saved: its open().

        Later findings go on with those, see Continuation.
        """
        self._run_id = run_id
        self._attempt = attempt
        self._alerted = {episode.key for episode in findings.episodes}
        self._open: list[Slow] = []
        self._standing: dict[str, OpenVerdict] = {}  # by Alert.about
        self._hang = hang
        self._hang_is_saved = hang is not None
        self._alone = saved.alone if saved is not None else ""
        episodes = {episode.key: episode for episode in findings.episodes}
        if saved is not None and saved.attempt == attempt:
            self._hang = hang or saved.hang
            self._hang_is_saved = self._hang is not None
            for slow in saved.stragglers:
                of = {key: episodes.pop(key) for key in slow.episodes if key in episodes}
                if of:
                    self._open.append(Slow(slow.about, slow.kind, slow.name, of))
            # They may have to be found anew.
            self._standing = {each.alert.about: dataclasses.replace(each, seen_ns=0) for each in saved.verdicts}
        left = [episode for episode in episodes.values() if not episode.is_over]
        self._open += [Slow(episode.key, "rank", "", {episode.key: episode}) for episode in left]

    def open(self) -> OpenAlerts:
        """For a log that goes on after this one."""
        return OpenAlerts(
            self._attempt,
            tuple(OpenStraggler(slow.about, slow.kind, slow.name, tuple(slow.episodes)) for slow in self._open),
            tuple(self._standing.values()),
            self._hang,
            self._alone,
        )

    @property
    def are_open(self) -> bool:
        return bool(self._open or self._standing or self._hang is not None)

    def changes(
        self,
        attempt: int,
        findings: Findings,
        hang: OpenHang | None,
        places: Mapping[int, Placement],
        unix_ns: int,
        *,
        at_step: int | None = None,
        judge: str | None = "",
        verdicts: Sequence[Verdict] = (),
        context: Callable[[], SlowRankContext] | None = None,
        diagnosed: Callable[[StragglerGroup], Diagnosis | None] | None = None,
    ) -> tuple[Alert, ...]:
        """What is new since the last call. findings and hang are those of the sidecar's state, unix_ns is now.

        at_step: the furthest step in progress; None: no process runs. judge: "" where these are findings on all ranks;
        the node's name where it judges its own alone, because node 0 is not reached; None where another node judges,
        and what is open here is over. verdicts: others that stand now, like an
        imbalance; an alert is raised when one comes, and when it has been gone for a minute. context: what sentences
        take from the report.
        diagnosed: why a straggler is slow. Both are called only when a straggler is to be reported.
        """
        cached = functools.cache(context if context is not None else no_modules)
        moment = Moment(self._run_id, attempt, findings, places, unix_ns, cached, diagnosed, judge or "")
        raised: list[Alert] = []
        if attempt != self._attempt:
            raised += self._closed(moment, "It is over: the job was restarted.")
        elif judge != self._alone:
            raised += self._closed(moment, "This alert ends: from now on, others judge it.")
            # What was over before is nothing new.
            self._alerted = {each.key for each in findings.slow_before}
        self._attempt, self._alone = attempt, judge or ""
        if judge is None:
            return tuple(raised)
        raised += self._stragglers(moment)
        raised += self._hangs(moment, hang, at_step)
        raised += self._others(moment, verdicts)
        return tuple(raised)

    def _closed(self, moment: Moment, why: str) -> Iterator[Alert]:
        """The ranks are other processes, or another node judges them: what was open is over."""
        before = dataclasses.replace(moment, attempt=self._attempt, alone=self._alone)
        if self._attempt >= 0:
            for slow in self._open:
                yield before.resolved(slow, why)
            if self._hang is not None:
                yield before.hang_over(self._hang, why)
            for each in self._standing.values():
                yield before.verdict_over(each.alert, why)
        self._hang = None
        for known in (self._open, self._alerted, self._standing):
            known.clear()

    def _stragglers(self, moment: Moment) -> Iterator[Alert]:
        episodes = {each.key: each for each in moment.findings.episodes}
        for slow in list(self._open):
            # The newest of each: what is known of it changes, and it may be another object.
            known = {key: episodes[key] for key in slow.episodes if key in episodes}
            if not known:  # findings lose none of theirs: these are of other processes
                self._open.remove(slow)
                yield moment.resolved(slow, "It is over: the ranks were started again.")
            slow.episodes = known
        self._alerted &= episodes.keys()
        new = [each for key, each in episodes.items() if key not in self._alerted]
        by_step = operator.attrgetter("named_step")
        self._alerted |= episodes.keys()
        for step, named in itertools.groupby(sorted(new, key=by_step), by_step):
            yield from self._begin(moment, step, list(named))
        for slow in list(self._open):
            if all(episode.is_over for episode in slow.episodes.values()):
                self._open.remove(slow)
                yield moment.ended(slow)

    def _begin(self, moment: Moment, step: int, named: Sequence[Episode]) -> Iterator[Alert]:
        """named: after that step."""
        # last_step grows while an episode is open: so these are those that were open then, whenever one looks.
        then = [
            each
            for each in moment.findings.episodes
            if each.named_step <= step and (not each.is_over or each.last_step >= step)
        ]
        for straggler in straggler_groups(then, moment.places):
            new = {episode.key: episode for episode in named if episode.rank in straggler.ranks}
            if straggler.kind == "rank":
                for key, episode in new.items():
                    self._open.append(Slow(key, straggler.kind, straggler.name, {key: episode}))
                    yield moment.started(self._open[-1], dataclasses.replace(straggler, lead=episode))
            elif new:
                together = {episode.key for episode in then if episode.rank in straggler.ranks}
                already_open = [slow for slow in self._open if slow.episodes.keys() & together]
                if already_open:
                    slow = min(already_open, key=lambda each: (each.about[1], each.about[0]))
                    slow.kind, slow.name, slow.episodes = straggler.kind, straggler.name, slow.episodes | new
                    yield moment.started(slow, straggler, UPDATED, step, ranges(straggler.ranks))
                else:
                    self._open.append(Slow(min(new), straggler.kind, straggler.name, new))
                    yield moment.started(self._open[-1], straggler)

    def _hangs(self, moment: Moment, hang: OpenHang | None, at_step: int | None) -> Iterator[Alert]:
        before = self._hang
        stands_still = before is not None and at_step is not None and at_step <= before.step
        if hang is None and self._hang_is_saved and stands_still:
            return  # a sidecar that was started again counts from its own start, and has not found it anew yet
        self._hang, self._hang_is_saved = hang, False
        if before is not None and (hang is None or hang.step != before.step):
            yield moment.hang_over(before, "It is over: steps are made again, or the processes have ended.")
            before = None
        if hang is None:
            return
        if before is None:
            yield moment.hang(hang, STARTED, hang.text)
            return
        self._hang = dataclasses.replace(hang, since_s=max(hang.since_s, before.since_s))
        if (hang.kind, hang.ranks) != (before.kind, before.ranks):
            yield moment.hang(self._hang, UPDATED, hang.text)

    def _others(self, moment: Moment, verdicts: Sequence[Verdict]) -> Iterator[Alert]:
        now = set()
        for verdict in verdicts:
            alert, evidence = moment.verdict(verdict), verdict.evidence
            now.add(alert.about)
            links = evidence.links if isinstance(evidence, SlowLinkEvidence) else ()
            subjects = {f"{link.group} {ranges(sorted(link.ranks))}" for link in links}
            known = self._standing.get(alert.about)
            if known is None:
                self._standing[alert.about] = OpenVerdict(alert, sorted(subjects), moment.unix_ns)
                yield alert
                continue
            known.alert, known.seen_ns = alert, moment.unix_ns
            if not subjects.issubset(known.subjects):
                known.subjects = sorted(subjects.union(known.subjects))
                yield moment.verdict(verdict, UPDATED, *known.subjects)
        for about in [about for about in self._standing if about not in now]:
            each = self._standing[about]
            each.seen_ns = each.seen_ns or moment.unix_ns  # one that was saved may have to be found anew
            if moment.unix_ns - each.seen_ns >= _OVER_NS:
                del self._standing[about]
                yield moment.verdict_over(each.alert)


def stragglers_by_class(findings: Findings) -> dict[str, int]:
    """How many ranks are slow now, of each class; also those of which there are none."""
    counts = dict.fromkeys(_CLASSES, 0)
    for episode in findings.slow_now:
        counts[cause_class(episode)] += 1
    return counts
