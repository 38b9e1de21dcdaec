"""Write events in Chrome's JSON format, gzipped, for Perfetto.

Times are microseconds since the trace's begin. They have three decimals, so they are exact. Texts
are printable, because Perfetto's tools print them to terminals.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchlens_perf.errors import printable
from torchlens_perf.page.gather.step_trace import LANES
from torchlens_perf.timeline.slices import Slice, Track

_FINDINGS = 2_000_000_000
"""Process id of the track of findings. Process ids of ranks and hosts are smaller."""
_HOSTS = 1_000_000
# Thread ids are PROCESS * _TRACKS + order: no thread is the main thread of its process.
_TRACKS, _ROWS = 1000, 100
_LANE_TITLES = ("phases and modules", *LANES[1:], "work")
_printable = functools.lru_cache(4096)(printable)


class TraceWriter:
    """Writes tracks, in any order, and what is between them, for https://ui.perfetto.dev."""

    def __init__(self, path: Path, begin_ns: int, host_of: Mapping[int, str]) -> None:
        """Begin to write. begin_ns: Unix time of the begin. host_of: the host of each rank."""
        self._begin_ns, self._host_of = begin_ns, host_of
        self._file = gzip.open(path, "wb", compresslevel=5)  # noqa: SIM115
        header = {"displayTimeUnit": "ns", "baseTimeNanoseconds": begin_ns, "traceEvents": []}
        self._file.write(msgspec.json.encode(header)[:-2])
        self._separator = b"\n"
        self._processes: dict[int | str, int] = {}
        self._threads: set[int] = set()
        self._describe("process", {"pid": _FINDINGS}, "findings", 0)
        self._describe("thread", {"pid": _FINDINGS, "tid": _FINDINGS}, "findings", 0)

    def write_track(self, track: Track, arrows: Mapping[int, tuple[int, int]]) -> None:
        """Write the slices of a track of a rank.

        arrows: the first and the last rank of each arrow between slices.
        """
        process = self._find_or_add_process(track.rank)
        order = track.lane * _ROWS + track.row
        thread = process * _TRACKS + order
        if thread not in self._threads:
            self._threads.add(thread)
            title = _LANE_TITLES[track.lane] + (f" {track.row + 1}" if track.row else "")
            self._describe("thread", {"pid": process, "tid": thread}, title, order)
        for each in track.slices:
            self._write(self._describe_slice(each, track.rank, process, thread, arrows))

    def write_counter(self, owner: int | str, name: str, unit: str, ns: int, value: float) -> None:
        """Write a value of a rank (int) or of something else (its name)."""
        self._write({
            "ph": "C", "pid": self._find_or_add_process(owner), "ts": self._microseconds(ns),
            "name": _printable(name), "args": {unit: value},
        })  # fmt: skip

    def write_instant(self, ns: int, name: str, arguments: Mapping[str, Any]) -> None:
        """Write an event of the whole job. Texts of the arguments are printable."""
        self._write({
            "ph": "i", "s": "t", "pid": _FINDINGS, "tid": _FINDINGS, "ts": self._microseconds(ns),
            "name": name, "args": arguments,
        })  # fmt: skip

    def close(self) -> None:
        """Complete the file."""
        self._file.write(b"\n]}\n")
        self._file.close()

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._separator + msgspec.json.encode(event))
        self._separator = b",\n"

    def _describe_slice(
        self,
        each: Slice,
        rank: int,
        process: int,
        thread: int,
        arrows: Mapping[int, tuple[int, int]],
    ) -> dict[str, Any]:
        event = {
            "ph": "X", "pid": process, "tid": thread, "ts": self._microseconds(each.start_ns),
            "dur": (each.end_ns - each.start_ns) / 1000, "name": _printable(each.name),
            "cat": each.category,
        }  # fmt: skip
        if each.arguments:
            event["args"] = each.arguments
        if each.flow is not None and each.flow in arrows:
            first, last = arrows[each.flow]
            event |= {"bind_id": each.flow, "flow_in": rank != first, "flow_out": rank != last}
        return event

    def _microseconds(self, ns: int) -> float:
        # The nearest float has the three decimals for the first 100 days.
        return max(0, ns - self._begin_ns) / 1000

    def _find_or_add_process(self, owner: int | str) -> int:
        if owner not in self._processes:
            name, number = str(owner), _HOSTS + len(self._processes)
            if isinstance(owner, int):
                name = printable(f"rank {owner} on {self._host_of.get(owner, '?')}")
                number = owner + 1
            self._processes[owner] = number
            self._describe("process", {"pid": number}, name, number)
        return self._processes[owner]

    def _describe(self, kind: str, ids: Mapping[str, int], name: str, order: int) -> None:
        """Name a process or a thread, and give it a place among the others."""
        self._write({"ph": "M", **ids, "name": f"{kind}_name", "args": {"name": printable(name)}})
        self._write({"ph": "M", **ids, "name": f"{kind}_sort_index", "args": {"sort_index": order}})
