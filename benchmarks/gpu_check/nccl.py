"""NCCL's kernels through the plugin: that it is loaded on one rank, and that two ranks of one GPU name the late one.

On one rank NCCL launches no kernel that it tells of: an all-reduce is a copy, and what a rank sends to itself is not
timed. Two ranks on one GPU are not what NCCL is for: each is told that it is another host, and they talk over
sockets. Where NCCL refuses, that is said and nothing is concluded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchlens_perf as perf
from benchmarks.gpu_check.checks import Checks, Spin
from benchmarks.gpu_check.runs import last_rings
from torchlens_perf import nccl_plugin
from torchlens_perf.collective_join import CollectiveJoin
from torchlens_perf.nccl_plugin import VARIABLE
from torchlens_perf.report.collective_table import collective_rows
from torchlens_perf.ring import Flag, Kind, Reader

ROOT = Path(__file__).parent.parent.parent
STEPS, SPIN_NS, LEAST_LAG_NS = 20, 20_000_000, 10_000_000
_TIMEOUT_S = 120
_TWO_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip


def nccl1(checks: Checks) -> None:
    """One rank: NCCL loads the plugin, and finds the variable gone after the watch."""
    plugin, version = nccl_plugin.load(), nccl_plugin.version()
    if plugin is None or version is None:
        checks.missing("nccl1", "the plugin", "it was not built, or this torch has no NCCL")
        return
    checks.value("nccl1", "NCCL; steps between timed ones", f"{version}; {nccl_plugin.steps_between(version)}")
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29654", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(environment)
    before = plugin.counters()
    try:
        with tempfile.TemporaryDirectory() as folder:
            with perf.watch(dir=folder, sidecar=False, report=False, modules="none", nccl="on") as watch:
                named = os.environ.get(VARIABLE) == str(nccl_plugin.path())
                dist.init_process_group("nccl")
                tensor = torch.ones(1 << 18, device="cuda")
                for _ in range(STEPS):
                    dist.all_reduce(tensor)
                    dist.all_to_all_single(torch.empty_like(tensor), tensor)
                    watch.step()
                torch.cuda.synchronize()
            reader = Reader(last_rings(folder))
            records = reader.read(final=True).records
            reader.close()
    finally:
        dist.destroy_process_group()
        for variable in environment:
            del os.environ[variable]
    after = plugin.counters()
    met = after.communicators > before.communicators
    checks.bar(
        "nccl1", "communicators made with the plugin", str(after.communicators - before.communicators), ">= 1", met
    )
    gone = VARIABLE not in os.environ
    checks.bar(
        "nccl1", "the variable inside and after the watch", f"{named}, {not gone}", "True, False", named and gone
    )
    collectives = records[records["kind"] == Kind.COLLECTIVE]
    ended = int((collectives["flags"] & Flag.COMPLETED != 0).sum())
    checks.bar("nccl1", "collectives recorded", str(len(collectives)), str(2 * STEPS), len(collectives) == 2 * STEPS)
    checks.value(
        "nccl1",
        "of them with a kernel's time; communicators distrusted",
        f"{ended}; {after.distrusted - before.distrusted}",
    )


def nccl2(checks: Checks) -> None:
    """Two ranks on one GPU, of which rank 1 has 20 ms of work before each all-reduce."""
    what = "who came last in an all-reduce"
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, **_TWO_HOSTS, "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, folder],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"torchlens-perf-{rank}"},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            errors = [rank.communicate(timeout=_TIMEOUT_S)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            checks.missing("nccl2", what, f"two ranks on one GPU did not end within {_TIMEOUT_S} s")
            return
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            words = [line for line in "\n".join(errors).splitlines() if "rror" in line]
            checks.missing(
                "nccl2", what, f"NCCL refused two ranks on one GPU: {words[-1][:120] if words else 'no word'}"
            )
            return
        row = _joined(Path(folder))
    if row is None or not row["joined"]:
        checks.bar("nccl2", what, "no joined all-reduce", "rank 1", False)
        return
    lag_ns = 1e9 * row["by_rank"]["1"]["exposed_lag_s"] / row["joined"]
    value = f"rank {row['slowest_rank']}, by {lag_ns / 1e6:.1f} ms, in {row['joined']} all-reduces"
    met = row["slowest_rank"] == 1 and lag_ns >= LEAST_LAG_NS
    checks.bar("nccl2", what, value, f"rank 1, by at least {LEAST_LAG_NS / 1e6:.0f} ms", met)
    by_device = f"{row['by_device']} of {row['count']}"
    checks.bar("nccl2", "with a kernel's time by the device", by_device, "all", row["by_device"] == row["count"])
    checks.value("nccl2", "the transfer, once both were there", f"{1e3 * row['transfer_s']['p50_s']:.2f} ms")


def _joined(folder: Path) -> dict[str, Any] | None:
    """The all-reduces of both ranks, put together."""
    join = CollectiveJoin()
    for path in folder.glob("*/rings/*.ring"):
        reader = Reader(path)
        metadata, records = reader.metadata(), reader.read(final=True).records
        rank = int(metadata["identity"]["rank"])
        join.know(0, [rank])
        join.add(0, rank, records[records["step"] > 0], reader.names(), metadata["groups"])
        reader.close()
    join.join()
    rows = [row for row in collective_rows([join.to_json()]) if row["operation"] == "allreduce"]
    return rows[0] if rows else None


def _one_rank(folder: str) -> None:
    torch.cuda.set_device(0)
    with perf.watch(dir=folder, sidecar=False, report=False, modules="none", nccl="on") as watch:
        dist.init_process_group("nccl")
        rank, tensor, spin = dist.get_rank(), torch.ones(1 << 18, device="cuda"), Spin()
        for _ in range(STEPS):
            if rank == 1:
                spin(SPIN_NS)
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            watch.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    _one_rank(sys.argv[1])
