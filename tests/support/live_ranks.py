"""Ranks that train until they are ended, with live sidecars, on one or several nodes.

Nodes are simulated by Linux namespaces.

At the end of the context all processes are killed by pid, including stopped ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.processes import SCRIPTS, clean_environ
from tests.support.reports import as_json
from tests.support.warm_python import WarmPython
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

SCRIPT = str(SCRIPTS / "train_ranks.py")
# A separate host name and shared memory make a rank and its sidecar see another machine.
NODE = 'hostname "$NODE" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


class LiveRanks:
    """The ranks of one job and their sidecars.

    The ranks and their sidecars run inside the context and are ended with it.
    """

    def __init__(
        self,
        folder: Path,
        ranks: int,
        nodes: tuple[str, ...] = (),
        script: str = SCRIPT,
        **environment: str,
    ) -> None:
        """Set up the job.

        `nodes` are names of nodes that each run an equal number of ranks, or () for this machine.
        """
        self.run_id = f"live-{uuid.uuid4().hex[:12]}"
        self._folder, self._nodes, self._environment = folder, nodes, environment
        self._count, self._script = ranks, script
        self._processes: list[subprocess.Popen[bytes]] = []
        # Pids of the ranks that this process has started.
        self._pids: dict[int, int] = {}

    def __enter__(self) -> LiveRanks:
        environ = clean_environ()
        share = self._count // max(1, len(self._nodes))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.job_store = ("127.0.0.1", port)
        environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": str(self._count), "LOCAL_WORLD_SIZE": str(share), "STEPS": "0",
            "TORCHLENS_PERF_RUN_ID": self.run_id,
        }  # fmt: skip
        if not self._nodes and self._environment.get("OMP_NUM_THREADS", "1") == "1":
            with open(self._folder / "log", "wb") as log:
                for rank in range(share):
                    theirs = {
                        **environ,
                        **self._environment,
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                    }
                    process = WarmPython(
                        [sys.executable, self._script],
                        cwd=self._folder,
                        env=theirs,
                        stdout=log,
                        stderr=log,
                    )
                    self._processes.append(process)
                    self._pids[rank] = process.pid
            return self
        starting = [sys.executable, "-c", _START_RANKS, self._script, str(share)]
        for number, node in enumerate(self._nodes or ("",)):
            folder = self.folder(node)
            folder.mkdir(exist_ok=True)
            isolated = ["unshare", "--uts", "--mount", "sh", "-c", NODE, "sh"] if node else []
            theirs = {
                **environ,
                **self._environment,
                "NODE": node,
                "FIRST_RANK": str(number * share),
            }
            with open(folder / "log", "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*isolated, *starting], cwd=folder, env=theirs, stdout=log, stderr=log
                    )
                )
        return self

    def folder(self, node: str = "") -> Path:
        """Return the working directory of a node's ranks."""
        return self._folder / node if node else self._folder

    def run_directory(self, node: str = "") -> RunDirectory:
        """Return the node's run directory.

        Each node has its own directory, because the nodes share no disk.
        """
        return RunDirectory(self.folder(node) / "torchlens-perf" / self.run_id)

    def report(self, node: str = "") -> dict[str, Any]:
        """Return the current output of `torchlens-perf report --json` on the node."""
        value: dict[str, Any] = as_json(
            build_report(self.run_id, node_state.load_all(self.run_directory(node)))
        )
        return value

    def compared(self, node: str = "") -> int:
        """Return the number of ranks that the node's sidecar compares.

        Once other nodes have reported, node 0's sidecar compares all ranks of the job.
        """
        return max(
            state.findings.compared for state in node_state.load_all(self.run_directory(node))
        )

    def wait_for(
        self, wanted: Callable[[dict[str, Any]], Any], timeout_s: float, node: str = ""
    ) -> Any:
        """Return the first true result of a function of the report.

        Raises AssertionError with the report after a timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            told = list(self.run_directory(node).nodes.glob("*.json"))
            answer = wanted(self.report(node)) if told else None
            if answer:
                return answer
            assert all(process.poll() is None for process in self._processes), self._said()
            time.sleep(0.2)
        verdicts = (
            [verdict["text"] for verdict in self.report(node)["verdicts"]] if told else "no report"
        )
        raise AssertionError(f"not within {timeout_s} s: {verdicts}; {self._said()}")

    def rank_pids(self) -> dict[int, int]:
        """Wait until all ranks run. Return the ranks' pids by rank."""
        return self._pids or {int(told.partition(" ")[0]): pid for pid, told in self._ours("RANK=")}

    def sidecar_pids(self, node: str = "") -> list[int]:
        """Return the pids of the sidecars of the node's run directory."""
        return [
            pid
            for pid, told in self._ours("")
            if f" sidecar {self.run_directory(node).path}" in told
        ]

    def _ours(self, variable: str) -> list[tuple[int, str]]:
        """Return this job's processes with their command lines and the value of `variable`."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                command = (
                    (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                )
                values = [
                    text.removeprefix(variable)
                    for text in environ
                    if variable and text.startswith(variable)
                ]
                if (
                    f"TORCHLENS_PERF_RUN_ID={self.run_id}" in environ
                    and command
                    and bool(values) == bool(variable)
                ):
                    found.append((int(entry.name), f"{''.join(values)} {command}"))
        return found

    def _said(self) -> str:
        return "; ".join(
            (self.folder(node) / "log").read_text()[-2000:] for node in self._nodes or ("",)
        )

    def __exit__(self, *error: object) -> None:
        deadline_s = time.monotonic() + 30
        kill = signal.SIGTERM
        while left := {pid for pid, _ in self._ours("")} | {
            each.pid for each in self._processes if each.poll() is None
        }:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, kill)
            kill = signal.SIGKILL
            assert time.monotonic() < deadline_s, f"processes {left} do not end"
            time.sleep(0.2)
        for process in self._processes:
            process.wait(30)


# A program that starts a node's ranks as a launcher does, and ends with them.
_START_RANKS = """
import os, subprocess, sys
script, share, first = sys.argv[1], int(sys.argv[2]), int(os.environ["FIRST_RANK"])
ranks = [
    subprocess.Popen([sys.executable, script], env={**os.environ, "RANK": str(first + local), "LOCAL_RANK": str(local)})
    for local in range(share)
]
for rank in ranks:
    rank.wait()
"""
