"""A step by the device's clock, divided into parts: what the training process and the sidecar must divide alike. Pure.

A step's spans are its phases and its stalls. A part is the own time of its spans, without the spans inside of them.
What lies in no span is the gap. analysis/statistics/device_steps.py does the same for many steps at once, and divides
the gap further, as it knows what the host did meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from torchlens_perf.run.ring import Kind

# By the kind of a span, the part of records.PARTS that its own time belongs to.
PART_OF_SPAN = {
    int(Kind.FORWARD): "forward",
    int(Kind.RECOMPUTE): "recompute",
    int(Kind.BACKWARD): "backward",
    int(Kind.OPTIMIZER): "optimizer",
    int(Kind.WAIT): "communication",
}


class Row(IntEnum):
    """What is merged over ranks of each step."""

    WORK = 0
    """The step without stalls: phases and gap."""
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
    "forward": Row.FORWARD, "recompute": Row.RECOMPUTE, "backward": Row.BACKWARD, "optimizer": Row.OPTIMIZER,
    "communication": Row.STALL,
}  # fmt: skip
_ROW_OF_SPAN = {kind: int(_ROW_OF_PART[part]) for kind, part in PART_OF_SPAN.items()}
_WORK_ROWS = slice(int(Row.FORWARD), int(Row.GAP) + 1)
Span = tuple[int, int, int]
"""Kind, start and duration in ns."""


def rows_of(spans: Sequence[Span], step_ns: int) -> list[int]:
    """One step's rows, in ns, from its spans in the order of their records; only of the kinds in PART_OF_SPAN.

    A span is inside of the shortest of the longer ones that its middle lies in. Of two that are as long, the one that
    was recorded later is the outer one.
    """
    rows = [0] * len(Row)
    own_ns = [span[2] for span in spans]
    gap_ns = step_ns
    by_start = sorted(range(len(spans)), key=lambda index: spans[index][1])
    by_middle = sorted([(start + duration // 2, index) for index, (_, start, duration) in enumerate(spans)])
    begun, around = 0, list[int]()  # spans that have begun, and those of them that have not ended
    for middle, index in by_middle:
        while begun < len(by_start) and spans[by_start[begun]][1] <= middle:
            around.append(by_start[begun])
            begun += 1
        around = [each for each in around if middle < spans[each][1] + spans[each][2]]
        duration = spans[index][2]
        size = duration, index
        outer = [(spans[each][2], each) for each in around if (spans[each][2], each) > size]
        if outer:
            own_ns[min(outer)[1]] -= duration
        else:
            gap_ns -= duration
    for (kind, _, _), own in zip(spans, own_ns, strict=True):
        if own > 0:
            rows[_ROW_OF_SPAN[kind]] += own
    rows[Row.GAP] = max(0, gap_ns)
    rows[Row.WORK] = sum(rows[_WORK_ROWS])
    rows[Row.STEP] = step_ns
    return rows
