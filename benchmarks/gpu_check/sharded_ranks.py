"""One of two ranks: `python -m benchmarks.gpu_check.sharded_ranks fsdp|tensor|hang FOLDER`.

fsdp and tensor train twice, without and with a watch, and write RANK.json to FOLDER: digests of
both results, and the forward pass by our marks and by the rank's own events. hang trains under a
live sidecar until the device of rank 1 starts a kernel that never ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import torchlens_perf as perf
from benchmarks.gpu_check.loops import (
    OUTER_BEGIN,
    OUTER_END,
    WARM_UP,
    OwnEvents,
    pair_with_bounds,
    recorded,
)
from benchmarks.gpu_check.runs import last_rings
from benchmarks.planted_device_training import Loop
from benchmarks.planted_device_truth import KERNEL_MS, LOOP_KERNEL_MS
from benchmarks.planted_on import DEVICES, PlantedDevice
from benchmarks.planted_truth import Fault, Truth
from torchlens_perf.run.ring import Kind, RingReader

STEPS, SPIN_MS, HANGS_AT, HANGS = 24, 10.0, 30, 1
# A kernel for the rest of the check, which ends with its process.
_ENDLESS_S = 1e6


def sharded(kind: str, folder: Path, rank: int, on: PlantedDevice) -> None:
    """Train without and with a watch, and write what was found."""
    unwatched = _loop(kind, rank, on)
    _train(unwatched, OwnEvents(on.name))
    without = _digest(unwatched)
    own, ring_folder = OwnEvents(on.name), str(folder / f"watched-{rank}")
    loop = _loop(kind, rank, on)
    with perf.watch(loop.model, loop.optimizer, dir=ring_folder, sidecar=False, report="off"):
        _train(loop, own)
        bounds = own.bounds_ms()
    ours, _ = recorded(last_rings(ring_folder))
    pairs = pair_with_bounds(ours["forward"], bounds["forward"])
    found = {"without": without, "with": _digest(loop), "forward_ms": None}
    if pairs:
        ours_ms, _, most_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
        found["forward_ms"] = ours_ms, most_ms
    found["work_ms"] = work_ms(last_rings(ring_folder))
    (folder / f"{rank}.json").write_text(json.dumps(found))


def work_ms(ring: Path) -> float:
    """Return the median of a step's device time without waits of the compute stream."""
    reader = RingReader(ring)
    records = reader.read_records(final=True).records
    reader.close()
    device = records[(records["kind"] == Kind.DEVICE) & (records["step"] >= WARM_UP)]
    steps, waits = (device[device["value0"] == kind] for kind in (Kind.STEP, Kind.WAIT))
    waited_ns = Counter[int]()
    for each in waits:
        waited_ns[int(each["step"])] += int(each["duration_ns"])
    return statistics.median(
        (int(each["duration_ns"]) - waited_ns[int(each["step"])]) / 1e6 for each in steps
    )


class _Marked:
    """A model whose calls are between two events of the check."""

    def __init__(self, model: Any, own: OwnEvents) -> None:
        self._model, self._own, self._step = model, own, -1

    def __call__(self, x: Tensor) -> Tensor:
        self._step += 1
        self._own.begin_step(self._step)
        self._own.mark("forward", OUTER_BEGIN)
        made: Tensor = self._model(x)
        self._own.mark("forward", OUTER_END)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _loop(kind: str, rank: int, on: PlantedDevice) -> Loop:
    fault = Fault(HANGS, "forward", 0, None, SPIN_MS, "spin")
    return Loop(Truth(f"{kind}-forward", 1, 2, STEPS, (fault,)), rank, on)


def _train(loop: Loop, own: OwnEvents) -> None:
    model, loop.model = loop.model, _Marked(loop.model, own)
    loop.train()
    loop.model = model


def _digest(loop: Loop) -> str:
    """Return a digest of this rank's part of all parameters."""
    parts = (
        each.to_local() if isinstance(each, DTensor) else each for each in loop.model.parameters()
    )
    return hashlib.sha256(
        b"".join(each.detach().cpu().numpy().tobytes() for each in parts)
    ).hexdigest()


def hang(_: str, folder: Path, rank: int, on: PlantedDevice) -> None:
    """Train without a wait for the device, and hang. The process is killed by the check."""
    loop = Loop(Truth("ahead-clean", 1, 2, 1 << 20, ()), rank, on)
    step = 0

    def may_hang(*_: Any) -> None:
        nonlocal step
        step += 1
        if step == HANGS_AT and rank == HANGS:
            on.spin(_ENDLESS_S)

    loop.model.register_forward_pre_hook(may_hang)
    with on.paced(LOOP_KERNEL_MS / 1e3):
        with perf.watch(loop.model, loop.optimizer, dir=str(folder / "runs"), report="off"):
            loop.train()


def main() -> None:
    """Join the group of two ranks, and train."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    rank, on = int(os.environ["RANK"]), DEVICES[os.environ["GPU_CHECK_DEVICE"]]()
    torch.set_num_threads(1)
    on.load(KERNEL_MS / 1e3, rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(on.backend, store=store, rank=rank, world_size=2)
    (hang if kind == "hang" else sharded)(kind, folder, rank, on)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
