"""Goodput over a requeue by a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_goodput_live import FAIL, LOST, SAVED, STEPS
from tests.jobs.launchers.test_clusters import need
from tests.support.launched import sidecars_ended, why_no_nodes
from tests.support.processes import ROOT, SCRIPTS, clean_environ
from tests.support.reports import as_json
from tests.support.servers import free_port
from tests.support.slurm import cluster
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

REASON = why_no_nodes()
pytestmark = [
    pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600),
    pytest.mark.skipif(bool(REASON), reason=REASON),
]  # fmt: skip

JOB = [
    sys.executable, str(SCRIPTS / "goodput_job.py"), "--steps", str(STEPS), "--fail", str(FAIL), "--save", "0.1",
]  # fmt: skip
QUEUE_S = 8.0
"""A requeued job waits at least this long, because its credentials must expire first."""
WITHIN_S = 240.0


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    need("slurmctld", "slurmd", "sbatch", "munged")
    with cluster(tmp_path / "slurm") as environ:
        yield environ


def run_until_done(folder: Path, slurm: dict[str, str], command: list[str]) -> list[RunDirectory]:
    """Submit a job that requeues itself after a failure. Return its run directories."""
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/sh\n{' '.join(command)} && touch done || scontrol requeue $SLURM_JOB_ID\n"
    )
    added = {
        "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT), **slurm,
    }  # fmt: skip
    asked = [
        "sbatch",
        "-N2",
        "--ntasks-per-node=1",
        "--requeue",
        "--output=log",
        "--open-mode=append",
    ]
    subprocess.run([*asked, str(script)], cwd=folder, env=clean_environ(added), check=True)
    deadline_s = time.monotonic() + WITHIN_S
    while not (folder / "done").exists():
        said = (folder / "log").read_text() if (folder / "log").exists() else ""
        queue = subprocess.run(
            ["squeue"], env={**os.environ, **slurm}, capture_output=True, text=True
        )
        assert time.monotonic() < deadline_s, said[-4000:] + queue.stdout
        time.sleep(0.5)
    sidecars_ended(folder)
    found = sorted((folder / "torchlens-perf").glob("*/nodes"))
    return [RunDirectory(path.parent) for path in found if not path.parent.is_symlink()]


def check_goodput(goodput: dict[str, Any]) -> None:
    seconds = {name: each["seconds"] for name, each in goodput["classes"].items()}
    assert (goodput["lost_steps"], goodput["lost_steps_from"]) == (LOST, "step counter")
    assert [(each["steps"], each["first_step"]) for each in goodput["attempts"]] == [
        (FAIL, 0),
        (STEPS - SAVED, SAVED),
    ]
    assert sum(seconds.values()) == pytest.approx(goodput["wall_s"])
    assert seconds["idle"] > QUEUE_S
    # The devices were not in use while the job waited in the queue.
    assert goodput["classes"]["idle"]["device_hours"] * 3600 / 2 < seconds["idle"] - QUEUE_S
    assert abs(seconds["other"]) < 0.01 * goodput["wall_s"]
    assert seconds["lost_work"] > 0


def test_requeue_under_srun_is_an_attempt_of_the_same_run(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    """Job id and step id, which name the run, are the same after a requeue."""
    (run,) = run_until_done(tmp_path, slurm, ["srun", *JOB])
    check_goodput(as_json(load_report(run))["goodput"])
