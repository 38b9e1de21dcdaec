"""What holds the device's memory: a snapshot of torch's allocator as a table of live blocks. Pure.

The snapshot is what torch.cuda.memory._snapshot() documents. Blocks are grouped by the Python stack that asked for
them, and by the modules whose forward() is in it; blocks without a stack (the history was off then, or it was one of
autograd's threads that asked) by their size.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

MAX_BLOCKS = 50_000  # that are looked at one by one, the largest
MAX_ROWS = 40
_MAX_FRAMES = 6
_MAX_CLASSES = 4

Frames = Sequence[Mapping[str, Any]]
Forwards = Mapping[str, Sequence[tuple[int, str]]]
"""By file, where the forward() of its classes begin: first line and class, by lines."""


class LiveRow(TypedDict):
    """Live blocks that were asked for at one place."""

    module: str
    """Classes whose forward() was running, outermost first, as "GPT > Block > MLP"; "" for none."""
    stack: list[str]
    """The innermost frames outside of torch, innermost first, as "train.py:12 forward"; empty where there is none."""
    bytes: int
    blocks: int
    largest_bytes: int
    new_blocks: int | None
    """How many of them were allocated within the history; None where there is no history."""


class LiveTable(TypedDict):
    """The live blocks of one device, most bytes first, and how full its segments are."""

    rows: list[LiveRow]
    other_bytes: int
    """Of live blocks that are in no row: of smaller rows, or smaller than the blocks that were looked at."""
    other_blocks: int
    without_stack_bytes: int
    allocated_bytes: int
    pending_bytes: int
    """Freed, but another stream may still be using them."""
    reserved_bytes: int
    inactive_bytes: int
    """Free inside of segments."""
    largest_inactive_bytes: int
    segments: int
    expandable: bool
    """Whether segments can grow: then inactive memory can be given back page by page."""
    history_events: int
    """Allocations and frees that the history holds; 0 where it was off."""
    history_s: float | None
    """How far back they go."""


class OutOfMemoryAtFirst(TypedDict):
    """What the process whose device's memory ran out tells of it at once."""

    schema: int
    process: str
    """Identity.key."""
    rank: int
    host: str
    step: int
    time_unix_ns: int
    device: int
    asked_bytes: int
    limit_bytes: int
    """What the process may take of the device."""
    free_bytes: int
    module: str
    stack: list[str]
    """Where it was asked for, as LiveRow has them."""
    inside: list[str]
    """Its open spans, outermost first."""
    untold: int
    """Errors before this one without a table."""
    table: LiveTable | None
    took_s: float


class OutOfMemory(OutOfMemoryAtFirst, total=False):
    """The same as its file has it, and the node's state and the report with the largest rows."""

    device_bytes: int
    caught: bool
    """Whether the watch ended without an error afterwards."""
    earlier: str | None
    """The file of the table before, where memory ran out again so soon that there is none."""
    file: str
    """In the run directory; set by the sidecar."""


def live_table(
    snapshot: Mapping[str, Any],
    device: int,
    places: Places,
    *,
    max_blocks: int = MAX_BLOCKS,
    max_rows: int = MAX_ROWS,
) -> LiveTable:
    """The table of one device. max_*: for tests."""
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = [block for block in blocks if block["state"] != "inactive"]
    inactive = [block["size"] for block in blocks if block["state"] == "inactive"]
    new, events, history_s = _history(snapshot, device)
    looked_at = live if len(live) <= max_blocks else heapq.nlargest(max_blocks, live, key=lambda block: block["size"])
    rows = _rows(looked_at, places, new if events else None)
    shown = rows[:max_rows]
    live_bytes = sum(block["size"] for block in live)
    return LiveTable(
        rows=shown,
        other_bytes=live_bytes - sum(row["bytes"] for row in shown),
        other_blocks=len(live) - sum(row["blocks"] for row in shown),
        without_stack_bytes=sum(row["bytes"] for row in rows if not row["stack"]),
        allocated_bytes=sum(block["size"] for block in live if block["state"] == "active_allocated"),
        pending_bytes=sum(block["size"] for block in live if block["state"] != "active_allocated"),
        reserved_bytes=sum(segment["total_size"] for segment in segments),
        inactive_bytes=sum(inactive),
        largest_inactive_bytes=max(inactive, default=0),
        segments=len(segments),
        expandable=any(segment.get("is_expandable") for segment in segments),
        history_events=events,
        history_s=history_s,
    )


def _rows(blocks: Sequence[Mapping[str, Any]], places: Places, new: set[int] | None) -> list[LiveRow]:
    # Stacks share their frames: their identities tell stacks apart in a tenth of the time that their contents take.
    groups: dict[tuple[int, ...], list[Mapping[str, Any]]] = {}
    for block in blocks:
        frames = block.get("frames")
        groups.setdefault(tuple(map(id, frames)) if frames else (-block["size"],), []).append(block)
    merged: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for group in groups.values():
        frames = group[0].get("frames")
        key = places.of(frames) if frames else ("", (), group[0]["size"])
        merged.setdefault(key, []).extend(group)
    rows = [
        LiveRow(
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


def _history(snapshot: Mapping[str, Any], device: int) -> tuple[set[int], int, float | None]:
    """Addresses that were allocated within the history, its length in events, and in seconds."""
    traces = snapshot.get("device_traces", ())
    trace = [each for each in traces[device] if each["action"] in _EVENTS] if device < len(traces) else []
    new = {each["addr"] for each in trace if each["action"] == "alloc"}
    if not trace:
        return new, 0, None
    return new, len(trace), (trace[-1]["time_us"] - trace[0]["time_us"]) / 1e6


_EVENTS = ("alloc", "free_completed")


class Places:
    """What stacks say of where memory was asked for. Frames are looked at once: stacks share them."""

    def __init__(self, forwards: Forwards, hidden: tuple[str, ...]) -> None:
        """hidden: paths of packages whose frames are not shown."""
        self._forwards = forwards
        self._hidden = hidden
        # By a frame's identity: its class, its text, whether it is shown; and itself, for it to keep its identity.
        self._known: dict[int, tuple[str, str, bool, Mapping[str, Any]]] = {}

    def of(self, frames: Frames) -> tuple[str, tuple[str, ...]]:
        """LiveRow's module and stack of these frames, innermost first."""
        looked_at = [self._known.get(id(frame)) or self._frame(frame) for frame in frames]
        classes = [name for name, *_ in reversed(looked_at) if name]
        if len(classes) > _MAX_CLASSES:
            classes = [classes[0], "...", *classes[1 - _MAX_CLASSES :]]
        shown = [text for _, text, show, _ in looked_at if show] or [text for _, text, *_ in looked_at]
        return " > ".join(classes), tuple(shown[:_MAX_FRAMES])

    def _frame(self, frame: Mapping[str, Any]) -> tuple[str, str, bool, Mapping[str, Any]]:
        filename, line, name = frame["filename"], frame["line"], frame["name"]
        of_class = ""
        if name == "forward":
            methods = self._forwards.get(filename, ())
            place = bisect_right(methods, line, key=lambda method: method[0])
            of_class = methods[place - 1][1] if place else ""
        shown = not filename.startswith(self._hidden)
        known = self._known[id(frame)] = of_class, f"{filename}:{line} {name}", shown, frame
        return known
