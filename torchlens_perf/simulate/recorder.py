"""Write the records of simulated spans into a ring file, many at a time.

The records equal those of the native recorder, which native/recorder.h explains: spans nest, each
is recorded when it ends, and phases inside of others count apart.
"""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from torchlens_perf.run.ring import (
    DEPTH,
    FRAMES,
    HEAD,
    RECORDS_OFFSET,
    STEP,
    Kind,
    RingFile,
    record_dtype,
)

_WORD_BYTES = 8
# The open span of a step: start, nested time, time of phases, name id, kind.
_STEP_FRAME = struct.Struct("<qqqII")


@dataclasses.dataclass(slots=True)
class _Span:
    """A span that has started and not ended."""

    kind: int
    name_id: int
    start_ns: int
    nested_ns: int = 0
    phase_ns: int = 0


class SimulatedRecorder:
    """Recorder of one rank by a simulated clock. Not thread-safe.

    Readers see records after flush(). The ring must have space for the records of one flush.
    """

    def __init__(self, ring: RingFile, now_ns: int) -> None:
        self.now_ns = now_ns
        """The simulated time, which the caller advances."""
        self.step = 0
        self._ring = ring
        self._spans = [_Span(Kind.STEP, 0, now_ns)]
        self._records: list[tuple[int, ...]] = []
        self._written = 0
        self.flush()

    @property
    def closed(self) -> bool:
        return self._ring.buffer.closed

    def begin(self, kind: int, name_id: int) -> None:
        self._spans.append(_Span(kind, name_id, self.now_ns))

    def end(self) -> None:
        """End the innermost span."""
        span = self._spans.pop()
        duration_ns = self.now_ns - span.start_ns
        self._spans[-1].nested_ns += duration_ns
        is_phase = Kind.DATA <= span.kind <= Kind.CLOSURE
        self._spans[-1].phase_ns += duration_ns if is_phase else span.phase_ns
        self._add(span, self.step, duration_ns, 0, 0, 0)

    def record_collective(
        self, name_id: int, start_ns: int, duration_ns: int, flags: int, size: int, sequence: int
    ) -> None:
        self._add(
            _Span(Kind.COLLECTIVE, name_id, start_ns), self.step, duration_ns, flags, size, sequence
        )

    def record_device_span(
        self, name_id: int, step: int, start_ns: int, duration_ns: int, kind: int, behind_ns: int
    ) -> None:
        """Record a span by the device's clock. kind, behind_ns: see Kind.DEVICE."""
        self._add(
            _Span(Kind.DEVICE, name_id, start_ns), step, duration_ns, 0, kind, behind_ns, depth=1
        )

    def end_step(self, flags: int, value0: int, value1: int) -> None:
        """End the step, and begin the next one at the same time."""
        (step,) = self._spans
        self._add(step, self.step, self.now_ns - step.start_ns, flags, value0, value1, depth=0)
        self.step += 1
        self._spans = [_Span(Kind.STEP, 0, self.now_ns)]

    def flush(self) -> None:
        """Write the records since the last call, and the step in progress."""
        records = np.array(self._records, record_dtype())
        sequences = np.arange(self._written, self._written + len(records))
        records["stamp"] = sequences + 1
        buffer = self._ring.buffer
        ring = np.frombuffer(buffer, record_dtype(), offset=RECORDS_OFFSET)
        ring[sequences % len(ring)] = records
        self._written += len(records)
        self._records.clear()
        for word, value in ((DEPTH, 1), (STEP, self.step), (HEAD, self._written)):
            struct.pack_into("<Q", buffer, _WORD_BYTES * word, value)
        step = self._spans[0]
        _STEP_FRAME.pack_into(
            buffer, _WORD_BYTES * FRAMES, step.start_ns, step.nested_ns, step.phase_ns, step.name_id, step.kind
        )  # fmt: skip

    def _add(
        self,
        span: _Span,
        step: int,
        duration_ns: int,
        flags: int,
        value0: int,
        value1: int,
        depth: int | None = None,
    ) -> None:
        """Add a record. depth: the number of spans around the span; None for all open spans."""
        self._records.append((
            0, span.kind, len(self._spans) if depth is None else depth, flags, span.name_id, step,
            span.start_ns, duration_ns, span.nested_ns, span.phase_ns, value0, value1,
        ))  # fmt: skip
