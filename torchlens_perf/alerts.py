"""Alerts: what began and what ended since the last look at the findings, as finished values. Pure.

An alert's id is made from the run, its attempt and what the alert is about, so a sidecar that was started again, and a
replay, raise the same alerts under the same ids.

Ranks that are slow together, as those of a slow node, are one alert: who is called looks at the node, once. Its id is
made from the one that was named first. Those that are named later update it; one that had an alert of its own before
they were known to be together keeps that too. It ends with the last of them. So that a replay, which sees a whole run
in one look, tells the same, who was slow together is taken from the steps at which they were named, not from the look.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.alert import STARTED, UPDATED, Alert, Moment, Slow, no_modules
from torchlens_perf.culprits import culprits
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.records import Verdict
from torchlens_perf.report.straggler_words import cause_class
from torchlens_perf.straggler import NOTHING, Findings, Place

if TYPE_CHECKING:
    from torchlens_perf.culprits import Culprit
    from torchlens_perf.diagnosis import Diagnosis
    from torchlens_perf.episodes import Episode

_CLASSES = ("slow_compute", "slow_data", "slow_host", "more_work")
# So long a verdict is missed before it is over: one that is about as large as it must be comes and goes.
_OVER_NS = 60_000_000_000


@dataclasses.dataclass
class _Standing:
    """Another verdict's alert that is open."""

    verdict: Verdict
    subjects: set[str]
    """All that it has told of."""
    seen_ns: int = 0
    """When it stood last."""


