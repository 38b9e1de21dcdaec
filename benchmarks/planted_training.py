"""One rank of the fault campaign: a small transformer under DistributedDataParallel over gloo, with
a fault.

The loop is written as a user's: a DataLoader, forward, loss, backward, AdamW, all under
`perf.watch` with its live sidecar. One group of processes does a list of runs, each with a fresh
model, a fresh watch and a separate folder. The next run starts when the sidecar of the last one has
ended. planted_faults.py starts the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.planted_truth import Fault, Truth, plant

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 256, 64, 96, 4, 4, 17
# In tokens. Variable lengths go from SHORTEST to 2 * LENGTH - SHORTEST.
LENGTH, SHORTEST = 32, 8
# Sequences that one block computes again: COMPUTE_SHARE of forward and backward, measured alone
# on a core.
REPEATED = 14
# Buckets are small, because several buckets should be reduced during one backward pass.
BUCKET_MIB = 0.6
GROUP_TIMEOUT_S, SIDECAR_TIMEOUT_S = 180, 90


def spend(ms: float, way: str) -> None:
    """Spend `ms` of wall time on the calling thread, in one of the ways in which real loops lose
    time.
    """
    end_s = time.perf_counter() + ms / 1e3
    if way == "sleep":
        time.sleep(ms / 1e3)
    elif way == "work":
        data = bytes(range(256)) * 32
        while time.perf_counter() < end_s:
            zlib.compress(data, 6)
    elif way == "collect":
        while time.perf_counter() < end_s:
            cycles = [[] for _ in range(500)]
            for one in cycles:
                one.append(one)
            del cycles
            gc.collect(1)
    elif way == "write":
        with tempfile.TemporaryFile() as file:
            while time.perf_counter() < end_s:
                file.write(bytes(1 << 16))
                file.flush()
    else:
        raise ValueError(f"unknown way {way!r}")


class PauseInBackward(torch.autograd.Function):
    """The identity function, whose backward pass spends the fault's time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        spend(ctx.fault.ms, ctx.fault.way)
        return gradients[0], None


class Planted:
    """The faults of this rank and the number of its current step."""

    def __init__(self, truth: Truth, rank: int) -> None:
        self._faults = [fault for fault in truth.faults if fault.rank == rank]
        self.step = 0

    def now(self, phase: str) -> Fault | None:
        """Return the fault of this phase in this step."""
        return next(
            (fault for fault in self._faults if fault.phase == phase and fault.slows(self.step)),
            None,
        )

    def ms(self, phase: str, way: str | None = None) -> float:
        """Return the ms that this phase's fault adds in this step, if the fault uses the given way.

        None: any way.
        """
        fault = self.now(phase)
        return (
            fault.ms
            if fault is not None and fault.ms is not None and way in (None, fault.way)
            else 0.0
        )

    def pause(self, phase: str) -> None:
        """Spend the time of this phase's fault."""
        fault = self.now(phase)
        if fault is not None and fault.ms is not None:
            spend(fault.ms, fault.way)


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random tokens and their successors. The items of one batch have the same length."""

    def __init__(self, truth: Truth, rank: int, planted: Planted) -> None:
        draw = random.Random(f"{truth.name}/{rank}")
        varies = truth.kind == "variable_length"
        self._lengths = [
            draw.randint(SHORTEST, 2 * LENGTH - SHORTEST) if varies else LENGTH
            for _ in range(truth.steps)
        ]
        self._planted = planted
        self._generator = torch.Generator().manual_seed(draw.getrandbits(32))

    def __len__(self) -> int:
        return BATCH * len(self._lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        step, item = divmod(index, BATCH)
        if item == 0:
            self._planted.pause("data")
        tokens = torch.randint(0, VOCABULARY, (self._lengths[step] + 1,), generator=self._generator)
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A model that predicts the next token.

    The faults in forward and backward are between its blocks.
    """

    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self._planted = planted

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits of the shape [batch, length, VOCABULARY] for ids of the shape [batch,
        length].
        """
        planted = self._planted
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for index, block in enumerate(self.blocks):
            if index == BLOCKS // 2:
                planted.pause("forward")
                fault = planted.now("backward")
                if fault is not None:
                    x = PauseInBackward.apply(x, fault)
            y = block(x)
            if index == BLOCKS // 2 and planted.now("compute"):
                # Repeat the work without a change to results, gradients or buckets.
                y = y + 0 * block(x[:REPEATED]).mean()
            x = y
        return self.head(self.norm(x))


Section = Callable[[str], AbstractContextManager[Any]]


def no_section(name: str) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    planted: Planted,
    each_step: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    section: Section = no_section,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Run the user's loop. Return each step's seconds.

    `section` marks forward, backward and optimizer, for tools whose user marks them.
    """
    planted.step = 0
    seconds, begin_s = [], time.perf_counter()
    for ids, targets in loader:
        with each_step():
            optimizer.zero_grad()
            with section("forward"):
                loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            with section("backward"):
                loss.backward()
            with section("optimizer"):
                optimizer.step()
            # The next step has begun at the end of optimizer.step().
            now_s = time.perf_counter()
            planted.step += 1
            planted.pause("host")
        after_step()
        seconds.append(now_s - begin_s)
        begin_s = now_s
    return seconds


