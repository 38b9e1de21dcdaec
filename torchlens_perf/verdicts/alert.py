"""Builds alerts from findings, with their ids, sentences and numbers. Pure.

finding_log.py decides when to raise alerts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchlens_perf.errors import printable
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.verdicts import ENDED, STARTED, UPDATED, Alert
from torchlens_perf.verdicts.stragglers.episodes import Episode
from torchlens_perf.verdicts.stragglers.findings import Findings, StragglerGroup
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.words.evidence import (
    SLOW_COMMUNICATION,
    ImbalanceEvidence,
    JudgedVerdict,
    SlowLinkEvidence,
)
from torchlens_perf.verdicts.words.stragglers import (
    SlowRankContext,
    build_past_verdict,
    build_slow_verdict,
    cause_class,
    phase_name,
)

if TYPE_CHECKING:
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis
    from torchlens_perf.verdicts.words.hang import OpenHang


@dataclasses.dataclass(frozen=True)
class Straggler:
    """One rank that is slow, or several that are slow together."""

    key: tuple[int, int]
    """Episode.key of the rank that was named first. It never changes."""
    kind: str
    name: str
    """Kind and name of its StragglerGroup."""
    episodes: tuple[Episode, ...]
    """The episodes of its ranks, including ended episodes."""

    @property
    def slowest_episode(self) -> Episode:
        return max(self.episodes, key=lambda episode: episode.excess_ns)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({episode.rank for episode in self.episodes}))


@dataclasses.dataclass(frozen=True)
class AlertBuilder:
    """Build alerts on findings from the values that are known at one time."""

    run_id: str
    attempt: int
    findings: Findings
    places: Mapping[int, Placement]
    unix_ns: int
    context: Callable[[], SlowRankContext]
    diagnosed: Callable[[StragglerGroup], Diagnosis | None] | None = None
    alone: str = ""
    """The name of a node that judges only its own ranks; "" if all ranks of the job are judged."""
    at_step: int | None = None
    """The furthest step in progress; None if no process runs."""
    last_step: int | None = None
    """The newest finished step."""

    def build_straggler_alert(
        self, slow: Straggler, group: StragglerGroup, change: str = STARTED, *parts: object
    ) -> Alert:
        """Return the alert on a straggler.

        group: the straggler's group that find_straggler_groups() returned last.
        """
        if self.diagnosed is not None:
            group = dataclasses.replace(group, diagnosis=self.diagnosed(group))
        verdict = build_slow_verdict(self.context(), group, self.findings)
        alert = self._straggler_alert(
            slow, group.lead, change, verdict, verdict.text, *parts, ranks=group.ranks
        )
        causes = group.diagnosis.causes if group.diagnosis is not None else ()
        return dataclasses.replace(alert, because=tuple(cause.kind for cause in causes))

    def build_straggler_end_alert(self, slow: Straggler) -> Alert:
        """Return the alert on the end of a straggler whose episodes have all ended."""
        until_step = max(episode.until_step or 0 for episode in slow.episodes)
        verdict = build_past_verdict(slow.slowest_episode)
        text = verdict.text
        if len(slow.episodes) > 1:
            text = f"{_subject_and_verb(slow)} slow up to step {until_step - 1}. {text}"
        return dataclasses.replace(
            self._straggler_alert(
                slow, slow.slowest_episode, ENDED, verdict, text, ranks=slow.ranks
            ),
            until_step=until_step,
        )

    def build_lost_straggler_alert(self, slow: Straggler, why: str) -> Alert:
        """Return the alert on the end of a straggler whose last slow step is not known.

        why: the reason for the end, as a sentence.
        """
        lead = slow.slowest_episode
        text = (
            f"{_subject_and_verb(slow)} slow in {phase_name(lead.phase)} from step {lead.since_step}"
            f" on. {why}"
        )
        verdict = build_past_verdict(dataclasses.replace(lead, until_step=lead.last_step + 1))
        return self._straggler_alert(slow, lead, ENDED, verdict, text, ranks=slow.ranks)

    def _straggler_alert(
        self, slow: Straggler, episode: Episode, change: str, verdict: JudgedVerdict, text: str, *parts: object,
        ranks: tuple[int, ...],
    ) -> Alert:  # fmt: skip
        """Return an alert on a straggler with the cost of its verdict.

        The cost of several slow ranks differs from the cost of each, and may not be known.
        """
        about = ("straggler", *slow.key)
        return dataclasses.replace(
            self._build_alert(
                "straggler",
                about,
                change,
                text,
                "" if change == ENDED else verdict.next,
                parts,
                ranks,
                episode.rank,
                episode.since_step,
            ),
            phase=episode.phase,
            cause=cause_class(episode),
            scope=slow.kind,
            cost_s_per_step=verdict.cost_s_per_step,
            cost_share=verdict.cost_share,
        )

    def _build_alert(
        self, kind: str, about: tuple[object, ...], change: str, text: str, action: str, parts: tuple[object, ...],
        ranks: tuple[int, ...], rank: int | None, since_step: int | None,
    ) -> Alert:  # fmt: skip
        """Return an alert.

        about: values that identify the finding. parts: values that distinguish the ids of alerts
        with the same finding and change. rank: the suspected rank.
        """
        if self.alone:
            about = (*about, self.alone)
            text = f"Only from node {self.alone}, which cannot reach node 0: {text}"
        key = _digest(self.run_id, self.attempt, *about)
        host = self.places[rank].host if rank is not None and rank in self.places else ""
        return Alert(
            _digest(key, change, *parts), key, kind, change, printable(text), printable(action), self.unix_ns,
            self.attempt, since_step,
            rank=rank, ranks=ranks, host=host,
        )  # fmt: skip

    def build_hang_alert(self, hang: OpenHang, change: str) -> Alert:
        """Return the alert on a hang in progress."""
        return self._hang_alert(hang, change, hang.text, hang.next)

    def _hang_alert(self, hang: OpenHang, change: str, text: str, action: str) -> Alert:
        ranks = hang.ranks
        parts = (hang.kind, format_ranges(ranks)) if change == UPDATED else ()
        rank = ranks[0] if ranks else None
        alert = self._build_alert(
            "hang", ("hang", hang.step), change, text, action, parts, ranks, rank, hang.step
        )
        return dataclasses.replace(alert, cause=hang.kind, duration_s=hang.since_s)

    def build_hang_end_alert(self, hang: OpenHang, why: str) -> Alert:
        """Return the alert on the end of a hang. why: the reason for the end, as a sentence."""
        return self._hang_alert(hang, ENDED, f"The job hung in step {hang.step}. {why}", "")

    def build_verdict_alert(
        self, verdict: JudgedVerdict, change: str = STARTED, *parts: object
    ) -> Alert:
        """Return the alert on a verdict that is not about a slow rank or a hang.

        All slow links share one alert, because the costliest link changes over time. When another
        link becomes slow, the alert is updated.
        """
        evidence, cause, scope = verdict.evidence, "", ""
        ranks: tuple[int, ...] = ()
        about = ""
        if isinstance(evidence, ImbalanceEvidence):
            ranks, cause, scope = evidence.ranks, evidence.cause, evidence.scope
            about = format_ranges(sorted(ranks))
        elif isinstance(evidence, SlowLinkEvidence):
            # Use the ranks that all slow links share, or else the ranks of the worst link.
            ranks, cause = evidence.shared_ranks or evidence.links[0].ranks, SLOW_COMMUNICATION
        key = verdict.kind, verdict.rank, verdict.phase, verdict.since_step, about
        return dataclasses.replace(
            self._build_alert(
                verdict.kind,
                key,
                change,
                verdict.text,
                verdict.next,
                parts,
                ranks,
                verdict.rank,
                verdict.since_step,
            ),
            phase=verdict.phase,
            cause=cause,
            scope=scope,
            cost_s_per_step=verdict.cost_s_per_step,
            cost_share=verdict.cost_share,
        )

    def build_verdict_end_alert(self, last: Alert, why: str = "") -> Alert:
        """Return the alert on the end of a verdict.

        last: its newest alert. why: the reason for the end, as a sentence. By default, the text
        says that the verdict no longer holds.
        """
        text, uid = (
            f"{last.text} {why}" if why else f"No longer: {last.text}",
            _digest(last.about, ENDED),
        )
        return dataclasses.replace(
            last, id=uid, change=ENDED, text=text, next="", unix_ns=self.unix_ns
        )


def _subject_and_verb(slow: Straggler) -> str:
    if slow.kind == "node":
        return f"Node {slow.name} (ranks {format_ranges(slow.ranks)}) was"
    if slow.kind == "position":
        return f"The ranks at {slow.name} ({format_ranges(slow.ranks)}) were"
    return f"Rank {slow.slowest_episode.rank} was"


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(str(part) for part in parts).encode()).hexdigest()[:32]
