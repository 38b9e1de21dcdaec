"""aggregate="device" on one rank with NCCL, which two ranks on one GPU cannot use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import torchlens_perf as perf
from benchmarks.gpu_check.checks import Spin
from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.runs import device_statistics, last_rings
from torchlens_perf.cuda.section_stamper import MERGE_STEPS
from torchlens_perf.run.device.merged_rows import MergedRow, unpack_row
from torchlens_perf.run.device.step_parts import StepPart
from torchlens_perf.run.ring import Kind, RingReader

WINDOWS, SPIN_NS = 3, 50_000


def merging(checks: Checks) -> None:
    """Compare three merged windows with the rank's own windows, and measure the additional device
    memory.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29653",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    os.environ.update(environment)
    dist.init_process_group("nccl")
    try:
        with tempfile.TemporaryDirectory() as folder:
            spin, model = Spin(), torch.nn.Linear(64, 64, device="cuda")
            with perf.watch(
                dir=folder, sidecar=False, report="off", modules="none", aggregate="device"
            ) as watch:
                for _ in range(WINDOWS * MERGE_STEPS):
                    with perf.device_section("planted"):
                        spin(SPIN_NS)
                    model(torch.ones(1, 64, device="cuda")).sum().backward()
                    watch.step()
                    torch.cuda.synchronize()
            found, work = device_statistics(last_rings(folder)), _merged_work(last_rings(folder))
    finally:
        dist.destroy_process_group()
        for variable in environment:
            del os.environ[variable]
    own = found.stamped.get("planted")
    count = own.count if own is not None else 0
    judge_merged(checks, found.merged.get("planted", {}), count, [row.times for row in work])


def judge_merged(
    checks: Checks, window: Mapping[str, float], count: int, times_of_windows: Sequence[int]
) -> None:
    """Compare the last merged window, the rank's own times, and the device's steps by window."""
    value = f"{window.get('count', 0):.0f} in the last window, {count} of its own in all"
    met = window.get("count") == MERGE_STEPS and count == WINDOWS * MERGE_STEPS
    checks.bar(
        "merging", "times merged by NCCL", value, f"{MERGE_STEPS}, {WINDOWS * MERGE_STEPS}", met
    )
    times = times_of_windows[-1] if times_of_windows else 0
    met = len(times_of_windows) == WINDOWS and times > MERGE_STEPS // 2
    value = f"{len(times_of_windows)} windows, {times} steps in the last one"
    checks.bar(
        "merging", "the device's steps by part", value, f"{WINDOWS}, most of {MERGE_STEPS}", met
    )
    p50_ns = window.get("p50_ns", 0.0)
    met = 0 <= p50_ns - SPIN_NS <= 10_000
    checks.bar(
        "merging", "their p50, of spins of 50 us", f"{p50_ns / 1e3:.1f} us", "50 to 60 us", met
    )


def _merged_work(ring: Path) -> list[MergedRow]:
    """Return the device's work of a step for each window."""
    reader = RingReader(ring)
    records = reader.read_records(final=True).records
    rows = [unpack_row(each, reader.names()) for each in records[records["kind"] == Kind.MERGED]]
    reader.close()
    return [row for row in rows if row.row == StepPart.WORK]
