"""One rank of the campaign of causes: a small transformer under DDP over gloo, with a planted
disturbance.

The loop and the data are the same on all ranks. The disturbance is outside the training code. For
the kind `gc`, it is many extra objects in the rank's process, which the garbage collector must
visit. planted_causes.py starts the ranks as root, because it limits a control group and evicts a
file's pages.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.limited_group import LimitedGroup
from benchmarks.planted_training import (
    BATCH,
    BUCKET_MIB,
    LENGTH,
    VOCABULARY,
    Planted,
    Transformer,
    wait_for_sidecar,
)
from benchmarks.planted_truth import Truth

STEPS = 240
FILE_BYTES, DIRECT_BYTES = 96 << 20, 128 << 10
# Pages of the file that each batch reads.
PAGES = (600, 1200)
# Seconds that a planted wait or collection adds to a step.
DELAY_S = (0.02, 0.04)
# Share of the time in which the other process on the core computes.
DUTY = (0.8, 1.0)
GROUP_MEMORY_BYTES = 24 << 20
GROUP_TIMEOUT_S = 120

_NEIGHBOUR = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print(os.getpid(), flush=True)
end = time.monotonic() + 120
while time.monotonic() < end:
    until = time.monotonic() + 0.05 * float(sys.argv[2])
    while time.monotonic() < until:
        pass
    time.sleep(0.05 * (1 - float(sys.argv[2])))
"""


class Cause:
    """The planted disturbance of this rank, from its first step to the end.

    Undisturbed ranks have the kind "clean".
    """

    def __init__(self, kind: str, seed: int, rank: int, ranks: int) -> None:
        draw = random.Random(f"{kind}/{seed}")
        self.suspect = draw.randrange(ranks)
        self.first_step = draw.randint(30, 70)
        self.pages = draw.randint(*PAGES)
        self.delay_s = draw.uniform(*DELAY_S)
        self.duty = draw.uniform(*DUTY)
        self.kind = kind if rank == self.suspect else "clean"
        self._group: LimitedGroup | None = None
        self._neighbour = 0
        self._heap: list[Any] = []

    def begin(self, file: File, step_s: float) -> None:
        """Start the disturbance. `step_s` is the duration of an undisturbed step."""
        if self.kind == "memory_pressure":
            self._group = LimitedGroup("memory", GROUP_MEMORY_BYTES)
            self._group.enter()
            file.evict()
        elif self.kind == "slow_storage":
            self._group = LimitedGroup("io", int(DIRECT_BYTES / (step_s + self.delay_s)), file.path)
            self._group.enter()
        elif self.kind == "busy_neighbour":
            (cpu,) = os.sched_getaffinity(0)
            # setsid detaches the process from this one, because other users' processes on a machine
            # are not children either.
            command = [
                "setsid",
                "--fork",
                sys.executable,
                "-c",
                _NEIGHBOUR,
                str(cpu),
                str(self.duty),
            ]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as started:
                assert started.stdout is not None
                self._neighbour = int(started.stdout.readline())
        elif self.kind == "gc":
            took_s = 0.0
            # A collection takes about five times as long in training, with cold caches.
            while took_s < self.delay_s / 5:
                self._heap.extend([[] for _ in range(20_000)])
                begin_s = time.perf_counter()
                gc.collect()
                took_s = time.perf_counter() - begin_s

    def in_step(self) -> None:
        """Run the part of the disturbance that happens in each step."""
        if self._heap:
            gc.collect()

    def end(self) -> None:
        """Stop the disturbance and undo its changes."""
        if self._group is not None:
            self._group.leave()
        if self._neighbour:
            os.kill(self._neighbour, signal.SIGKILL)
        self._heap.clear()


class File:
    """A rank's data: one part of the file is mapped, and one part is read without the page cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists() or path.stat().st_size < FILE_BYTES:
            path.write_bytes(os.urandom(FILE_BYTES))
        self._descriptor = os.open(path, os.O_RDONLY)
        self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        # O_DIRECT requires an aligned buffer, which an anonymous mapping is.
        self._block = mmap.mmap(-1, DIRECT_BYTES)
        self._map()
        # Read all pages, which brings them into the page cache.
        self._bytes.sum()

    def _map(self) -> None:
        mapped = mmap.mmap(self._descriptor, FILE_BYTES, prot=mmap.PROT_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        self._bytes = np.frombuffer(mapped, np.uint8)

    def read(self, pages: int, draw: np.random.Generator) -> int:
        """Read the pages of one batch. Return a value that depends on all pages."""
        at = draw.integers(FILE_BYTES // mmap.PAGESIZE, size=pages) * mmap.PAGESIZE
        offset = int(draw.integers(FILE_BYTES // DIRECT_BYTES)) * DIRECT_BYTES
        os.preadv(self._direct, [self._block], offset)
        return int(self._bytes[at].sum()) + self._block[0]

    def evict(self) -> None:
        """Drop the file's pages from the page cache, as the memory demand of another program would."""
        # Unmap first, because the kernel does not evict mapped pages.
        self._map()
        gc.collect()
        os.sync()
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of tokens that are drawn from the file's pages."""

    def __init__(self, file: File, cause: Cause, seed: int, steps: int) -> None:
        self._file, self._cause, self._steps = file, cause, steps
        self._draw = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self._steps * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index % BATCH == 0:
            self._file.read(self._cause.pages, self._draw)
        tokens = torch.from_numpy(self._draw.integers(VOCABULARY, size=LENGTH + 1))
        return tokens[:-1], tokens[1:]


def run(kind: str, seed: int, rank: int, ranks: int, out: Path, steps: int = STEPS) -> str:
    """Run once under perf.watch in a separate folder.

    Return the slow rank and the run directory.
    """
    import torchlens_perf as perf

    cause = Cause(kind, seed, rank, ranks)
    file = File(out / f"data{rank}")
    planted = Planted(Truth(kind, seed, ranks, steps, ()), rank)
    torch.manual_seed(seed)
    model = DistributedDataParallel(Transformer(planted), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Batches(file, cause, 1000 * seed + rank, steps), batch_size=BATCH)
    dist.barrier()
    with perf.watch(model, optimizer, dir=str(out / f"{kind}-{seed}"), report="quiet") as watch:
        try:
            begun_s = time.perf_counter()
            for step, (ids, targets) in enumerate(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
                optimizer.step()
                if step == cause.first_step:
                    cause.begin(file, (time.perf_counter() - begun_s) / (step + 1))
                cause.in_step()
        finally:
            cause.end()
    assert watch.run_dir is not None
    if rank == 0:
        wait_for_sidecar(watch.run_dir)
    dist.barrier()
    return f"{cause.suspect} {watch.run_dir}"


def main() -> None:
    """Run one rank, pinned to a CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="KIND:SEED")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="file that the ranks meet at")
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    torch.set_num_threads(1)
    store = dist.FileStore(str(asked.store), ranks)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    for each in asked.runs:
        kind, _, seed = each.partition(":")
        told = run(kind, int(seed), rank, ranks, asked.out, asked.steps)
        gc.collect()
        if rank == 0:
            (asked.out / f"{kind}-{seed}" / "truth").write_text(told)
    # gloo's threads may still be finishing the last collective.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
