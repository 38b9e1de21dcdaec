"""Train a small model on a device with a planted fault: the program of each rank of the campaign on
devices.

The loop is written as a user's: a DataLoader, forward, loss, backward, SGD, under `perf.watch` with
its live sidecar. The parallelism is DistributedDataParallel, fully_shard, or a tensor-parallel
plan. One group of processes does a list of runs, each with a fresh model, a fresh watch and a
separate folder. planted_devices.py starts the group. The device is the tests' asynchronous device,
or a GPU (planted_on.py).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchlens_perf as perf
from benchmarks.planted_device_truth import (
    HOST_DELAYS_MS,
    KERNEL_MS,
    LOOP_BLOCKS,
    LOOP_KERNEL_MS,
    STEPS,
    Pace,
    pace,
    plant,
)
from benchmarks.planted_on import DEVICES, PlantedDevice, Spins
from benchmarks.planted_training import Planted, wait_for_sidecar
from benchmarks.planted_truth import Truth

WIDTH, BLOCKS, BATCH, BUCKET_MIB = 32, 4, 8, 0.02
GROUP_TIMEOUT_S = 120


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random batches. The loader of a slow rank waits."""

    def __init__(self, truth: Truth, rank: int, planted: Planted, micro_steps: int) -> None:
        self._count, self._planted, self._micro_steps = (
            truth.steps * micro_steps,
            planted,
            micro_steps,
        )
        self._generator = torch.Generator().manual_seed(truth.seed * 64 + rank)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        fault = self._planted.now("data")
        if fault is not None and fault.ms is not None and index % self._micro_steps == 0:
            time.sleep(fault.ms / 1e3)
        x = torch.randn(BATCH, WIDTH, generator=self._generator)
        return x, x.roll(1, 0)


