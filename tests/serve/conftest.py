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


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one run, named "done", in which rank 3 of 4 was slow."""
    folder = tmp_path_factory.mktemp("runs")
    fault = f"constant:rank={SLOW},share=0.4,phase=forward,since=20"
    # A run can have only one sidecar at a time, so each process simulates its own run.
    made = folder / f"done-{os.getpid()}"
    command = [
        "simulate",
        "--ranks",
        "4",
        "--steps",
        "96",
        "--fault",
        fault,
        "--out",
        str(made),
        "--quiet",
    ]
    subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *command],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    made.rename(folder / "done")
    return folder


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[PageServer]:
    with PageServer(runs) as started:
        yield started


@pytest.fixture(scope="session")
def viewer(server: PageServer) -> Viewer:
    return server.viewer()
