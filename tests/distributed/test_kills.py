"""Tests that processes killed at a random moment lose none of their finished steps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.sidecar.test_node import finish
from tests.support.figures import note, share
from tests.support.leftovers import eventually
from tests.support.long import long
from tests.support.processes import (
    SCRIPTS,
    TRAIN,
    read_by_hand,
    report,
    run,
    run_warm,
    runs,
    torchrun,
    wait_for_sidecar,
)
from tests.support.warm_python import WarmPython
from torchlens_perf.run.directory import RunDirectory, find_sidecar_lock
from torchlens_perf.run.place.node import node_name
from torchlens_perf.run.ring import HEAD, reading_ring
from torchlens_perf.run.sidecar_status import read_status

pytestmark = pytest.mark.distributed


KILLS = 1000


def count_unfinished_records(made: RunDirectory) -> int:
    """Return how many records the killed process was writing. They are the only ones that may be lost."""
    (path,) = made.registered_rings(node_name())
    with reading_ring(path) as reader:
        assert reader is not None
        reader.read_records()
        unfinished = reader.read_counter(HEAD) - reader.cursor
    assert unfinished in (0, 1)
    return unfinished


@pytest.mark.parametrize("kills", [10, *long(KILLS)])
@pytest.mark.timeout(3600)
def test_ring_has_all_finished_steps_after_an_early_kill(kills: int, tmp_path: Path) -> None:
    """SIGKILL arrives in the first moments of a run, when no sidecar has read the ring."""
    script, seed = str(SCRIPTS / "train_until_killed.py"), 12
    began_s, number = time.monotonic(), kills if kills < KILLS else share(KILLS)
    done = run_warm(
        [sys.executable, script, str(tmp_path), str(number), str(seed), "alone"],
        tmp_path,
        timeout_s=3000,
    )
    assert done.returncode == 0, done.stderr
    finished, lost = [tuple(map(int, line.split())) for line in done.stdout.splitlines()], 0
    for each, steps in finished:
        (path,) = [path.parent for path in (tmp_path / str(each)).glob("*/nodes")]
        made = RunDirectory(path)
        # A watch that starts in another test may already be reading the ring of the killed process.
        wait_for_sidecar(made)
        unfinished = 0
        if not list(made.nodes.glob("*.json")):
            unfinished = count_unfinished_records(made)
            finish(made, node_name())
        (rank,) = report(made)["ranks"]
        assert (rank["state"], rank["lost"]) == ("died", unfinished)
        assert rank["steps"] - steps <= 1
        lost += max(0, steps - rank["steps"])
        shutil.rmtree(tmp_path / str(each))

    assert (len(finished), lost) == (number, 0)
    if kills == KILLS:
        total = sum(steps for _, steps in finished)
        note(
            "SIGKILL of training",
            number,
            KILLS,
            f"{lost} of {total:,} finished steps lost",
            time.monotonic() - began_s,
            seed,
        )


@pytest.mark.parametrize("kills", [5, *long(20)])
def test_report_has_all_finished_steps_after_a_kill(kills: int, tmp_path: Path) -> None:
    """The kills by SIGKILL happen at random moments. The report has all records of each step."""
    script = str(SCRIPTS / "train_until_killed.py")
    done = run_warm(
        [sys.executable, script, str(tmp_path), str(kills), "11"], tmp_path, timeout_s=250
    )
    assert done.returncode == 0, done.stderr
    finished = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(finished) == kills
    for number, steps in finished:
        (path,) = [path.parent for path in (tmp_path / str(number)).glob("*/nodes")]
        made = RunDirectory(path)
        wait_for_sidecar(made)
        value = report(made)
        (rank,) = value["ranks"]

        # The kill may happen between the step's end and the script's own count of it.
        assert rank["steps"] - steps in (0, 1)
        assert (rank["state"], rank["lost"], rank["coverage"]) == ("died", 0, 1.0)
        per_step = (
            pd.read_parquet(made.spans).query(f"step < {steps}").groupby("step")["kind"].apply(list)
        )
        assert len(per_step) == steps
        assert all(
            {"forward", "backward", "optimizer", "section", "step"} <= set(kinds)
            for kinds in per_step
        )


def sidecar_of(folder: Path) -> int:
    """Return the process id of the sidecar of the run in this folder, or 0 before it has started.

    A search by command line would also find the shell that starts the sidecar.
    """
    for path in folder.glob("*"):
        lock = find_sidecar_lock(path.name)
        if lock is not None:
            return read_status(str(lock))[0]
    return 0


def test_ring_can_be_read_after_rank_and_sidecar_are_killed_together(tmp_path: Path) -> None:
    """`torchlens-perf sidecar` reads the rest of the ring without a loss."""
    script = str(SCRIPTS / "train_until_killed.py")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    trainer = WarmPython(
        [sys.executable, script, str(tmp_path), "1", "3"],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert eventually(lambda: sidecar_of(tmp_path / "0") != 0, 200)
    os.kill(sidecar_of(tmp_path / "0"), signal.SIGKILL)
    steps = int(trainer.communicate(timeout=60)[0].split()[1])
    (path,) = [path.parent for path in (tmp_path / "0").glob("*/nodes")]
    by_hand = read_by_hand(path, tmp_path)
    assert by_hand.returncode == 0, by_hand.stderr
    value = report(RunDirectory(path))

    assert value["ranks"][0]["steps"] - steps in (0, 1)
    assert value["quality"]["lost"] == 0


@pytest.mark.parametrize("name", ["SIGTERM", *long("SIGKILL", "SIGABRT", "SIGHUP", "SIGUSR1")])
def test_signal_ends_a_recorded_job_like_an_unrecorded_one(name: str, tmp_path: Path) -> None:
    """The report contains the finished steps."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHLENS_PERF": "1"}
    trainer = WarmPython(
        [sys.executable, TRAIN, "--steps", "100000"],
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("torchlens-perf/*/nodes/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    trainer.send_signal(getattr(signal, name))
    trainer.communicate(timeout=30)
    value = report(runs(tmp_path)[0])

    assert trainer.returncode == -getattr(signal, name)
    assert value["ranks"][0]["state"] == "died"
    assert value["ranks"][0]["steps"] > 0


@pytest.mark.long
def test_report_has_all_steps_when_one_rank_fails(tmp_path: Path) -> None:
    """If one rank raises, the job ends with torchrun's exit code.

    The report contains both ranks' finished steps.
    """
    done = run(torchrun("--logs-specs", "torchlens_perf", TRAIN, "--fail-at", "20"), tmp_path)
    value = report(runs(tmp_path)[0])

    assert done.returncode == 1
    assert "planted failure" in done.stderr
    assert min(rank["steps"] for rank in value["ranks"]) >= 19
