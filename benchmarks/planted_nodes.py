"""Ranks on several simulated nodes: namespaces of this machine with separate host names and shared
memory.

Each node has a sidecar. The sidecars exchange windows over the job's store, and node 0's sidecar
judges. Needs root.
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

# Namespaces that make two nodes look like two machines to a rank and its sidecar.
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
def started_on_nodes(
    command: list[str], ranks: int, nodes: int, out: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start `ranks` processes, equally many on each node, with a log per node in `out`.

    Kill the remaining ranks at the end.
    """
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
                    subprocess.Popen(
                        starts, cwd=REPOSITORY, env=theirs, stderr=log, start_new_session=True
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
