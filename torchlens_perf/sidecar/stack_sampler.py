"""Sample the stack of a rank that spends much time in host code or in waits for data.

py-spy reads the stacks without a pause of the process. Which part of its step the rank was in is only
known later, from its records. Samples are therefore taken at any time, and joined with the records.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterable

import numpy as np

from torchlens_perf.analysis.statistics.stack_samples import StackSample
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.sidecar.host.stacks import read_main_stack
from torchlens_perf.sidecar.rings.source import RingSource

_SAMPLED = [PARTS.index(part) for part in ("host", "data")]
# Smallest share of the newest steps, as a median, for which one of these parts is sampled.
_MIN_SHARE = 0.1
# Limits: the number of samples, of which a failed one counts as several, the CPU time of py-spy as a
# share of the run's time, the distance of samples, and the time for one.
_MAX_SAMPLES, _FAILED = 40, 10
_MAX_CPU_SHARE, _MIN_INTERVAL_S, _TIMEOUT_S = 0.01, 0.5, 1.0


class StackSampler:
    """Sampler of this node's ranks, for one generation of processes. Not thread-safe."""

    def __init__(self, began_s: float) -> None:
        """began_s: the begin of the generation by a monotonic clock."""
        self.notes: list[str] = []
        """The reason why stacks cannot be read, if that is so."""
        self._shares: dict[int, float] = {}
        self._left, self._due_s = _MAX_SAMPLES, began_s

    def add_steps(self, rank: int, steps: StepTable) -> None:
        """Add steps of a rank, by the clock by which it is judged. Only the newest ones count."""
        shares = steps.parts_ns[:, _SAMPLED] / steps.duration_ns.clip(min=1)[:, None]
        self._shares[rank] = float(np.median(shares, axis=0).max())

    def sample_if_due(self, sources: Iterable[RingSource], now_s: float) -> None:
        """Add a sample to the ring of the lowest rank with much host code or waits for data, if any.

        Blocks for about 30 ms. now_s: a monotonic clock.
        """
        running = (each for each in sources if not each.read_to_end)
        worth = {
            each.state.identity.rank: each
            for each in running
            # py-spy's stack is that of the main thread, which must be the recorded one.
            if each.state.facts.thread_id == each.state.identity.pid
            and self._shares.get(each.state.identity.rank, 0.0) >= _MIN_SHARE
        }
        if now_s < self._due_s or self._left <= 0 or not worth:
            return
        found, began_ns = worth[min(worth)], time.monotonic_ns()
        cost_s = -sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        stack = read_main_stack(found.state.identity.pid, _TIMEOUT_S)
        cost_s += sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        self._left -= 1 if stack.lines else _FAILED
        if stack.lines:
            # py-spy reads the stack after four fifths of its work, which take at least their CPU time.
            began_ns += int(cost_s / 2 * 1e9)
            found.samples.append(StackSample(began_ns, time.monotonic_ns(), stack.user_line))
        elif self._left <= 0:
            self.notes.append(f"slow lines of code are not known: {stack.reason}")
        # A random distance, because the steps may have the period of the samples.
        earliest_s = now_s + _MIN_INTERVAL_S * (1 + random.random())
        self._due_s = max(self._due_s + cost_s / _MAX_CPU_SHARE, earliest_s)
