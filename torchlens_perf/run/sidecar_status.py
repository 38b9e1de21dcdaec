"""Arguments that ranks pass to their node's sidecar, and the sidecar's status in the lock file.

The status is one line that tells a waiting rank what the sidecar is doing. Each new status costs
one write(2).
"""

from __future__ import annotations

import os

from torchlens_perf.interruption import suppress
from torchlens_perf.run.processes import process_start_ticks

SEVERAL_NODES = "--several-nodes"
"""Argument: the job has several nodes. The sidecar must connect to the sidecars of other nodes."""
SHARED = "--shared"
"""Argument: make the run directory readable for its group."""
CANNOT_WRITE = "cannot write to the run directory"
"""Status: records stay in this node's memory until the run directory can be written."""
LOADS = "is loading its libraries"
# A status has a fixed length, so a new status overwrites the old one completely.
BYTES = 160


def write_status(descriptor: int, doing: str) -> None:
    """Write a new status to the lock file.

    descriptor: the lock file's descriptor. doing: a line that completes the sentence "the sidecar
    ...".
    """
    pid = os.getpid()
    line = f"{pid} {process_start_ticks(pid)} {doing}".encode(errors="surrogateescape")[: BYTES - 1]
    # Shared memory may be full.
    with suppress(OSError):
        os.pwrite(descriptor, line.ljust(BYTES - 1) + b"\n", 0)


def read_status(path: str) -> tuple[int, int, str]:
    """Return the sidecar's pid, its start in clock ticks after boot, and its activity.

    Return 0, 0 and "" if the lock file is missing or contains no status.

    path: path of the lock file. Raise OSError if the file cannot be read.
    """
    # A waiting sidecar only writes its status, and must import few modules.
    from torchlens_perf.run import ownership

    try:
        line = ownership.read_regular_file(path, BYTES)
    except FileNotFoundError:
        return 0, 0, ""
    words = line.decode(errors="replace").split(maxsplit=2)
    if len(words) < 3 or not (words[0].isdigit() and words[1].isdigit()):
        return 0, 0, ""
    return int(words[0]), int(words[1]), words[2].strip()
