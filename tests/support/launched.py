"""Run jobs on two simulated nodes, under any launcher, and return their output and runs.

A node is a pair of namespaces with a separate host name and shared memory.

The nodes share the network and, as on a cluster, the disk with the working directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, SCRIPTS, clean_environ
from tests.support.reports import checked
from tests.support.warm_python import WarmPython
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.verdict import Verdict

SCRIPT = str(SCRIPTS / "launched.py")
NODES = ("node-a", "node-b")
# The slow rank is on the second node.
RANKS, SLOW_RANK = 4, 3
ON_NODE = str(SCRIPTS / "on_node.py")
SHELL_NODE = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
# Steps last at least 15 ms. Nodes connect about six seconds after the start, on a busy machine
# later.
STEPS = 1200
# This delay is long enough for the second node to choose another run name on its own.
_LATER_S = 2.0


def on_nodes(*programs: list[str]) -> list[list[str]]:
    """Return the commands that run a Python program, one command per node.

    Each command starts a little after the previous one.
    """
    return [
        on_node(node, number * _LATER_S, *program)
        for number, (node, program) in enumerate(zip(NODES, programs, strict=True))
    ]


def on_node(node: str, delay_s: float, *program: str) -> list[str]:
    """Return the command of a Python program on one node, which starts after a delay."""
    return [sys.executable, ON_NODE, node, str(delay_s), *program]


def by_shell(node: str, *command: str) -> list[str]:
    """Return the command prefix that runs any command on the node."""
    return ["unshare", "--uts", "--mount", "sh", "-c", SHELL_NODE, node, *command]


def why_no_nodes() -> str:
    """Return the reason why this machine cannot have a second node, or an empty string."""
    if os.geteuid():
        return "namespaces with names and mounts of their own need root"
    done = subprocess.run(by_shell("node-x", "true"), capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


@dataclasses.dataclass(frozen=True)
class Done:
    """The output and the run directories of a job that has ended."""

    folder: Path
    said: str

    @property
    def losses(self) -> list[str]:
        return [
            line.partition("loss ")[2].strip() for line in self.said.splitlines() if "loss " in line
        ]

    @property
    def runs(self) -> list[RunDirectory]:
        """Return the run directories, without links to run directories."""
        found = sorted((self.folder / "torchlens-perf").glob("*/nodes"))
        return [RunDirectory(path.parent) for path in found if not path.parent.is_symlink()]

    def report(self) -> dict[str, Any]:
        """Return the report on the only run."""
        (run,) = self.runs
        return checked(build_report(run.run_id, node_state.load_all(run)))

    def straggler(self) -> Verdict | None:
        verdicts = [each for each in self.report()["verdicts"] if each.kind.startswith("straggler")]
        return next((each for each in verdicts if each.rank == SLOW_RANK), None)


def run(
    folder: Path,
    *commands: list[str],
    watched: bool = True,
    timeout_s: float = 150,
    **environment: str,
) -> Done:
    """Run commands in parallel, each of which starts a part of the job, and wait for
    the sidecars.
    """
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
            processes.append(
                start(
                    command,
                    cwd=folder,
                    env=environ,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
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
    """Wait until the sidecars of the folder's runs have ended on all nodes."""
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
            if (
                entry.name.isdigit()
                and f"\0sidecar\0{folder}/".encode() in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def torchrun(*arguments: str) -> list[str]:
    """Return the torchrun command for on_nodes(), with two ranks per node."""
    return ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *arguments]
