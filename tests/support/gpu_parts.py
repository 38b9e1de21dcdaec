"""Parts of a GPU check that need no GPU, for tests of the check's runner.

Each part ends in a different way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_check.lines import Checks


def passes(checks: Checks) -> None:
    """Report one line of each kind except FAIL."""
    checks.value("passes", "a figure", "3 | 4")
    checks.bar("passes", "one with a bar", "1 ms", "<= 2 ms", True)
    checks.missing("passes", "what needs more", "there is no more")


def fails(checks: Checks) -> None:
    """Report a measurement below its required value."""
    checks.bar("fails", "one with a bar", "3 ms", "<= 2 ms", False)


def raises(checks: Checks) -> None:
    """Raise after the first line."""
    checks.bar("raises", "before", "1", "1", True)
    raise ValueError("planted")


def dies(checks: Checks) -> None:
    """End by SIGSEGV, as if a driver had ended the process."""
    checks.bar("dies", "before", "1", "1", True)
    os.kill(os.getpid(), signal.SIGSEGV)


def killed(checks: Checks) -> None:
    """End by SIGKILL, as when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def silent(checks: Checks) -> None:
    """End without reporting a line."""


def hangs(checks: Checks) -> None:
    """Hang together with a child process, with signals blocked.

    Write both process ids to $HANGING.
    """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    Path(os.environ["HANGING"]).write_text(f"{os.getpid()} {child.pid}")
    checks.bar("hangs", "before", "1", "1", True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(100)
