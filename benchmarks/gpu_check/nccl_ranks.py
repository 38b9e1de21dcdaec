"""Rank processes of the NCCL checks: `python -m benchmarks.gpu_check.nccl_ranks lone|pair FOLDER
WISH [GROUPS]`.

Each process writes its resources and the plugin's counters to FOLDER/told-RANK.json, and the time
to destroy its communicators to ended-RANK.json. If the destruction of the communicators never ends,
ended-RANK.json is missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchlens_perf as perf
from benchmarks.gpu_check.checks import Spin
from benchmarks.gpu_check.runs import last_rings
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl_plugin import VARIABLE
from torchlens_perf.run.ring import Flag, Kind, RingReader

STEPS, SPIN_NS = 20, 20_000_000


def shared_bytes() -> int:
    """Return the used bytes of /dev/shm."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _tell(folder: str, shared_before: int, **found: object) -> None:
    """Write this process's resources and the plugin's counters for the parent process.

    Destroy the communicators.
    """
    plugin = nccl_plugin.load_plugin()
    counters = {} if plugin is None else plugin.counters()._asdict()
    used = {"threads": len(os.listdir("/proc/self/task")), "cpu_s": time.process_time()}
    used["shared_mib"] = (shared_bytes() - shared_before) / 2**20
    rank = os.environ["RANK"]
    (Path(folder) / f"told-{rank}.json").write_text(json.dumps({**counters, **used, **found}))
    begin_s = time.monotonic()
    dist.destroy_process_group()
    (Path(folder) / f"ended-{rank}.json").write_text(json.dumps(time.monotonic() - begin_s))


def _lone(folder: str, wish: str) -> None:
    before = shared_bytes()
    with perf.watch(dir=folder, sidecar=False, report="off", modules="none", nccl=wish) as watch:
        named = os.environ.get(VARIABLE) == str(nccl_plugin.find_plugin_file())
        dist.init_process_group("nccl")
        tensor = torch.ones(1 << 18, device="cuda")
        for _ in range(STEPS):
            dist.all_reduce(tensor)
            dist.all_to_all_single(torch.empty_like(tensor), tensor)
            watch.step()
        torch.cuda.synchronize()
    reader = RingReader(last_rings(folder))
    records = reader.read_records(final=True).records
    reader.close()
    collectives = records[records["kind"] == Kind.COLLECTIVE]
    ended = int((collectives["flags"] & Flag.COMPLETED != 0).sum())
    _tell(
        folder,
        before,
        named=named,
        left=VARIABLE in os.environ,
        recorded=len(collectives),
        ended=ended,
    )


def _one_of_two(folder: str, wish: str, groups: str = "1") -> None:
    """Run one of two ranks.

    `groups` is the number of communicators of both ranks, each with an all-reduce per step.
    """
    torch.cuda.set_device(0)
    before = shared_bytes()
    with perf.watch(dir=folder, sidecar=False, report="off", modules="none", nccl=wish) as watch:
        dist.init_process_group("nccl")
        all_groups = [None, *(dist.new_group() for _ in range(int(groups) - 1))]
        rank, tensor, spin = dist.get_rank(), torch.ones(1 << 18, device="cuda"), Spin()
        for _ in range(STEPS):
            for group in all_groups:
                if rank == 1:
                    spin(SPIN_NS)
                dist.all_reduce(tensor, group=group)
                torch.cuda.synchronize()
            watch.step()
    _tell(folder, before)


if __name__ == "__main__":
    {"lone": _lone, "pair": _one_of_two}[sys.argv[1]](*sys.argv[2:])