class AlertLog:
    """Which alerts have been raised, and so which are new. One thread."""

    def __init__(
        self,
        run_id: str,
        attempt: int = -1,
        findings: Findings = NOTHING,
        hang: Mapping[str, Any] | None = None,
        *,
        generation: int = 0,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """What an earlier sidecar of the node has saved, and raised alerts for; told: its to_json().

        Later findings go on with those, see Continuation.
        """
        self._run_id = run_id
        self._attempt, self._generation = attempt, generation
        self._told = {episode.key for episode in findings.episodes}
        self._open: list[Slow] = []
        self._standing: dict[tuple[object, ...], _Standing] = {}
        self._hang = hang
        self._hang_is_saved = hang is not None
        episodes = {episode.key: episode for episode in findings.episodes}
        if told and told["of"] == [attempt, generation]:
            for each in told["stragglers"]:
                keys = [(rank, step) for rank, step in each["episodes"]]
                of = {key: episodes.pop(key) for key in keys if key in episodes}
                if of:
                    self._open.append(Slow((each["about"][0], each["about"][1]), each["kind"], each["name"], of))
            for each in told["verdicts"]:
                verdict = Verdict(**each["verdict"])
                self._standing[_key(verdict)] = _Standing(verdict, set(each["subjects"]))
        left = [episode for episode in episodes.values() if episode.until_step is None]
        self._open += [Slow(episode.key, "rank", "", {episode.key: episode}) for episode in left]

    def to_json(self) -> dict[str, Any]:
        """What the saved findings do not tell of the alerts that are open."""
        return {
            "of": [self._attempt, self._generation],
            "stragglers": [
                {"about": slow.about, "kind": slow.kind, "name": slow.name, "episodes": list(slow.episodes)}
                for slow in self._open
            ],
            "verdicts": [
                {"verdict": each.verdict.to_json(), "subjects": sorted(each.subjects)}
                for each in self._standing.values()
            ],
        }

    def changes(
        self,
        attempt: int,
        findings: Findings,
        hang: Mapping[str, Any] | None,
        places: Mapping[int, Place],
        unix_ns: int,
        *,
        generation: int = 0,
        at_step: int | None = None,
        verdicts: Sequence[Verdict] = (),
        report: Callable[[], dict[str, Any]] | None = None,
        diagnosed: Callable[[Culprit], Diagnosis | None] | None = None,
    ) -> tuple[Alert, ...]:
        """What is new since the last call. findings and hang are those of the sidecar's state, unix_ns is now.

        generation: how often the processes were started anew within the attempt. at_step: the furthest step in
        progress; None: no process runs. verdicts: others that stand now, like an imbalance; an alert is raised when one
        comes, and when it has been gone for a minute. report: has `modules` as build() makes them, for the sentences;
        it is asked for only when a straggler is to be told of, and so is diagnosed, why it is slow.
        """
        of_modules = functools.cache(report if report is not None else no_modules)
        moment = Moment(self._run_id, attempt, generation, findings, places, unix_ns, of_modules, diagnosed)
        raised: list[Alert] = []
        if (attempt, generation) != (self._attempt, self._generation):
            raised += self._restarted(moment)
        raised += self._stragglers(moment)
        raised += self._hangs(moment, hang, at_step)
        raised += self._others(moment, verdicts)
        return tuple(raised)

    def _restarted(self, moment: Moment) -> Iterator[Alert]:
        """The ranks are other processes: what was open is over."""
        before = dataclasses.replace(moment, attempt=self._attempt, generation=self._generation)
        why = "the job was restarted" if moment.attempt != self._attempt else "the ranks were started again"
        if self._attempt >= 0:
            for slow in self._open:
                yield before.no_longer(slow, why)
            if self._hang is not None:
                yield before.hang_over(self._hang)
            for key, each in self._standing.items():
                yield before.verdict_over(each.verdict, key)
        self._attempt, self._generation, self._hang = moment.attempt, moment.generation, None
        for known in (self._open, self._told, self._standing):
            known.clear()

    def _stragglers(self, moment: Moment) -> Iterator[Alert]:
        episodes = {each.key: each for each in moment.findings.episodes}
        for slow in list(self._open):
            # The newest of each: what is known of it changes, and it may be another object.
            known = {key: episodes[key] for key in slow.episodes if key in episodes}
            if not known:  # findings lose none of theirs: these are of other processes
                self._open.remove(slow)
                yield moment.no_longer(slow, "the ranks were started again")
            slow.episodes = known
        self._told &= episodes.keys()
        new = [each for key, each in episodes.items() if key not in self._told]
        self._told |= episodes.keys()
        for step, named in itertools.groupby(sorted(new, key=_named_step), _named_step):
            yield from self._begin(moment, step, list(named))
        for slow in list(self._open):
            if all(episode.until_step is not None for episode in slow.episodes.values()):
                self._open.remove(slow)
                yield moment.ended(slow)

    def _begin(self, moment: Moment, step: int, named: Sequence[Episode]) -> Iterator[Alert]:
        """named: after that step."""
        # last_step grows while an episode is open: so these are those that were open then, whenever one looks.
        then = [
            each
            for each in moment.findings.episodes
            if each.named_step <= step and (each.until_step is None or each.last_step >= step)
        ]
        for culprit in culprits(then, moment.places):
            new = {episode.key: episode for episode in named if episode.rank in culprit.ranks}
            if culprit.kind == "rank":
                for key, episode in new.items():
                    self._open.append(Slow(key, culprit.kind, culprit.name, {key: episode}))
                    yield moment.began(self._open[-1], dataclasses.replace(culprit, lead=episode))
            elif new:
                together = {episode.key for episode in then if episode.rank in culprit.ranks}
                told = [slow for slow in self._open if slow.episodes.keys() & together]
                if told:
                    slow = min(told, key=lambda each: (each.about[1], each.about[0]))
                    slow.kind, slow.name, slow.episodes = culprit.kind, culprit.name, slow.episodes | new
                    yield moment.joined(slow, culprit, step)
                else:
                    self._open.append(Slow(min(new), culprit.kind, culprit.name, new))
                    yield moment.began(self._open[-1], culprit)

    def _hangs(self, moment: Moment, hang: Mapping[str, Any] | None, at_step: int | None) -> Iterator[Alert]:
        before = self._hang
        stands_still = before is not None and at_step is not None and at_step <= before["step"]
        if hang is None and self._hang_is_saved and stands_still:
            return  # a sidecar that was started again counts from its own start, and has not found it anew yet
        self._hang, self._hang_is_saved = hang, False
        if before is not None and (hang is None or hang["step"] != before["step"]):
            yield moment.hang_over(before)
            before = None
        if hang is None:
            return
        if before is None:
            yield moment.hang(hang, STARTED, hang["text"])
            return
        self._hang = {**hang, "since_s": max(hang["since_s"], before["since_s"])}
        if (hang["kind"], hang["ranks"]) != (before["kind"], before["ranks"]):
            yield moment.hang(self._hang, UPDATED, hang["text"])

    def _others(self, moment: Moment, verdicts: Sequence[Verdict]) -> Iterator[Alert]:
        now = {_key(verdict): verdict for verdict in verdicts}
        for key, verdict in now.items():
            known, subjects = self._standing.get(key), _subjects(verdict)
            if known is None:
                self._standing[key] = _Standing(verdict, subjects, moment.unix_ns)
                yield moment.verdict(verdict, key, STARTED, verdict.text)
                continue
            known.verdict, known.seen_ns = verdict, moment.unix_ns
            if not subjects <= known.subjects:
                known.subjects |= subjects
                yield moment.verdict(verdict, key, UPDATED, verdict.text, *sorted(known.subjects))
        for key in [key for key in self._standing if key not in now]:
            each = self._standing[key]
            each.seen_ns = each.seen_ns or moment.unix_ns  # one that was saved may have to be found anew
            if moment.unix_ns - each.seen_ns >= _OVER_NS:
                del self._standing[key]
                yield moment.verdict_over(each.verdict, key)


def stragglers_by_class(findings: Findings) -> dict[str, int]:
    """How many ranks are slow now, of each class; also those of which there are none."""
    counts = dict.fromkeys(_CLASSES, 0)
    for episode in findings.episodes:
        if episode.until_step is None:
            counts[cause_class(episode)] += 1
    return counts


def _named_step(episode: Episode) -> int:
    return episode.named_step


def _key(verdict: Verdict) -> tuple[object, ...]:
    """What it is about, however its numbers change.

    Slow links are one thing, for which of them costs most changes: one that was not told of before updates the alert.
    """
    of = verdict.evidence
    return verdict.kind, verdict.rank, verdict.phase, verdict.since_step, ranges(sorted(of.get("ranks", ())))


def _subjects(verdict: Verdict) -> set[str]:
    """The slow links, of a verdict about such."""
    return {f"{link['group']} {ranges(sorted(link['ranks']))}" for link in verdict.evidence.get("links", ())}
