"""The hooks with the Python recorder, which is used without a C compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS_FOLDER = Path(__file__).parents[1]
TESTS = (
    "jobs/test_bit_equality.py", "jobs/test_nothing_left_behind.py", "hooks/test_module.py", "hooks/test_backward.py",
    "hooks/test_data.py", "hooks/test_memory.py", "hooks/loop/test_optimizer.py",
)  # fmt: skip
# The package chooses a recorder at its import, so the Python recorder needs another process.
PROGRAM = """
import sys
sys.modules["torchlens_perf._native"] = None
import pytest
from torchlens_perf.recorder import recorder
assert not recorder.NATIVE
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.long
def test_hook_tests_pass_with_the_python_recorder() -> None:
    """Tests of compilers are slow and left out."""
    finished = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "-k",
            "not compile",
            *[str(TESTS_FOLDER / name) for name in TESTS],
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS_FOLDER.parent,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
