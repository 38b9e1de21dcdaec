"""SIGTERM to the sidecar: what the ranks recorded is written at once, and it goes on for as long as they do.

Who ends a pod or a job sends SIGTERM to all of its processes and SIGKILL some time later, which nobody can know; ranks
may save a checkpoint meanwhile. So from then on the sidecar writes what is new once a second. Imports next to nothing:
a sidecar's first seconds need it (start/wait.py).
"""

from __future__ import annotations

import os
import signal
import time

_SAME_S = 1.0  # a launcher and a scheduler may each send one
_asked_s: float | None = None


def install() -> None:
    """From here on SIGTERM only asks. Main thread."""
    signal.signal(signal.SIGTERM, _ask)


def is_asked() -> bool:
    """Whether there was a SIGTERM."""
    return _asked_s is not None


def _ask(number: int, frame: object) -> None:
    """A second one, later than that, ends the process as it would without us."""
    global _asked_s
    if _asked_s is None:
        _asked_s = time.monotonic()
    elif time.monotonic() - _asked_s > _SAME_S:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
