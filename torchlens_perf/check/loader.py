"""Measure the storage of a dataset, and prove how many workers its DataLoader needs.

Reads are told from the page cache: posix_fadvise(POSIX_FADV_DONTNEED) drops the pages of a file, and
mincore() counts those that stayed. Linux answers mincore() only for files that the user may write.
Entries of folders stay cached, so look-ups are those of a folder that was just listed.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import mmap
import os
import random
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_rounded,
)
from torchlens_perf.errors import ConfigError
from torchlens_perf.hooks.loader_workers import LoaderWorkersHook, WorkerTimes
from torchlens_perf.interruption import suppress

_MAX_FILES, _MAX_MAPPED = 4000, 1 << 30
_LARGE_BYTES, _BLOCK_BYTES, _PAGE_BYTES = 4 << 20, 1 << 20, mmap.PAGESIZE
# A number of workers is enough if steps take at most this many times the shortest time.
_ENOUGH = 1.1
_PARTS = "read", "decode", "collate", "waiting for a CPU", "queue"


class Reads(NamedTuple):
    """Times of one kind of reads. With a count of 0, there was no file for them."""

    kind: str
    reads: int = 0
    bytes: int = 0
    total_s: float = 0.0
    median_s: float = 0.0
    p99_s: float = 0.0
    cached_share: float | None = None
    """Share of the files' pages that were in the page cache before the reads; None if not known."""

    def describe(self) -> str:
        """Return a line such as "sequential: 1.2 GB/s, median 0.8 ms ..."."""
        if not self.reads:
            return f"{self.kind}: not measured, no file is of the size for it"
        rate = f"{format_bytes(self.bytes / self.total_s, 'B')}/s" if self.bytes else ""
        per_s = f"{format_rounded(self.reads / self.total_s)} reads/s"
        cached = "unknown" if self.cached_share is None else format_percent(self.cached_share)
        return (
            f"{self.kind}: {', '.join(filter(None, [rate, per_s]))}, median"
            f" {format_duration(self.median_s)}, p99 {format_duration(self.p99_s)}; in the page cache"
            f" before: {cached}"
        )


class Counters(NamedTuple):
    """Reads since the file system was mounted, by its own counters."""

    source: str
    reads: int
    bytes: int
    server_s: float | None = None
    """Sum of times until the server has answered; None if the file system does not count it."""
    repeated: int | None = None
    """Requests that were sent more than once; None if the file system does not count them."""


class Trial(NamedTuple):
    """Times per batch of a DataLoader with this number of workers."""

    workers: int
    period_s: float
    """From batch to batch, with the step."""
    read_s: float
    """Time that a worker waits, mostly for reads."""
    decode_s: float
    """CPU time of a worker, without collate_s."""
    collate_s: float
    cpu_wait_s: float
    """Time that a worker waits for a CPU."""
    queue_s: float
    """Time in which a worker hands over a batch, or waits until the next one is wanted."""

    def describe(self) -> str:
        """Return a line such as "3 workers: 20.1 ms per batch ..."."""
        parts = zip(_PARTS, self[2:], strict=True)
        times = ", ".join(f"{name} {format_duration(each)}" for name, each in parts)
        return (
            f"{format_count(self.workers, 'worker')}: a batch every {format_duration(self.period_s)};"
            f" a worker's time for it: {times}"
        )


def measure_mount(path: Path, seconds: float) -> list[Reads]:
    """Read files below a path in four ways, each for a quarter of the time."""
    walked = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    files = list(itertools.islice([path] if path.is_file() else walked, _MAX_FILES))
    # The first look-ups of the files are those that count.
    metadata = _time_reads("metadata", seconds / 4, ((None, file.stat) for file in files))
    sizes = {file: file.stat().st_size for file in files if os.access(file, os.R_OK)}
    large = sorted(
        (file for file in files if sizes.get(file, 0) >= _LARGE_BYTES), key=sizes.__getitem__
    )
    small = [file for file in files if 0 < sizes.get(file, 0) <= _BLOCK_BYTES]
    return [
        _time_reads("sequential", seconds / 4, _read_large(large, _BLOCK_BYTES, lambda each: each)),
        _time_reads(
            "random",
            seconds / 4,
            _read_large(large, _PAGE_BYTES, lambda each: random.sample(each, 64)),
        ),
        _time_reads(
            "small files", seconds / 4, ((drop_pages(each), each.read_bytes) for each in small)
        ),
        metadata,
    ]


