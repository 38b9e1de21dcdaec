"""The log of a run's findings. No other module records when findings start and end.

Every change raises an alert. The alert's id is made from the run, the attempt and the subject of
the finding. A restarted sidecar and a replay therefore raise the same alerts with the same ids.

Ranks that are slow together, such as those of a slow node, are one finding. The finding's id is
made from the rank that was named first. If more of these ranks become slow, the finding is updated.
A rank that already has a separate finding keeps it. The finding ends when its last rank is no
longer slow. A replay judges a whole run at once, so it uses the steps at which ranks were named to
decide which ranks were slow together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import structs

from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.verdicts import ENDED, UPDATED, Alert
from torchlens_perf.verdicts.alert import AlertBuilder
from torchlens_perf.verdicts.causes.straggler_groups import find_straggler_groups
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Diagnosis, Findings, StragglerGroup
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.hang import HangEvidence, build_hang_verdict
from torchlens_perf.verdicts.words.phases import phase_name
from torchlens_perf.verdicts.words.stragglers import (
    SlowRankContext,
    build_past_verdict,
    build_slow_verdict,
)

# Above this number of findings, the oldest ended findings are removed.
MAX_KEPT = 32
# A verdict close to its threshold appears and disappears. A finding ends after this time without
# its verdict.
_MAX_ABSENCE_NS = 60_000_000_000


@dataclasses.dataclass
class Finding:
    """A straggler, a hang, slow links or an imbalance. Times are UTC."""

    alert: Alert
    """The newest alert on the finding."""
    since_step: int | None
    """The first step. For slow links and an imbalance, the step in which they were found."""
    since_unix_ns: int
    until_step: int | None = None
    """The first step after the end; None while the finding is open."""
    until_unix_ns: int | None = None
    episodes: tuple[Episode, ...] = ()
    """For a straggler, the episodes of its ranks, including ended episodes."""
    name: str = ""
    """For a straggler, the name of its StragglerGroup."""
    hang: HangEvidence | None = None
    """The newest state of the hang, with its longest duration and with the stacks that were
    read."""
    subjects: list[str] = dataclasses.field(default_factory=list)
    """The reported slow links, sorted."""
    seen_ns: int = 0
    """Time of the last verdict on the finding; 0 after a restart of the sidecar."""

    @property
    def kind(self) -> str:
        return self.alert.kind

    @property
    def is_over(self) -> bool:
        return self.until_unix_ns is not None

    @property
    def slowest_episode(self) -> Episode:
        return max(self.episodes, key=lambda episode: episode.excess_ns)

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        return tuple(sorted({episode.rank for episode in self.episodes}))


@dataclasses.dataclass
class FindingRecords:
    """The findings of one attempt of the job, as saved in the node's state."""

    attempt: int = -1
    alone: str = ""
    """The name of the node that made the findings if it judged only its own ranks; else ""."""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    """The findings, oldest first. Ended stragglers are removed, because the detector keeps their
    episodes."""
    hung_s: dict[int, dict[int, float]] = dataclasses.field(default_factory=dict)
    """Duration of each hang by attempt and step, of all attempts."""

    @property
    def open_findings(self) -> list[Finding]:
        """The findings that have not ended."""
        return [each for each in self.findings if not each.is_over]

    def find_open(self, kind: str, since_step: int | None = None) -> Finding | None:
        """Return the open finding of a kind; None if there is no such finding.

        since_step: for a hang, the step in which the job hangs.
        """
        found = (each for each in self.open_findings if each.kind == kind)
        return next((each for each in found if since_step in (None, each.since_step)), None)


