"""Divide a step into parts by the device's clock, in the training process and the sidecar. Pure.

The spans of a step are its phases and its stalls. A part is the time of its spans without the
spans nested in them. Time outside all spans is the gap. analysis/statistics/device_steps.py divides
many steps at once, and also the gaps, because it has the host's spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from torchlens_perf.run.ring import Kind

# By kind of span: the part of records.PARTS to which a span's time without nested spans is added.
PART_OF_SPAN = {
    int(Kind.FORWARD): "forward",
    int(Kind.RECOMPUTE): "recompute",
    int(Kind.BACKWARD): "backward",
    int(Kind.OPTIMIZER): "optimizer",
    int(Kind.WAIT): "communication",
}


class StepPart(IntEnum):
    """The parts of a step that are merged over ranks."""

    WORK = 0
    """The step without stalls, that is, the phases and the gap."""
    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    OPTIMIZER = 4
    GAP = 5
    STALL = 6
    STEP = 7


ROW_NAMES = (
    "step work", "forward work", "recompute work", "backward work", "optimizer work", "gap", "stalls", "whole step"
)  # fmt: skip
_ROW_OF_PART = {
    "forward": StepPart.FORWARD, "recompute": StepPart.RECOMPUTE, "backward": StepPart.BACKWARD,
    "optimizer": StepPart.OPTIMIZER,
    "communication": StepPart.STALL,
}  # fmt: skip
_ROW_OF_SPAN = {kind: int(_ROW_OF_PART[part]) for kind, part in PART_OF_SPAN.items()}
_WORK_ROWS = slice(int(StepPart.FORWARD), int(StepPart.GAP) + 1)
Span = tuple[int, int, int]
"""Kind, start and duration in ns."""


def find_enclosing_spans(start_ns: Sequence[int], duration_ns: Sequence[int]) -> list[int]:
    """Return for each span of a step the index of its enclosing span; -1 if no span encloses it.

    The enclosing span is the shortest of the longer spans that contain the middle of the span. Of
    two spans of equal length, the one that was recorded later encloses the other.

    A step may have thousands of spans, so pairs of spans are not compared. The spans are processed
    in time order. start_ns, duration_ns: the spans in the order of their records.
    """
    outer = [-1] * len(start_ns)
    by_start = sorted(range(len(start_ns)), key=start_ns.__getitem__)
    by_middle = sorted([(start_ns[index] + duration_ns[index] // 2, index) for index in by_start])
    # Number of spans that have started, and a list of the started spans that have not ended.
    begun, around = 0, list[int]()
    for middle, index in by_middle:
        while begun < len(by_start) and start_ns[by_start[begun]] <= middle:
            around.append(by_start[begun])
            begun += 1
        around = [each for each in around if middle < start_ns[each] + duration_ns[each]]
        size = duration_ns[index], index
        longer = [(duration_ns[each], each) for each in around if (duration_ns[each], each) > size]
        if longer:
            outer[index] = min(longer)[1]
    return outer


def compute_part_durations_ns(spans: Sequence[Span], step_ns: int) -> list[int]:
    """Return the duration in ns of each StepPart of one step.

    spans: in the order of their records; their kinds are keys of PART_OF_SPAN.
    """
    rows = [0] * len(StepPart)
    own_ns = [span[2] for span in spans]
    gap_ns = step_ns
    for (_, _, duration), outer in zip(
        spans, find_enclosing_spans([span[1] for span in spans], own_ns.copy()), strict=True
    ):
        if outer < 0:
            gap_ns -= duration
        else:
            own_ns[outer] -= duration
    for (kind, _, _), own in zip(spans, own_ns, strict=True):
        if own > 0:
            rows[_ROW_OF_SPAN[kind]] += own
    rows[StepPart.GAP] = max(0, gap_ns)
    rows[StepPart.WORK] = sum(rows[_WORK_ROWS])
    rows[StepPart.STEP] = step_ns
    return rows
