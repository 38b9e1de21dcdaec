"""Write a trace in Chrome's JSON format for each rank, which HolisticTraceAnalysis reads.

HTA takes spans with a stream for kernels, and those with NCCL's names for communication.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from torchlens_perf.page.gather.step_trace import DEVICE
from torchlens_perf.timeline.trace_file import Event, EventType

# Not a .json file, which HTA would read as a trace.
MANIFEST = "manifest.jsonl"
# In these spans, a device waits or is not used.
_NO_KERNELS = ("step", "data", "wait")


class ChromeTraceWriter:
    """Write a file per rank and a manifest into a folder. Has the methods of TraceWriter.

    Counters, arrows and hosts are left out. Instants are lines of the manifest.
    """

    def __init__(self, folder: Path, begin_ns: int) -> None:
        self._folder = folder
        self._begin_ns = begin_ns
        self._numbers = itertools.count(1)
        self._ranks: dict[int, tuple[int, IO[str]]] = {}
        """Rank and file by number of the process."""
        self._tracks: dict[int, tuple[int | None, str, int]] = {}
        """Process, name and order by number of the track."""
        self._open: dict[int, list[Event]] = defaultdict(list)
        self._manifest: list[dict[str, Any]] = []

    def add_process(self, number: int, name: str, order: int) -> int:
        process = next(self._numbers)
        if name.startswith("rank "):
            rank, path = number - 1, self._folder / f"rank{number - 1:05d}.json.gz"
            file = gzip.open(path, "wt", compresslevel=5)  # noqa: SIM115
            head = {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": self._begin_ns}
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            label = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
            file.write(json.dumps(label))
            self._ranks[process] = rank, file
            self._manifest.append({"rank": rank, "file": path.name, "name": name})
        return process

    def add_track(self, name: str, parent: int | None, order: int) -> int:
        track = next(self._numbers)
        self._tracks[track] = parent, name, order
        return track

    def add_counter(self, name: str, unit: str, parent: int, order: int) -> int:
        return self.add_track(name, parent, order)

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.type is EventType.BEGIN:
                self._open[event.track].append(event)
            elif event.type is EventType.END:
                self._write_span(self._open[event.track].pop(), event.time_ns)
            elif event.type is EventType.INSTANT:
                instant = {"unix_ns": event.time_ns, "name": event.name, **event.annotations}
                self._manifest.append(instant)

    def _write_span(self, begin: Event, end_ns: int) -> None:
        process, lane, order = self._tracks[begin.track]
        rank, file = self._ranks[process or 0]
        # HTA rounds fractions, after which kernels may overlap.
        begin_us, end_us = ((ns - self._begin_ns) // 1000 for ns in (begin.time_ns, end_ns))
        span = {
            "ph": "X", "cat": "cpu_op", "name": begin.name, "pid": rank, "tid": order,
            "ts": begin_us, "dur": end_us - begin_us, "args": {**begin.annotations},
        }  # fmt: skip
        if DEVICE in lane:
            if begin.category in _NO_KERNELS or begin_us == end_us:
                return
            span |= {"cat": "kernel", "args": {"stream": order, "correlation": -1}}
            if begin.category == "collective":
                span["name"] = f"ncclDevKernel_{begin.name}"
            elif begin.category != "section":
                span["name"] = begin.category
        elif begin.category == "step":
            number = begin.name.removeprefix("step ")
            span |= {"cat": "user_annotation", "name": f"ProfilerStep#{number}"}
        file.write(",\n" + json.dumps(span))

    def flush(self) -> None:
        """Complete all files."""
        for _, file in self._ranks.values():
            file.write("\n]}\n")
            file.close()
        lines = "".join(json.dumps(each) + "\n" for each in self._manifest)
        (self._folder / MANIFEST).write_text(lines)
