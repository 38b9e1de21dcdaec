"""A finished run in a folder, and one server for all tests that change nothing in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page_server import PageServer, Viewer
from tests.support.processes import ROOT

SLOW = 3


def simulate(path: Path, *options: str) -> None:
    """Write a run of four ranks, in a process whose CPU time is not that of the test."""
    command = ["simulate", "--ranks", "4", "--steps", "96", "--out", str(path), "--quiet", *options]
    subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *command],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one run, named "done", in which rank 3 of 4 was slow."""
    folder = tmp_path_factory.mktemp("runs")
    fault = f"constant:rank={SLOW},share=0.4,phase=forward,since=20"
    # A run can have only one sidecar at a time, so each process simulates its own run.
    made = folder / f"done-{os.getpid()}"
    simulate(made, "--fault", fault)
    made.rename(folder / "done")
    return folder


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[PageServer]:
    with PageServer(runs) as started:
        yield started


@pytest.fixture(scope="session")
def viewer(server: PageServer) -> Viewer:
    return server.viewer()
