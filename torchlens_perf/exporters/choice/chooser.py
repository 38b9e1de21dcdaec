"""Chooses the steps that are sent as traces, after the fact, and the ranks of each within a budget of spans. Pure.

A step is to be sent by its number, because it is slow beside those before it, or because a rank is named in it. What
then is sent is decided when its records are there: all ranks where that fits into the budget, else those that explain
the step. What there is no room for is counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.exporters.choice.budget import SpanBudget
from torchlens_perf.exporters.choice.rank_rows import RankRows, ranks_that_matter
from torchlens_perf.exporters.choice.said import FIRST, NUMBER, ONLY_KNOWN, SLOW, VERDICT
from torchlens_perf.exporters.choice.slow_steps import SlowSteps
from torchlens_perf.run.records import TracedStep

if TYPE_CHECKING:
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.verdicts.stragglers.placement import Placement

FIRST_TRACED_STEPS = 3
_RECORDS_S, _ROWS_S = 3.0, 8.0  # that a step waits for all local ranks' records, and for the rows of other nodes' ranks
_OTHERS_MARGIN = 1.1  # ranks of other nodes may have more spans than those that can be counted here
# Of the budget, what a step must leave: many are slow at once where the job becomes slower, and then a rank is named.
_LEAVES = {FIRST: 0.0, NUMBER: 0.1, SLOW: 0.5, VERDICT: 0.0}
_WHOLE_STEPS_S = 60.0  # for so long a job whose ranks fit into the budget waits for a step with all of them
_MAX_CANDIDATES = 4096
_MIN_SPANS = 48


@dataclasses.dataclass
class _Candidate:
    because: str
    ended_s: float
    """By the rank's clock."""
    since_s: float
    """By the sidecar's clock."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What the choice is made by."""

    spans: Callable[[int], Mapping[int, int]]
    """Of a step, by rank of this node whose records of it are there: its spans."""
    running: frozenset[int]
    """The ranks of this node that make steps."""
    world_size: int
    """How many ranks the choice is for."""
    rows: RankRows
    slow: Sequence[int]
    """The ranks that are named, the costliest first."""
    places: Mapping[int, Placement]


