"""A short run of benchmarks/training_step.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT


@pytest.mark.slow
def test_one_run_measures_both_ways_to_watch_and_the_marks_of_a_step() -> None:
    program = (
        "from benchmarks import training_step as measured\n"
        "measured.ROUNDS, measured.SAMPLES, measured.MARKS_ROUNDS = 2, 4, 2\n"
        "measured.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (.+?) \| (\S+)", done.stdout, re.MULTILINE)
    found = {name: value for name, value in rows if re.match(r"[\d.]+$", value)}
    assert set(found) == {
        "unwatched",
        "unwatched again (control)",
        "default watch",
        "every module",
        "median of steps that C ends",
        "mean of all steps",
    }
    assert float(found["median of steps that C ends"]) > 0
