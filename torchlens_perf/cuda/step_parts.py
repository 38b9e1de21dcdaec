"""Compute the parts of each step on the device, which are then merged over ranks on the device.

The sidecar computes the same parts from the same records. The training process also computes them,
because only this process can communicate with the devices of other ranks. Each span takes a
microsecond of host time at the end of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.run.device.step_parts import PART_OF_SPAN, Span, compute_part_durations_ns
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import PendingSteps

# Largest number of spans of a step, as many as the clock has events.
_MAX_SPANS = 32768
_STEP, _BACKWARD = int(Kind.STEP), int(Kind.BACKWARD)


class StepPartCollector:
    """Collector of the device spans of each step. Used on the training thread."""

    def __init__(self, known: PendingSteps) -> None:
        """known: queue to which each complete training step is added."""
        self._known = known
        self._spans: list[Span] = []
        self._step = -1
        self._is_truncated = False

    def add_span(self, kind: int, step: int, start_ns: int, duration_ns: int) -> None:
        """Add a span whose device times are known. Spans must be in the order of their records.

        The span of the step itself comes last and completes the step.
        """
        if step != self._step:
            self._spans, self._step, self._is_truncated = [], step, False
        if kind in PART_OF_SPAN:
            if len(self._spans) < _MAX_SPANS:
                self._spans.append((kind, start_ns, duration_ns))
            else:
                # Leave out the step: the missing span's time would be counted in another part.
                self._is_truncated = True
        elif kind == _STEP:
            self._complete_step(duration_ns)

    @guard("the parts of a device's step")
    def _complete_step(self, duration_ns: int) -> None:
        spans, self._spans = self._spans, []
        # A step without a backward pass is not a training step.
        if not self._is_truncated and any(span[0] == _BACKWARD for span in spans):
            self._known.add_step(compute_part_durations_ns(spans, duration_ns))
