"""Tests that a ring file can be cut or overwritten while a live sidecar reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sidecar.test_node import WORK
from tests.support.leftovers import eventually
from tests.support.long import long_except
from tests.support.processes import ROOT, clean_environ, wait_for_sidecar
from tests.support.ranks import HOST, Rank
from tests.support.warm_python import WarmPython
from torchlens_perf.recorder import sidecar
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run import ring
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

# The rank runs in its own process, because a write to pages that were cut off ends the process.
OTHER_RANK = """
import sys, time
from pathlib import Path
from tests.sidecar.test_node import WORK
from tests.support.ranks import Rank
from torchlens_perf.run.directory import RunDirectory
rank = Rank(RunDirectory(Path(sys.argv[1])), 1)
rank.steps(int(sys.argv[2]), **WORK)
print(rank.ring_path, flush=True)
time.sleep(300)
"""
STEPS = 200


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


CUTS: dict[str, Callable[[Path], None]] = {
    "to nothing": lambda path: os.truncate(path, 0),
    "in the header": lambda path: os.truncate(path, 100),
    "in the names": lambda path: os.truncate(path, ring.NAMES_OFFSET + 5),
    "in the records": lambda path: os.truncate(path, ring.RECORDS_OFFSET + 10 * ring.RECORD_BYTES),
    "overwritten": zeros,
}


def counted(run: RunDirectory) -> dict[int, int]:
    """Return the number of steps that the live sidecar has saved, by rank."""
    if not run.node_state_path(HOST).exists():
        return {}
    state = node_state.load(run.node_state_path(HOST))
    return {each.identity.rank: each.statistics.counted_steps for each in state.processes.values()}


@pytest.mark.parametrize("cut", long_except({"to nothing"}, CUTS))
def test_truncated_ring_loses_only_its_own_records(cut: str, run: RunDirectory) -> None:
    """The sidecar continues with the other ring. A note names the rank."""
    command = [sys.executable, "-c", OTHER_RANK, str(run.path), str(STEPS)]
    environ = clean_environ({"PYTHONPATH": str(ROOT)})
    with WarmPython(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=run.path) as other:
        try:
            assert other.stdout is not None
            path = Path(other.stdout.readline().strip())
            rank = Rank(run, 0)
            rank.steps(STEPS, **WORK)
            sidecar.ensure_running(run, rank.identity)
            assert eventually(lambda: counted(run) == {0: STEPS, 1: STEPS})
            CUTS[cut](path)
            rank.steps(STEPS, **WORK)
            assert eventually(lambda: counted(run) == {0: 2 * STEPS, 1: STEPS})
        finally:
            other.kill()
    rank.steps(STEPS, **WORK)
    rank.close()
    wait_for_sidecar(run)
    report, log = load_report(run), run.node_log_path(HOST).read_text()

    assert {each["rank"]: each["steps"] for each in report["ranks"]} == {0: 3 * STEPS, 1: STEPS}
    assert report["quality"]["lost"] == 0
    assert log.count("reading ") == 2, "one sidecar has read both rings, once"
    (note,) = [note for note in report["quality"]["notes"] if "damaged" in note]
    assert note.startswith("rank 1: its ring is damaged, and records of it are missing: ")
