"""Find ring files of jobs that were killed with their sidecars, and start a program to drain them.

Such a ring file takes 4.5 MB of shared memory per rank until the node restarts. The next watch of
the same user on the node starts the drain program (sidecar/start/drain.py). This program moves the
records to their run directories, or removes the ring files. The watch does not wait for that
program.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.run import children
from torchlens_perf.run.directory import find_local_run_folders, is_writer_running
from torchlens_perf.run.place.node import namespace_digest
from torchlens_perf.run.ring import reading_ring
from torchlens_perf.run.rings import memory

OLD_S = 600.0
"""Age at which ring files of another PID namespace count as dead. This process cannot see processes
of other namespaces.
"""


class DeadRun(NamedTuple):
    """A run whose ring files on this node have no running writer."""

    run_id: str
    path: Path | None
    """The run directory; None if no ring file contains its path."""
    node: str
    """Name of the node in its file names."""
    digest: str
    """Digest of the boot and PID namespace of the run's processes, see run/place/node.py."""
    rings: list[Path]


def find_dead_runs(old_s: float = OLD_S) -> Iterator[DeadRun]:
    """Yield this user's dead runs. Runs with a live sidecar are skipped.

    A ring file that any process has mapped, even in another container, counts as live.
    """
    for folder, changed_s in find_local_run_folders():
        rings = [path for path in folder.glob("*.ring") if path.is_file() and not path.is_symlink()]
        is_old = folder.name.endswith(f".{namespace_digest()}") or time.time() - changed_s >= old_s
        if not rings or not is_old or memory.is_held(folder / "sidecar.lock", fcntl.LOCK_SH):
            continue
        if not any(memory.is_held(path) or is_writer_running(path) for path in rings):
            known = next(filter(None, map(_read_run_and_node, rings)), None)
            run_id, _, digest = folder.name.rpartition(".")
            path, node = known if known is not None and known[0].name == run_id else (None, "")
            yield DeadRun(run_id, path, node, digest, rings)


def _read_run_and_node(ring: Path) -> tuple[Path, str] | None:
    """Return the run directory and the node in a ring file's metadata; None if they are missing."""
    with reading_ring(ring) as reader:
        metadata = reader.read_metadata() if reader is not None else {}
    run_dir, node = metadata.get("run_dir"), metadata.get("identity", {}).get("node")
    # Ring files of other versions lack these fields.
    return (Path(run_dir), node) if run_dir and node else None


def start_draining(but: str = "") -> bool:
    """Start a program that reads the rings of dead runs. Return False without dead runs.

    The program exports nothing, because the OTEL_* variables are meant for another job.

    but: id of the run that is starting, whose own sidecar reads its earlier ring files. Raise
    OSError or RunStoreError.
    """
    if all(run.run_id == but for run in find_dead_runs()):
        return False
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OTEL_")
    }
    children.start_detached(
        children.build_command("drain", but), env=children.build_environment(environment)
    )
    return True