class Chooser:
    """Of one attempt of a job. One thread."""

    def __init__(self, spans_per_s: float) -> None:
        """spans_per_s: see SpanBudget."""
        self.budget = SpanBudget(spans_per_s)
        self.samples_slow = True
        """Whether steps are sent because they are slow, or a rank is."""
        self._slow_steps = SlowSteps()
        self._candidates: dict[int, _Candidate] = {}
        self._newest = -1
        self._newest_ended_s = 0.0
        self._number_s = -math.inf  # when the last step ended that was sent by its number
        self._left_out = 0
        self.left_out = 0
        """Steps that were to be sent, and for which there was no room."""

    def add_steps(self, steps: StepTable, every: int, now_s: float) -> None:
        """Finished steps of the rank that the others are held to be alike. every: by their number, one of so many; 0:
        none is sent. now_s: the sidecar's clock."""
        if not len(steps):
            return
        slow = self._slow_steps.add(steps).tolist()
        ended_s = ((steps.start_ns + steps.duration_ns) / 1e9).tolist()
        for step, is_slow, end_s in zip(steps.step.tolist(), slow, ended_s, strict=True):
            because = reason(step, every)
            if not because and is_slow and every and self.samples_slow:
                because = SLOW
            if because and len(self._candidates) < _MAX_CANDIDATES:
                self._candidates[step] = _Candidate(because, end_s, now_s)
            elif because:
                self._count_left_out()
        self._newest, self._newest_ended_s = int(steps.step[-1]), ended_s[-1]

    def verdict_began(self, now_s: float) -> None:
        """A rank was named: the newest step shows it."""
        if self.samples_slow and self._newest >= 0:
            self._candidates[self._newest] = _Candidate(VERDICT, self._newest_ended_s, now_s)

    @property
    def decided_to(self) -> int:
        """All steps up to this one are decided about."""
        return min(self._candidates, default=self._newest + 1) - 1

    @property
    def has_candidates(self) -> bool:
        """Whether there are steps to decide about."""
        return bool(self._candidates)

    def forget(self, decided_to: int) -> None:
        """Somebody else has decided about the steps up to this one."""
        for step in [step for step in self._candidates if step <= decided_to]:
            del self._candidates[step]

    def choose(
        self, attempt: int, known: Known, now_s: float, *, final: bool = False, after_s: float = 0.0
    ) -> list[TracedStep]:
        """The steps that are to be sent, of those that can be decided about by now. final: nothing more comes.

        after_s: only steps that have waited for so long.
        """
        found = []
        for step in sorted(self._candidates):
            candidate = self._candidates[step]
            waited_s = math.inf if final else now_s - candidate.since_s
            if waited_s < after_s:
                break
            spans = known.spans(step)
            if not known.running <= spans.keys() and waited_s < _RECORDS_S:
                break
            chosen = self._decide(attempt, step, candidate.because, spans, known, waited_s, candidate.ended_s)
            if chosen is None:
                break  # in their order: what is decided is told by one number
            del self._candidates[step]
            if isinstance(chosen, TracedStep):
                found.append(chosen)
                self._left_out = 0
            else:
                self._count_left_out()
        return found

    def _decide(
        self, attempt: int, step: int, because: str, spans: Mapping[int, int], known: Known, waited_s: float,
        ended_s: float,
    ) -> TracedStep | bool | None:  # fmt: skip
        """False: there is no room, or nothing of it is left. None: not yet."""
        if not spans:
            return False
        most = max(spans.values()) + 1
        if self.budget.is_unlimited:
            return TracedStep(attempt, step, because, left_out=self._left_out)
        left = self.budget.at(ended_s) - _LEAVES[because] * self.budget.capacity
        elsewhere = known.world_size - len(spans)
        allowed = math.ceil(_OTHERS_MARGIN * most) if elsewhere > 0 else most
        total = 1 + sum(spans.values()) + len(spans) + max(0, elsewhere) * allowed
        if total <= left:
            return self._chosen(attempt, step, because, (), allowed - 1, total, ended_s)
        is_small = total <= (1 - _LEAVES[NUMBER]) * self.budget.capacity
        if because == NUMBER and is_small and ended_s - self._number_s < _WHOLE_STEPS_S:
            return False  # rather fewer steps than a part of the ranks; but some
        row = known.rows.at(step)
        awaited = known.world_size if elsewhere > 0 else len(spans)
        if (row is None or row.known < awaited) and waited_s < _ROWS_S:
            return None
        within = None if elsewhere > 0 else spans.keys()
        matter = ranks_that_matter(row, known.slow, known.places, within) or {ONLY_KNOWN: [min(spans)]}
        count = sum(map(len, matter.values()))
        allowed = min(allowed, max(_MIN_SPANS, int(self.budget.capacity) // (2 * count)))
        if because == VERDICT:
            allowed = max(_MIN_SPANS, min(allowed, int(left - 1) // count))
        if 1 + count * allowed > left:
            return False
        roles = tuple((why, tuple(ranks)) for why, ranks in matter.items())
        return self._chosen(attempt, step, because, roles, allowed - 1, 1 + count * allowed, ended_s)

    def _chosen(
        self, attempt: int, step: int, because: str, roles: tuple[tuple[str, tuple[int, ...]], ...], max_spans: int,
        total: int, ended_s: float,
    ) -> TracedStep:  # fmt: skip
        self.budget.spend(total)
        if because in (FIRST, NUMBER):
            self._number_s = ended_s
        return TracedStep(attempt, step, because, roles, max_spans, self._left_out)

    def _count_left_out(self) -> None:
        self._left_out += 1
        self.left_out += 1


def reason(step: int, every: int) -> str:
    """Why a step is sent by its number; "" if it is not."""
    if not every:
        return ""
    return FIRST if step < FIRST_TRACED_STEPS else NUMBER if step % every == 0 else ""
