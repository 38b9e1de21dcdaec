"""Read a trace of torch.profiler: the Chrome JSON of export_chrome_trace(), which may be gzipped.

Events are decoded one at a time, because a trace may take a gigabyte. Times are Unix time:
`baseTimeNanoseconds` plus `ts`, or `ts` alone in files of early versions.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.timeline.slices import Slice

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync")
"""Categories of the slices on streams of a device."""
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})", re.IGNORECASE)
_CHUNK_CHARACTERS = 1 << 22
# Neither one event nor the fields before the events are longer.
_MAX_CHARACTERS = 1 << 28


@dataclasses.dataclass
class ProfiledThread:
    """A thread of the host, or a stream of a device."""

    name: str = ""
    on_device: bool = False
    slices: list[Slice] = dataclasses.field(default_factory=list)
    """In order of start; of those that start together, the longest first."""


@dataclasses.dataclass(frozen=True)
class ProfilerTrace:
    """The events of one process."""

    path: Path
    rank: int | None
    """From distributedInfo, else from the name of the file."""
    header: dict[str, Any]
    threads: list[ProfiledThread]
    memory: list[tuple[int, int]]
    """Unix time in ns, and bytes that the allocator of a GPU holds from then on."""

    def select(self, pattern: str) -> list[Slice]:
        """Return the slices whose names begin with this regular expression."""
        begins = re.compile(pattern).match
        return [each for thread in self.threads for each in thread.slices if begins(each.name)]


def read_profiler_trace(path: Path) -> ProfilerTrace:
    """Read a trace. Raise RunStoreError if the file is no trace, is damaged or cannot be read."""
    header: dict[str, Any] = {}
    try:
        with path.open("rb") as binary:
            is_gzip = binary.read(2) == b"\x1f\x8b"
        with (gzip.open if is_gzip else open)(path, "rt", encoding="utf-8") as file:
            return build_trace(path, _decode_events(file, header), header)
    except (OSError, EOFError, zlib.error, *DAMAGED_DATA) as error:
        raise RunStoreError(
            f"{path} cannot be read as a trace of torch.profiler:"
            f" {getattr(error, 'strerror', None) or error}. Expected is the JSON of"
            " export_chrome_trace(), which may be gzipped"
        ) from None


def _decode_events(file: IO[str], header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events. Add the other fields to the header, also those that follow the events."""
    text = file.read(_CHUNK_CHARACTERS)
    while (found := _EVENTS.search(text)) is None:
        more = file.read(_CHUNK_CHARACTERS)
        if not more or len(text) > _MAX_CHARACTERS:
            raise ValueError("it has no traceEvents")
        text += more
    before, at = text[: found.end()], found.end()
    # Names may contain control characters.
    decode = json.JSONDecoder(strict=False).raw_decode
    while text[(begin := _BETWEEN.match(text, at).end()) : begin + 1] != "]":  # type: ignore[union-attr]
        try:
            event, at = decode(text, begin)
        except ValueError:
            more = file.read(_CHUNK_CHARACTERS)
            if not more or len(text) - begin > _MAX_CHARACTERS:
                raise ValueError("it is damaged or incomplete") from None
            text, at = text[begin:] + more, 0
            continue
        yield event
    header.update(decode((before + text[begin:] + file.read()).lstrip())[0])


def build_trace(
    path: Path, events: Iterable[dict[str, Any]], header: dict[str, Any]
) -> ProfilerTrace:
    """Return the trace of events in the form of Chrome's JSON. header: complete after the events."""
    threads: dict[tuple[Any, Any], ProfiledThread] = defaultdict(ProfiledThread)
    complete: list[tuple[ProfiledThread, float, float, str, str, dict[str, Any]]] = []
    arrows: dict[tuple[str, Any], int] = {}
    flows: dict[tuple[int, float], list[int]] = defaultdict(list)
    memory: list[tuple[float, int]] = []
    for event in events:
        phase, category = event.get("ph"), event.get("cat", "")
        if phase == "X" and category != "Trace":
            thread = threads[event["pid"], event["tid"]]
            thread.on_device |= category in ON_DEVICE
            name, args = sys.intern(event["name"]), event.get("args", {})
            args = args if "Collective name" in args or "Input Dims" in args else {}
            begin_us = event["ts"]
            complete.append(
                (thread, begin_us, begin_us + max(0, event.get("dur", 0)), name, category, args)
            )
        elif phase in ("s", "f"):
            arrow = arrows.setdefault((category, event["id"]), len(arrows))
            flows[id(threads[event["pid"], event["tid"]]), event["ts"]].append(arrow)
        elif phase == "i" and event["name"] == "[memory]" and event["args"]["Device Id"] >= 0:
            memory.append((event["ts"], event["args"]["Total Allocated"]))
        elif phase == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]].name = event["args"]["name"].strip()
    base_ns = int(header.get("baseTimeNanoseconds", 0))
    for thread, begin_us, end_us, name, category, args in complete:
        begin_ns, end_ns = round(1e3 * begin_us) + base_ns, round(1e3 * end_us) + base_ns
        arrows_here = tuple(flows.get((id(thread), begin_us), ()))
        thread.slices.append(Slice(begin_ns, end_ns, name, category, arrows_here, args))
    for (pid, tid), thread in threads.items():
        thread.name = thread.name or str(tid)
        if thread.on_device:
            thread.name = f"device {pid} {thread.name}"
        thread.slices.sort(key=lambda each: (each.start_ns, -each.end_ns))
    distributed = header.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    if not isinstance(rank, int) or rank < 0:
        found = _RANK_IN_NAME.findall(path.name)
        rank = int(found[-1]) if found else None
    used = [thread for thread in threads.values() if thread.slices]
    held = [(round(1e3 * time_us) + base_ns, size) for time_us, size in memory]
    return ProfilerTrace(path, rank, header, used, held)
