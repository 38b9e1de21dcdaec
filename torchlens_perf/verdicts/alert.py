"""Builds alerts from verdicts, with their ids. Pure.

finding_log.py decides when to raise alerts.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping

from torchlens_perf.errors import printable
from torchlens_perf.run.verdicts import ENDED, STARTED, Alert
from torchlens_perf.verdicts.stragglers.findings import Diagnosis, Findings, StragglerGroup
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.stragglers import SlowRankContext


@dataclasses.dataclass(frozen=True)
class AlertBuilder:
    """Build alerts from verdicts and the values that are known at one time."""

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

    def start(self, kind: str, verdict: Verdict, *about: object) -> Alert:
        """Return the first alert on a finding. about: values that identify the finding."""
        alone = (self.alone,) if self.alone else ()
        key = _digest(self.run_id, self.attempt, *about, *alone)
        first = Alert("", key, kind, "", "", "", self.unix_ns, self.attempt)
        return self.follow(first, verdict, STARTED)

    def follow(
        self, last: Alert, verdict: Verdict, change: str, *parts: object, text: str = ""
    ) -> Alert:
        """Return the next alert on a finding.

        last: its newest alert. parts: values that distinguish the ids of alerts with the same
        finding and change. text: a text in place of the verdict's.
        """
        evidence, text = verdict.evidence, text or verdict.text
        place = None if verdict.rank is None else self.places.get(verdict.rank)
        if self.alone:
            text = f"Only from node {self.alone}, which cannot reach node 0: {text}"
        causes = () if verdict.diagnosis is None else verdict.diagnosis.causes
        hangs = verdict.lost_s is not None
        return dataclasses.replace(
            last,
            id=_digest(last.about, change, *parts),
            change=change,
            text=printable(text),
            next="" if change == ENDED else printable(verdict.action),
            unix_ns=self.unix_ns,
            since_step=verdict.since_step,
            rank=verdict.rank,
            ranks=verdict.ranks,
            host="" if place is None else place.host,
            phase=verdict.phase,
            cause=evidence.cause,
            because=() if change == ENDED else tuple(cause.kind for cause in causes),
            scope=evidence.scope or last.scope,
            # Steps that do not end have no cost per step.
            cost_s_per_step=None if hangs else verdict.cost_s_per_step,
            cost_share=None if hangs else verdict.cost_share,
            duration_s=verdict.lost_s,
        )

    def end(self, last: Alert, why: str = "") -> Alert:
        """Return the alert on the end of a finding whose last verdict is not known.

        why: the reason for the end, as a sentence. By default, the text says that the verdict no
        longer holds.
        """
        return dataclasses.replace(
            last,
            id=_digest(last.about, ENDED),
            change=ENDED,
            text=f"{last.text} {why}"
            if why
            else f"This is over, and needs no action unless it returns: {last.text}",
            next="",
            unix_ns=self.unix_ns,
        )


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(str(part) for part in parts).encode()).hexdigest()[:32]
