"""Jobs on two nodes of this machine, under any launcher: what they print, and the one run that they leave.

A node is a pair of namespaces: a host name and a shared memory of its own. The nodes share the working directory, as
on a cluster's disk, and the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, SCRIPTS, clean_environ
from tests.support.reports import checked
from tests.support.warm_python import WarmPython
from torchlens_perf.report.build import build
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

SCRIPT = str(SCRIPTS / "launched.py")
NODES = ("node-a", "node-b")
RANKS, SLOW_RANK = 4, 3  # of the second node
ON_NODE = str(SCRIPTS / "on_node.py")
SHELL_NODE = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
STEPS = 1200  # of 15 ms and more: nodes meet some six seconds after the start, on a busy machine later
_LATER_S = 2.0  # so that the second node, on its own, calls the run otherwise than the first


def on_nodes(*programs: list[str]) -> list[list[str]]:
    """Python programs, the first on the first node; the next one begins a little later."""
    return [
        on_node(node, number * _LATER_S, *program)
        for number, (node, program) in enumerate(zip(NODES, programs, strict=True))
    ]


def on_node(node: str, delay_s: float, *program: str) -> list[str]:
    """A Python program, on that node, after some time."""
    return [sys.executable, ON_NODE, node, str(delay_s), *program]


def by_shell(node: str, *command: str) -> list[str]:
    """Any command, run on that node."""
    return ["unshare", "--uts", "--mount", "sh", "-c", SHELL_NODE, node, *command]


def why_no_nodes() -> str:
    """Why there can be no second node here; empty if there can."""
    if os.geteuid():
        return "namespaces with names and mounts of their own need root"
    done = subprocess.run(by_shell("node-x", "true"), capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclasses.dataclass(frozen=True)
class Done:
    """A job that has ended."""

    folder: Path
    said: str

    @property
    def losses(self) -> list[str]:
        return [line.partition("loss ")[2].strip() for line in self.said.splitlines() if "loss " in line]

    @property
    def runs(self) -> list[RunDirectory]:
        """The run directories, without other names of theirs."""
        found = sorted((self.folder / "torchlens-perf").glob("*/nodes"))
        return [RunDirectory(path.parent) for path in found if not path.parent.is_symlink()]

    def report(self) -> dict[str, Any]:
        """On the one run."""
        (run,) = self.runs
        return checked(build(run.run_id, node_state.load_all(run)))

    def straggler(self) -> dict[str, Any] | None:
        verdicts = [each for each in self.report()["verdicts"] if each["kind"].startswith("straggler")]
        return next((each for each in verdicts if each["rank"] == SLOW_RANK), None)


def run(folder: Path, *commands: list[str], watched: bool = True, timeout_s: float = 150, **environment: str) -> Done:
    """Runs the commands side by side, each of which starts a part of the job, and waits for its sidecars."""
    folder.mkdir(exist_ok=True)
    environ = clean_environ(
        {
            "TORCHLENS_PERF": str(int(watched)), "GLOO_SOCKET_IFNAME": "lo", "STEPS": str(STEPS),
            "PYTHONPATH": str(ROOT), **environment,
        }
    )  # fmt: skip
    logs = [folder / f"log{number}" for number in range(len(commands))]
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with open(log, "wb") as file:
            start = WarmPython if command[0] == sys.executable else subprocess.Popen
            processes.append(start(command, cwd=folder, env=environ, stdout=file, stderr=file, start_new_session=True))
    deadline_s = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.wait(max(1.0, deadline_s - time.monotonic()))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said = "\n".join(log.read_text(errors="replace") for log in logs)
        sidecars_ended(folder)
    assert all(process.returncode == 0 for process in processes), said[-6000:]
    return Done(folder, said)


def sidecars_ended(folder: Path, timeout_s: float = 60) -> None:
    """Waits for those of this folder's runs, whichever node they are on."""
    deadline_s = time.monotonic() + timeout_s
    while pids := _sidecars(folder):
        if time.monotonic() > deadline_s:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"sidecars {pids} still run after {timeout_s} s")
        time.sleep(0.1)


def _sidecars(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"\0sidecar\0{folder}/".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def torchrun(*arguments: str) -> list[str]:
    """For on_nodes(): two ranks a node."""
    return ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *arguments]
