"""Kill the sidecars of one run one after the other at random moments.

usage: sidecars_killed.py FOLDER KILLS SEED

Between two kills the run's rank makes some steps.

The sidecars write segments and their state all the time, so many kills interrupt a write.

The script prints a line of JSON about the final state of the rank's records.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pandas as pd

from tests.sidecar.test_node import WORK, finish, report, sidecar
from tests.support.ranks import Rank, run_without_traces
from torchlens_perf.run.directory import RunDirectory, sidecar_lock_path
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar import schedule
from torchlens_perf.sidecar.loop import run_sidecar

folder, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
# Make sidecars write states even without new segments.
schedule._SAVE_S = schedule._ACCOUNT_S = 0.002
schedule._KEEP_S = schedule._LATEST_KEEP_S = 0.008
# Maximum lifetime of a sidecar.
LONGEST_S = 0.12
# Time limit for the first write of a sidecar.
START_S = 10.0


def one(run_directory: RunDirectory) -> None:
    made, _ = sidecar(run_directory)
    lock = SidecarLock(sidecar_lock_path(made.run.run_id))
    while not lock.acquire():
        time.sleep(0.001)
    run_sidecar(made, lock)


def saved(run_directory: RunDirectory) -> int | None:
    """Return the time at which the sidecar last saved its state, or None."""
    try:
        return run_directory.node_state_path("node-a").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def half_written(run_directory: RunDirectory) -> set[tuple[str, int]]:
    """Return the paths and creation times of the sidecar's incomplete files."""
    found = set()
    for folder_name, _, names in os.walk(run_directory.path):
        for name in names:
            if ".partial" in name or ".tmp" in name:
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(folder_name, name)
                    found.add((path, os.stat(path).st_ctime_ns))
    return found


with run_without_traces(folder) as run:
    rank = Rank(run, 0, 1, ring_records=1 << 14)
    steps, states, partial = 0, 0, 0
    for number in range(kills):
        child = os.fork()
        if child == 0:
            try:
                one(run)
            finally:
                os._exit(9)
        # Kill half of the sidecars at a random moment after their start. Kill the other half in the
        # middle of a write, for which a slow start on a busy machine leaves time.
        writes, state, before = number % 2 == 0, saved(run), half_written(run)
        until_s = time.monotonic() + (START_S if writes else draw.uniform(0, LONGEST_S))
        due_s = 0.0
        while time.monotonic() < until_s:
            if writes and saved(run) != state and half_written(run) - before:
                break
            if time.monotonic() > due_s:
                rank.steps(1, **WORK)
                steps, due_s = steps + 1, time.monotonic() + 0.004
            time.sleep(0.0002)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "a sidecar ended by itself"
        states += run.node_state_path("node-a").exists()
        partial += bool(half_written(run) - before)
    rank.close()
    segments = len(list(run.spans.glob("*.parquet")))
    finish(run)
    value = report(run)
    sequences = sorted(pd.read_parquet(run.spans)["sequence"])
    print(json.dumps({
        "steps": steps, "counted": value["ranks"][0]["steps"], "lost": value["quality"]["lost"], "segments": segments,
        "once": sequences == list(range(5 * steps)), "states": states, "partial": partial,
        "notes": value["quality"]["notes"],
    }))  # fmt: skip
