"""Measure the storage of a dataset, and prove how many workers its DataLoader needs.

Reads are told from the page cache: posix_fadvise(POSIX_FADV_DONTNEED) drops the pages of a file, and
mincore() counts those that stayed. Linux answers mincore() only for files that the user may write.
Entries of folders stay cached, so look-ups are those of a folder that was just listed.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import math
import mmap
import os
import pkgutil
import random
import re
import shlex
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
from torchlens_perf.errors import require
from torchlens_perf.hooks.loader_workers import LoaderWorkersHook, WorkerTimes
from torchlens_perf.interruption import suppress

_MAX_FILES, _MAX_MAPPED = 4000, 1 << 30
_LARGE_BYTES, _BLOCK_BYTES, _PAGE_BYTES = 4 << 20, 1 << 20, mmap.PAGESIZE
_COUNTERS = {
    "nfs": (
        r"mounted on MOUNT with fstype nfs(?s:(?:(?!^device ).)*?)"
        r"^\s*READ: (?P<reads>\d+) \d+ \d+ \d+ (?P<bytes>\d+) \d+ (?P<server_ms>\d+)"
    ),
    "lustre": r"^read_bytes +(?P<reads>\d+) samples \[bytes\] \d+ \d+ (?P<bytes>\d+)",
    "gpfs": r" _fs_ MOUNT .*_br_ (?P<bytes>\d+) .*_rdc_ (?P<reads>\d+)",
}
# A number of workers is enough if steps take at most this many times the shortest time.
_ENOUGH = 1.1
_CPU_WAIT = "waiting for a CPU"


class Reads(NamedTuple):
    """Reads of one kind. Without a time, there was no file for them."""

    kind: str
    times_s: list[float]
    bytes: int
    cached_share: float
    """Share of the files' pages that were in the page cache before the reads; NaN if not known."""

    def describe(self) -> str:
        """Return a line such as "sequential: 1.2 GB/s, 1,187 reads/s, median 107 us ..."."""
        if not self.times_s:
            return f"{self.kind}: not measured, no file is of the size for it"
        total_s, times_s = sum(self.times_s), sorted(self.times_s)
        rate = f"{format_bytes(self.bytes / total_s, 'B')}/s, " if self.bytes else ""
        cached = "unknown" if math.isnan(self.cached_share) else format_percent(self.cached_share)
        return (
            f"{self.kind}: {rate}{format_rounded(len(times_s) / total_s)} reads/s, median"
            f" {format_duration(statistics.median(times_s))}, p99"
            f" {format_duration(times_s[int(0.99 * len(times_s))])}; in the page cache before:"
            f" {cached}"
        )


class Trial(NamedTuple):
    """Times per batch of a DataLoader with this number of workers."""

    workers: int
    period_s: float
    """From batch to batch, with the step."""
    times_s: dict[str, float]
    """Parts of a worker's time for a batch: read is waiting, mostly for reads; decode is CPU time
    without collate; queue is handing over a batch, and waiting until the next one is wanted."""

    def describe(self) -> str:
        """Return a line such as "3 workers: a batch every 20.1 ms; ..."."""
        return (
            f"{format_count(self.workers, 'worker')}: a batch every {format_duration(self.period_s)};"
            " a worker's time for it: "
            + ", ".join(f"{name} {format_duration(time)}" for name, time in self.times_s.items())
        )


def list_files(path: Path) -> list[Path]:
    """Return files below a path without looking at them, or the path if it is a file."""
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return [path] if path.is_file() else list(itertools.islice(inside, _MAX_FILES))


def measure_mount(files: list[Path], seconds: float) -> list[Reads]:
    """Read files in four ways, each for a quarter of the time."""
    metadata = _time_reads(
        "metadata",
        seconds / 4,
        ((math.nan, partial(os.access, file, os.R_OK)) for file in files),
    )
    sizes = {file: file.stat().st_size for file in files if os.access(file, os.R_OK)}
    large = [file for file in files if sizes.get(file, 0) >= _LARGE_BYTES]
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


