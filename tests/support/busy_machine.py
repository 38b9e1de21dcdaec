"""Programs that keep all processors busy while a test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PROCESSORS = len(os.sched_getaffinity(0))
# Ends with its parent, so that an interrupted test run leaves no busy program.
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_machine(programs: int = PROCESSORS) -> Iterator[None]:
    """Run that many programs, each of which wants a whole processor. They are killed at the end."""
    # A session of its own is a scheduling group of its own, as another user's program has.
    running = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN], start_new_session=True) for _ in range(programs)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
