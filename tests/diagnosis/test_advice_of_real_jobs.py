"""Advice on real processes on a CPU, each with one habit, and on one without."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.processes import SCRIPTS
from tests.support.recorded_run import environment
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.words.report import Advice

STEPS = 120


def advice_on(kind: str, folder: Path, ranks: int = 1) -> dict[str, Advice]:
    """Return the advice by rule on a run of train_advised.py."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(SCRIPTS / "train_advised.py"), kind, str(STEPS), str(folder)]
    done = warm_python.run(command, 200, env=environment(folder, {}))
    assert done.returncode == 0, done.stderr
    (path,) = {each.parent for each in folder.glob("*/nodes")}
    report = load_report(RunDirectory(path))
    assert report["lost_time"] is not None
    return {each["key"]: each for each in report["advice"]}


pytestmark = pytest.mark.long  # Eight jobs; test_advice.py has each rule.


@pytest.mark.parametrize(
    ("kind", "ranks", "key", "figure"),
    [
        ("collation", 1, "loader-workers", "num_workers=0"),
        ("unused", 2, "ddp-unused-parameters", "all have gradients"),
        ("foreach", 1, "fused-optimizer", "412 tensors"),
        ("gc", 1, "garbage-collection", "steps collected garbage"),
        ("checkpointing", 1, "needless-checkpointing", "of memory while"),
        ("saving", 1, "asynchronous-saving", "6 steps saved a checkpoint"),
    ],
)
def test_habit_gets_its_advice_and_no_other(
    tmp_path: Path, kind: str, ranks: int, key: str, figure: str
) -> None:
    if kind == "collation" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a worker needs a CPU of its own")
    found = advice_on(kind, tmp_path, ranks)
    assert figure in found[key]["finding"]
    # Two ranks of a small model on a CPU do little else than reduce gradients.
    assert set(found) <= {key, "accumulate-gradients", "cpu-binding"}


@pytest.mark.parametrize("kind", ["clean", "item"])
def test_job_without_habit_gets_no_advice(tmp_path: Path, kind: str) -> None:
    """On a CPU, .item() waits for nothing."""
    assert advice_on(kind, tmp_path) == {}
