"""Small simulated run directories for tests of commands that read whole runs."""

from __future__ import annotations

import contextlib
import fcntl
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchlens_perf.commands.cli import main


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Let one process of the tests at a time make a run of this name.

    The name is the run's id, and a node has one sidecar for each id.
    """
    with open(Path(tempfile.gettempdir(), f"torchlens-perf-tests-{name[:50]}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def simulate_run(path: Path, *options: str, ranks: int = 2, steps: int = 64, seed: int = 0) -> Path:
    """Write a run directory of a simulated job and return its path."""
    arguments = ("--ranks", str(ranks), "--steps", str(steps), "--seed", str(seed), *options)
    with alone(path.name), contextlib.redirect_stdout(io.StringIO()):
        code = main(["simulate", "--out", str(path), "--quiet", *arguments])
    assert code == 0
    return path
