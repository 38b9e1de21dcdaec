"""The device's steps by part, as their times become known: for the merge over ranks on the device.

The sidecar makes the same of the same records. Here it is needed in the training process, as that alone reaches the
other ranks' devices; a step costs some microseconds, at the end of the step in which its times are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.run.device.step_parts import PART_OF_SPAN, Span, rows_of
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.cuda.steps import KnownSteps

_STEP, _BACKWARD = int(Kind.STEP), int(Kind.BACKWARD)
_MAX_SPANS = 1024  # of steps that are not whole: there may never be one


class StepParts:
    """Joins the spans of each step. On the training thread, at a step's end."""

    def __init__(self, known: KnownSteps) -> None:
        """known: takes each step that is whole and trains."""
        self._known = known
        self._spans: list[tuple[int, Span]] = []

    def add(self, kind: int, step: int, start_ns: int, duration_ns: int) -> None:
        """A span that the device has reported, in the order of their records: a step's own comes last, and completes
        it."""
        if kind in PART_OF_SPAN:
            if len(self._spans) < _MAX_SPANS:
                self._spans.append((step, (kind, start_ns, duration_ns)))
        elif kind == _STEP:
            self._complete(step, duration_ns)

    @guard("the parts of a device's step")
    def _complete(self, step: int, duration_ns: int) -> None:
        spans = [span for number, span in self._spans if number == step]
        self._spans = [each for each in self._spans if each[0] > step]
        if any(span[0] == _BACKWARD for span in spans):  # else it does other work than training
            self._known.add(rows_of(spans, duration_ns))
