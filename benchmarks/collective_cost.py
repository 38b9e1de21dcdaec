"""Overhead of a watch on a small collective: a 4 KB all-reduce of two gloo ranks on one busy core,
and on two cores, and of a single rank, which never waits.

Blocks of calls without and with a watch alternate in the same processes and are compared pair by
pair. The wall clock is that of rank 0. CPU time is the sum of both processes, including gloo's
threads.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Table, ratio_interval
from torchlens_perf.hooks.collectives import process_group_hooks

ROUNDS, WARM_CALLS, CALLS = 300, 20, 100
MAX_NS, MAX_ALONE_NS = 8_000, 1_000
PLACES = {"1 core": (1, 2), "2 cores": (2, 2), "alone": (1, 1)}
"""Numbers of cores and ranks."""


def main() -> int:
    """Print the table. Return the number of missed bars."""
    table = Table(
        "tap, ranks", "unwatched us", "watched us", "added a rank us", "bar", "", "ratio",
        "CPU unwatched us", "CPU added us",
    )  # fmt: skip
    for tap in ("native", *(["hooks"] if process_group_hooks.are_available() else []), "python"):
        for place, (cores, ranks) in PLACES.items():
            found = measured(tap, cores, ranks)
            plain, watched = found[0]["plain"], found[0]["watched"]
            # On one core the ranks run in turn, so a call contains the overhead of all ranks.
            added = [
                (b - a) / (ranks if cores == 1 else 1) for a, b in zip(plain, watched, strict=True)
            ]
            plain_cpu = [each for rank in found for each in rank["plain CPU"]]
            watched_cpu = [each for rank in found for each in rank["watched CPU"]]
            added_cpu = [b - a for a, b in zip(plain_cpu, watched_cpu, strict=True)]
            bar = met = ""
            if tap == "native" and place == "1 core":
                bar, met = "at most 8 us", table.bar(statistics.median(added) <= MAX_NS)
            elif tap == "native" and place == "alone":
                bar = "CPU: at most 1 us"
                met = table.bar(statistics.median(added_cpu) <= MAX_ALONE_NS)
            ratio = ratio_interval(watched, plain)
            table.row(
                f"{tap}, {place}", microseconds(plain), microseconds(watched), interval(added),
                bar, met, f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
                microseconds(plain_cpu), interval(added_cpu),
            )  # fmt: skip
    return table.missed


def microseconds(nanoseconds: Sequence[float]) -> str:
    """Format the median in microseconds."""
    return f"{statistics.median(nanoseconds) / 1e3:.1f}"


def interval(nanoseconds: Sequence[float]) -> str:
    """Format the median in us and its 95 % interval from 2000 bootstrap samples."""
    draw = random.Random(1)
    medians = sorted(
        statistics.median(draw.choices(nanoseconds, k=len(nanoseconds))) for _ in range(2000)
    )
    return f"{microseconds(nanoseconds)} [{medians[50] / 1e3:.1f}, {medians[1949] / 1e3:.1f}]"


def measured(tap: str, cores: int, ranks: int) -> list[dict[str, list[float]]]:
    """Return for each rank the ns per call by round: unwatched and watched, wall clock and CPU
    time.

    Raises RuntimeError if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, folder, str(rank), tap, str(cores)],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        try:
            told = [each.communicate(timeout=600)[1] for each in processes]
        finally:
            for each in processes:
                each.kill()
        found = [Path(folder) / f"values{rank}" for rank in range(ranks)]
        if not all(path.exists() for path in found):
            raise RuntimeError(b"\n".join(told).decode(errors="replace"))
        return [json.loads(path.read_text()) for path in found]


def one_rank(folder: str, rank: int, tap: str, cores: int) -> None:
    """Run blocks of calls with and without a watch. The order changes in each round."""
    import torch
    import torch.distributed as dist

    from torchlens_perf import watch
    from torchlens_perf.recorder import native_tap

    if tap != "native":
        native_tap.tap_folders = lambda: ()
    if tap == "python":
        process_group_hooks.are_available = lambda: False
    if tap == "native" and native_tap.load_tap() is None:
        raise RuntimeError("the native tap is missing: torchlens-perf build-tap")
    ranks = int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0 if cores == 1 else rank]})
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks
    )
    tensor = torch.ones(1024)
    values: dict[str, list[float]] = {
        "plain": [],
        "watched": [],
        "plain CPU": [],
        "watched CPU": [],
    }

    def block(name: str) -> None:
        for _ in range(WARM_CALLS):
            dist.all_reduce(tensor)
        dist.barrier()
        start_ns, start_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        values[name].append((time.perf_counter_ns() - start_ns) / CALLS)
        values[f"{name} CPU"].append((time.process_time_ns() - start_cpu_ns) / CALLS)

    for turn in range(ROUNDS):
        for name in ("plain", "watched") if turn % 2 else ("watched", "plain"):
            if name == "watched":
                with watch(dir=f"{folder}/runs", sidecar=False, report="off"):
                    block(name)
            else:
                block(name)
    (Path(folder) / f"values{rank}").write_text(json.dumps(values))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    one_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
