"""Memory growth and disk use over a million steps.

The training process must not grow, and the run directory must stay below its size limit.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

import torchlens_perf as perf
from benchmarks.measure import Table
from torchlens_perf.run.directory import RunDirectory, sidecar_lock_path
from torchlens_perf.run.ring import RECORD_BYTES, RECORDS_OFFSET
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.verdicts import node_state

STEPS, RING_RECORDS, CAP_BYTES = 1_000_000, 65536, 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Print the table. Return the number of missed bars."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with tempfile.TemporaryDirectory() as folder:
        with perf.watch(
            optimizer=optimizer, dir=folder, report="quiet", disk_bytes=CAP_BYTES
        ) as watch:
            for _ in range(1000):
                optimizer.step()
            before, largest, begin = resident_bytes(), 0, time.monotonic()
            for _ in range(100):
                for _ in range(STEPS // 100):
                    with perf.section("part"):
                        optimizer.step()
                largest = max(
                    largest, sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
                )
            seconds, grown = time.monotonic() - begin, resident_bytes() - before
        assert watch.run_dir is not None
        run = RunDirectory(watch.run_dir)
        while not SidecarLock(sidecar_lock_path(run.run_id)).acquire():
            time.sleep(0.1)
        (node,) = node_state.load_all(run)
        (process,) = node.processes.values()
    ring = RECORDS_OFFSET + RING_RECORDS * RECORD_BYTES
    table = Table("a million steps", "value", "bar", "")
    # The ring's pages become resident when they are first written, so they are part of the growth.
    own = grown - ring
    table.row(
        "growth of the process, beyond the ring",
        f"{own / 1e6:.2f} MB",
        "at most 8 MB",
        table.bar(own <= 8e6),
    )
    cap = f"cap {CAP_BYTES / 1e6:.0f} MB"
    table.row(
        "most records in the run directory",
        f"{largest / 1e6:.1f} MB",
        cap,
        table.bar(largest <= CAP_BYTES),
    )
    table.row("steps per second, with their section", f"{STEPS / seconds:.0f}", "", "")
    table.row("records counted", process.statistics.records, "", "")
    table.row("records lost, counted", process.statistics.lost, "", "")
    table.row(
        "processor time of the sidecar", f"{node.sidecar_cpu_s:.1f} s of {seconds:.0f} s", "", ""
    )
    return table.missed