def drop_pages(path: Path) -> float:
    """Drop the pages of a file from the page cache. Return the share of those that stayed; NaN if
    Linux does not tell it to this user."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = min(os.fstat(file.fileno()).st_size, _MAX_MAPPED)
        if not size or not os.access(path, os.W_OK):
            return math.nan
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            pages = (ctypes.c_ubyte * math.ceil(size / _PAGE_BYTES))()
            first = ctypes.c_ubyte.from_buffer(mapped)
            failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), pages)
            del first
    return math.nan if failed else bytes(pages).count(1) / len(pages)


def _read_large(
    files: Iterable[Path], size: int, choose: Callable[[range], Iterable[int]]
) -> Iterator[tuple[float, Callable[[], bytes]]]:
    """Yield reads of this size at chosen places of each file, with the share of it in the cache."""
    for path in files:
        cached = drop_pages(path)
        with open(path, "rb", buffering=0) as file:
            for place in choose(range(path.stat().st_size // size)):
                yield cached, partial(os.pread, file.fileno(), size, place * size)


def _time_reads(
    kind: str, seconds: float, reads: Iterable[tuple[float, Callable[[], object]]]
) -> Reads:
    times_s, shares, size, until_s = (
        list[float](),
        list[float](),
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
    return Reads(kind, times_s, size, statistics.fmean(shares or [math.nan]))


def read_counters(path: Path) -> dict[str, int]:
    """Return the counters of the file system of a path; {} if it has none, or this user cannot read
    them."""
    rows = map(str.split, Path("/proc/self/mounts").read_text().splitlines())
    above = (row for row in rows if path.resolve().is_relative_to(row[1]))
    source, point, kind, *_ = max(above, key=lambda row: len(row[1]))
    name = source.rpartition("/")[2]
    stats = f"lustre/llite/{shlex.quote(name)}-*/stats"
    commands = {
        "nfs": "cat /proc/self/mountstats",
        "lustre": f"cat /proc/fs/{stats} /sys/kernel/debug/{stats}",
        "gpfs": "echo fs_io_s | /usr/lpp/mmfs/bin/mmpmon -p",
    }
    kind = kind.rstrip("4")
    return parse_counters(
        kind, subprocess.getoutput(commands.get(kind, "")), point if kind == "nfs" else name
    )


def parse_counters(kind: str, text: str, mount: str) -> dict[str, int]:
    """Return reads and bytes since the file system was mounted, by its own counters.

    server_ms: sum of times until the server has answered. text: /proc/self/mountstats, the file
    stats of a mount of Lustre, or what `fs_io_s` of mmpmon prints. mount: what it calls the mount.
    """
    pattern = _COUNTERS.get(kind, "(?!)").replace("MOUNT", re.escape(mount))
    found = re.search(pattern, text, re.MULTILINE)
    return {name: int(value) for name, value in found.groupdict().items()} if found else {}


def describe_counters(before: dict[str, int], after: dict[str, int]) -> str:
    """Return a line on the reads between two readings."""
    more = {name: value - before[name] for name, value in after.items()}
    server = f", {format_duration(more['server_ms'] / 1e3)} in all" if "server_ms" in more else ""
    return f"by the file system: {format_count(more['reads'], 'read')} of {format_bytes(more['bytes'], 'B')}{server}"


def try_workers(
    loader: Any,
    workers: int,
    step: Callable[[], object],
    seconds: float,
    files: Iterable[Path] = (),
) -> Trial:
    """Run steps on batches of a DataLoader with another number of workers.

    The first batches, which workers have made in advance, do not count. files: their pages are
    dropped from the page cache before.
    """
    for file in files:
        drop_pages(file)
    tried, hook = copy.copy(loader), LoaderWorkersHook()
    hook.times = WorkerTimes()
    # DataLoader does not let all of these be set.
    vars(tried).update(
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor or 2,
        persistent_workers=False,
        _iterator=None,
    )
    with hook.begin_start(tried) or nullcontext(), warnings.catch_warnings():
        # torch warns of more workers than CPUs.
        warnings.simplefilter("ignore")
        iterator = iter(tried)
    pids = [worker.pid for worker in iterator._workers]
    for _ in itertools.islice(iterator, (tried.prefetch_factor + 1) * workers):
        step()
    rounds = list[tuple[float, list[int]]]()
    # Workers return batches in turn: whole rounds count. A worker may end before the last round.
    with suppress(OSError):
        for count, _ in enumerate(itertools.chain([None], iterator)):
            if count:
                step()
            if count % workers == 0:
                # How long workers have waited for a CPU, in ns.
                waits = (int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids)
                rounds.append((time.perf_counter(), [*hook.times.sum_up(pids), sum(waits)]))
            if len(rounds) > 2 and rounds[-1][0] - rounds[0][0] > seconds:
                break
    require(
        len(rounds) > 1 and rounds[-1][1][0] > rounds[0][1][0],
        f"the DataLoader has too few batches to try {workers} workers: give it more, or forked workers",
    )
    count, *sums = (end - start for start, end in zip(rounds[0][1], rounds[-1][1], strict=True))
    busy_s, cpu_s, collate_s, cpu_wait_s = (each / count / 1e9 for each in sums)
    period_s = (rounds[-1][0] - rounds[0][0]) / (len(rounds) - 1) / workers
    times_s = {
        "read": busy_s - max(cpu_s, collate_s) - cpu_wait_s,
        "decode": cpu_s - collate_s,
        "collate": collate_s,
        _CPU_WAIT: cpu_wait_s,
        "queue": workers * period_s - busy_s,
    }
    return Trial(workers, period_s, {name: max(0.0, each) for name, each in times_s.items()})


def predict_workers(one: Trial, step_s: float, cpus: float) -> int:
    """Return the number of workers with which steps do not wait for data, or are as short as the CPUs
    allow.

    one: a trial of one worker without a step. cpus: number of CPUs that the steps leave.
    """
    least_s = max(step_s, (one.times_s["decode"] + one.times_s["collate"]) / cpus)
    return math.ceil((one.period_s - one.times_s[_CPU_WAIT]) / least_s / _ENOUGH)


def prove_loader(
    loader: Any, step_s: float, seconds: float, files: Iterable[Path]
) -> tuple[bool, list[str]]:
    """Try one worker without a step, then the predicted number and its neighbours with it.

    Return lines on them, and whether steps do not wait for data with the best number.
    """
    cpus = len(os.sched_getaffinity(0)) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    one = try_workers(loader, 1, lambda: None, seconds / 4, files)
    predicted = predict_workers(one, step_s, cpus)
    trials = [
        try_workers(loader, workers, partial(time.sleep, step_s), seconds / 4, files)
        for workers in range(max(1, predicted - 1), predicted + 2)
    ]
    best_s = min(each.period_s for each in trials)
    told = (
        f"{'SLOW DATA' if best_s > _ENOUGH * step_s else 'OK'}  num_workers="
        f"{min(each.workers for each in trials if each.period_s <= _ENOUGH * best_s)}:"
        f" {format_duration(best_s)} per step of {format_duration(step_s)} (predicted:"
        f" num_workers={predicted}; CPUs of a rank: {format_rounded(cpus)})"
    )
    return best_s <= _ENOUGH * step_s, [told, *(each.describe() for each in (one, *trials))]


def check_data(options: argparse.Namespace) -> int:
    """Measure the storage and, if it is given, the DataLoader. Return 1 if steps wait for data."""
    path, is_fast, lines = Path(options.data), True, list[str]()
    require(path.exists(), f"--data {path}: there is no such file or folder")
    before, files = read_counters(path), list_files(path)
    reads = [each.describe() for each in measure_mount(files, options.seconds / 2)]
    after = read_counters(path)
    if before and after:
        reads.append(describe_counters(before, after))
    if options.loader:
        require(options.step_ms > 0, "--loader needs the time of a step: add --step-ms")
        loader = pkgutil.resolve_name(options.loader)()
        is_fast, lines = prove_loader(
            loader,
            options.step_ms / 1e3,
            options.seconds / 2,
            [file for file in files if os.access(file, os.R_OK)],
        )
    if os.environ.get("RANK", "0") == "0":
        print("\n".join([*lines, *reads]))
    return int(not is_fast)
