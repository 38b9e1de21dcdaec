"""Tests of a node's wall clock that is set back or forward by an hour during a job.

Changes of the wall clock affect neither durations nor deadlines.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.support.endpoints import silent
from tests.support.leftovers import eventually
from tests.support.long import long
from tests.support.processes import SCRIPTS, report, slowdown
from tests.support.recorded_run import environment, wait_for_sidecar
from tests.support.warm_python import WarmPython
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.place.node import node_name
from torchlens_perf.verdicts import node_state

SOURCE = Path(__file__).parents[1] / "support" / "stepping_clock.c"
AN_HOUR_S = 3600
# Timeout of an export to an endpoint that never answers. Deadlines of OpenTelemetry's SDK use the
# wall clock.
TIMEOUT_S = 2


def only_run(folder: Path) -> RunDirectory | None:
    found = [
        path for path in folder.glob("*") if (path / "nodes").is_dir() and not path.is_symlink()
    ]
    return RunDirectory(found[0]) if found else None


def counted(folder: Path) -> int:
    """Return the number of steps in the live state, or 0 without one."""
    run = only_run(folder)
    if run is None or not run.node_state_path(node_name()).exists():
        return 0
    (process,) = node_state.load(run.node_state_path(node_name())).processes.values()
    return process.statistics.counted_steps


@pytest.mark.long
@pytest.mark.parametrize("step_s", [-AN_HOUR_S, *long(AN_HOUR_S)])
def test_setting_the_wall_clock_changes_no_step_and_no_deadline(
    step_s: int, tmp_path: Path
) -> None:
    """While the sidecar reads and exports, no step is lost or gets longer, and job and sidecar end
    in time.

    The report stays ordered in time.
    """
    library, stepped, stop, runs = (
        tmp_path / name for name in ("clock.so", "stepped", "stop", "runs")
    )
    built = [
        "gcc",
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
    ]
    subprocess.run(built, check=True)
    slow = slowdown()
    with silent() as address:
        told = {
            "LD_PRELOAD": str(library), "CLOCK_STEP_FILE": str(stepped), "CLOCK_STEP_S": str(step_s),
            "OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_TIMEOUT": str(TIMEOUT_S),
        }  # fmt: skip
        command = [sys.executable, str(SCRIPTS / "train_until_told.py"), str(runs), str(stop)]
        trainer = WarmPython(
            command,
            env=environment(runs, told),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert eventually(lambda: counted(runs) > 0)
            stepped.touch()
            before = counted(runs)
            assert eventually(lambda: counted(runs) > before + 500), "the live state stands still"
            stop.touch()
            assert trainer.wait(120) == 0
        finally:
            trainer.kill()
        run = only_run(runs)
        assert run is not None
        ended_s = wait_for_sidecar(run, 120)
    value, steps, log = (
        report(run),
        pd.read_parquet(run.steps),
        run.node_log_path(node_name()).read_text(),
    )

    days = {line[:13] for line in log.splitlines() if line[:2] == "20"}
    assert len(days) > 1, f"the sidecar has not seen the step of its clock: {log}"
    assert (value["quality"]["lost"], value["quality"]["coverage"]) == (0, 1.0)
    assert sorted(steps["step"]) == list(range(value["steps"]["count"]))
    assert steps["duration_ns"].between(0, 60e9).all()
    assert value["run"]["started"] < value["run"]["ended"] <= value["run"]["last_step_at"]
    assert ended_s < (3 * TIMEOUT_S + 4) * slow
