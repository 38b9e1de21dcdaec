"""Select the finished steps that a node sends as traces. Pure.

Each node decides by itself, and for all of its ranks. Whether a step is sent because of its number
follows from the number and the cost of a step. Nodes therefore select the same steps without a
message. A node also sends steps that it finds slow, and a step when one of its ranks is reported as
slow, within its share of the budget of spans. If a step of all ranks exceeds a burst of that budget,
a hash of the step and the node selects the nodes that send it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping

import numpy as np
import numpy.typing as npt

from torchlens_perf.run.records import StepTable, TracedStep

FIRST, NUMBER, SLOW, VERDICT = "first", "number", "slow", "verdict"
"""Reasons why a step is sent."""
FIRST_TRACED_STEPS = 3
# Slow steps are those beyond a quantile of the last steps, and beyond their median by a share. The
# share matters for jobs in which all steps take about the same time.
_WINDOW, MIN_STEPS = 512, 64
_QUANTILE, _MIN_EXCESS = 0.99, 0.1
_RECORDS_TIMEOUT_S = 3.0
# Shares of the spans. When a job slows down, many steps are slow, which leaves the share of verdicts.
_SHARES = {NUMBER: 0.5, SLOW: 0.25, VERDICT: 0.25}
# Most spans of a step, and capacity of the budgets for other steps, in seconds of their rates.
_BURST_S = 20.0
_MAX_CANDIDATES = 4096


class SpanBudget:
    """A limit of spans per second; 0 for no limit.

    A step may be sent while spans are left, also if it has more spans. The budget then recovers
    before the next step. It is refilled by the timestamps of steps instead of a clock. A replay,
    which is faster than real time, thus sends no more spans than the run.
    """

    def __init__(self, spans_per_s: float) -> None:
        self.spans_per_s = spans_per_s
        self.capacity = spans_per_s * _BURST_S
        self._left = self.capacity
        self._newest_s: float | None = None

    def refill_until(self, time_s: float) -> float:
        """Refill the budget up to `time_s`. Return the number of spans that are left."""
        if self._newest_s is not None and time_s > self._newest_s:
            more = (time_s - self._newest_s) * self.spans_per_s
            self._left = min(self.capacity, self._left + more)
        self._newest_s = time_s if self._newest_s is None else max(time_s, self._newest_s)
        return self._left

    def spend(self, spans: float) -> None:
        self._left -= spans


class SlowStepDetector:
    """Detects slow steps from the durations on one rank, which are similar on all ranks."""

    def __init__(self) -> None:
        self._recent_ns: deque[int] = deque(maxlen=_WINDOW)

    @property
    def usual_s(self) -> float:
        """Median duration of the recent steps."""
        return float(np.median(np.fromiter(self._recent_ns, np.int64))) / 1e9

    def find_slow_steps(self, steps: StepTable) -> npt.NDArray[np.bool_]:
        """Add steps, and return a mask of the slow steps.

        No step is slow until MIN_STEPS steps were added.
        """
        above_ns = math.inf
        if len(self._recent_ns) >= MIN_STEPS:
            median, high = np.quantile(np.fromiter(self._recent_ns, np.int64), [0.5, _QUANTILE])
            above_ns = max(float(high), (1 + _MIN_EXCESS) * float(median))
        self._recent_ns.extend(steps.duration_ns.tolist())
        return steps.duration_ns > above_ns


@dataclasses.dataclass
class _Candidate:
    because: str
    ended_s: float
    """End of the step by the rank's clock."""
    since_s: float
    """Time at which the step became a candidate, by the sidecar's clock."""


