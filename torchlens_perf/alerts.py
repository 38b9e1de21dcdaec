"""Alerts: what began and what ended since the last look at the findings, as finished values. Pure.

An alert's id is made from the run, its attempt and what the alert is about, so a sidecar that was started again, and a
replay, raise the same alerts under the same ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.culprits import NOBODY, Culprit, Named, culprits
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.report.straggler_words import cause_class, phase_name, straggler_verdicts
from torchlens_perf.straggler import NOTHING, Findings, Place

if TYPE_CHECKING:
    from torchlens_perf.episodes import Episode
    from torchlens_perf.records import Verdict

STARTED, UPDATED, ENDED = "started", "updated", "ended"
_CLASSES = ("slow_compute", "slow_data", "slow_host", "more_work")


@dataclasses.dataclass(frozen=True)
class Alert:
    """Something began, is known better by now, or ended. None and "" stand for what does not apply."""

    id: str
    """32 hexadecimal digits; the same whoever raises the alert, and however often."""
    about: str
    """The same for all alerts about one straggler, or one hang."""
    kind: str
    """straggler, hang, or a verdict's kind."""
    change: str
    """STARTED, UPDATED or ENDED."""
    text: str
    """The verdict's sentence."""
    unix_ns: int
    """When it was found."""
    attempt: int
    since_step: int | None = None
    until_step: int | None = None
    """The step from which on it was over."""
    rank: int | None = None
    """The suspect; of several, the one to look at first."""
    ranks: tuple[int, ...] = ()
    """All suspects."""
    host: str = ""
    """The suspect's."""
    phase: str | None = None
    cause: str = ""
    """A straggler's class: slow_compute, slow_data, slow_host or more_work. A hang's kind: dead, missing and others."""
    scope: str = ""
    """What is slow: "rank", "node" with all its ranks, or "position" in the mesh."""
    cost_s: float | None = None
    """Seconds that each step of the job would be shorter without it."""
    cost_share: float | None = None
    duration_s: float | None = None
    """For a hang: for how long no step has been made."""

    @property
    def urgent(self) -> bool:
        """Whether somebody should look: not for an end."""
        return self.change != ENDED


@dataclasses.dataclass
class _Open:
    """A straggler that was told of."""

    episode: Episode
    since_step: int
    """As it was told first: a sidecar that was started again does not know the steps before."""
    from_start: bool


