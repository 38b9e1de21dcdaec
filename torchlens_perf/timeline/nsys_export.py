"""Read the SQLite file of `nsys export --type sqlite` as the traces of its processes.

Read are NVTX ranges, CUDA calls, kernels and copies, by the columns that the exporter's schema has
had since 2022.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchlens_perf.errors import RunStoreError
from torchlens_perf.timeline.profiler_trace import ProfilerTrace, build_trace

_MAGIC = b"SQLite format 3\0"
_PUSH_POP_AND_START_END = "(59, 60)"
# Of a globalTid, the lower 24 bits are the thread, the next 24 the process.
_RANGES = f"""SELECT start, end, coalesce(text, value), globalTid >> 24, globalTid & 16777215
FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId
WHERE eventType IN {_PUSH_POP_AND_START_END} AND end IS NOT NULL"""
_CALLS = """SELECT start, end, value, globalTid >> 24, globalTid & 16777215, correlationId
FROM CUPTI_ACTIVITY_KIND_RUNTIME LEFT JOIN StringIds ON id = nameId"""
_KERNELS = """SELECT start, end, value, globalPid >> 24, deviceId || ' ' || streamId, correlationId
FROM CUPTI_ACTIVITY_KIND_KERNEL LEFT JOIN StringIds ON id = demangledName"""
_COPIES = """SELECT start, end, 'copy', globalPid >> 24, deviceId || ' ' || streamId, correlationId
FROM CUPTI_ACTIVITY_KIND_MEMCPY"""
_TABLES = (("user_annotation", _RANGES), ("cuda_runtime", _CALLS), ("kernel", _KERNELS),
           ("gpu_memcpy", _COPIES))  # fmt: skip


def is_sqlite(path: Path) -> bool:
    """Return True if the file is a SQLite database. Raise OSError."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_nsys_export(path: Path) -> list[ProfilerTrace]:
    """Return the trace of each process with NVTX ranges. Raise RunStoreError for another file.

    A process has no rank. A file of one process may name the rank, as in `rank3.sqlite`.
    """
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as file:
            tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
            if "NVTX_EVENTS" not in tables:
                raise RunStoreError(
                    f"{path} has no NVTX ranges: record with `nsys profile -t cuda,nvtx`"
                )
            (base_ns,) = file.execute(
                "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME"
            ).fetchone()
            processes = sorted({row[3] for row in file.execute(_RANGES)})
            header = {"baseTimeNanoseconds": base_ns, "program": "Nsight Systems"}
            return [build_trace(path, _read_events(file, tables, pid), header) for pid in processes]
    except (sqlite3.Error, TypeError) as error:
        raise RunStoreError(
            f"{path} cannot be read as an export of Nsight Systems: {error}"
        ) from None


def _read_events(
    file: sqlite3.Connection, tables: set[str], process: int
) -> Iterator[dict[str, Any]]:
    """Yield the events of a process in the form of Chrome's JSON."""
    for category, query in _TABLES:
        if query.split("FROM ")[1].split()[0] not in tables:
            continue
        for start, end, name, pid, tid, *correlation in file.execute(query):
            if pid == process:
                at = {
                    "pid": "GPU" if category in ("kernel", "gpu_memcpy") else pid,
                    "tid": tid,
                    "ts": start / 1e3,
                }
                yield {
                    "ph": "X",
                    "cat": category,
                    "name": name or "",
                    "dur": (end - start) / 1e3,
                    **at,
                }
                if correlation and correlation[0]:
                    yield {
                        "ph": "f" if at["pid"] == "GPU" else "s",
                        "cat": "ac2g",
                        "id": correlation[0],
                        **at,
                    }
