"""Device memory: values and cost of memory readings, and the records of out-of-memory errors."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torchlens_perf as perf
from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.runs import last_rings
from torchlens_perf.analysis.statistics.memory import MemoryStatistics, compute_memory_signals
from torchlens_perf.run.ring import Kind, RingReader

MB = 1 << 20
HISTORY = 20_000
BLOCKS = 100_000
# Memory that a process may allocate in addition in tests of out-of-memory errors.
_LEFT_BYTES = 512 * MB


class Keeper(nn.Module):
    """A module that keeps all its results, which is the planted memory leak."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(torch.empty(16 * MB, dtype=torch.uint8, device="cuda"))
        return x


class Net(nn.Module):
    """A module that contains the keeper, which gives the keeper a module name."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.keeper(x)


def allocator(checks: Checks) -> None:
    """Compare memory readings with torch's, provoke allocation retries, and run out of memory with
    and without an allocation history.
    """
    _readings(checks)
    _retries(checks)
    _runs_out(checks, history=0)
    _runs_out(checks, history=HISTORY)
    _many_blocks(checks)
    _cost_of_history(checks)


@contextmanager
def _watched(folder: str, **settings: Any) -> Iterator[perf.Watch]:
    with perf.watch(dir=folder, sidecar=False, report="off", modules="none", **settings) as watch:
        yield watch


@contextmanager
def _little_left() -> Iterator[None]:
    """Limit the process's device memory to an amount that a test can fill."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _LEFT_BYTES) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def _recorded(folder: str) -> tuple[MemoryStatistics, Any]:
    """Return the statistics of the memory readings and the records of the readings."""
    reader, statistics = RingReader(last_rings(folder)), MemoryStatistics()
    records = reader.read_records(final=True).records
    statistics.add_records(records, reader.names())
    reader.close()
    return statistics, records[records["kind"] == Kind.MEMORY]


def _readings(checks: Checks) -> None:
    kept = torch.empty(100 * MB, dtype=torch.uint8, device="cuda")
    del kept
    held = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        with _watched(folder) as watch:
            for _ in range(200):
                watch.step()
                time.sleep(0.002)
        statistics, records = _recorded(folder)
    last, theirs = statistics.readings[-1], torch.cuda.memory_stats()
    ours = (
        last.allocated_bytes,
        last.reserved_bytes,
        last.inactive_bytes,
        last.peak_bytes,
        last.alloc_retries,
    )
    fields = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
    wanted = (
        *(theirs[f"{field}.all.current"] for field in fields),
        theirs["allocated_bytes.all.peak"],
        0,
    )
    checks.bar(
        "allocator", "values", str(ours), "those of torch.cuda.memory_stats()", ours == wanted
    )
    took_us = float(np.median(records["duration_ns"])) / 1e3
    seconds = (int(records["start_ns"][-1]) - int(records["start_ns"][0])) / 1e9
    share = statistics.count * took_us / 1e6 / seconds
    checks.value("allocator", "one reading", f"{took_us:.0f} us")
    checks.bar("allocator", "readings, of the time", f"{share:.3%}", "<= 0.2 %", share <= 0.002)
    del held


def _retries(checks: Checks) -> None:
    """Provoke allocation retries: a cached block makes cudaMalloc of a larger one fail, until torch
    releases the cache.
    """
    with tempfile.TemporaryDirectory() as folder, _little_left():
        with _watched(folder) as watch:
            for _ in range(64):
                torch.cuda.empty_cache()
                for size in (300, 400):
                    torch.empty(size * MB, dtype=torch.uint8, device="cuda")
                watch.step()
                time.sleep(0.005)
        statistics, _ = _recorded(folder)
    signals = compute_memory_signals(statistics.readings, 0, 64)
    rate = signals.get("alloc_retries_per_step", 0.0)
    checks.bar(
        "allocator",
        "retries of a job that provokes one a step",
        f"{rate:.2f} a step",
        ">= 0.5",
        rate >= 0.5,
    )
    used = signals.get("memory_used_share", 0.0)
    checks.bar(
        "allocator",
        "used, of what the process may take",
        f"{used:.0%}",
        "30 to 100 %",
        0.3 <= used <= 1,
    )


def _runs_out(checks: Checks, history: int) -> None:
    model, x = Net(), torch.ones(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder, _little_left():
        with _watched(folder, memory="history" if history else "usage") as watch:
            watch.step()
            raised = False
            try:
                for _ in range(2 * _LEFT_BYTES // (16 * MB)):
                    model(x)
            except torch.cuda.OutOfMemoryError:
                raised = True
            model.keeper.kept.clear()
            tables = sorted(Path(folder).glob("*/oom/*.json"))
        after = torch._C._cuda_isHistoryEnabled()
        table = json.loads(tables[-1].read_text()) if tables else None
    judge_table(checks, table, raised=raised, history=history > 0, left_on=after)


def judge_table(
    checks: Checks, table: dict[str, Any] | None, *, raised: bool, history: bool, left_on: bool
) -> None:
    """Compare the table of an out-of-memory error with the planted leak."""
    what = "with a history" if history else "without a history"
    checks.bar("allocator", f"the job's own error, {what}", str(raised), "is raised", raised)
    if table is None:
        checks.bar("allocator", f"a table, {what}", "none", "is written", False)
        return
    took = table["took_s"]
    checks.bar("allocator", f"the table, {what}", f"{took * 1e3:.1f} ms", "< 1 s", took < 1)
    top = table["table"]["rows"][0]
    if history:
        named = top["module"] == "Net > Keeper" and "allocator.py" in top["stack"][0]
        value = f"{top['module']}, {top['blocks']} blocks, {top['new_blocks']} of them new"
        checks.bar("allocator", "the planted module", value, "Net > Keeper, all new", named)
        checks.bar(
            "allocator",
            "the history after the watch",
            "on" if left_on else "off",
            "off",
            not left_on,
        )
    else:
        value = f"{top['blocks']} blocks of {top['largest_bytes'] / MB:.0f} MB"
        checks.bar(
            "allocator", "the planted blocks", value, "of 16 MB", top["largest_bytes"] == 16 * MB
        )
        asked = table["module"]
        checks.bar("allocator", "who asked", asked, "Net > Keeper", asked == "Net > Keeper")


def _many_blocks(checks: Checks) -> None:
    """Measure readings with as many small live blocks as in a large model, each with a stack."""
    with tempfile.TemporaryDirectory() as folder:
        with _watched(folder, memory="history"):
            blocks = [torch.empty(512, dtype=torch.uint8, device="cuda") for _ in range(BLOCKS)]
            with suppress(torch.cuda.OutOfMemoryError):
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            (path,) = Path(folder).glob("*/oom/*.json")
            table = json.loads(path.read_text())
        del blocks
    took = table["took_s"]
    checks.bar(
        "allocator", f"the table of {BLOCKS} blocks", f"{took * 1e3:.0f} ms", "< 1 s", took < 1
    )


def _cost_of_history(checks: Checks) -> None:
    """Measure the additional time of one allocation and its free while a history is recorded."""

    def pair_us() -> float:
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(1000):
                torch.empty(512, dtype=torch.uint8, device="cuda")
            times.append((time.perf_counter() - begin) * 1e3)
        return float(np.median(times))

    without = pair_us()
    with tempfile.TemporaryDirectory() as folder, _watched(folder, memory="history"):
        recorded = pair_us()
    checks.value(
        "allocator", "an allocation and its free", f"{without:.2f} us, recorded {recorded:.2f} us"
    )