def drop_pages(path: Path) -> float | None:
    """Drop the pages of a file from the page cache. Return the share of those that stayed; None if
    Linux does not tell it to this user."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = min(os.fstat(file.fileno()).st_size, _MAX_MAPPED)
        if not size or not os.access(path, os.W_OK):
            return None
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            pages = (ctypes.c_ubyte * math.ceil(size / _PAGE_BYTES))()
            first = ctypes.c_ubyte.from_buffer(mapped)
            failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), pages)
            del first
    return None if failed else bytes(pages).count(1) / len(pages)


def _read_large(
    files: Iterable[Path], size: int, choose: Callable[[range], Iterable[int]]
) -> Iterator[tuple[float | None, Callable[[], bytes]]]:
    """Yield reads of this size at chosen places of each file, with the share of it in the cache."""
    for path in files:
        cached = drop_pages(path)
        with open(path, "rb", buffering=0) as file:
            for place in choose(range(path.stat().st_size // size)):
                yield cached, partial(os.pread, file.fileno(), size, place * size)


def _time_reads(
    kind: str, seconds: float, reads: Iterable[tuple[float | None, Callable[[], object]]]
) -> Reads:
    times_s, shares, size, until_s = (
        list[float](),
        list[float | None](),
        0,
        time.monotonic() + seconds,
    )
    for share, read in reads:
        began_s = time.perf_counter()
        found = read()
        times_s.append(time.perf_counter() - began_s)
        shares.append(share)
        size += len(found) if isinstance(found, bytes) else 0
        if time.monotonic() > until_s:
            break
    if not times_s:
        return Reads(kind)
    known = [each for each in shares if each is not None]
    cached = statistics.fmean(known) if len(known) == len(shares) else None
    p99_s, total_s = sorted(times_s)[int(0.99 * len(times_s))], sum(times_s)
    return Reads(kind, len(times_s), size, total_s, statistics.median(times_s), p99_s, cached)


def read_counters(path: Path) -> Counters | None:
    """Return the counters of the file system of a path; None if they do not exist or are not
    readable."""
    rows = [line.split()[:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [row for row in rows if path.resolve().is_relative_to(row[1])]
    source, point, kind = max(above, key=lambda row: len(row[1]))
    name = source.rpartition("/")[2]
    with suppress(OSError):
        if kind.startswith("nfs"):
            return parse_mountstats(Path("/proc/self/mountstats").read_text(), point)
        if kind == "lustre":
            folders = Path("/proc/fs/lustre/llite"), Path("/sys/kernel/debug/lustre/llite")
            files = [file for each in folders for file in each.glob(f"{name}-*/stats")]
            return parse_llite(files[0].read_text()) if files else None
        if kind == "gpfs":
            command = ["/usr/lpp/mmfs/bin/mmpmon", "-p"]
            done = subprocess.run(command, input="fs_io_s\n", capture_output=True, text=True)
            return parse_mmpmon(done.stdout, name)
    return None


def parse_mountstats(text: str, mount_point: str) -> Counters | None:
    """Read the counters of an NFS mount in /proc/self/mountstats."""
    about = f" mounted on {mount_point} with fstype nfs"
    mounts = [each for each in text.split("\ndevice ") if about in each.partition("\n")[0]]
    found = re.search(r"^\s*READ: (.*)", mounts[-1], re.MULTILINE) if mounts else None
    if found is None:
        return None
    reads, sent, _, _, received, _, server_ms, *_ = map(int, found[1].split())
    return Counters("NFS mountstats", reads, received, server_ms / 1e3, sent - reads)


def parse_llite(text: str) -> Counters | None:
    """Read the counters of a mount of Lustre."""
    found = re.search(r"^read_bytes +(\d+) samples \[bytes\] \d+ \d+ (\d+)", text, re.MULTILINE)
    return Counters("Lustre llite", int(found[1]), int(found[2])) if found else None


def parse_mmpmon(text: str, file_system: str) -> Counters | None:
    """Read the counters of a file system of GPFS, which `fs_io_s` of mmpmon prints."""
    found = re.search(rf" _fs_ {re.escape(file_system)} .*_br_ (\d+) .*_rdc_ (\d+)", text)
    return Counters("GPFS mmpmon", int(found[2]), int(found[1])) if found else None


def try_workers(loader: Any, workers: int, step: Callable[[], object], seconds: float) -> Trial:
    """Run steps on batches of a DataLoader with another number of workers.

    The first batches, which workers have made in advance, do not count.
    """
    tried, hook = copy.copy(loader), LoaderWorkersHook()
    hook.times = WorkerTimes()
    ahead = tried.prefetch_factor or 2
    # DataLoader does not let all of these be set.
    vars(tried).update(
        num_workers=workers, prefetch_factor=ahead, persistent_workers=False, _iterator=None
    )
    with hook.begin_start(tried) or nullcontext(), warnings.catch_warnings():
        # torch warns of more workers than CPUs.
        warnings.simplefilter("ignore")
        iterator = iter(tried)
    pids = [worker.pid for worker in iterator._workers]
    for _ in itertools.islice(iterator, (ahead + 1) * workers):
        step()
    rounds = list[tuple[float, list[int]]]()
    # Workers return batches in turn: whole rounds count. A worker may end before the last round.
    with suppress(OSError):
        for count, _ in enumerate(itertools.chain([None], iterator)):
            if count:
                step()
            if count % workers == 0:
                rounds.append((time.perf_counter(), _sum_up(hook.times, pids)))
            if len(rounds) > 2 and rounds[-1][0] - rounds[0][0] > seconds:
                break
    sums = (
        [end - start for start, end in zip(rounds[0][1], rounds[-1][1], strict=True)]
        if rounds
        else [0]
    )
    if not sums[0]:
        raise ConfigError(
            f"the DataLoader has too few batches to try {workers} workers: give it more, or forked"
            " workers"
        )
    period_s = (rounds[-1][0] - rounds[0][0]) / (len(rounds) - 1) / workers
    busy_s, cpu_s, collate_s, cpu_wait_s = (each / sums[0] / 1e9 for each in sums[1:])
    decode_s = max(0.0, cpu_s - collate_s)
    read_s = max(0.0, busy_s - decode_s - collate_s - cpu_wait_s)
    queue_s = max(0.0, workers * period_s - busy_s)
    return Trial(workers, period_s, read_s, decode_s, collate_s, cpu_wait_s, queue_s)


def _sum_up(times: WorkerTimes, pids: list[int]) -> list[int]:
    """Return the sums of workers, and how long they have waited for a CPU in ns."""
    waits = (int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids)
    return [*times.sum_up(pids), sum(waits)]


def predict_workers(one: Trial, step_s: float, cpus: float) -> int:
    """Return the number of workers with which steps do not wait for data, or are as short as the CPUs
    allow.

    one: a trial of one worker without a step. cpus: number of CPUs that the steps leave.
    """
    pace_s = max(step_s, (one.decode_s + one.collate_s) / cpus)
    return math.ceil((one.period_s - one.cpu_wait_s) / pace_s / _ENOUGH)


def prove_loader(loader: Any, step_s: float, seconds: float) -> tuple[int, int, list[Trial]]:
    """Return the predicted number of workers, the least that is enough, and the trials: of one worker
    without a step, of the predicted number, and of its neighbours."""
    cpus = len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    one = try_workers(loader, 1, lambda: None, seconds / 4)
    predicted = predict_workers(one, step_s, cpus)
    trials = [
        try_workers(loader, workers, partial(time.sleep, step_s), seconds / 4)
        for workers in range(max(1, predicted - 1), predicted + 2)
    ]
    limit_s = _ENOUGH * min(each.period_s for each in trials)
    return (
        predicted,
        min(each.workers for each in trials if each.period_s <= limit_s),
        [one, *trials],
    )
