"""Rings of jobs that were killed together with their sidecars: read into their run directories, or removed.

Shared memory keeps them until the node restarts: 4.5 MB a rank. The next sidecar of the same user on the node starts
a program for them (sidecar/start/drain.py), which waits for the disks of those run directories in its place.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.errors import RingError
from torchlens_perf.run import children
from torchlens_perf.run.directory import runs_on_this_node, writer_lives
from torchlens_perf.run.ring import Reader
from torchlens_perf.run.rings import memory

OLD_S = 600.0  # since something last came or went beside the rings


class DeadRun(NamedTuple):
    """A run whose rings on this node nobody writes any more."""

    path: Path | None
    """The run directory; None where no ring says it."""
    node: str
    """What its files are named by."""
    digest: str
    """Of the boot and the PID namespace that its processes were in, see run/place/node.py."""
    rings: list[Path]


def find(old_s: float = OLD_S) -> Iterator[DeadRun]:
    """Those of this user. A ring that any process has mapped is written, in whichever container that runs."""
    for folder, changed_s in runs_on_this_node():
        rings = [path for path in folder.glob("*.ring") if path.is_file() and not path.is_symlink()]
        if not rings or time.time() - changed_s < old_s:
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


def begin() -> None:
    """Starts the program, if there is something to do for it. Waits for nothing. Raises OSError.

    It exports nothing, as the environment is that of another job.
    """
    if next(find(), None) is None:
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.Popen(
        children.command("drain"),
        stdin=subprocess.DEVNULL,
        env=children.environment(environment),
        start_new_session=True,
        cwd="/",
    )
