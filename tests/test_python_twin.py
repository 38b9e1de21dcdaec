"""The hooks over the recorder in Python, which is in use where there is no C compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = (
    "test_bit_equality.py", "test_hooks_module.py", "test_hooks_backward.py", "test_hooks_optimizer.py",
    "test_hooks_data.py", "test_hooks_memory.py", "test_nothing_left_behind.py",
)  # fmt: skip
# The modules of the package choose a recorder when they are imported; so it takes another process.
PROGRAM = """
import sys
sys.modules["torchlens_perf._native"] = None
import pytest
from torchlens_perf import recorder
assert not recorder.NATIVE
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.long
def test_hooks_over_the_python_twin() -> None:
    """The same tests hold: the same records, and nothing of the user's is changed. (Compilers are left out: slow.)"""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-k", "not compile", *[str(HERE / name) for name in TESTS]],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
