"""Handle SIGTERM: the sidecar writes all records at once, and goes on for as long as its ranks do.

When a pod or a job ends, all of its processes receive SIGTERM and later, after an unknown time,
SIGKILL. Ranks may save a checkpoint in this time. After SIGTERM the sidecar therefore writes new
records once a second. This module imports very little, because start/wait.py needs it in the
sidecar's first seconds.
"""

from __future__ import annotations

import os
import signal
import time

# A second SIGTERM within this time does not end the process: a launcher and a scheduler may each
# send one.
_IGNORE_REPEATED_S = 1.0
_asked_s: float | None = None


def install() -> None:
    """Install the handler of SIGTERM. Must be called from the main thread."""
    signal.signal(signal.SIGTERM, _ask)


def is_asked() -> bool:
    """Return True after a SIGTERM."""
    return _asked_s is not None


def _ask(number: int, frame: object) -> None:
    """Note the first SIGTERM. A later one ends the process, as without this handler."""
    global _asked_s
    if _asked_s is None:
        _asked_s = time.monotonic()
    elif time.monotonic() - _asked_s > _IGNORE_REPEATED_S:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
