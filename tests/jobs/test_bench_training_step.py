"""A short run of benchmarks/training_step.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT


@pytest.mark.long
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
    # In so few steps, an interruption by another program makes the cost of a mark negative.
    found = {name: value for name, value in rows if re.fullmatch(r"-?[\d.]+", value)}
    assert set(found) == {
        "unwatched",
        "unwatched again (control)",
        "default watch",
        "every module",
        "median of steps that C ends",
        "mean of all steps",
    }
    share = re.search(
        r"^\| median of steps that C ends \|[^|]+\| (\d+)%", done.stdout, re.MULTILINE
    )
    assert share is not None
    assert int(share[1]) > 0
