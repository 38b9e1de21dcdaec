"""Programs that keep all processors busy while a test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PROCESSORS = len(os.sched_getaffinity(0))
# The program ends with its parent, so an interrupted test run leaves no busy program.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_machine(programs: int = PROCESSORS) -> Iterator[None]:
    """Run `programs` programs that each use a whole processor, and kill them at the end."""
    # Each program has its own session (a scheduling group), like another user's program.
    running = [
        subprocess.Popen([sys.executable, "-S", "-c", _SPIN], start_new_session=True)
        for _ in range(programs)
    ]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


@contextmanager
def one_cpu() -> Iterator[int]:
    """Run this thread, and the programs that it starts, on one CPU only. Yield the CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield min(before)
    finally:
        os.sched_setaffinity(0, before)
