"""Actions on the verdicts of real processes on a CPU, each with one habit, and of one without."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.diagnosis.test_actions import choices
from tests.support import warm_python
from tests.support.processes import SCRIPTS
from tests.support.recorded_run import environment
from torchlens_perf.diagnosis.actions.table import Choice
from torchlens_perf.report.run_report import load_report_and_states
from torchlens_perf.report.usual_steps import build_job, read_usual_steps
from torchlens_perf.run.directory import RunDirectory

STEPS = 120


def choices_on(kind: str, folder: Path, ranks: int = 1) -> list[Choice]:
    """Return the actions that verdicts on a run of train_with_habit.py would get.

    Which verdict is given depends on the load of the machine.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(SCRIPTS / "train_with_habit.py"), kind, str(STEPS), str(folder)]
    done = warm_python.run(command, 200, env=environment(folder, {}))
    assert done.returncode == 0, done.stderr
    (path,) = {each.parent for each in folder.glob("*/nodes")}
    run = RunDirectory(path)
    report, states = load_report_and_states(run)
    times = read_usual_steps(run, report, states)
    assert times is not None
    return choices(build_job(report, states, times))


pytestmark = pytest.mark.long  # Six jobs; test_actions.py has each rule.


@pytest.mark.parametrize(
    ("kind", "ranks", "action", "figure"),
    [
        ("collation", 1, "DataLoader(num_workers=", "num_workers=0"),
        ("unused", 2, "find_unused_parameters", "found none in the step that was looked at"),
        ("foreach", 1, "fused=True", "412 tensors"),
        ("checkpointing", 1, "fewer modules", "of memory while"),
    ],
)
def test_habit_gets_its_action_and_figures(
    tmp_path: Path, kind: str, ranks: int, action: str, figure: str
) -> None:
    if kind == "collation" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a worker needs a CPU of its own")
    found = choices_on(kind, tmp_path, ranks)

    assert any(action in each.action and figure in each.because for each in found), found


@pytest.mark.parametrize("kind", ["clean", "item"])
def test_job_without_habit_gets_no_precise_action(tmp_path: Path, kind: str) -> None:
    """On a CPU, .item() waits for nothing."""
    assert not choices_on(kind, tmp_path)
