"""Convert a snapshot of torch's allocator to a table of live memory blocks. Pure functions.

The snapshot is the value of torch.cuda.memory._snapshot(). Blocks are grouped by the Python stack
of their allocation and by the modules whose forward() is on that stack. Blocks without a stack are
grouped by size. Such blocks were allocated while the memory history was off, or by a thread of
autograd.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

# Largest number of blocks that are assigned to rows, largest blocks first.
MAX_BLOCKS = 50_000
MAX_ROWS = 40
_MAX_FRAMES = 6
_MAX_CLASSES = 4

Frames = Sequence[Mapping[str, Any]]
Forwards = Mapping[str, Sequence[tuple[int, str]]]
"""For each file, the first line and class of each forward() method, sorted by line."""


class LiveMemoryRow(TypedDict):
    """Live memory blocks that were allocated by the same line of code."""

    module: str
    """Classes whose forward() was running, outermost first, such as "GPT > Block > MLP"; "" if no
    forward() was running.
    """
    stack: list[str]
    """Innermost frames outside torch, innermost first, such as "train.py:12 forward". The list is
    empty if the allocation has no stack.
    """
    bytes: int
    blocks: int
    largest_bytes: int
    new_blocks: int | None
    """Number of these blocks that the memory history contains; None if the history is off."""


class LiveMemoryTable(TypedDict):
    """Live memory blocks of one device, most bytes first, and statistics of its segments."""

    rows: list[LiveMemoryRow]
    other_bytes: int
    """Bytes of live blocks in no row: those of omitted rows, and blocks beyond MAX_BLOCKS."""
    other_blocks: int
    allocated_bytes: int
    reserved_bytes: int
    inactive_bytes: int
    """Free bytes inside segments."""
    largest_inactive_bytes: int
    segments: int
    expandable: bool
    """True if segments can grow. The allocator can then return inactive memory page by page."""
    history_events: int
    """Number of allocations and frees in the memory history; 0 if the history was off."""
    history_s: float | None
    """Length of the memory history in seconds."""


class InitialOutOfMemory(TypedDict):
    """Data that a process records when its device is out of memory, before later fields are set."""

    schema: int
    process: str
    """Identity.key of the process."""
    rank: int
    host: str
    step: int
    time_unix_ns: int
    device: int
    asked_bytes: int
    limit_bytes: int
    """Bytes that the process may allocate on the device."""
    free_bytes: int
    module: str
    stack: list[str]
    """Stack of the failed allocation, in the format of LiveMemoryRow.stack."""
    inside: list[str]
    """Open spans of the process, outermost first."""
    untold: int
    """Number of earlier out-of-memory errors for which no table was made."""
    table: LiveMemoryTable | None
    took_s: float


class OutOfMemory(InitialOutOfMemory, total=False):
    """Content of an out-of-memory file. The node's state and the report have its largest rows."""

    device_bytes: int
    caught: bool
    """True if the watch ended without an error afterwards."""
    earlier: str | None
    """File with the previous error's table, if this error followed too soon for a new table."""
    file: str
    """Path within the run directory. The sidecar fills in this field."""


def build_live_table(
    snapshot: Mapping[str, Any],
    device: int,
    places: AllocationSites,
    *,
    max_blocks: int = MAX_BLOCKS,
    max_rows: int = MAX_ROWS,
) -> LiveMemoryTable:
    """Build the table of one device. max_blocks, max_rows: limits, which tests change."""
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = [block for block in blocks if block["state"] != "inactive"]
    inactive = [block["size"] for block in blocks if block["state"] == "inactive"]
    new, events, history_s = _read_history(snapshot, device)
    looked_at = (
        live
        if len(live) <= max_blocks
        else heapq.nlargest(max_blocks, live, key=lambda block: block["size"])
    )
    rows = _group_blocks(looked_at, places, new if events else None)
    shown = rows[:max_rows]
    live_bytes = sum(block["size"] for block in live)
    return LiveMemoryTable(
        rows=shown,
        other_bytes=live_bytes - sum(row["bytes"] for row in shown),
        other_blocks=len(live) - sum(row["blocks"] for row in shown),
        allocated_bytes=sum(
            block["size"] for block in live if block["state"] == "active_allocated"
        ),
        reserved_bytes=sum(segment["total_size"] for segment in segments),
        inactive_bytes=sum(inactive),
        largest_inactive_bytes=max(inactive, default=0),
        segments=len(segments),
        expandable=any(segment.get("is_expandable") for segment in segments),
        history_events=events,
        history_s=history_s,
    )


