"""Ranks on several nodes, for campaigns: namespaces of this machine, each with a name and a shared memory of its own.

Each node has a sidecar; they exchange windows over the job's store, and node 0's judges. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from benchmarks.planted_faults import REPOSITORY, environment

# What tells one machine from another to a rank and its sidecar.
_NODE = 'hostname "$NODE" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'
# Starts a node's ranks as a launcher does.
_START_RANKS = """
import os, subprocess, sys
first, share = int(os.environ["FIRST_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
ranks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": str(first + local), "LOCAL_RANK": str(local)})
    for local in range(share)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@contextlib.contextmanager
def started_on_nodes(command: list[str], ranks: int, nodes: int, out: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """That many ranks, as many on each node; a process for each node, with a log in `out`. Afterwards none lives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = {
        **environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks // nodes), "TORCHLENS_PERF_RUN_ID": f"nodes-{uuid.uuid4().hex[:12]}",
    }  # fmt: skip
    isolated = ["unshare", "--uts", "--mount", "sh", "-c", _NODE, "sh"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(nodes):
            theirs = {**environ, "NODE": f"node-{node}", "FIRST_RANK": str(node * ranks // nodes)}
            starts = [*isolated, sys.executable, "-c", _START_RANKS, *command]
            with open(out / f"node{node}.log", "ab") as log:
                processes.append(
                    subprocess.Popen(starts, cwd=REPOSITORY, env=theirs, stderr=log, start_new_session=True)
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
