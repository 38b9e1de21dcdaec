"""Programs that keep all processors busy while a test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PROCESSORS = len(os.sched_getaffinity(0))


@contextmanager
def busy_machine(programs: int = PROCESSORS) -> Iterator[None]:
    """Run that many programs, each of which wants a whole processor. They are killed at the end."""
    # A session of its own is a scheduling group of its own, as another user's program has.
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    running = [subprocess.Popen(spin, start_new_session=True) for _ in range(programs)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
