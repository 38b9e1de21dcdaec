"""The device's steps by part, as their times become known: for the merge over ranks on the device.

The sidecar makes the same of the same records. Here it is needed in the training process, as that alone reaches the
other ranks' devices; a span costs a microsecond, at the end of the step in which its times are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.hooks.on_device.clock import MAX_EVENTS
from torchlens_perf.run.device.step_parts import PART_OF_SPAN, Span, rows_of
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import KnownSteps

_STEP, _BACKWARD = int(Kind.STEP), int(Kind.BACKWARD)


class StepParts:
    """Joins the spans of each step. On the training thread, at a step's end."""

    def __init__(self, known: KnownSteps) -> None:
        """known: takes each step that is whole and trains."""
        self._known = known
        self._spans: list[Span] = []
        self._step = -1  # that they are of
        self._is_truncated = False

    def add(self, kind: int, step: int, start_ns: int, duration_ns: int) -> None:
        """A span that the device has reported, in the order of their records: a step's own comes last, and completes
        it. Of steps before it nothing more comes."""
        if step != self._step:
            self._spans, self._step, self._is_truncated = [], step, False
        if kind in PART_OF_SPAN:
            if len(self._spans) < MAX_EVENTS:
                self._spans.append((kind, start_ns, duration_ns))
            else:
                self._is_truncated = True  # a part of it would count as another: it is left out
        elif kind == _STEP:
            self._complete(duration_ns)

    @guard("the parts of a device's step")
    def _complete(self, duration_ns: int) -> None:
        spans, self._spans = self._spans, []
        if not self._is_truncated and any(span[0] == _BACKWARD for span in spans):  # else it does not train
            self._known.add(rows_of(spans, duration_ns))