class AlertLog:
    """Which alerts have been raised, and so which are new. One thread."""

    def __init__(
        self, run_id: str, attempt: int = -1, findings: Findings = NOTHING, hang: Mapping[str, Any] | None = None
    ) -> None:
        """attempt, findings, hang: what an earlier sidecar of the node has saved, and raised alerts for."""
        self._run_id = run_id
        self._attempt = attempt
        self._open: dict[tuple[int, int], _Open] = {}
        self._over: set[tuple[int, int]] = set()
        self._inherited: dict[int, Episode] = {}  # open when saved; by rank
        self._hang = hang
        self._hang_found_ns: int | None = None
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        for episode in findings.episodes:
            if episode.until_step is None:
                self._inherited[episode.rank] = episode
            else:
                self._over.add((episode.rank, episode.since_step))

    def changes(
        self,
        attempt: int,
        findings: Findings,
        hang: Mapping[str, Any] | None,
        places: Mapping[int, Place],
        unix_ns: int,
        *,
        verdicts: Sequence[Verdict] = (),
        report: dict[str, Any] | None = None,
    ) -> tuple[Alert, ...]:
        """What is new since the last call. findings and hang are those of the sidecar's state, unix_ns is now.

        verdicts: others that stand now, like an imbalance; an alert is raised when one comes and when it goes. report:
        as build() makes it, for the modules in the sentences; without one these are left out.
        """
        moment = _Moment(self._run_id, attempt, findings, places, unix_ns, report or {"modules": []})
        raised: list[Alert] = []
        if attempt != self._attempt:
            raised += self._restarted(moment)
        raised += self._stragglers(moment)
        raised += self._hangs(moment, hang)
        raised += self._others(moment, verdicts)
        return tuple(raised)

    def _restarted(self, moment: _Moment) -> Iterator[Alert]:
        """The ranks of another attempt are other processes: what was open is over."""
        before = dataclasses.replace(moment, attempt=self._attempt)
        left = [(each.episode, each.since_step) for each in self._open.values()]
        left += [(episode, episode.since_step) for episode in self._inherited.values()]
        if self._attempt >= 0:
            for episode, since_step in left:
                yield before.no_longer(episode, since_step, "the job was restarted")
            if self._hang is not None:
                yield before.hang_over(self._hang, self._hang_found_ns)
        self._attempt, self._hang = moment.attempt, None
        for known in (self._open, self._over, self._inherited, self._verdicts):
            known.clear()

    def _stragglers(self, moment: _Moment) -> Iterator[Alert]:
        episodes = moment.findings.episodes
        new = []
        for episode in episodes:
            key = (episode.rank, episode.since_step)
            if key in self._open or key in self._over:
                continue
            inherited = self._inherited.pop(episode.rank, None)
            if inherited is not None and (episode.from_start or episode.since_step <= inherited.last_step):
                self._open[key] = _Open(episode, inherited.since_step, inherited.from_start)
                continue
            if inherited is not None:
                yield moment.no_longer(inherited, inherited.since_step)
            self._open[key] = _Open(episode, episode.since_step, episode.from_start)
            new.append(episode)
        if new:
            together = culprits([each for each in episodes if each.until_step is None], moment.places)
            for episode in new:
                yield moment.began(episode, together)
        for episode in episodes:
            key = (episode.rank, episode.since_step)
            if key in self._open and episode.until_step is not None:
                yield moment.ended(self._open.pop(key))
                self._over.add(key)
        for rank, episode in list(self._inherited.items()):
            # It would have been named again by now.
            if moment.findings.detectable_ns <= episode.excess_ns:
                yield moment.no_longer(self._inherited.pop(rank), episode.since_step)

    def _hangs(self, moment: _Moment, hang: Mapping[str, Any] | None) -> Iterator[Alert]:
        before, self._hang = self._hang, hang
        if before is not None and (hang is None or hang["step"] != before["step"]):
            yield moment.hang_over(before, self._hang_found_ns)
            before = None
        if hang is None:
            return
        if before is None:
            self._hang_found_ns = moment.unix_ns
            yield moment.hang(hang, STARTED, hang["text"])
        elif (hang["kind"], hang["ranks"]) != (before["kind"], before["ranks"]):
            yield moment.hang(hang, UPDATED, hang["text"])

    def _others(self, moment: _Moment, verdicts: Sequence[Verdict]) -> Iterator[Alert]:
        now = {_key(verdict): verdict for verdict in verdicts}
        for key in [key for key in self._verdicts if key not in now]:
            verdict = self._verdicts.pop(key)
            yield moment.verdict(verdict, key, ENDED, f"No longer: {verdict.text.partition(' Next: ')[0]}")
        for key, verdict in now.items():
            if key not in self._verdicts:
                yield moment.verdict(verdict, key, STARTED, verdict.text)
                self._verdicts[key] = verdict


