"""Faults planted in four nodes of this machine, and the verdicts of `torchlens_perf check` on them.

    sudo python -m benchmarks.check_verdicts --runs 20 --clean 40 --file runs.jsonl --minutes 60

Runs are appended to the file. A campaign that has ended early goes on with the runs that are missing.

Each node is a network namespace with two ranks, a host name and control groups of its own, behind a
bridge. Needs root, `ip`, `tc` (Debian's iproute2) and control groups of version 1. A line of JSON per
run, with the load average before it; the last lines have the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.device_mesh

from torchlens_perf.check import runner  # noqa: F401
from torchlens_perf.commands.cli import main as main_command
from torchlens_perf.run.grouping import group_values

_CLONE_NEWNET, _CLONE_NEWUTS, _CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
NODES, RANKS_PER_NODE = 4, 2
_GROUPS = Path("/sys/fs/cgroup")
_BYTES = bytes(1 << 20)
FAULTS = {
    "slow_cpu": (
        "CPU quota",
        "one CPU thread",
        "all CPU threads",
        "matmul",
        "memory bandwidth",
        "Python import",
    ),
    "slow_disk": ("disk write", "disk read"),
    "slow_link": ("transfers",),
    "lossy_link": ("transfers",),
    "one_direction": ("transfers",),
    "small_shared_memory": ("shared memory",),
    "small_mtu": ("MTU",),
    "memory_neighbour": ("free memory",),
}
"""Planted faults of a node, and the quantities of a verdict that is right."""


def sh(*command: object, check: bool = True) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


class Cluster:
    """Four network namespaces behind a bridge, in which faults are planted."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.name = f"chk{os.getpid() % 10_000}"
        hub = f"{self.name}-hub"
        self._add_namespace(hub)
        sh("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", hub, "link", "set", "bridge", "up")
        for node in range(NODES):
            space = self.space(node)
            self._add_namespace(space)
            sh(
                "ip",
                "-n",
                hub,
                "link",
                "add",
                f"port{node}",
                "type",
                "veth",
                "peer",
                "eth0",
                "netns",
                space,
            )
            sh("ip", "-n", hub, "link", "set", f"port{node}", "master", "bridge", "up")
            sh("ip", "-n", space, "address", "add", f"10.84.0.{node + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                sh("ip", "-n", space, "link", "set", device, "up")

    def space(self, node: int) -> str:
        return f"{self.name}-{node}"

    def _add_namespace(self, name: str) -> None:
        sh("ip", "netns", "add", name)
        self._stack.callback(sh, "ip", "netns", "del", name, check=False)

    def limit_port(self, node: int, *, sends: bool, receives: bool, mbit: int) -> None:
        """Limit the rate of a node's link: at its own end what it sends, at the bridge what it receives."""
        rule = "root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"
        if sends:
            sh("tc", "-n", self.space(node), "qdisc", "add", "dev", "eth0", *rule)
        if receives:
            sh("tc", "-n", f"{self.name}-hub", "qdisc", "add", "dev", f"port{node}", *rule)

    def make_group(self, controller: str, node: int, **limits: object) -> Path:
        """Return a new control group with limits."""
        path = _GROUPS / controller / self.space(node)
        path.mkdir()
        self._stack.callback(_remove_group, path)
        for name, value in limits.items():
            file = name.replace("__", ".")
            (path / file).write_text(str(value))
        return path


def _remove_group(path: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.1)


def plant(
    cluster: Cluster, fault: str, node: int, stack: contextlib.ExitStack, folder: Path
) -> tuple[list[Path], str]:
    """Plant a fault in a node. Return the control groups of its ranks, and a command for its mounts."""
    groups, mounts = [], ""
    if fault == "slow_cpu":
        quota = {"cpu__cfs_period_us": 50_000, "cpu__cfs_quota_us": 3_000}
        groups.append(cluster.make_group("cpu", node, **quota))
    elif fault == "slow_disk":
        device = os.stat(folder).st_dev
        limit = f"{os.major(device)}:{os.minor(device)} {5 << 20}"
        of = {"blkio__throttle__write_bps_device": limit, "blkio__throttle__read_bps_device": limit}
        groups.append(_make_blkio_group(cluster, node, of))
    elif fault == "slow_link":
        cluster.limit_port(node, sends=True, receives=True, mbit=200)
    elif fault == "one_direction":
        cluster.limit_port(node, sends=True, receives=False, mbit=200)
    elif fault == "lossy_link":
        _plant_loss(cluster, node)
    elif fault == "small_shared_memory":
        mounts = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    elif fault == "small_mtu":
        sh("ip", "-n", cluster.space(node), "link", "set", "eth0", "mtu", 1200)
    elif fault == "memory_neighbour":
        group = cluster.make_group("memory", node, memory__limit_in_bytes=6 << 30)
        groups.append(group)
        hog = subprocess.Popen(
            [sys.executable, "-c", "b = bytearray(b'1') * (2 << 30); input()"],
            stdin=subprocess.PIPE,
        )
        (group / "cgroup.procs").write_text(str(hog.pid))
        stack.callback(hog.wait)
        stack.callback(hog.kill)
        time.sleep(2)
    return groups, mounts


def _make_blkio_group(cluster: Cluster, node: int, limits: dict[str, str]) -> Path:
    path = cluster.make_group("blkio", node)
    for name, value in limits.items():
        (path / name.replace("__", ".")).write_text(value)
    return path


def _plant_loss(cluster: Cluster, node: int) -> None:
    """Drop packets that reach a node, by a queue that is too short: this kernel has no netem."""
    rule = "root", "tbf", "rate", "1gbit", "burst", "16kb", "limit", "20kb"
    sh("tc", "-n", f"{cluster.name}-hub", "qdisc", "add", "dev", f"port{node}", *rule)


def run_check(fault: str, node: int, seconds: float, keep: Path | None) -> dict[str, Any]:
    """Run one check. keep: file for its result, with all values."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        cluster = Cluster(stack)
        groups, mounts = plant(cluster, fault, node, stack, folder) if fault else ([], "")
        result = folder / "result.json"
        begin_s, load = time.monotonic(), os.getloadavg()[0]
        ranks = []
        for rank in range(NODES * RANKS_PER_NODE):
            at = rank // RANKS_PER_NODE
            if not (pid := os.fork()):
                planted = (groups, mounts) if at == node else ([], "")
                _be_rank(
                    cluster,
                    rank,
                    folder,
                    ["--seconds", str(seconds), "--json", str(result)],
                    *planted,
                )
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)
        found = (
            json.loads(result.read_text())
            if result.exists()
            else {"verdicts": [], "exit_code": None}
        )
        if keep and result.exists():
            keep.parent.mkdir(exist_ok=True)
            shutil.copy(result, keep)
    texts = [each["text"] for each in found["verdicts"]]
    wall_s = round(time.monotonic() - begin_s, 1)
    return {
        "fault": fault,
        "node": node,
        "seconds": seconds,
        "wall_s": wall_s,
        "load": load,
        **judge(fault, node, found),
        "texts": texts,
    }


def _be_rank(
    cluster: Cluster,
    rank: int,
    folder: Path,
    arguments: list[str],
    groups: Sequence[Path],
    mounts: str,
) -> NoReturn:
    """Run the check as a rank, in a forked process that has imported torch already."""
    at, libc = rank // RANKS_PER_NODE, ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{cluster.space(at)}") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS | _CLONE_NEWNS):
            os._exit(90)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    socket.sethostname(f"node-{at}")
    for each in groups:
        (each / "cgroup.procs").write_text(str(os.getpid()))
    subprocess.run(["sh", "-c", mounts], check=True)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(NODES * RANKS_PER_NODE), "LOCAL_RANK": str(rank % RANKS_PER_NODE),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE), "MASTER_ADDR": "10.84.0.1", "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(folder), "TORCHLENS_PERF_DIR": str(folder / "runs"),
    }  # fmt: skip
    tempfile.tempdir = None
    torch.set_num_threads(1)
    with open(folder / f"rank{rank}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        code = main_command(["check", *arguments])
    except BaseException as error:
        print(error, flush=True)
        code = 91
    sys.stdout.flush()
    os._exit(code)


def judge(fault: str, node: int, found: dict[str, Any]) -> dict[str, Any]:
    """Return whether the fault is named with its node, and how many verdicts are on other parts."""
    right, others = [], []
    for verdict in found["verdicts"]:
        evidence = verdict["evidence"]
        quantities = [each["quantity"] for each in evidence["found"]]
        nodes = {rank // RANKS_PER_NODE for rank in evidence["ranks"]}
        fits = any(each.startswith(FAULTS[fault]) for each in quantities) if fault else False
        if fault == "lossy_link":
            fits &= "again" in evidence["reason"]
        if fault == "one_direction":
            fits &= "sending only" in evidence["subject"]
        (right if fits and nodes == {node} else others).append(evidence["subject"])
    of_node = [each for each in others if f"node-{node}" not in each] if fault else others
    return {"named": bool(right), "others": of_node, "exit_code": found["exit_code"]}


def choose_next(done: Sequence[dict[str, Any]], wanted: Mapping[str, int]) -> str | None:
    """Return the fault of which the smallest share of runs is done; None if nothing is missing."""
    counts = Counter(each["fault"] for each in done)
    missing = [fault for fault, runs in wanted.items() if counts[fault] < runs]
    return min(missing, key=lambda fault: counts[fault] / wanted[fault], default=None)


def describe(done: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line on each fault."""
    rows = group_values((each["fault"], each) for each in done)
    for fault, runs in rows.items():
        named = sum(each["named"] for each in runs)
        wrong = sum(bool(each["others"]) for each in runs)
        wall_s = statistics.median(each["wall_s"] for each in runs)
        loads = [each["load"] for each in runs]
        yield (
            f"{fault or 'clean'}: named in {named} of {len(runs)}; another part in {wrong};"
            f" median {wall_s:.0f} s, load average {min(loads):.1f} to {max(loads):.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Verdicts of the check on planted faults.")
    parser.add_argument("--runs", type=int, default=5, help="runs of each fault")
    parser.add_argument("--clean", type=int, default=10, help="runs without a fault")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument(
        "--file", type=Path, help="lines of earlier runs, to which new ones are added"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="time for new runs")
    parser.add_argument("--keep", type=Path, help="folder for the results with all values")
    given = parser.parse_args()
    begin_s, earlier = time.monotonic(), given.file and given.file.exists()
    done = [json.loads(line) for line in given.file.read_text().splitlines()] if earlier else []
    wanted = {**dict.fromkeys(given.faults, given.runs), "": given.clean}
    while (fault := choose_next(done, wanted)) is not None:
        if time.monotonic() - begin_s > 60 * given.minutes:
            break
        node = sum(each["fault"] == fault for each in done) % NODES if fault else -1
        keep = given.keep and given.keep / f"{len(done):03}-{fault or 'clean'}.json"
        done.append(run_check(fault, node, given.seconds, keep))
        line = json.dumps(done[-1])
        print(line, flush=True)
        if given.file:
            with given.file.open("a") as file:
                file.write(line + "\n")
    print("\n".join(describe(done)))


if __name__ == "__main__":
    main()
