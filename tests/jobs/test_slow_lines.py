"""A verdict on a slow place of a real job names its line of code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import SCRIPTS, only_report, run_warm
from torchlens_perf.sidecar.host.stacks import find_py_spy

SCRIPT = SCRIPTS / "train_host_code.py"
# py-spy takes about 13 ms, and may take one hundredth of a CPU.
SECONDS = "20"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed"),
]


@pytest.mark.parametrize(
    ("place", "part", "function"),
    [
        ("loss", "host code", "loss_fn"),
        ("section", 'section "log"', "main"),
        ("data", "data loading", "__getitem__"),
    ],
)
def test_verdict_names_the_slow_line(place: str, part: str, function: str, tmp_path: Path) -> None:
    done = run_warm([sys.executable, str(SCRIPT), place, SECONDS], tmp_path, 120)
    assert done.returncode == 0, done.stderr
    lines = SCRIPT.read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"  # {place}"))
    verdict = only_report(tmp_path)["verdicts"][0]

    assert verdict.evidence.lines is not None, verdict.text
    (named, *_) = verdict.evidence.lines.lines
    # From Python 3.11 on, a method has the name of its class.
    assert named.startswith(f"train_host_code.py:{line} in ")
    assert named.endswith(function)
    assert f"Of the stack samples of rank 0 in {part}, " in verdict.text
