"""NCCL's kernels through the plugin: that it is loaded on one rank, and that two ranks of one GPU name the late one.

Each in processes of its own, for NCCL looks for the plugin at a process's first communicator only. On one rank it
launches no kernel that it tells of: an all-reduce is a copy, and at a send to itself timing is given up. Two ranks on
one GPU are not what NCCL is for: each is told that it is another host, and they talk over sockets. Where NCCL refuses,
that is said and nothing is concluded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchlens_perf as perf
from benchmarks.gpu_check.checks import Checks, Spin
from benchmarks.gpu_check.runs import last_rings
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.recorder import nccl_plugin
from torchlens_perf.recorder.nccl_plugin import VARIABLE, Cause
from torchlens_perf.report.collective_table import collective_rows
from torchlens_perf.run.ring import Flag, Kind, Reader

ROOT = Path(__file__).parent.parent.parent
STEPS, SPIN_NS, MIN_LAG_NS = 20, 20_000_000, 10_000_000
_TIMEOUT_S = 120
_ALONE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29654", "RANK": "0", "WORLD_SIZE": "1"}
_TWO_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip


def nccl1(checks: Checks) -> None:
    """One rank in a process of its own: NCCL loads the plugin, which gives up at the first copy to itself."""
    version = nccl_plugin.version()
    if nccl_plugin.load() is None or version is None:
        checks.missing("nccl1", "the plugin", "it was not built, or this torch has no NCCL")
        return
    every = nccl_plugin.steps_between(version, asked_for=True)
    checks.value("nccl1", "NCCL; steps between timed ones", f"{version}; {every}")
    told = {}
    for wish in ("on", "off"):
        with tempfile.TemporaryDirectory() as folder:
            environ = {**os.environ, **_ALONE, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", __name__, "lone", folder, wish]
            subprocess.run(command, env=environ, check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)
            told[wish] = json.loads((Path(folder) / "told-0.json").read_text())
    found = told["on"]
    made = found["communicators"]
    checks.bar("nccl1", "communicators made with the plugin", str(made), ">= 1", made >= 1)
    value = f"{found['named']}, {found['left']}"
    met = found["named"] and not found["left"]
    checks.bar("nccl1", "the variable inside and after the watch", value, "True, False", met)
    number = found["recorded"]
    checks.bar("nccl1", "collectives recorded", str(number), str(2 * STEPS), number == 2 * STEPS)
    checks.value("nccl1", "of them with a kernel's time", str(found["ended"]))
    cause = Cause(found["given_up"])
    checks.bar("nccl1", "timing given up for", cause.name, "SELF_COPY", cause is Cause.SELF_COPY)
    _costs(checks, "nccl1", told)


def _costs(checks: Checks, part: str, told: dict[str, dict[str, Any]]) -> None:
    """Threads and processor time in both arms.

    Not what timing costs one node: over sockets the progress thread is there anyway, and on one rank nothing is timed.
    """
    for what, field, unit in (("threads", "threads", ""), ("process CPU", "cpu_s", " s")):
        value = " / ".join(f"{told[wish][field]:.4g}{unit}" for wish in ("on", "off"))
        checks.value(part, f"{what} with / without the plugin", value)


def nccl2(checks: Checks) -> None:
    """Two ranks on one GPU, of which rank 1 has 20 ms of work before each all-reduce."""
    what = "who came last in an all-reduce"
    told = {}
    for wish in ("off", "on"):
        with tempfile.TemporaryDirectory() as folder:
            problem = _two_ranks(folder, wish)
            if problem:
                checks.missing("nccl2", what, problem)
                return
            told[wish] = json.loads((Path(folder) / "told-0.json").read_text())
            row = _joined(Path(folder))
    _costs(checks, "nccl2", told)
    cause = Cause(told["on"]["given_up"])
    checks.bar("nccl2", "timing given up for", cause.name, "NOT_GIVEN_UP", cause is Cause.NOT_GIVEN_UP)
    if row is None or not row["joined"]:
        checks.bar("nccl2", what, "no joined all-reduce", "rank 1", False)
        return
    lag_ns = 1e9 * row["by_rank"]["1"]["exposed_lag_s"] / row["joined"]
    value = f"rank {row['slowest_rank']}, by {lag_ns / 1e6:.1f} ms, in {row['joined']} all-reduces"
    met = row["slowest_rank"] == 1 and lag_ns >= MIN_LAG_NS
    checks.bar("nccl2", what, value, f"rank 1, by at least {MIN_LAG_NS / 1e6:.0f} ms", met)
    by_device = f"{row['by_device']} of {row['count']}"
    checks.bar("nccl2", "with a kernel's time by the device", by_device, "all", row["by_device"] == row["count"])
    checks.value("nccl2", "the transfer, once both were there", f"{1e3 * row['transfer_s']['p50_s']:.2f} ms")


def _two_ranks(folder: str, wish: str) -> str:
    """Runs both. What went wrong; "" if nothing did."""
    environ = {**os.environ, **_TWO_HOSTS, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, "pair", folder, wish],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"torchlens-perf-{rank}"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=_TIMEOUT_S)[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"two ranks on one GPU did not end within {_TIMEOUT_S} s"
    finally:
        for each in ranks:
            each.kill()
    if any(rank.returncode for rank in ranks):
        words = [line for line in "\n".join(errors).splitlines() if "rror" in line]
        return f"NCCL refused two ranks on one GPU: {words[-1][:120] if words else 'no word'}"
    return ""


def _joined(folder: Path) -> dict[str, Any] | None:
    """The all-reduces of both ranks, put together."""
    join = CollectiveJoin()
    for path in folder.glob("*/rings/*.ring"):
        reader = Reader(path)
        metadata, records = reader.metadata(), reader.read(final=True).records
        rank = int(metadata["identity"]["rank"])
        join.set_ranks(0, [rank])
        join.add(0, rank, records[records["step"] > 0], reader.names(), metadata["groups"])
        reader.close()
    join.join()
    rows = [row for row in collective_rows([join]) if row["operation"] == "allreduce"]
    return rows[0] if rows else None


def _tell(folder: str, **found: object) -> None:
    """What this process used, and what the plugin has counted, for the one that has started it."""
    plugin = nccl_plugin.load()
    counters = {} if plugin is None else plugin.counters()._asdict()
    used = {"threads": len(os.listdir("/proc/self/task")), "cpu_s": time.process_time()}
    (Path(folder) / f"told-{os.environ['RANK']}.json").write_text(json.dumps({**counters, **used, **found}))


def _lone(folder: str, wish: str) -> None:
    with perf.watch(dir=folder, sidecar=False, report=False, modules="none", nccl=wish) as watch:
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
    collectives = records[records["kind"] == Kind.COLLECTIVE]
    ended = int((collectives["flags"] & Flag.COMPLETED != 0).sum())
    _tell(folder, named=named, left=VARIABLE in os.environ, recorded=len(collectives), ended=ended)
    dist.destroy_process_group()


def _one_of_two(folder: str, wish: str) -> None:
    torch.cuda.set_device(0)
    with perf.watch(dir=folder, sidecar=False, report=False, modules="none", nccl=wish) as watch:
        dist.init_process_group("nccl")
        rank, tensor, spin = dist.get_rank(), torch.ones(1 << 18, device="cuda"), Spin()
        for _ in range(STEPS):
            if rank == 1:
                spin(SPIN_NS)
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            watch.step()
    _tell(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    {"lone": _lone, "pair": _one_of_two}[sys.argv[1]](*sys.argv[2:])