class StepSampler:
    """Selects the steps of one attempt of a job that a node sends. Not thread-safe."""

    def __init__(
        self, spans_per_s: float, *, samples_slow: bool = True, first_rank: int = 0
    ) -> None:
        """spans_per_s: this node's share of the job's limit; 0 for no limit.

        samples_slow: False if steps are sent only because of their numbers. first_rank: the lowest
        rank of this node.
        """
        self._spans_per_s, self._first_rank = spans_per_s, first_rank
        self._budgets = {
            because: SpanBudget(spans_per_s * _SHARES[because]) for because in (SLOW, VERDICT)
        }
        self._samples_slow = samples_slow
        self._slow_steps = SlowStepDetector()
        self._candidates: dict[int, _Candidate] = {}
        self._every = 1
        self._newest = self._last_sent = -1
        self._newest_ended_s = 0.0
        self._reported = 0
        self.left_out = 0
        """Total number of candidates that were not sent because they exceeded the budget."""

    def add_steps(self, steps: StepTable, every: int, now_s: float) -> None:
        """Add finished steps of one rank, and make candidates of some steps.

        every: one in this number of steps becomes a candidate; 0 for none. now_s: time by the
        sidecar's clock.
        """
        if not len(steps) or not every:
            return
        self._every = every
        slow = self._slow_steps.find_slow_steps(steps).tolist()
        ended_s = ((steps.start_ns + steps.duration_ns) / 1e9).tolist()
        for step, is_slow, end_s in zip(steps.step.tolist(), slow, ended_s, strict=True):
            because = reason_from_step_number(step, every)
            if not because and is_slow and self._samples_slow:
                because = SLOW
            if because and len(self._candidates) < _MAX_CANDIDATES:
                self._candidates[step] = _Candidate(because, end_s, now_s)
            elif because:
                self.left_out += 1
        self._newest, self._newest_ended_s = int(steps.step[-1]), ended_s[-1]

    def add_newest_step(self, now_s: float) -> None:
        """Make the newest step a candidate, because a rank of the node was reported as slow."""
        if self._samples_slow and self._newest > self._last_sent:
            self._candidates[self._newest] = _Candidate(VERDICT, self._newest_ended_s, now_s)

    def select_steps(
        self, attempt: int, count_spans: Callable[[int], Mapping[int, int]], running: Collection[int], now_s: float,
        *, final: bool = False,
    ) -> list[TracedStep]:  # fmt: skip
        """Decide about candidates, and return the steps to send.

        count_spans: a function that returns a step's number of spans by rank, for ranks of this node
        with complete records. running: ranks of this node that still make steps. final: True if no
        more records will arrive.
        """
        found = []
        for step in sorted(self._candidates):
            candidate, spans = self._candidates[step], count_spans(step)
            is_late = final or now_s - candidate.since_s >= _RECORDS_TIMEOUT_S
            if not is_late and any(rank not in spans for rank in running):
                break
            del self._candidates[step]
            # Each rank also has a span of its step.
            if not spans or not self._fits(step, candidate, sum(spans.values()) + len(spans)):
                self.left_out += 1
                continue
            left_out = self.left_out - self._reported
            found.append(TracedStep(attempt, step, candidate.because, left_out))
            self._reported, self._last_sent = self.left_out, step
        return found

    def _fits(self, step: int, candidate: _Candidate, spans: int) -> bool:
        """Return True if a step may be sent, and spend its spans."""
        if not self._spans_per_s:
            return True
        is_verdict = candidate.because == VERDICT
        part = 1.0 if is_verdict else min(1.0, _BURST_S * self._spans_per_s / spans)
        if candidate.because in (FIRST, NUMBER):
            thinning = self._find_thinning(step, spans * part)
            return self._takes_part(step, part) and (
                thinning == 1 or step % (thinning * self._every) == 0
            )
        budget = self._budgets[candidate.because]
        if budget.refill_until(candidate.ended_s) <= 0:
            return False
        budget.spend(spans * part)
        return self._takes_part(step, part)

    def _takes_part(self, step: int, part: float) -> bool:
        """Return True if this node is one of the part of all nodes that send a step.

        The node of rank 0 always is, because rank 0 has the root span.
        """
        text = f"{step}/{self._first_rank}".encode()
        drawn = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64
        return self._first_rank == 0 or drawn < part

    def _find_thinning(self, step: int, spans: float) -> int:
        """Return the power of two by which `every` is multiplied to keep to the budget.

        It is 1 while the steps sent by number so far have no more spans than a burst. Steps of a
        larger power are also steps of a smaller one. If nodes differ, the steps of one are thus among
        the steps of the other.
        """
        sent = min(step + 1, FIRST_TRACED_STEPS) + step // self._every
        if sent * spans <= _BURST_S * self._spans_per_s:
            return 1
        spans_per_s = _SHARES[NUMBER] * self._spans_per_s
        allowed = spans_per_s * self._every * self._slow_steps.usual_s
        return 1 << max(0, math.ceil(math.log2(spans / max(allowed, 1e-9))))


def reason_from_step_number(step: int, every: int) -> str:
    """Return FIRST or NUMBER if the step is traced because of its number, else ""."""
    if not every:
        return ""
    return FIRST if step < FIRST_TRACED_STEPS else NUMBER if step % every == 0 else ""
