"""Handle SIGTERM: the sidecar writes all records at once, and continues until its ranks end.

When a pod or a job ends, all its processes receive SIGTERM and, after an unknown time, SIGKILL.
Between the two signals, ranks may save a checkpoint. After SIGTERM, the sidecar therefore writes
new records once a second. This module has few imports, because start/wait.py uses it in the
sidecar's first seconds.
"""

from __future__ import annotations

import os
import signal
import time

# A second SIGTERM within this time does not end the process: a launcher and a scheduler may each
# send one.
_IGNORE_REPEATED_S = 1.0
_requested_s: float | None = None


def install_handler() -> None:
    """Install the handler of SIGTERM. Must be called from the main thread."""
    signal.signal(signal.SIGTERM, _on_sigterm)


def is_requested() -> bool:
    """Return True after a SIGTERM."""
    return _requested_s is not None


def _on_sigterm(number: int, frame: object) -> None:
    """Record the first SIGTERM. A later SIGTERM ends the process, as without this handler."""
    global _requested_s
    if _requested_s is None:
        _requested_s = time.monotonic()
    elif time.monotonic() - _requested_s > _IGNORE_REPEATED_S:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
