"""Select the finished steps, and the ranks of each step, that are sent as traces. Pure.

A step becomes a candidate because of its number, because it is slower than earlier steps, or
because a rank is reported as slow. The sampler decides about a candidate when the records of its
step have arrived. All ranks are sent if they fit into the budget of spans. Otherwise, only the
ranks that explain the step are sent. Candidates that exceed the budget are counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.exporters.sampling.budget import SpanBudget
from torchlens_perf.exporters.sampling.decision import FIRST, NUMBER, ONLY_KNOWN, SLOW, VERDICT
from torchlens_perf.exporters.sampling.rank_rows import RecentRankTimes, select_explaining_ranks
from torchlens_perf.exporters.sampling.slow_steps import SlowStepDetector
from torchlens_perf.run.records import TracedStep

if TYPE_CHECKING:
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.verdicts.stragglers.placement import Placement

FIRST_TRACED_STEPS = 3
_LOCAL_RECORDS_TIMEOUT_S, _OTHER_NODES_TIMEOUT_S = 3.0, 8.0
# Ranks of other nodes may have more spans than ranks of this node.
_REMOTE_SPANS_MARGIN = 1.1
# When a job slows down, many steps are slow. For each reason, a fraction of the budget is therefore
# reserved for steps with other reasons.
_RESERVED_SHARE = {FIRST: 0.0, NUMBER: 0.1, SLOW: 0.5, VERDICT: 0.0}
_COMPLETE_STEP_INTERVAL_S = 60.0
_MAX_CANDIDATES = 4096
_MIN_SPANS = 48


@dataclasses.dataclass
class _StepCandidate:
    because: str
    ended_s: float
    """End of the step by the rank's clock."""
    since_s: float
    """Time at which the step became a candidate, by the sidecar's clock."""


@dataclasses.dataclass(frozen=True)
class JobSnapshot:
    """The state of the job on which the selection of steps and ranks is based."""

    spans: Callable[[int], Mapping[int, int]]
    """Return a step's number of spans by rank, for local ranks with complete records."""
    running: frozenset[int]
    """Ranks of this node that still run steps."""
    world_size: int
    """Number of ranks from which the sampler selects."""
    rows: RecentRankTimes
    slow: Sequence[int]
    """Ranks reported as slow, most expensive first."""
    places: Mapping[int, Placement]


