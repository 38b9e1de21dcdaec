"""The findings of a run, with their start and end. No other module records these.

Every change is an alert. Its id is made from the run, its attempt and the subject of the finding. A
restarted sidecar and a replay therefore raise the same alerts with the same ids.

Ranks that are slow together, such as those of a slow node, are one finding. Its id is made from the
rank that was named first. Ranks named later update it. A rank that already has a finding of its own
keeps it. The finding ends with the last of its ranks. A replay evaluates a whole run at once, so
the steps at which ranks were named decide which ranks were slow together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.verdicts import STARTED, UPDATED, Alert
from torchlens_perf.verdicts.alert import AlertContext, Straggler
from torchlens_perf.verdicts.causes.straggler_groups import straggler_groups
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.evidence import JudgedVerdict, SlowLinkEvidence
from torchlens_perf.verdicts.words.hang import OpenHang, RankStack
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, cause_class

if TYPE_CHECKING:
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis, StragglerGroup

# Above this number, the oldest findings that are over are removed.
MAX_KEPT = 32
_CLASSES = ("slow_compute", "slow_data", "slow_host", "more_work")
# A verdict that is close to its threshold comes and goes. It ends after this absence.
_MAX_ABSENCE_NS = 60_000_000_000


@dataclasses.dataclass
class Finding:
    """A straggler, a hang, slow links or an imbalance. Times are UTC."""

    alert: Alert
    """Its newest alert, with id, sentence and figures."""
    since_step: int | None
    """Its first step. For slow links and an imbalance, the step in which it was found."""
    since_unix_ns: int
    until_step: int | None = None
    """The first step after its end; None while it holds."""
    until_unix_ns: int | None = None
    straggler: Straggler | None = None
    hang: OpenHang | None = None
    """The newest state of the hang, with the longest duration and the stacks that were read."""
    subjects: list[str] = dataclasses.field(default_factory=list)
    """The slow links that were reported, sorted."""
    seen_ns: int = 0
    """Time at which it was found last; 0 after a restart of the sidecar."""

    @property
    def kind(self) -> str:
        return self.alert.kind

    @property
    def is_over(self) -> bool:
        return self.until_unix_ns is not None

    @property
    def duration_s(self) -> float | None:
        """Time without a finished step in a hang; None for other kinds."""
        return None if self.hang is None else self.hang.since_s

    @property
    def stacks(self) -> Mapping[int, RankStack]:
        """Python stacks that were read during a hang, by rank."""
        return {} if self.hang is None else self.hang.stacks


@dataclasses.dataclass
class FindingRecords:
    """The findings of one attempt of the job, as saved in the node's state."""

    attempt: int = -1
    alone: str = ""
    """The node that found them, if it judged only its own ranks."""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    """The oldest first. Stragglers are removed at their end, as the detector keeps the episodes of
    earlier ones."""

    @property
    def open(self) -> list[Finding]:
        """The findings that hold."""
        return [each for each in self.findings if not each.is_over]

    def holds(self, kind: str, since_step: int | None = None) -> Finding | None:
        """Return the open finding of a kind.

        since_step: for a hang, the step in which the job hangs.
        """
        found = (each for each in self.open if each.kind == kind)
        return next((each for each in found if since_step in (None, each.since_step)), None)