def prepare(
    truth: Truth, rank: int
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Planted]:
    """Return a fresh model, optimizer and loader, and this rank's planted faults.

    All ranks must call this function together, because DDP builds its buckets by a collective.
    """
    torch.manual_seed(truth.seed)
    planted = Planted(truth, rank)
    model = DistributedDataParallel(Transformer(planted), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, DataLoader(Sequences(truth, rank, planted), batch_size=BATCH), planted


def busy_s() -> float:
    """Return the seconds since boot in which processors were busy, including time stolen by a
    hypervisor.
    """
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = _first_line("/proc/stat")[:8]
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def _first_line(path: str) -> list[int]:
    with open(path) as file:
        return [int(value) for value in file.readline().split()[1:]]


def others_share(ours_s: float, machine_s: float, elapsed_s: float) -> float:
    """Return the share of the processors' time that neither the ranks nor their sidecar used."""
    return max(0.0, machine_s - ours_s) / (elapsed_s * (os.cpu_count() or 1))


def record(truth: Truth, out: Path, rank: int) -> str:
    """Record one run under perf.watch in a separate folder.

    Write the truth last. Return a line for the log.
    """
    import torchlens_perf as perf

    folder = out / truth.name
    if rank == 0 and folder.exists():
        # Remove the folder of an interrupted run.
        shutil.rmtree(folder)
    model, optimizer, loader, planted = prepare(truth, rank)
    dist.barrier()
    begin_s, machine_s, rank_s = time.monotonic(), busy_s(), time.process_time()
    with perf.watch(model, optimizer, dir=str(folder)) as watch:
        seconds = train(model, optimizer, loader, planted)
    ranks_s = torch.tensor(time.process_time() - rank_s, dtype=torch.float64)
    dist.all_reduce(ranks_s)
    others = 0.0
    if rank == 0 and watch.run_dir is not None:
        wait_for_sidecar(watch.run_dir)
        ours_s = ranks_s.item() + sidecar_s(watch.run_dir)
        others = others_share(ours_s, busy_s() - machine_s, time.monotonic() - begin_s)
        facts = {"run": watch.run_dir.name, "others_share": round(others, 3)}
        partial = folder / "truth.partial"
        partial.write_text(json.dumps({**truth.to_json(), **facts}, indent=1))
        partial.rename(folder / "truth.json")
    dist.barrier()
    return (
        f"step {1e3 * statistics.median(seconds):.1f} ms, {100 * others:.0f} % of the processors"
        " went to others"
    )


def sidecar_s(run: Path) -> float:
    """Return the processor seconds of the run's sidecar, which has ended."""
    return float(
        sum(
            json.loads(path.read_text())["sidecar_cpu_s"] for path in (run / "nodes").glob("*.json")
        )
    )


def wait_for_sidecar(run: Path) -> None:
    """Wait until no sidecar of this run is left on this node. Raises TimeoutError."""
    from torchlens_perf.run.directory import sidecar_lock_path
    from torchlens_perf.run.sidecar_lock import SidecarLock

    deadline_s = time.monotonic() + SIDECAR_TIMEOUT_S
    while time.monotonic() < deadline_s:
        lock = SidecarLock(sidecar_lock_path(run.name))
        if lock.acquire():
            lock.remove()
            return
        time.sleep(0.05)
    raise TimeoutError(f"the sidecar of {run} still runs after {SIDECAR_TIMEOUT_S} s")


def join(store: Path | None) -> tuple[int, int]:
    """Join the group of the ranks that meet at this file, or at a launcher's store.

    Return the rank and their number.
    """
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    where = (
        {"store": dist.FileStore(str(store), ranks), "rank": rank, "world_size": ranks}
        if store
        else {}
    )
    dist.init_process_group("gloo", timeout=timeout, **where)
    return rank, ranks


def main() -> None:
    """Run one rank of planted_faults.py's group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="KIND:SEED")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--store", type=Path, required=True, help="file that the ranks meet at")
    asked = parser.parse_args()
    rank, ranks = join(asked.store)
    for each in asked.runs:
        kind, _, seed = each.partition(":")
        truth, begin_s = plant(kind, int(seed), ranks), time.monotonic()
        told = record(truth, asked.out, rank)
        # Free the model and its buckets before the next run.
        gc.collect()
        if rank == 0:
            print(f"{truth.name}  {time.monotonic() - begin_s:.1f} s, {told}", flush=True)
    # gloo's threads may still be finishing the last collective. Destroying the group now would
    # abort the process.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