class StepSampler:
    """Selects the traced steps of one attempt of a job. Not thread-safe."""

    def __init__(self, spans_per_s: float) -> None:
        self.budget = SpanBudget(spans_per_s)
        self.samples_slow = True
        """True if slow steps, and steps in which a rank was reported as slow, become candidates."""
        self._slow_steps = SlowStepDetector()
        self._candidates: dict[int, _StepCandidate] = {}
        self._newest = -1
        self._newest_ended_s = 0.0
        self._last_numbered_end_s = -math.inf
        self._left_out = 0
        self.left_out = 0
        """Total number of candidates that were not sent because they exceeded the budget."""

    def add_steps(self, steps: StepTable, every: int, now_s: float) -> None:
        """Add finished steps of one rank, and make candidates of some steps.

        every: one in this number of steps becomes a candidate; 0 for none. now_s: time by the
        sidecar's clock.
        """
        if not len(steps):
            return
        slow = self._slow_steps.find_slow_steps(steps).tolist()
        ended_s = ((steps.start_ns + steps.duration_ns) / 1e9).tolist()
        for step, is_slow, end_s in zip(steps.step.tolist(), slow, ended_s, strict=True):
            because = reason_from_step_number(step, every)
            if not because and is_slow and every and self.samples_slow:
                because = SLOW
            if because and len(self._candidates) < _MAX_CANDIDATES:
                self._candidates[step] = _StepCandidate(because, end_s, now_s)
            elif because:
                self._count_left_out()
        self._newest, self._newest_ended_s = int(steps.step[-1]), ended_s[-1]

    def add_newest_step(self, now_s: float) -> None:
        """Make the newest step a candidate, because a rank was reported as slow."""
        if self.samples_slow and self._newest >= 0:
            self._candidates[self._newest] = _StepCandidate(VERDICT, self._newest_ended_s, now_s)

    @property
    def decided_to(self) -> int:
        """Last step before the oldest undecided candidate."""
        return min(self._candidates, default=self._newest + 1) - 1

    @property
    def has_candidates(self) -> bool:
        """True if there are undecided candidates."""
        return bool(self._candidates)

    def drop_candidates_until(self, decided_to: int) -> None:
        """Drop the candidates up to this step, because another node has decided about them."""
        for step in [step for step in self._candidates if step <= decided_to]:
            del self._candidates[step]

    def select_steps(
        self,
        attempt: int,
        known: JobSnapshot,
        now_s: float,
        *,
        final: bool = False,
        after_s: float = 0.0,
    ) -> list[TracedStep]:
        """Decide about candidates, and return the steps to send.

        final: True if no more records will arrive. after_s: smallest age of candidates that are
        decided.
        """
        found = []
        for step in sorted(self._candidates):
            candidate = self._candidates[step]
            waited_s = math.inf if final else now_s - candidate.since_s
            if waited_s < after_s:
                break
            spans = known.spans(step)
            if not known.running <= spans.keys() and waited_s < _LOCAL_RECORDS_TIMEOUT_S:
                break
            chosen = self._decide_candidate(
                attempt, step, candidate.because, spans, known, waited_s, candidate.ended_s
            )
            if chosen is None:
                # `decided_to` is a single number, so candidates must be decided in order.
                break
            del self._candidates[step]
            if isinstance(chosen, TracedStep):
                found.append(chosen)
                self._left_out = 0
            else:
                self._count_left_out()
        return found

    def _decide_candidate(
        self, attempt: int, step: int, because: str, spans: Mapping[int, int], known: JobSnapshot, waited_s: float,
        ended_s: float,
    ) -> TracedStep | bool | None:  # fmt: skip
        """Decide about one candidate.

        Return False if the step exceeds the budget or has no records. Return None if the candidate
        cannot be decided yet.
        """
        if not spans:
            return False
        most = max(spans.values()) + 1
        if self.budget.is_unlimited:
            return TracedStep(attempt, step, because, left_out=self._left_out)
        left = self.budget.refill_until(ended_s) - _RESERVED_SHARE[because] * self.budget.capacity
        elsewhere = known.world_size - len(spans)
        allowed = math.ceil(_REMOTE_SPANS_MARGIN * most) if elsewhere > 0 else most
        total = 1 + sum(spans.values()) + len(spans) + max(0, elsewhere) * allowed
        if total <= left:
            return self._select_step(attempt, step, because, (), allowed - 1, total, ended_s)
        is_small = total <= (1 - _RESERVED_SHARE[NUMBER]) * self.budget.capacity
        if (
            because == NUMBER
            and is_small
            and ended_s - self._last_numbered_end_s < _COMPLETE_STEP_INTERVAL_S
        ):
            # All ranks of a later step will fit into the budget.
            return False
        row = known.rows.times_in_step(step)
        awaited = known.world_size if elsewhere > 0 else len(spans)
        if (row is None or row.known_count < awaited) and waited_s < _OTHER_NODES_TIMEOUT_S:
            return None
        within = None if elsewhere > 0 else spans.keys()
        matter = select_explaining_ranks(row, known.slow, known.places, within) or {
            ONLY_KNOWN: [min(spans)]
        }
        count = sum(map(len, matter.values()))
        allowed = min(allowed, max(_MIN_SPANS, int(self.budget.capacity) // (2 * count)))
        if because == VERDICT:
            allowed = max(_MIN_SPANS, min(allowed, int(left - 1) // count))
        if 1 + count * allowed > left:
            return False
        roles = tuple((why, tuple(ranks)) for why, ranks in matter.items())
        return self._select_step(
            attempt, step, because, roles, allowed - 1, 1 + count * allowed, ended_s
        )

    def _select_step(
        self, attempt: int, step: int, because: str, roles: tuple[tuple[str, tuple[int, ...]], ...], max_spans: int,
        total: int, ended_s: float,
    ) -> TracedStep:  # fmt: skip
        self.budget.spend(total)
        if because in (FIRST, NUMBER):
            self._last_numbered_end_s = ended_s
        return TracedStep(attempt, step, because, roles, max_spans, self._left_out)

    def _count_left_out(self) -> None:
        self._left_out += 1
        self.left_out += 1


def reason_from_step_number(step: int, every: int) -> str:
    """Return FIRST or NUMBER if the step is traced because of its number, else ""."""
    if not every:
        return ""
    return FIRST if step < FIRST_TRACED_STEPS else NUMBER if step % every == 0 else ""
