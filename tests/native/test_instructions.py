"""The number of instructions of a step's marks, counted by valgrind, does not grow unnoticed.

Wall-clock times on a shared machine vary by more than the marks take. Instruction counts are the
same in each run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        shutil.which("valgrind") is None, reason="valgrind is missing: apt-get install valgrind"
    ),
]
SCRIPT = Path(__file__).parent / "instructions_per_step.py"
FEW, MANY = 200, 1200
# Counted with gcc 12 and Python 3.11. Python 3.10, 3.12 and 3.13 need 2 to 8 % less. Half as many
# more instructions in the marks exceed the slack.
EXPECTED, SLACK = 19_000, 1.25


def start_counting(folder: Path, steps: int) -> subprocess.Popen[str]:
    """Start a process under valgrind that runs this many steps."""
    folder.mkdir()
    environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(SCRIPT.parents[2])}
    return subprocess.Popen(
        [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder / 'out'}",
            sys.executable, str(SCRIPT), str(folder / "ring"), str(steps),
        ],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def read_instructions(process: subprocess.Popen[str]) -> int:
    """Return the number of instructions of the whole process."""
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    (counted,) = re.findall(r"Collected : (\d+)", output)
    return int(counted)


def test_marks_of_a_step_need_no_more_instructions_than_before(tmp_path: Path) -> None:
    """Fails if the marks need half as many instructions more."""
    running = [start_counting(tmp_path / str(steps), steps) for steps in (FEW, MANY)]
    few, many = map(read_instructions, running)

    assert EXPECTED / 2 < (many - few) / (MANY - FEW) < EXPECTED * SLACK