def _group_blocks(
    blocks: Sequence[Mapping[str, Any]], places: AllocationSites, new: set[int] | None
) -> list[LiveMemoryRow]:
    # Stacks share frame objects. Comparing ids of frames is ten times faster than comparing
    # contents.
    groups: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for block in blocks:
        frames = block.get("frames")
        groups.setdefault(tuple(map(id, frames)) if frames else (-block["size"],), []).append(block)
    merged: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for group in groups.values():
        frames = group[0].get("frames")
        key = places.find_site(frames) if frames else ("", (), group[0]["size"])
        merged.setdefault(key, []).extend(group)
    rows = [
        LiveMemoryRow(
            module=key[0],
            stack=list(key[1]),
            bytes=sum(block["size"] for block in group),
            blocks=len(group),
            largest_bytes=max(block["size"] for block in group),
            new_blocks=None if new is None else sum(block["address"] in new for block in group),
        )
        for key, group in merged.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _read_history(snapshot: Mapping[str, Any], device: int) -> tuple[set[int], int, float | None]:
    """Return the memory history's allocated addresses, number of events and length in seconds."""
    traces = snapshot.get("device_traces", ())
    trace = (
        [each for each in traces[device] if each["action"] in _EVENTS]
        if device < len(traces)
        else []
    )
    new = {each["addr"] for each in trace if each["action"] == "alloc"}
    if not trace:
        return new, 0, None
    return new, len(trace), (trace[-1]["time_us"] - trace[0]["time_us"]) / 1e6


_EVENTS = ("alloc", "free_completed")


class AllocationSites:
    """Converter from stacks of allocations to the module and stack of a LiveMemoryRow.

    Stacks share frame objects, so the result for each frame is cached.
    """

    def __init__(self, forwards: Forwards, hidden: tuple[str, ...]) -> None:
        """hidden: paths of packages whose frames are left out."""
        self._forwards = forwards
        self._hidden = hidden
        # By id(frame): class, text, whether the frame is shown, and the frame, which keeps the id
        # valid.
        self._known: dict[int, tuple[str, str, bool, Mapping[str, Any]]] = {}

    def find_site(self, frames: Frames) -> tuple[str, tuple[str, ...]]:
        """Return the module and the stack of a LiveMemoryRow. frames: innermost first."""
        looked_at = [self._known.get(id(frame)) or self._convert_frame(frame) for frame in frames]
        classes = [name for name, *_ in reversed(looked_at) if name]
        if len(classes) > _MAX_CLASSES:
            classes = [classes[0], "...", *classes[1 - _MAX_CLASSES :]]
        shown = [text for _, text, show, _ in looked_at if show] or [
            text for _, text, *_ in looked_at
        ]
        return " > ".join(classes), tuple(shown[:_MAX_FRAMES])

    def _convert_frame(self, frame: Mapping[str, Any]) -> tuple[str, str, bool, Mapping[str, Any]]:
        filename, line, name = frame["filename"], frame["line"], frame["name"]
        of_class = ""
        if name == "forward":
            methods = self._forwards.get(filename, ())
            place = bisect_right(methods, line, key=lambda method: method[0])
            of_class = methods[place - 1][1] if place else ""
        shown = not filename.startswith(self._hidden)
        known = self._known[id(frame)] = of_class, f"{filename}:{line} {name}", shown, frame
        return known
