"""Convert the records of one step on one rank to rows of spans for the page."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.page.contents import RankTrace, SpanRow
from torchlens_perf.page.gather.node_clocks import SEQUENCE_MASK
from torchlens_perf.run.ring import Flag, Kind, kind_name
from torchlens_perf.store.segments import ProcessRecords

HOST, DEVICE = "host", "device"
LANES = (HOST, "collectives", "other threads", DEVICE, "collectives on the device")
_ROUNDED_US = 0.1
# Only the longest spans of each rank in a step are kept.
MAX_SPANS = 600


def find_step_end(records: npt.NDArray[np.void]) -> np.void:
    """Return the record of the end of the step, which must be among the records."""
    return records[records["kind"] == Kind.STEP][-1]


def build_rank_trace(
    rank: int, of: ProcessRecords, index_of: dict[str, int], offset_us: float | None
) -> tuple[RankTrace, int]:
    """Return the trace of the step in these records and the number of left-out spans.

    index_of: the index of each name; new names are added.
    """
    end = find_step_end(of.records)
    spans = of.records[of.records["kind"] != Kind.STEP]
    left_out = max(0, len(spans) - MAX_SPANS)
    if left_out:
        order = np.argsort(-spans["duration_ns"], kind="stable")
        spans = spans[np.sort(order[:MAX_SPANS])]
    lanes = assign_lanes(spans)
    rows = []
    for lane in range(len(LANES)):
        chosen = spans[lanes == lane]
        if len(chosen):
            chosen = chosen[np.lexsort((-chosen["duration_ns"], chosen["start_ns"]))]
            row = _build_span_row(LANES[lane], chosen, of.names, index_of, int(end["start_ns"]))
            rows.append(row)
    trace: RankTrace = {
        "rank": rank,
        "offset_us": None if offset_us is None else round(offset_us, 1),
        "duration_us": round(int(end["duration_ns"]) / 1e3, 1),
        "rows": rows,
    }
    return trace, left_out


def assign_lanes(spans: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    flags, is_collective = spans["flags"], spans["kind"] == Kind.COLLECTIVE
    by_device = (spans["kind"] == Kind.DEVICE) | ((flags & Flag.DEVICE) != 0)
    lanes = np.where(is_collective, 1, 0)
    lanes[(flags & Flag.OTHER_THREAD) != 0] = 2
    lanes[by_device] = np.where(is_collective[by_device], 4, 3)
    return lanes


def _build_span_row(
    lane: str,
    spans: npt.NDArray[np.void],
    texts: list[str],
    index_of: dict[str, int],
    begin_ns: int,
) -> SpanRow:
    # In a DEVICE record, value0 is the kind of the host span that the record belongs to.
    on_device = spans["kind"] == Kind.DEVICE
    kinds = np.where(
        on_device, spans["value0"].astype(np.int64), spans["kind"].astype(np.int64)
    ).tolist()
    start_us = np.round((spans["start_ns"] - begin_ns) / 1e3, 1)
    duration_us = np.round(np.maximum(spans["duration_ns"], 0) / 1e3, 1)
    numbered = spans["kind"] == Kind.COLLECTIVE
    depth = spans["depth"].astype(np.int64)
    depth = (
        depth - depth.min() if lane == HOST else assign_free_rows(start_us, start_us + duration_us)
    )
    return {
        "lane": lane,
        "kind": [kind_name(kind) for kind in kinds],
        "name": [
            index_of.setdefault(texts[name_id], len(index_of))
            for name_id in spans["name_id"].tolist()
        ],
        "start_us": start_us.tolist(),
        "duration_us": duration_us.tolist(),
        "depth": depth.tolist(),
        "number": (
            np.where(numbered, spans["value1"] & SEQUENCE_MASK, 0).tolist()
            if numbered.any()
            else None
        ),
    }


def assign_free_rows(
    start: npt.NDArray[Any], end: npt.NDArray[Any], tolerance: float = _ROUNDED_US
) -> npt.NDArray[np.int64]:
    """Return the lowest row in which each span overlaps no other span.

    Spans are sorted by start. tolerance: a shorter overlap is ignored.
    """
    found = np.zeros(len(start), np.int64)
    # A heap of (end of the span, row).
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rows = 0
    for index, (begins, ends) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and busy[0][0] <= begins + tolerance:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        found[index] = row
        heapq.heappush(busy, (ends, row))
    return found
