"""Test of the number of system calls to the run directory's disk.

Calls must be few, because nodes of a cluster share the disk's metadata server.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.sidecar.test_node import WORK
from tests.support.failing_calls import kill_all_at_end, library
from tests.support.leftovers import eventually
from tests.support.processes import wait_for_sidecar
from tests.support.ranks import HOST, Rank
from torchlens_perf.recorder import sidecar
from torchlens_perf.run.directory import RunDirectory

SETTLED_S, WATCHED_S = 60.0, 60.0  # A young run writes segments and states more often.
MAX_CALLS_PER_S = 1  # The measured rate is 0.75.
ON_DESCRIPTORS = {"write", "read", "fsync", "mmap", "mmap64", "flock"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sidecar_makes_few_file_system_calls_while_a_job_trains(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only calls with a path in the run directory are counted."""
    log = tmp_path / "calls"
    for name, value in {
        "LD_PRELOAD": library(),
        "FAILING_PATHS": run.path,
        "FAILING_LOG": log,
    }.items():
        monkeypatch.setenv(name, str(value))
    with kill_all_at_end(str(log)):
        rank = Rank(run, 0, 1, ring_records=1 << 16)
        sidecar.ensure_running(run, rank.identity)
        assert eventually(run.node_state_path(HOST).exists)

        def train(seconds: float) -> None:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                rank.steps(5, **WORK)
                time.sleep(0.5)

        train(SETTLED_S)
        before = log.read_text().splitlines()
        train(WATCHED_S)
        calls = [line.split(" ", 2) for line in log.read_text().splitlines()[len(before) :]]
        rank.close()
        wait_for_sidecar(run)
    with_a_path = [(name, path) for _, name, path in calls if name not in ON_DESCRIPTORS]

    assert len(with_a_path) / WATCHED_S < MAX_CALLS_PER_S, Counter(with_a_path).most_common(20)
    assert any("spans" in path for _, path in with_a_path), "no segment was written"
    assert any("nodes" in path for _, path in with_a_path), "no state was written"
