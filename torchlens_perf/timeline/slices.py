"""Turn one rank's records of a step into the slices of its tracks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.collectives.semantics import parse_collective_name
from torchlens_perf.page.gather.node_clocks import SEQUENCE_MASK
from torchlens_perf.page.gather.step_trace import LANES, assign_free_rows, assign_lanes
from torchlens_perf.run.ring import Flag, Kind, kind_name
from torchlens_perf.store.segments import ProcessRecords

_WITHOUT_MODULES = {"modules": "not timed in this step"}


class MatchedCollective(NamedTuple):
    """One collective of a rank, matched with the other ranks: arrow, wait, and last rank."""

    flow: int
    wait_ns: int
    last_rank: int | None


class Slice(NamedTuple):
    """A slice of a track, in ns of the trace's clock."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    flow: int | None = None
    """Number of the arrow that connects the slice with slices of other ranks."""
    arguments: Mapping[str, str] = {}


class Track(NamedTuple):
    """Slices of one rank that nest in each other, in order of start."""

    rank: Any
    """A rank (int), or the name of another process."""
    lane: int
    """Index in LANES."""
    row: int
    """Spans of a lane that overlap lie in several rows."""
    slices: Sequence[Slice]


MatchedCollectives = Mapping[tuple[str, int], MatchedCollective]
"""Collectives of a rank by name of the group and sequence number."""


def build_tracks(
    rank: int, read: ProcessRecords, offset_ns: int, matched: MatchedCollectives
) -> Iterator[Track]:
    """Yield the tracks of a rank.

    offset_ns: from the times of the records to the clock of the trace.
    """
    spans, texts = read
    lanes = assign_lanes(spans)
    for lane in range(len(LANES)):
        chosen = spans[lanes == lane]
        if not len(chosen):
            continue
        chosen = chosen[np.lexsort((-chosen["duration_ns"], chosen["start_ns"]))]
        rows = np.zeros(len(chosen), np.int64)
        if lane:
            end_ns = chosen["start_ns"] + np.maximum(chosen["duration_ns"], 0)
            rows = assign_free_rows(chosen["start_ns"], end_ns, 0)
        for row in np.unique(rows).tolist():
            named = _name_spans(chosen[rows == row], texts, offset_ns, matched)
            yield Track(rank, lane, row, list(_end_in_parents(named)))


def _name_spans(
    spans: npt.NDArray[np.void], texts: list[str], offset_ns: int, matched: MatchedCollectives
) -> Iterator[Slice]:
    """Yield spans in their order. A matched collective is followed by its wait."""
    starts = (spans["start_ns"] + offset_ns).tolist()
    ends = (spans["start_ns"] + np.maximum(spans["duration_ns"], 0) + offset_ns).tolist()
    on_device = spans["kind"] == Kind.DEVICE
    kinds = np.where(on_device, spans["value0"].astype(np.int64), spans["kind"]).tolist()
    fields = zip(
        starts,
        ends,
        kinds,
        spans["name_id"].tolist(),
        spans["step"].tolist(),
        (spans["value1"] & SEQUENCE_MASK).tolist(),
        spans["kind"].tolist(),
        (spans["flags"] & Flag.WITHOUT_MODULES).tolist(),
        strict=True,
    )
    for start, end, kind, name_id, step, number, recorded_kind, without in fields:
        name = f"step {step}" if kind == Kind.STEP else texts[name_id] or kind_name(kind)
        match = None
        if recorded_kind == Kind.COLLECTIVE:
            operation = parse_collective_name(name)
            match = operation and matched.get((operation.group, number))
        arguments = _WITHOUT_MODULES if without and recorded_kind == Kind.STEP else {}
        yield Slice(start, end, name, kind_name(kind), match.flow if match else None, arguments)
        if match and 0 < match.wait_ns <= end - start:
            waited_for = "" if match.last_rank is None else f" for rank {match.last_rank}"
            yield Slice(start, start + match.wait_ns, f"wait{waited_for}", "wait")


def _end_in_parents(slices: Iterator[Slice]) -> Iterator[Slice]:
    """Yield the slices, none of which ends after the slice around it.

    A record of an earlier version may end later.
    """
    open_until: list[int] = []
    for each in slices:
        while open_until and open_until[-1] <= each.start_ns:
            open_until.pop()
        end_ns = min([each.end_ns, *open_until[-1:]])
        open_until.append(end_ns)
        yield each._replace(end_ns=end_ns)
