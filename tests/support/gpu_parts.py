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


def meets(checks: Checks, name: str) -> None:
    """Wait for the other part of two that run side by side. Lines come before the wait."""
    folder = Path(os.environ["MEETING"])
    checks.value(f"meets-{name}", "came", "yes")
    (folder / name).touch()
    while len(list(folder.iterdir())) < 2 and checks.left_s > 1:
        time.sleep(0.02)
    met = len(list(folder.iterdir())) == 2
    checks.bar(f"meets-{name}", "met the other one", str(met), "True", met)


def excludes(checks: Checks, name: str) -> None:
    """Fail if another such part runs at the same time."""
    lock = Path(os.environ["MEETING"]) / "lock"
    try:
        lock.touch(exist_ok=False)
    except FileExistsError:
        checks.bar(f"excludes-{name}", "alone", "no", "yes", False)
        return
    time.sleep(0.3)
    lock.unlink()
    checks.bar(f"excludes-{name}", "alone", "yes", "yes", True)


def imports(checks: Checks) -> None:
    """Import a module of the caller's PYTHONPATH in a process that the part starts elsewhere."""
    program = "import of_the_caller, benchmarks.gpu_check; print(of_the_caller.VALUE)"
    done = subprocess.run([sys.executable, "-c", program], cwd="/", capture_output=True, text=True)
    checks.bar(
        "imports", "of the caller", done.stdout.strip() or done.stderr, "7", done.stdout == "7\n"
    )
