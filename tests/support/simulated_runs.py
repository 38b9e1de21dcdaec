"""Small simulated run directories for tests of commands that read whole runs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from torchlens_perf.commands.cli import main


def simulate_run(path: Path, *options: str, ranks: int = 2, steps: int = 64, seed: int = 0) -> Path:
    """Write a run directory of a simulated job and return its path."""
    arguments = ("--ranks", str(ranks), "--steps", str(steps), "--seed", str(seed), *options)
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["simulate", "--out", str(path), "--quiet", *arguments])
    assert code == 0
    return path
