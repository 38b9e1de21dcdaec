"""Write events in Chrome's JSON format, gzipped: one file for Perfetto, or a file per rank for HTA.

Times of the files are microseconds since the trace's begin. In Perfetto's file they have three
decimals, so they are exact. Texts are printable, because Perfetto's tools print them to terminals.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchlens_perf.errors import printable
from torchlens_perf.page.gather.step_trace import DEVICE, LANES
from torchlens_perf.timeline.slices import Slice, Track

# Not a .json file, which HTA would read as a trace.
MANIFEST = "manifest.jsonl"
# In these spans, a device waits or is not used.
_NO_KERNELS = ("step", "data", "wait")
_FINDINGS = 2_000_000_000
"""Process id of the track of findings. Process ids of ranks and hosts are smaller."""
_HOSTS = 1_000_000
# Thread ids are PROCESS * _TRACKS + order: no thread is the main thread of its process.
_TRACKS, _ROWS = 1000, 100
_LANE_TITLES = ("phases and modules", *LANES[1:])
_printable = functools.lru_cache(4096)(printable)


class TraceWriter:
    """Writes tracks, in any order, and what is between them."""

    def __init__(self, path: Path, begin_ns: int, host_of: Mapping[int, str]) -> None:
        """Begin to write. begin_ns: Unix time of the begin. host_of: the host of each rank."""
        self._path, self._begin_ns, self._host_of = path, begin_ns, host_of

    def write_track(self, track: Track, arrows: Mapping[int, tuple[int, int]]) -> None:
        """Write the slices of a track of a rank.

        arrows: the first and the last rank of each arrow between slices.
        """

    def write_counter(self, owner: int | str, name: str, unit: str, ns: int, value: float) -> None:
        """Write a value of a rank (int) or of a host (str)."""

    def write_instant(self, ns: int, name: str, arguments: Mapping[str, Any]) -> None:
        """Write an event of the whole job. Texts of the arguments are printable."""

    def close(self) -> None:
        """Complete the files."""

    def _name_rank(self, rank: int) -> str:
        return printable(f"rank {rank} on {self._host_of.get(rank, '?')}")


class _EventFile:
    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._file = gzip.open(path, "wb", compresslevel=5)  # noqa: SIM115
        self._file.write(msgspec.json.encode({**header, "traceEvents": []})[:-2])
        self._separator = b"\n"

    def write(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._separator + msgspec.json.encode(event))
        self._separator = b",\n"

    def close(self) -> None:
        self._file.write(b"\n]}\n")
        self._file.close()


class PerfettoWriter(TraceWriter):
    """Write one file with all ranks, for https://ui.perfetto.dev."""

    def __init__(self, path: Path, begin_ns: int, host_of: Mapping[int, str]) -> None:
        super().__init__(path, begin_ns, host_of)
        self._file = _EventFile(path, {"displayTimeUnit": "ns", "baseTimeNanoseconds": begin_ns})
        self._processes: dict[int | str, int] = {}
        self._threads: set[int] = set()
        self._describe("process", {"pid": _FINDINGS}, "findings", 0)
        self._describe("thread", {"pid": _FINDINGS, "tid": _FINDINGS}, "findings", 0)

    def write_track(self, track: Track, arrows: Mapping[int, tuple[int, int]]) -> None:
        process = self._find_or_add_process(track.rank)
        order = track.lane * _ROWS + track.row
        thread = process * _TRACKS + order
        if thread not in self._threads:
            self._threads.add(thread)
            title = _LANE_TITLES[track.lane] + (f" {track.row + 1}" if track.row else "")
            self._describe("thread", {"pid": process, "tid": thread}, title, order)
        for each in track.slices:
            self._file.write(self._describe_slice(each, track.rank, process, thread, arrows))

    def write_counter(self, owner: int | str, name: str, unit: str, ns: int, value: float) -> None:
        process, ts = self._find_or_add_process(owner), self._microseconds(ns)
        name = _printable(name)
        counter = {"ph": "C", "pid": process, "ts": ts, "name": name, "args": {unit: value}}
        self._file.write(counter)

    def write_instant(self, ns: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._file.write({
            "ph": "i", "s": "t", "pid": _FINDINGS, "tid": _FINDINGS, "ts": self._microseconds(ns),
            "name": name, "args": arguments,
        })  # fmt: skip

    def close(self) -> None:
        self._file.close()

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
            name, number = f"host {owner}", _HOSTS + len(self._processes)
            if isinstance(owner, int):
                name, number = self._name_rank(owner), owner + 1
            self._processes[owner] = number
            self._describe("process", {"pid": number}, name, number)
        return self._processes[owner]

    def _describe(self, kind: str, ids: Mapping[str, int], name: str, order: int) -> None:
        """Name a process or a thread, and give it a place among the others."""
        facts = {"name": {"name": printable(name)}, "sort_index": {"sort_index": order}}
        for fact, arguments in facts.items():
            self._file.write({"ph": "M", **ids, "name": f"{kind}_{fact}", "args": arguments})


class HtaWriter(TraceWriter):
    """Write a file per rank and a manifest, as HolisticTraceAnalysis reads them.

    HTA takes spans with a stream for kernels, and those with NCCL's names for communication. Arrows
    and counters are left out. Instants are lines of the manifest.
    """

    def __init__(self, path: Path, begin_ns: int, host_of: Mapping[int, str]) -> None:
        """path: an empty folder."""
        super().__init__(path, begin_ns, host_of)
        self._files: dict[int, _EventFile] = {}
        self._manifest: list[dict[str, Any]] = []

    def write_track(self, track: Track, arrows: Mapping[int, tuple[int, int]]) -> None:
        file = self._find_or_add_file(track.rank)
        for each in track.slices:
            event = self._describe_slice(each, track)
            if event is not None:
                file.write(event)

    def write_instant(self, ns: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._manifest.append({"unix_ns": ns, "name": name, **arguments})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        lines = [msgspec.json.encode(each) + b"\n" for each in self._manifest]
        (self._path / MANIFEST).write_bytes(b"".join(lines))

    def _find_or_add_file(self, rank: int) -> _EventFile:
        if rank not in self._files:
            path = self._path / f"rank{rank:05d}.json.gz"
            header = {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": self._begin_ns}
            file = self._files[rank] = _EventFile(path, header)
            name = self._name_rank(rank)
            file.write({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
            self._manifest.append({"rank": rank, "file": path.name, "name": name})
        return self._files[rank]

    def _describe_slice(self, each: Slice, track: Track) -> dict[str, Any] | None:
        # HTA rounds fractions, after which kernels may overlap.
        begin_us, end_us = ((ns - self._begin_ns) // 1000 for ns in (each.start_ns, each.end_ns))
        order = track.lane * _ROWS + track.row
        event: dict[str, Any] = {
            "ph": "X", "cat": "cpu_op", "name": _printable(each.name), "pid": track.rank, "tid": order,
            "ts": begin_us, "dur": end_us - begin_us, "args": {**each.arguments},
        }  # fmt: skip
        if DEVICE in LANES[track.lane]:
            if each.category in _NO_KERNELS or begin_us == end_us:
                return None
            event |= {"cat": "kernel", "args": {"stream": order, "correlation": -1}}
            if each.category == "collective":
                event["name"] = f"ncclDevKernel_{event['name']}"
            elif each.category != "section":
                event["name"] = each.category
        elif each.category == "step":
            number = each.name.removeprefix("step ")
            event |= {"cat": "user_annotation", "name": f"ProfilerStep#{number}"}
        return event
