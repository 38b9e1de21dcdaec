"""Tests of two threads that train at once.

The process does not crash, and its results equal those without the package.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.busy_machine import busy_machine
from tests.support.figures import note
from tests.support.long import long
from tests.support.processes import SCRIPTS
from tests.support.recorded_run import environment

SCRIPT = SCRIPTS / "train_in_threads.py"
LIKES = ["trials", "grad", "inputs", "accumulates", "federated"]
WATCHED = ["all", "each", "autoload", "run"]
RUNS = 50


def train(folder: Path, like: str, watched: str, steps: int = 150) -> str:
    """Return the script's output. Fail if the script crashes."""
    told = (
        {"TORCHLENS_PERF": "1" if watched == "autoload" else "0"}
        if watched in ("autoload", "")
        else {}
    )
    told["TORCHLENS_PERF_REPORT"] = "off"
    python = [
        sys.executable,
        *(["-m", "torchlens_perf", "run", "--quiet"] if watched == "run" else []),
    ]
    command = [
        *python,
        str(SCRIPT),
        like,
        watched if watched in ("all", "each") else "none",
        str(steps),
    ]
    environ = environment(folder, told)
    # `run` replaces the process with a new interpreter.
    if watched == "run":
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300
        )
    else:
        done = warm_python.run(command, 300, env=environ, cwd=folder)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()[0]


@cache
def unrecorded(folder: Path, like: str) -> str:
    """Return the script's output without the package."""
    return train(folder, like, "")


@pytest.mark.parametrize(
    ("like", "watched"),
    [
        ("trials", "all"),
        *long(("trials", "autoload"), ("trials", "each"), ("trials", "run")),
        *long(*((like, watched) for like in LIKES[1:] for watched in WATCHED)),
    ],
)  # fmt: skip
def test_losses_of_training_threads_equal_those_of_an_unwatched_run(
    tmp_path: Path, like: str, watched: str
) -> None:
    """Hyperparameter searches, ensembles and federated simulations train in threads."""
    expected = unrecorded(tmp_path.parent, like)
    with busy_machine(2):
        assert train(tmp_path, like, watched) == expected


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("watched", WATCHED)
def test_none_of_fifty_runs_with_training_threads_crashes(tmp_path: Path, watched: str) -> None:
    """Most runs would crash if a thread of ours read a gradient while it is written."""
    began_s = time.monotonic()
    with busy_machine(2):
        losses = {train(tmp_path, "trials", watched) for _ in range(RUNS)}
    counted = f"0 crashed, {len(losses)} result{'s' * (len(losses) > 1)}"
    note(
        f"two training threads on a busy machine, {watched}",
        RUNS,
        RUNS,
        counted,
        time.monotonic() - began_s,
    )

    assert len(losses) == 1
