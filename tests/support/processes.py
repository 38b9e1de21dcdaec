"""Run real training processes, and wait for their sidecars to finish."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import warm_python
from tests.support.reports import checked
from torchlens_perf.errors import RAISE
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory, sidecar_lock_path
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.verdicts import node_state

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
TRAIN = str(SCRIPTS / "train.py")
# Seconds that an interpreter needs to start on the machines for which the time limits were set.
QUIET_START_S = 0.06
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(
    command: list[str], folder: Path, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with one thread per process and additional variables."""
    environ = clean_environ(environment)
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=timeout_s
    )


def run_warm(
    command: list[str], folder: Path, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program, or torchrun, with torch already loaded.

    Tests of how a program starts use run() instead.
    """
    return warm_python.run(command, timeout_s, cwd=folder, env=clean_environ(environment))


def clean_environ(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment without our settings and OpenTelemetry's, plus `added`.

    The result sets one OpenMP thread, makes our internal errors raise, and disables the page by
    default.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHLENS", "OTEL_"))
    }
    ours = {"OMP_NUM_THREADS": "1", RAISE: "1", "TORCHLENS_PERF_REPORT": "text"}
    return {**inherited, **ours, **(added or {})}


def slowdown() -> float:
    """Return how many times longer an interpreter's start takes now than on an idle machine.

    The factor is at least 1.
    """
    began_s = time.monotonic()
    for _ in range(5):
        subprocess.run([sys.executable, "-c", ""], check=True)
    return max(1.0, (time.monotonic() - began_s) / 5 / QUIET_START_S)


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    """Return a torchrun command line."""
    return [*TORCHRUN, "--nproc-per-node", str(ranks), *arguments]


def runs(folder: Path) -> list[RunDirectory]:
    """Wait for the sidecars in `folder`. Return the run directories, oldest first."""
    found = [
        RunDirectory(path.parent)
        for path in sorted((folder / "torchlens-perf").glob("*/nodes"))
        if not path.parent.is_symlink()
    ]
    for each in found:
        wait_for_sidecar(each)
    return found


def wait_for_sidecar(run_directory: RunDirectory, timeout_s: float = 60) -> None:
    """Wait until no sidecar of this run is left on this node."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lock = SidecarLock(sidecar_lock_path(run_directory.run_id))
        if lock.acquire():
            lock.remove()
            return
        time.sleep(0.05)
    raise TimeoutError(f"the sidecar of {run_directory.path} still runs after {timeout_s} s")


def read_by_hand(run_directory: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `torchlens-perf sidecar RUN_DIRECTORY` on a run whose processes were killed.

    Other processes may read the rings too, because each start of a watch on this node reads the
    rings of dead runs.

    The command is therefore repeated until no other process reads the rings.
    """
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run_directory)]
    deadline = time.monotonic() + 120
    while True:
        done = run(command, folder)
        if "runs on this node already" not in done.stderr or time.monotonic() > deadline:
            return done


def report(run_directory: RunDirectory) -> dict[str, Any]:
    """Return the report on a run."""
    return checked(build_report(run_directory.run_id, node_state.load_all(run_directory)))


def only_report(folder: Path) -> dict[str, Any]:
    """Return the report on the only run in `folder`."""
    (one,) = runs(folder)
    return report(one)
