"""Tests of `run` with training scripts, which end as under `python`. The recording is kept."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.processes import SCRIPTS, only_report, run

RUN = [sys.executable, "-m", "torchlens_perf", "run"]
# Recording begins at the end of the first step.
AFTER_EIGHT, UNTIL_FIVE = 7, 4


@pytest.mark.parametrize(
    ("command", "environment", "code", "program", "steps"),
    [
        (
            "-m trainer.fit exit",
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            3,
            "trainer.fit",
            AFTER_EIGHT,
        ),
        *long(
            ("train.py everything", {}, 0, "train.py", AFTER_EIGHT),
            ("train.py SIGTERM no-autoload", {}, -signal.SIGTERM, "train.py", UNTIL_FIVE),
            ("-I train.py crash", {}, 1, "train.py", UNTIL_FIVE),
        ),
    ],
)
def test_training_under_run_ends_as_under_python(
    command: str, environment: dict[str, str], code: int, program: str, steps: int, tmp_path: Path
) -> None:
    """Output, traceback and exit code are equal, and each finished step is in the report."""
    (tmp_path / "trainer").mkdir()
    for name in ("train.py", "trainer/fit.py"):
        shutil.copy(SCRIPTS / "train_and_end.py", tmp_path / name)
    environment = {"TORCHLENS_PERF_REPORT": "off", **environment}
    plain = run([sys.executable, *command.split()], tmp_path, 140, **environment)
    recorded = run([*RUN, *command.split()], tmp_path, 140, **environment)
    value = only_report(tmp_path)

    assert plain.returncode == code, plain.stderr
    assert (recorded.stdout, recorded.stderr, recorded.returncode) == (
        plain.stdout,
        plain.stderr,
        code,
    )
    assert [rank["steps"] for rank in value["ranks"]] == [steps]
    assert value["run"]["program"] == program


@pytest.mark.parametrize("more", ["", "import torchlens_perf; torchlens_perf.watch();"])
def test_invalid_variable_is_reported_once_by_run(more: str, tmp_path: Path) -> None:
    """Recording is off. The variable is read in several places."""
    done = run(
        [*RUN, "-c", f"import torch; {more} print('ran')"],
        tmp_path,
        TORCHLENS_PERF_RING_RECORDS="many",
    )

    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert (
        done.stderr == "torchlens_perf is off: TORCHLENS_PERF_RING_RECORDS='many': not a valid"
        " ring_records, see docs/reference/settings.md\n"
    )
