"""Turn one rank's records of a step into the events of its tracks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.collectives.semantics import parse_collective_name
from torchlens_perf.page.gather.step_trace import LANES, assign_free_rows, assign_lanes
from torchlens_perf.run.ring import Flag, Kind, kind_name
from torchlens_perf.timeline.trace_file import Event, EventType

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.store.segments import ProcessRecords

_NUMBER = 0xFFFFFFFF
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
    flows: tuple[int, ...] = ()
    arguments: Mapping[str, str] = {}


TrackOf = Callable[[str, int], int]
"""Returns the number of a track of the rank by its lane and the row in that lane."""
MatchedCollectives = Mapping[tuple[str, int], MatchedCollective]
"""Collectives of a rank by name of the group and sequence number."""


def build_slice_events(
    read: ProcessRecords, offset_ns: int, track_of: TrackOf, matched: MatchedCollectives
) -> Iterator[list[Event]]:
    """Yield the events of each track, in order of time.

    offset_ns: from the times of the records to the clock of the trace. Spans of a track nest.
    """
    spans, texts = read
    lanes = assign_lanes(spans)
    for lane, name in enumerate(LANES):
        chosen = spans[lanes == lane]
        if not len(chosen):
            continue
        chosen = chosen[np.lexsort((-chosen["duration_ns"], chosen["start_ns"]))]
        rows = np.zeros(len(chosen), np.int64)
        if lane:
            end_ns = chosen["start_ns"] + np.maximum(chosen["duration_ns"], 0)
            rows = assign_free_rows(chosen["start_ns"], end_ns, 0)
        for row in np.unique(rows).tolist():
            of_row = chosen[rows == row]
            named = _name_spans(of_row, texts, offset_ns, matched)
            yield nest_slices(named, track_of(name, row))


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
        (spans["value1"] & _NUMBER).tolist(),
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
        yield Slice(start, end, name, kind_name(kind), (match.flow,) if match else (), arguments)
        if match and 0 < match.wait_ns <= end - start:
            waited_for = "" if match.last_rank is None else f" for rank {match.last_rank}"
            yield Slice(start, start + match.wait_ns, f"wait{waited_for}", "wait")


def nest_slices(slices: Iterable[Slice], track: int) -> list[Event]:
    """Return the begins and ends of slices, which are sorted by start and nest in each other."""
    events: list[Event] = []
    open_until: list[int] = []
    for start, end, name, category, flows, arguments in slices:
        while open_until and open_until[-1] <= start:
            events.append(Event(open_until.pop(), EventType.END, track))
        # A record of an earlier version may end after the span around it.
        end = min([end, *open_until[-1:]])
        begin = Event(start, EventType.BEGIN, track, name, category, flows, annotations=arguments)
        events.append(begin)
        open_until.append(end)
    events += [Event(end, EventType.END, track) for end in reversed(open_until)]
    return events