@dataclasses.dataclass(frozen=True)
class _Moment:
    """One look at the findings, and how alerts are made in it."""

    run_id: str
    attempt: int
    findings: Findings
    places: Mapping[int, Place]
    unix_ns: int
    report: dict[str, Any]

    def began(self, episode: Episode, together: Sequence[Culprit]) -> Alert:
        """together: who is slow now, as culprits() has found."""
        alone = Culprit("rank", "", (episode.rank,), episode, self._host(episode.rank))
        culprit = next((each for each in together if episode.rank in each.ranks), alone)
        # The rank that is slowest speaks for those that are slow with it.
        told = culprit if culprit.lead is episode else alone
        findings = dataclasses.replace(self.findings, episodes=())
        (verdict,), _ = straggler_verdicts(self.report, findings, Named((told,)))
        alert = self._straggler(episode, episode.since_step, STARTED, verdict.text)
        return dataclasses.replace(alert, ranks=culprit.ranks, scope=culprit.kind)

    def ended(self, opened: _Open) -> Alert:
        told = dataclasses.replace(opened.episode, since_step=opened.since_step, from_start=opened.from_start)
        findings = dataclasses.replace(self.findings, episodes=(told,))
        _, (verdict,) = straggler_verdicts(self.report, findings, NOBODY)
        return dataclasses.replace(
            self._straggler(told, told.since_step, ENDED, verdict.text), until_step=told.until_step
        )

    def no_longer(self, episode: Episode, since_step: int, why: str = "") -> Alert:
        """An end of which the step is not known."""
        text = f"Rank {episode.rank} was slow in {phase_name(episode.phase)} from step {since_step} on. "
        text += f"It is over: {why}." if why else "It is over."
        return self._straggler(episode, since_step, ENDED, text)

    def _straggler(self, episode: Episode, since_step: int, change: str, text: str) -> Alert:
        about = _hash(self.run_id, self.attempt, "straggler", episode.rank, since_step)
        return Alert(
            id=_hash(about, change),
            about=about,
            kind="straggler",
            change=change,
            text=text,
            unix_ns=self.unix_ns,
            attempt=self.attempt,
            since_step=since_step,
            rank=episode.rank,
            ranks=(episode.rank,),
            host=self._host(episode.rank),
            phase=episode.phase,
            cause=cause_class(episode),
            scope="rank",
            cost_s=episode.cost_ns / 1e9,
            cost_share=episode.cost_ns / episode.step_ns if episode.step_ns else 0.0,
        )

    def hang(self, hang: Mapping[str, Any], change: str, text: str) -> Alert:
        """hang: as the node's state has it."""
        about = _hash(self.run_id, self.attempt, "hang", hang["step"])
        ranks = tuple(hang["ranks"])
        parts = (hang["kind"], ranges(ranks)) if change == UPDATED else ()
        return Alert(
            id=_hash(about, change, *parts),
            about=about,
            kind="hang",
            change=change,
            text=text,
            unix_ns=self.unix_ns,
            attempt=self.attempt,
            since_step=hang["step"],
            rank=ranks[0] if ranks else None,
            ranks=ranks,
            host=self._host(ranks[0]) if ranks else "",
            cause=hang["kind"],
            duration_s=hang["since_s"],
        )

    def hang_over(self, hang: Mapping[str, Any], found_ns: int | None) -> Alert:
        """found_ns: when this hang was found; None if an earlier sidecar did."""
        text = f"The hang in step {hang['step']} is over: steps are made again, or the processes have ended."
        since_found_s = 0.0 if found_ns is None else (self.unix_ns - found_ns) / 1e9
        return dataclasses.replace(self.hang(hang, ENDED, text), duration_s=hang["since_s"] + since_found_s)

    def verdict(self, verdict: Verdict, key: tuple[object, ...], change: str, text: str) -> Alert:
        about = _hash(self.run_id, self.attempt, *key)
        return Alert(
            id=_hash(about, change),
            about=about,
            kind=verdict.kind,
            change=change,
            text=text,
            unix_ns=self.unix_ns,
            attempt=self.attempt,
            since_step=verdict.since_step,
            rank=verdict.rank,
            ranks=tuple(verdict.evidence.get("ranks", ())),
            host=self._host(verdict.rank),
            phase=verdict.phase,
            cause=verdict.evidence.get("class", ""),
            scope=verdict.evidence.get("scope", ""),
            cost_s=verdict.cost_s_per_step,
            cost_share=verdict.cost_share,
        )

    def _host(self, rank: int | None) -> str:
        return self.places[rank].host if rank is not None and rank in self.places else ""


def stragglers_by_class(findings: Findings) -> dict[str, int]:
    """How many ranks are slow now, of each class; also those of which there are none."""
    counts = dict.fromkeys(_CLASSES, 0)
    for episode in findings.episodes:
        if episode.until_step is None:
            counts[cause_class(episode)] += 1
    return counts


def _key(verdict: Verdict) -> tuple[object, ...]:
    """What it is about, however its numbers change."""
    of = verdict.evidence
    return verdict.kind, verdict.rank, verdict.phase, verdict.since_step, ranges(sorted(of.get("ranks", ())))


def _hash(*parts: object) -> str:
    return hashlib.sha256("/".join(str(part) for part in parts).encode()).hexdigest()[:32]