class FindingLog:
    """Record findings, and raise an alert for each change. Not thread-safe."""

    def __init__(
        self, run_id: str, saved: FindingRecords | None = None, findings: Findings = NOTHING
    ) -> None:
        """Start a log, or resume the log of an earlier sidecar of the node.

        saved, findings: saved by the earlier sidecar, which has raised alerts for them. Later
        findings continue them, see stragglers/resume.py.
        """
        self._run_id = run_id
        self.records = FindingRecords() if saved is None else saved
        self._alerted = {episode.key for episode in findings.episodes}
        self._hang_is_saved = saved is not None
        for each in self.records.open:
            each.seen_ns = 0

    @property
    def are_open(self) -> bool:
        return bool(self.records.open)

    def changes(
        self,
        attempt: int,
        findings: Findings,
        hang: OpenHang | None,
        places: Mapping[int, Placement],
        unix_ns: int,
        *,
        at_step: int | None = None,
        last_step: int | None = None,
        judge: str | None = "",
        verdicts: Sequence[JudgedVerdict] = (),
        context: Callable[[], SlowRankContext] | None = None,
        diagnosed: Callable[[StragglerGroup], Diagnosis | None] | None = None,
    ) -> tuple[Alert, ...]:
        """Record the changes since the last call, and return their alerts.

        findings, hang: from the sidecar's state. unix_ns: the present time.
        at_step: the furthest step in progress; None if no process runs. last_step: the newest
        finished step.
        judge: "" for findings on all ranks. The node's name if it judges only its own ranks,
        because node 0 cannot be reached. None if another node judges: findings recorded here are
        over.
        verdicts: other verdicts that hold now, such as an imbalance. Each is a finding until it was
        absent for a minute.
        context: returns the report's values that sentences need. diagnosed: returns the diagnosis
        of a straggler. Both are called only when a straggler is reported.
        """
        cached = functools.cache(SlowRankContext if context is None else context)
        now = AlertContext(
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
            raised += self._end_all(now, "It is over: the job was restarted.")
            self.records.findings.clear()
        elif judge != self.records.alone:
            raised += self._end_all(now, "This alert ends: another node judges this from now on.")
            self._alerted = {each.key for each in findings.slow_before}
        self.records.attempt, self.records.alone = attempt, judge or ""
        if judge is None:
            return tuple(raised)
        raised += self._stragglers(now)
        raised += self._hangs(now, hang)
        raised += self._other_changes(now, verdicts)
        over = [each for each in self.records.findings if each.is_over]
        for each in over[: max(0, len(self.records.findings) - MAX_KEPT)]:
            self.records.findings.remove(each)
        return tuple(raised)

    def _begin(self, now: AlertContext, alert: Alert) -> Finding:
        began_ns = now.unix_ns - round((alert.duration_s or 0.0) * 1e9)
        since_step = now.last_step if alert.since_step is None else alert.since_step
        self.records.findings.append(Finding(alert, since_step, began_ns, seen_ns=now.unix_ns))
        return self.records.findings[-1]

    def _end(self, now: AlertContext, finding: Finding, alert: Alert) -> Alert:
        if finding.straggler is not None:
            self.records.findings.remove(finding)
            return alert
        finding.until_unix_ns = now.unix_ns
        finding.until_step = now.last_step if alert.since_step is None else alert.since_step + 1
        return alert

    def _end_all(self, now: AlertContext, why: str) -> Iterator[Alert]:
        """End all open findings: the ranks are other processes now, or another node judges them."""
        before = dataclasses.replace(now, attempt=self.records.attempt, alone=self.records.alone)
        order = {"straggler": 0, "hang": 1}
        for each in sorted(self.records.open, key=lambda finding: order.get(finding.kind, 2)):
            if each.straggler is not None:
                alert = before.resolved(each.straggler, why)
            elif each.hang is not None:
                alert = before.hang_over(each.hang, why)
            else:
                alert = before.verdict_over(each.alert, why)
            yield self._end(now, each, alert)
        self._alerted.clear()

    # -- stragglers

    def _stragglers(self, now: AlertContext) -> Iterator[Alert]:
        episodes = {each.key: each for each in now.findings.episodes}
        for finding, straggler in self._open_stragglers:
            # Episodes are immutable: an updated one is another object with the same key.
            known = tuple(episodes[each.key] for each in straggler.episodes if each.key in episodes)
            if known:
                finding.straggler = dataclasses.replace(straggler, episodes=known)
            else:
                # Findings keep all their episodes. If none is left, these are other processes.
                yield self._end(
                    now,
                    finding,
                    now.resolved(straggler, "It is over: the ranks were started again."),
                )
        self._alerted &= episodes.keys()
        new = [each for key, each in episodes.items() if key not in self._alerted]
        by_step = operator.attrgetter("named_step")
        self._alerted |= episodes.keys()
        for step, named in itertools.groupby(sorted(new, key=by_step), by_step):
            yield from self._record_named(now, step, list(named))
        for finding, straggler in self._open_stragglers:
            if all(episode.is_over for episode in straggler.episodes):
                yield self._end(now, finding, now.ended(straggler))

    @property
    def _open_stragglers(self) -> list[tuple[Finding, Straggler]]:
        return [(each, each.straggler) for each in self.records.open if each.straggler is not None]

    def _record_named(
        self, now: AlertContext, step: int, named: Sequence[Episode]
    ) -> Iterator[Alert]:
        """Record the ranks that were named after a step."""
        # last_step grows while an episode is open, so this selects the episodes that were open
        # after that step, also when the call is made later.
        then = [
            each
            for each in now.findings.episodes
            if each.named_step <= step and (not each.is_over or each.last_step >= step)
        ]
        for group in straggler_groups(then, now.places):
            new = tuple(episode for episode in named if episode.rank in group.ranks)
            if group.kind == "rank":
                for episode in new:
                    yield self._slow_straggler(now, group, episode.key, (episode,))
            elif new:
                together = {episode.key for episode in then if episode.rank in group.ranks}
                open_now = self._open_stragglers
                joined = [
                    each
                    for each in open_now
                    if together & {episode.key for episode in each[1].episodes}
                ]
                if joined:
                    finding, straggler = min(joined, key=lambda each: each[1].key[::-1])
                    finding.straggler = Straggler(
                        straggler.key, group.kind, group.name, (*straggler.episodes, *new)
                    )
                    finding.alert = now.started(
                        finding.straggler, group, UPDATED, step, format_ranges(group.ranks)
                    )
                    yield finding.alert
                else:
                    yield self._slow_straggler(now, group, min(episode.key for episode in new), new)

    def _slow_straggler(
        self,
        now: AlertContext,
        group: StragglerGroup,
        key: tuple[int, int],
        episodes: tuple[Episode, ...],
    ) -> Alert:
        straggler = Straggler(key, group.kind, group.name, episodes)
        lead = episodes[0] if group.kind == "rank" else group.lead
        alert = now.started(straggler, dataclasses.replace(group, lead=lead))
        self._begin(now, alert).straggler = straggler
        return alert

    # -- hangs and other verdicts

    def _hangs(self, now: AlertContext, hang: OpenHang | None) -> Iterator[Alert]:
        before = self.records.holds("hang")
        if before is not None and before.hang is not None:
            stands_still = now.at_step is not None and now.at_step <= before.hang.step
            if hang is None and self._hang_is_saved and stands_still:
                # A restarted sidecar measures a hang from its own start, and has not found it yet.
                return
            if hang is None or hang.step != before.hang.step:
                why = "It is over: steps continue, or the processes have ended."
                yield self._end(now, before, now.hang_over(before.hang, why))
                before = None
        self._hang_is_saved = False
        if hang is None:
            return
        if before is None or before.hang is None:
            alert = now.hang(hang, STARTED, hang.text)
            self._begin(now, alert).hang = hang
            yield alert
            return
        was, longest_s = before.hang, max(hang.since_s, before.hang.since_s)
        before.hang = dataclasses.replace(hang, since_s=longest_s, stacks=hang.stacks or was.stacks)
        before.alert = now.hang(before.hang, UPDATED, hang.text)
        if (hang.kind, hang.ranks) != (was.kind, was.ranks):
            yield before.alert

    def _other_changes(
        self, now: AlertContext, verdicts: Sequence[JudgedVerdict]
    ) -> Iterator[Alert]:
        stand = {
            each.alert.about: each
            for each in self.records.open
            if not (each.straggler or each.hang)
        }
        for verdict in verdicts:
            alert, evidence = now.verdict(verdict), verdict.evidence
            links = evidence.links if isinstance(evidence, SlowLinkEvidence) else ()
            subjects = {f"{link.group} {format_ranges(sorted(link.ranks))}" for link in links}
            known = stand.pop(alert.about, None)
            if known is None:
                self._begin(now, alert).subjects = sorted(subjects)
                yield alert
                continue
            known.alert, known.seen_ns = alert, now.unix_ns
            if not subjects.issubset(known.subjects):
                known.subjects = sorted(subjects.union(known.subjects))
                yield now.verdict(verdict, UPDATED, *known.subjects)
        for missed in stand.values():
            missed.seen_ns = missed.seen_ns or now.unix_ns
            if now.unix_ns - missed.seen_ns >= _MAX_ABSENCE_NS:
                yield self._end(now, missed, now.verdict_over(missed.alert))


def stragglers_by_class(findings: Findings) -> dict[str, int]:
    """Return the number of slow ranks of each class, including classes without any."""
    counts = dict.fromkeys(_CLASSES, 0)
    for episode in findings.slow_now:
        counts[cause_class(episode)] += 1
    return counts
