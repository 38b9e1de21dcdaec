"""What was found of a run and when, as far as only who looked at the time can know: hangs, slow links, an imbalance.

Made from the alerts, so that both say the same; kept in the node's state. Since when a rank was slow is known from its
episode, and what limits the step from the windows of all ranks: a replay finds those again. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torchlens_perf.analysis.alerts.alert import ENDED, STARTED, Alert
from torchlens_perf.analysis.words.hang import OpenHang, RankStack

MAX_KEPT = 32  # the oldest that are over go first


@dataclasses.dataclass
class Noted:
    """Something that was found. Times are UTC."""

    about: str
    """Alert.about."""
    kind: str
    text: str
    """As it stood last."""
    ranks: tuple[int, ...]
    since_step: int | None
    """A hang's; of the others, the step in which it was found."""
    since_unix_ns: int
    until_step: int | None = None
    """The step from which on it was over; None while it holds."""
    until_unix_ns: int | None = None
    duration_s: float | None = None
    """Of a hang, for how long no step has been made."""
    stacks: Mapping[int, RankStack] = dataclasses.field(default_factory=dict)
    """Python stacks that were read during a hang, by rank."""

    @property
    def is_over(self) -> bool:
        return self.until_unix_ns is not None


@dataclasses.dataclass
class History:
    """Of one attempt of the job: what is known of an earlier one holds of none of its processes. One thread."""

    attempt: int = -1
    noted: list[Noted] = dataclasses.field(default_factory=list)
    """The oldest first."""

    def add(self, alerts: Iterable[Alert], at_step: int | None, hang: OpenHang | None = None) -> None:
        """Add alerts in their order.

        at_step: the newest finished step, None before the first. hang: the one in progress, whose stacks are kept.
        """
        for alert in alerts:
            if alert.attempt != self.attempt:
                self.attempt, self.noted = alert.attempt, []
            if alert.kind == "straggler":
                continue
            known = next((each for each in self.noted if each.about == alert.about and not each.is_over), None)
            if alert.change == STARTED and known is None:
                began_ns = alert.unix_ns - round((alert.duration_s or 0.0) * 1e9)
                since_step = at_step if alert.since_step is None else alert.since_step
                known = Noted(alert.about, alert.kind, alert.text, alert.ranks, since_step, began_ns)
                self.noted.append(known)
            if known is None:
                continue  # it began before this history
            known.duration_s = alert.duration_s
            if alert.change == ENDED:
                known.until_unix_ns = alert.unix_ns
                known.until_step = at_step if alert.since_step is None else alert.since_step + 1
            else:
                known.text, known.ranks = alert.text, alert.ranks
        if hang is not None and hang.stacks:
            for each in self.noted:
                if each.kind == "hang" and each.since_step == hang.step and not each.is_over:
                    each.stacks = hang.stacks
        over = [each for each in self.noted if each.is_over]
        for each in over[: max(0, len(self.noted) - MAX_KEPT)]:
            self.noted.remove(each)

    def holds(self, kind: str, since_step: int | None = None) -> Noted | None:
        """What is noted of that kind and holds; since_step: of a hang, which step's."""
        found = (each for each in self.noted if each.kind == kind and not each.is_over)
        return next((each for each in found if since_step in (None, each.since_step)), None)
