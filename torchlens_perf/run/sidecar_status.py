"""How ranks and their node's sidecar communicate: a rank passes arguments, the sidecar writes a line in its lock file.

The line says what it is doing, for a rank that waits for the report. It costs one write(2) where the sidecar begins
something else.
"""

from __future__ import annotations

import contextlib
import os

from torchlens_perf.run.processes import process_started

SEVERAL_NODES = "--several-nodes"
"""The job has other nodes: the sidecar must meet theirs while it runs."""
SHARED = "--shared"
"""The run directory is for its group to read, too."""
AT_ONCE = "--at-once"
"""Nothing is to be waited for."""
CANNOT_WRITE = "cannot write to the run directory"
"""The records stay in this node's memory meanwhile."""
LOADS = "is loading its libraries"
BYTES = 160  # written whole, so that what was there before is gone


def write_status(descriptor: int, doing: str) -> None:
    """Replaces the status. descriptor: of the lock file. doing: what would follow "the sidecar", in one line."""
    pid = os.getpid()
    line = f"{pid} {process_started(pid)} {doing}".encode(errors="surrogateescape")[: BYTES - 1]
    with contextlib.suppress(OSError):  # there may be no room in shared memory
        os.pwrite(descriptor, line.ljust(BYTES - 1) + b"\n", 0)


def read_status(path: str) -> tuple[int, int, str]:
    """The sidecar's pid, when it began (process_started), and what it does; 0, 0 and "" if it has written no status.

    path: of the lock file. Raises OSError if it cannot be read; a missing file holds no status.
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
