"""Rings of jobs that were killed together with their sidecars: read into their run directories, or removed.

Shared memory keeps them until the node restarts: 4.5 MB a rank. The next start of a watch of the same user on the node
starts a program for them (sidecar/start/drain.py), which waits for the disks of those run directories in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.errors import RingError
from torchlens_perf.run import children
from torchlens_perf.run.directory import runs_on_this_node, writer_lives
from torchlens_perf.run.place.node import namespace_digest
from torchlens_perf.run.ring import Reader
from torchlens_perf.run.rings import memory
from torchlens_perf.run.sidecar_lock import is_held

OLD_S = 600.0
"""Rings of another PID namespace, whose processes are not seen here, are left alone for so long after a change."""


class DeadRun(NamedTuple):
    """A run whose rings on this node nobody writes any more."""

    path: Path | None
    """The run directory; None where no ring says it."""
    node: str
    """What its files are named by."""
    digest: str
    """Of the boot and the PID namespace that its processes were in, see run/place/node.py."""
    rings: list[Path]

    @property
    def run_id(self) -> str:
        return self.rings[0].parent.name.rpartition(".")[0]


def find(old_s: float = OLD_S) -> Iterator[DeadRun]:
    """Yield this user's dead runs. A ring that a process of any container has mapped is written, see is_mapped().

    A run whose sidecar lives is left to that.
    """
    for folder, changed_s in runs_on_this_node():
        rings = [path for path in folder.glob("*.ring") if path.is_file() and not path.is_symlink()]
        is_old = folder.name.endswith(f".{namespace_digest()}") or time.time() - changed_s >= old_s
        if not rings or not is_old or _is_locked(folder / "sidecar.lock"):
            continue
        if not any(memory.is_mapped(str(path)) or writer_lives(path) for path in rings):
            known = next(filter(None, map(_place, rings)), None)
            run_id, _, digest = folder.name.rpartition(".")
            path, node = known if known is not None and known[0].name == run_id else (None, "")
            yield DeadRun(path, node, digest, rings)


def _place(ring: Path) -> tuple[Path, str] | None:
    """The run directory that a ring belongs to, and its node; None where it does not say."""
    try:
        reader = Reader(ring)
    except (OSError, RingError):
        return None
    try:
        metadata = reader.metadata()
    finally:
        reader.close()
    run_dir, node = metadata.get("run_dir"), metadata.get("identity", {}).get("node")
    return (Path(run_dir), node) if run_dir and node else None  # else it is of another version


def _is_locked(path: Path) -> bool:
    try:
        return is_held(path)
    except OSError:
        return False


def begin(but: str = "") -> bool:
    """Start the program if there are dead runs, and return whether there are. Raise OSError or RunStoreError.

    The program exports nothing, because the environment is that of another job. but: a run that begins just now, whose
    own sidecar reads what an earlier process of it has left.
    """
    if all(run.run_id == but for run in find()):
        return False
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    children.start_detached(children.command("drain", but), env=children.environment(environment))
    return True
