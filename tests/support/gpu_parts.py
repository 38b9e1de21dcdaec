"""Parts of a check for GPUs that need none, and end as a real one may: for its runner's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.lines import Checks


def passes(checks: Checks) -> None:
    """One line of each kind but FAIL."""
    checks.value("passes", "a figure", "3 | 4")
    checks.bar("passes", "one with a bar", "1 ms", "<= 2 ms", True)
    checks.missing("passes", "what needs more", "there is no more")


def fails(checks: Checks) -> None:
    """A bar that is not met."""
    checks.bar("fails", "one with a bar", "3 ms", "<= 2 ms", False)


def raises(checks: Checks) -> None:
    """After its first line."""
    checks.bar("raises", "before", "1", "1", True)
    raise ValueError("planted")


def dies(checks: Checks) -> None:
    """As in a driver that ends the process."""
    checks.bar("dies", "before", "1", "1", True)
    os.kill(os.getpid(), signal.SIGSEGV)


def killed(checks: Checks) -> None:
    """As where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def silent(checks: Checks) -> None:
    """Finds nothing."""


def hangs(checks: Checks) -> None:
    """With a process of its own; leaves both ids in $HANGING. Signals are blocked as in a call that hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    Path(os.environ["HANGING"]).write_text(f"{os.getpid()} {child.pid}")
    checks.bar("hangs", "before", "1", "1", True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(100)
