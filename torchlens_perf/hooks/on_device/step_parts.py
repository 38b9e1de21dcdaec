"""The parts of the device's steps, computed for the merge over ranks on the device.

The sidecar computes the same parts from the same records. The training process needs them too,
because only this process can communicate with the devices of other ranks. Each span costs a
microsecond at the end of the step in which its times become known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.hooks.on_device.clock import MAX_EVENTS
from torchlens_perf.run.device.step_parts import PART_OF_SPAN, Span, compute_rows
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import PendingSteps

_STEP, _BACKWARD = int(Kind.STEP), int(Kind.BACKWARD)


class StepParts:
    """Collector of the spans of each step. Used on the training thread at the ends of steps."""

    def __init__(self, known: PendingSteps) -> None:
        """known: receives each complete training step."""
        self._known = known
        self._spans: list[Span] = []
        self._step = -1
        self._is_truncated = False

    def add(self, kind: int, step: int, start_ns: int, duration_ns: int) -> None:
        """Add a span whose device times are known. Spans come in the order of their records.

        The span of the step itself comes last and completes the step.
        """
        if step != self._step:
            self._spans, self._step, self._is_truncated = [], step, False
        if kind in PART_OF_SPAN:
            if len(self._spans) < MAX_EVENTS:
                self._spans.append((kind, start_ns, duration_ns))
            else:
                # Without this span, its time would count as another part. The step is left out.
                self._is_truncated = True
        elif kind == _STEP:
            self._complete(duration_ns)

    @guard("the parts of a device's step")
    def _complete(self, duration_ns: int) -> None:
        spans, self._spans = self._spans, []
        # A step without a backward pass does not train.
        if not self._is_truncated and any(span[0] == _BACKWARD for span in spans):
            self._known.add(compute_rows(spans, duration_ns))
