"""Arguments that ranks pass to their node's sidecar, and its status in the lock file.

The status is a line for a rank that waits for the report. It costs one write(2) for each new
activity of the sidecar.
"""

from __future__ import annotations

import contextlib
import os

from torchlens_perf.run.processes import process_start_ticks

SEVERAL_NODES = "--several-nodes"
"""Argument: the job has other nodes, and the sidecar must connect to theirs."""
SHARED = "--shared"
"""Argument: make the run directory readable for its group."""
AT_ONCE = "--at-once"
"""Argument: do not wait for any process."""
CANNOT_WRITE = "cannot write to the run directory"
"""Status. Records stay in this node's memory meanwhile."""
LOADS = "is loading its libraries"
# Fixed length of a status, so that a new one replaces the old one completely.
BYTES = 160


def write_status(descriptor: int, doing: str) -> None:
    """Replace the status.

    descriptor: of the lock file. doing: one line that continues "the sidecar ...".
    """
    pid = os.getpid()
    line = f"{pid} {process_start_ticks(pid)} {doing}".encode(errors="surrogateescape")[: BYTES - 1]
    # Shared memory may be full.
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, line.ljust(BYTES - 1) + b"\n", 0)


def read_status(path: str) -> tuple[int, int, str]:
    """Return the sidecar's pid, its start (process_started) and its activity.

    They are 0, 0 and "" if there is no status.

    path: of the lock file. A missing file has no status. Raise OSError if it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0, 0, ""
    try:
        words = os.read(descriptor, BYTES).decode(errors="replace").split(maxsplit=2)
    finally:
        os.close(descriptor)
    if len(words) < 3 or not (words[0].isdigit() and words[1].isdigit()):
        return 0, 0, ""
    return int(words[0]), int(words[1]), words[2].strip()
