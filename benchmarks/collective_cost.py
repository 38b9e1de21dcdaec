"""What a watch adds to a small collective: a 4 KB all-reduce of two gloo ranks, both on one busy core, and on two."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Table, ratio_interval

ROUNDS, CALLS = 30, 300
MOST_NS = 8_000


def main() -> int:
    table = Table("tap, cores", "unwatched us", "watched us", "added a rank us", "bar", "", "ratio")
    for tap in ("native", "python"):
        for cores in (1, 2):
            plain, watched = measured(tap, cores)
            # On one core the two ranks take turns: a call holds what is added to both.
            added = [(b - a) / (2 if cores == 1 else 1) for a, b in zip(plain, watched, strict=True)]
            draw = random.Random(1)
            medians = sorted(statistics.median(draw.choices(added, k=len(added))) for _ in range(2000))
            low, high = medians[50] / 1e3, medians[1949] / 1e3
            barred = tap == "native" and cores == 1
            met = table.bar(statistics.median(added) <= MOST_NS) if barred else ""
            ratio = ratio_interval(watched, plain)
            table.row(
                f"{tap}, {cores}", f"{statistics.median(plain) / 1e3:.0f}", f"{statistics.median(watched) / 1e3:.0f}",
                f"{statistics.median(added) / 1e3:.1f} [{low:.1f}, {high:.1f}]", "at most 8 us" if barred else "", met,
                f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
            )  # fmt: skip
    return table.missed


def measured(tap: str, cores: int) -> tuple[list[float], list[float]]:
    """ns a call on rank 0, unwatched and watched, by round."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, folder, str(rank), tap, str(cores)],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            rank.wait(600)
        values = json.loads((Path(folder) / "values").read_text())
    return values["plain"], values["watched"]


def one_rank(folder: str, rank: int, tap: str, cores: int) -> None:
    """Blocks of calls, watched and unwatched in turn, the order swapped each round."""
    import torch
    import torch.distributed as dist

    from torchlens_perf import native_tap, watch

    if tap == "python":
        native_tap.find = lambda: None  # type: ignore[assignment]
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0 if cores == 1 else rank]})
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    tensor = torch.ones(1024)

    def block(calls: int) -> float:
        dist.barrier()
        start_ns = time.perf_counter_ns()
        for _ in range(calls):
            dist.all_reduce(tensor)
        return (time.perf_counter_ns() - start_ns) / calls

    values: dict[str, list[float]] = {"plain": [], "watched": []}
    for turn in range(ROUNDS):
        for name in ("plain", "watched") if turn % 2 else ("watched", "plain"):
            if name == "watched":
                with watch(dir=f"{folder}/runs", sidecar=False, report=False):
                    block(20)
                    values[name].append(block(CALLS))
            else:
                block(20)
                values[name].append(block(CALLS))
    if rank == 0:
        (Path(folder) / "values").write_text(json.dumps(values))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    one_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