class FindingLog:
    """Records findings, and raises an alert for each change. Not thread-safe."""

    def __init__(
        self, run_id: str, saved: FindingRecords | None = None, findings: Findings = NOTHING
    ) -> None:
        """Start a log, or resume the log of an earlier sidecar of the node.

        saved, findings: state of the earlier sidecar, which has already raised alerts on these
        findings.
        """
        self._run_id = run_id
        self.records = FindingRecords() if saved is None else saved
        self._alerted = {episode.key for episode in findings.episodes}
        self._hang_is_saved = saved is not None
        for each in self.records.open_findings:
            each.seen_ns = 0

    def record_changes(
        self,
        attempt: int,
        findings: Findings,
        hang: HangEvidence | None,
        places: Mapping[int, Placement],
        unix_ns: int,
        *,
        at_step: int | None = None,
        last_step: int | None = None,
        judge: str | None = "",
        verdicts: Sequence[Verdict] = (),
        context: Callable[[], SlowRankContext] | None = None,
        diagnosed: Callable[[StragglerGroup], Diagnosis | None] | None = None,
    ) -> tuple[Alert, ...]:
        """Record the changes since the last call, and return their alerts.

        findings, hang: the present state of the job. unix_ns: the present time.
        at_step: the furthest step in progress; None if no process runs. last_step: the newest
        finished step.
        judge: "" if this node judges all ranks; the name of this node if it judges only its own
        ranks, because node 0 cannot be reached. `judge` is None if another node judges, which ends
        all findings here.
        verdicts: other verdicts that hold now, such as an imbalance. A finding on one of them ends
        after a minute without its verdict.
        context: returns the report's values that sentences need. diagnosed: returns the diagnosis
        of a straggler. context() and diagnosed() are called only when a straggler is reported.
        """
        cached = functools.cache(SlowRankContext if context is None else context)
        now = AlertBuilder(
            self._run_id,
            attempt,
            findings,
            places,
            unix_ns,
            cached,
            diagnosed,
            judge or "",
            at_step,
            last_step,
        )
        raised: list[Alert] = []
        if attempt != self.records.attempt:
            raised += self._close_all(now, "It is over: the job was restarted.")
            self.records.findings.clear()
        elif judge != self.records.alone:
            raised += self._close_all(now, "This alert ends: another node judges this from now on.")
            self._alerted = {each.key for each in findings.slow_before}
        self.records.attempt, self.records.alone = attempt, judge or ""
        if judge is None:
            return tuple(raised)
        raised += self._record_straggler_changes(now)
        raised += self._record_hang_changes(now, hang)
        raised += self._record_other_changes(now, verdicts)
        over = [each for each in self.records.findings if each.is_over]
        for each in over[: max(0, len(self.records.findings) - MAX_KEPT)]:
            self.records.findings.remove(each)
        return tuple(raised)

    def _open_finding(self, now: AlertBuilder, alert: Alert) -> Finding:
        began_ns = now.unix_ns - round((alert.duration_s or 0.0) * 1e9)
        since_step = now.last_step if alert.since_step is None else alert.since_step
        self.records.findings.append(Finding(alert, since_step, began_ns, seen_ns=now.unix_ns))
        return self.records.findings[-1]

    def _close_finding(self, now: AlertBuilder, finding: Finding, alert: Alert) -> Alert:
        if finding.episodes:
            self.records.findings.remove(finding)
        else:
            finding.until_unix_ns = now.unix_ns
            finding.until_step = now.last_step if alert.since_step is None else alert.since_step + 1
        return alert

    def _close_all(self, now: AlertBuilder, why: str) -> Iterator[Alert]:
        """End all open findings, because ranks have new processes or another node judges them."""
        before = dataclasses.replace(now, alone=self.records.alone)
        order = {"straggler": 0, "hang": 1}
        for each in sorted(
            self.records.open_findings, key=lambda finding: order.get(finding.kind, 2)
        ):
            if each.episodes:
                alert = _end_lost_straggler(before, each, why)
            elif each.hang is not None:
                alert = _end_hang(before, each, each.hang, why)
            else:
                alert = before.end(each.alert, why)
            yield self._close_finding(now, each, alert)
        self._alerted.clear()

    # -- stragglers

    def _record_straggler_changes(self, now: AlertBuilder) -> Iterator[Alert]:
        episodes = {each.key: each for each in now.findings.episodes}
        for finding in self._open_stragglers:
            # Episodes are immutable. An updated episode is a new object with the same key.
            known = [episodes[each.key] for each in finding.episodes if each.key in episodes]
            if known:
                finding.episodes = tuple(known)
            else:
                # Findings keep the episodes of all processes that run. If all episodes of the
                # straggler are missing, its processes were replaced.
                lost = _end_lost_straggler(
                    now, finding, "It is over: the ranks were started again."
                )
                yield self._close_finding(now, finding, lost)
        self._alerted &= episodes.keys()
        new = [each for key, each in episodes.items() if key not in self._alerted]
        by_step = operator.attrgetter("named_step")
        self._alerted |= episodes.keys()
        for step, named in itertools.groupby(sorted(new, key=by_step), by_step):
            yield from self._record_newly_named(now, step, list(named))
        for finding in self._open_stragglers:
            if all(episode.is_over for episode in finding.episodes):
                yield self._close_finding(now, finding, _end_straggler(now, finding))

    @property
    def _open_stragglers(self) -> list[Finding]:
        return [each for each in self.records.open_findings if each.episodes]

    def _record_newly_named(
        self, now: AlertBuilder, step: int, named: Sequence[Episode]
    ) -> Iterator[Alert]:
        """Record the ranks that were first named as slow after a step."""
        # An episode's last_step grows while the episode is open. This condition therefore selects
        # the episodes that were open after `step`, even if the call is made much later.
        then = [
            each
            for each in now.findings.episodes
            if each.named_step <= step and (not each.is_over or each.last_step >= step)
        ]
        for group in find_straggler_groups(then, now.places):
            new = tuple(episode for episode in named if episode.rank in group.ranks)
            if group.kind == "rank":
                for episode in new:
                    of_rank = dataclasses.replace(group, lead=episode)
                    yield self._open_straggler(now, of_rank, (episode,))
            elif new:
                together = {episode.key for episode in then if episode.rank in group.ranks}
                joined = [
                    each
                    for each in self._open_stragglers
                    if together & {episode.key for episode in each.episodes}
                ]
                if not joined:
                    yield self._open_straggler(now, group, new)
                    continue
                finding = min(joined, key=lambda each: min(e.key[::-1] for e in each.episodes))
                finding.name, finding.episodes = group.name, (*finding.episodes, *new)
                finding.alert = now.follow(
                    finding.alert, _judge(now, group), UPDATED, step, format_ranges(group.ranks)
                )
                yield finding.alert

    def _open_straggler(
        self, now: AlertBuilder, group: StragglerGroup, episodes: tuple[Episode, ...]
    ) -> Alert:
        key = min(episode.key for episode in episodes)
        alert = now.start("straggler", _judge(now, group), "straggler", *key)
        finding = self._open_finding(now, alert)
        finding.name, finding.episodes = group.name, episodes
        return alert

    # -- hangs and other verdicts

    def _record_hang_changes(self, now: AlertBuilder, hang: HangEvidence | None) -> Iterator[Alert]:
        before = self.records.find_open("hang")
        if before is not None and before.hang is not None:
            stands_still = now.at_step is not None and now.at_step <= before.hang.step
            if hang is None and self._hang_is_saved and stands_still:
                # A restarted sidecar measures from its own start, so it finds the hang again later.
                return
            if hang is None or hang.step != before.hang.step:
                why = "It is over: steps continue, or the processes have ended."
                yield self._close_finding(now, before, _end_hang(now, before, before.hang, why))
                before = None
        self._hang_is_saved = False
        if hang is None:
            return
        if before is None or before.hang is None:
            alert = now.start("hang", build_hang_verdict(hang), "hang", hang.step)
            self._open_finding(now, alert).hang = hang
            yield alert
        else:
            was = before.hang
            before.hang = hang = structs.replace(
                hang, since_s=max(hang.since_s, was.since_s), stacks=hang.stacks or was.stacks
            )
            before.alert = now.follow(
                before.alert,
                build_hang_verdict(hang),
                UPDATED,
                hang.kind,
                format_ranges(hang.ranks),
            )
            if (hang.kind, hang.ranks) != (was.kind, was.ranks):
                yield before.alert
        of_attempt = self.records.hung_s.setdefault(self.records.attempt, {})
        if hang.step in of_attempt or len(of_attempt) < MAX_KEPT:
            of_attempt[hang.step] = hang.since_s

    def _record_other_changes(
        self, now: AlertBuilder, verdicts: Sequence[Verdict]
    ) -> Iterator[Alert]:
        stand = {
            each.alert.about: each
            for each in self.records.open_findings
            if not (each.episodes or each.hang)
        }
        for verdict in verdicts:
            # All slow links share one finding, because the costliest link changes over time. When
            # another link becomes slow, the finding is updated.
            about = format_ranges(sorted(verdict.ranks)) if verdict.evidence.scope else ""
            key = verdict.kind, verdict.rank, verdict.phase, verdict.since_step, about
            alert, subjects = now.start(verdict.kind, verdict, *key), verdict.evidence.subjects
            known = stand.pop(alert.about, None)
            if known is None:
                self._open_finding(now, alert).subjects = sorted(subjects)
                yield alert
                continue
            known.alert, known.seen_ns = alert, now.unix_ns
            if not subjects.issubset(known.subjects):
                known.subjects = sorted(subjects.union(known.subjects))
                yield now.follow(alert, verdict, UPDATED, *known.subjects)
        for missed in stand.values():
            missed.seen_ns = missed.seen_ns or now.unix_ns
            if now.unix_ns - missed.seen_ns >= _MAX_ABSENCE_NS:
                yield self._close_finding(now, missed, now.end(missed.alert))