def _no_time(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._work = work
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, before = self._work(self.norm(x)), x
        return before + self._work(self.down(F.gelu(self._work(self.up(x)))))


class Model(nn.Module):
    """A stack of blocks with the forward and backward faults in the middle.

    With two streams, the head uses the second one.
    """

    def __init__(
        self, planted: Planted, device: PlantedDevice, pace: Pace | None, two_streams: bool
    ) -> None:
        super().__init__()
        # In the loops (Pace), planned spins set the device's time, and the modules' own time is
        # negligible.
        self._work = device.work if pace is None else _no_time
        self.blocks = nn.ModuleList(
            Block(self._work) for _ in range(LOOP_BLOCKS if pace else BLOCKS)
        )
        self.side, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._planted, self._device, self._pace = planted, device, pace
        self._stream = torch.Stream(device.name) if two_streams else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as `x`, [batch, WIDTH]."""
        side: Tensor | None = None
        if self._stream is not None:
            main = torch.accelerator.current_stream()
            self._stream.wait_stream(main)
            with self._stream:
                side = self.side(x)
        for index, block in enumerate(self.blocks):
            if index == len(self.blocks) // 2:
                x = self._pause(x)
            x = block(x)
        if side is not None and self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        else:
            side = self.side(x)
        return self._work(self.head(x)) + side

    def _pause(self, x: Tensor) -> Tensor:
        for way, take, by_phase in (
            ("spin", self._device.spin, self._pace.device_ms if self._pace else {}),
            ("sleep", time.sleep, self._pace.host_ms if self._pace else {}),
        ):
            forward_s, backward_s = (
                (by_phase.get(phase, 0.0) + self._planted.ms(phase, way)) / 1e3
                for phase in ("forward", "backward")
            )
            if forward_s or backward_s:
                x = Spins.apply(x, take, forward_s, backward_s)
        return x


class Loop:
    """A fresh model, optimizer and loader with this rank's faults.

    All ranks must create a Loop together.
    """

    def __init__(self, truth: Truth, rank: int, device: PlantedDevice) -> None:
        torch.manual_seed(truth.seed)
        self._device = device
        self.way, _, self.what = truth.kind.partition("-")
        self.micro_steps = 2 if "accumulation" in self.what else 1
        self.planted = Planted(truth, rank)
        self.pace = pace(truth.kind, truth.seed)
        model = Model(self.planted, device, self.pace, self.what == "two_streams").to(device.name)
        self.model: Any = model
        if self.way == "ddp" or self.pace:
            self.model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
        elif self.way == "fsdp":
            mesh = init_device_mesh(device.name, (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            mesh = init_device_mesh(device.name, (dist.get_world_size(),))
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, mesh, plan)
        sharded = [each for each in model.parameters() if isinstance(each, DTensor)]
        whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
        # Separate parameter groups, because an operator over several tensors accepts only one
        # tensor type.
        groups = [{"params": each} for each in (sharded, whole) if each]
        self.optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        self.optimizer.register_step_pre_hook(lambda *_: self._spin("optimizer"))
        # All ranks of a tensor-parallel group compute on the same batch.
        seen_by = 0 if self.way == "tensor" else rank
        self.loader = DataLoader(
            Samples(truth, seen_by, self.planted, self.micro_steps), batch_size=None
        )

    def train(self) -> list[float]:
        """Run the user's loop. Train, and return each step's seconds on the host."""
        seconds, begin_s = [], time.perf_counter()
        slow = self.planted.now("device")
        host_s = self.pace.host_ms.get("host", 0.0) / 1e3 if self.pace else 0.0
        for index, (x, y) in enumerate(self.loader):
            last = (index + 1) % self.micro_steps == 0
            with self._syncs(last):
                name = self._device.name
                x, y = (each.to(name, non_blocking=self.pace is not None) for each in (x, y))
                loss = (self.model(x) - y).square().mean()
                loss.backward()
            if not last:
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()
            if "item" in self.what or (self.pace and self.pace.item):
                loss.item()
            self.planted.step += 1
            if slow_s := host_s + self.planted.ms("host") / 1e3:
                time.sleep(slow_s)
            if slow is None:
                slow = self.planted.now("device")
                if slow is not None and slow.share is not None:
                    self._device.set_slowness(1 + slow.share)
            now_s = time.perf_counter()
            seconds.append(now_s - begin_s)
            begin_s = now_s
        self._device.set_slowness(1.0)
        torch.accelerator.synchronize()
        return seconds

    def _syncs(self, last: bool) -> AbstractContextManager[Any]:
        if self.way == "ddp" and not last:
            return self.model.no_sync()  # type: ignore[no-any-return]
        if self.way == "fsdp":
            self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def _spin(self, phase: str) -> None:
        device_ms = self.pace.device_ms.get(phase, 0.0) if self.pace else 0.0
        if slow_ms := device_ms + self.planted.ms(phase):
            self._device.spin(slow_ms / 1e3)


def record(truth: Truth, out: Path, rank: int, device: PlantedDevice) -> str:
    """Record one run under perf.watch in a separate folder.

    Write the truth last. Return a line for the log.
    """
    folder = out / truth.name
    if rank == 0 and folder.exists():
        # Remove the folder of an interrupted run.
        shutil.rmtree(folder)
    loop = Loop(truth, rank, device)
    dist.barrier()
    with device.paced(None if loop.pace is None else LOOP_KERNEL_MS / 1e3):
        with perf.watch(loop.model, loop.optimizer, dir=str(folder)) as watch:
            seconds = loop.train()
    if rank == 0 and watch.run_dir is not None:
        wait_for_sidecar(watch.run_dir)
        partial = folder / "truth.partial"
        partial.write_text(json.dumps({**truth.to_json(), "run": watch.run_dir.name}, indent=1))
        partial.rename(folder / "truth.json")
    dist.barrier()
    return f"step {1e3 * statistics.median(seconds):.1f} ms"


def main(
    done: Callable[[Truth, str], None] = lambda truth, how: print(
        f"{truth.name}  {how}", flush=True
    ),
) -> None:
    """Run one rank of the group that planted_devices.py starts.

    The group's environment contains RANK, WORLD_SIZE and the store.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="KIND:SEED")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument(
        "--store", type=Path, help="file that the ranks meet at; default: the job's store"
    )
    parser.add_argument("--device", choices=DEVICES, default="asyncdev")
    parser.add_argument(
        "--host-ms", nargs=2, type=int, default=HOST_DELAYS_MS, help="of a slow host: from, to"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where: dict[str, Any] = {"init_method": "env://"}
    if asked.store:
        where = {
            "store": dist.FileStore(str(asked.store), ranks),
            "rank": rank,
            "world_size": ranks,
        }
    device = DEVICES[asked.device]()
    device.load(KERNEL_MS / 1e3, rank)
    dist.init_process_group(
        device.backend, timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S), **where
    )
    for each in asked.runs:
        kind, _, seed = each.partition(":")
        truth = plant(kind, int(seed), ranks, asked.steps or STEPS, device.slowness, asked.host_ms)
        how = record(truth, asked.out, rank, device)
        # Free the model and its buckets before the next run.
        gc.collect()
        if rank == 0:
            done(truth, how)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