def _judge(now: AlertBuilder, group: StragglerGroup) -> Verdict:
    """Return the verdict on ranks that are slow together."""
    if now.diagnosed is not None:
        group = dataclasses.replace(group, diagnosis=now.diagnosed(group))
    return build_slow_verdict(now.context(), group, now.findings)


def _end_straggler(now: AlertBuilder, slow: Finding) -> Alert:
    """Return the alert on the end of a straggler whose episodes have all ended."""
    until_step = max(episode.until_step or 0 for episode in slow.episodes)
    verdict, text = build_past_verdict(slow.slowest_episode), ""
    if len(slow.episodes) > 1:
        text = f"{_subject_and_verb(slow)} slow up to step {until_step - 1}. {verdict.text}"
    alert = now.follow(slow.alert, verdict, ENDED, text=text)
    return dataclasses.replace(alert, ranks=slow.slow_ranks, until_step=until_step)


def _end_lost_straggler(now: AlertBuilder, slow: Finding, why: str) -> Alert:
    """Return the alert on the end of a straggler whose last slow step is not known.

    why: the reason for the end, as a sentence.
    """
    lead = slow.slowest_episode
    where = f"in {phase_name(lead.phase)} from step {lead.since_step} on"
    verdict = build_past_verdict(dataclasses.replace(lead, until_step=lead.last_step + 1))
    text = f"{_subject_and_verb(slow)} slow {where}. {why}"
    alert = now.follow(slow.alert, verdict, ENDED, text=text)
    return dataclasses.replace(alert, ranks=slow.slow_ranks)


def _end_hang(now: AlertBuilder, finding: Finding, hang: HangEvidence, why: str) -> Alert:
    text = f"The job hung in step {hang.step}. {why}"
    return now.follow(finding.alert, build_hang_verdict(hang), ENDED, text=text)


def _subject_and_verb(slow: Finding) -> str:
    if slow.alert.scope == "node":
        return f"Node {slow.name} (ranks {format_ranges(slow.slow_ranks)}) was"
    if slow.alert.scope == "position":
        return f"The ranks at {slow.name} ({format_ranges(slow.slow_ranks)}) were"
    return f"Rank {slow.slowest_episode.rank} was"
