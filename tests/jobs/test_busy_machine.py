"""Repeat the tests of the most important guarantees while other programs keep the machine busy."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.busy_machine import PROCESSORS, busy_machine
from tests.support.figures import note, share
from tests.support.processes import ROOT

RUNS, RUNS_OF_PROGRAMS = 10, 50
PARTS = {
    "training threads": [
        "tests/recorder/test_training_thread.py",
        "tests/jobs/test_training_threads.py",
    ],
    "pickled models": ["tests/hooks/test_pickles.py"],
    "closed stderr": ["tests/jobs/test_stderr.py"],
    "programs frozen by PyInstaller": ["tests/jobs/test_children.py"],
    "concurrent watches": ["tests/test_concurrent_watches.py"],
    "exceptions of the program": ["tests/jobs/test_user_exceptions.py"],
    "files of the program": ["tests/jobs/test_files_of_the_program.py"],
    "pickled functions": ["tests/hooks/test_patches.py"],
    "batches of any type": ["tests/hooks/test_batch_size.py"],
}
# What a watch must leave alone is repeated more often.
OF_PROGRAMS = (
    "exceptions of the program",
    "files of the program",
    "pickled functions",
    "batches of any type",
)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", PARTS)
def test_recording_guarantees_hold_on_a_busy_machine(part: str) -> None:
    planned = RUNS_OF_PROGRAMS if part in OF_PROGRAMS else RUNS
    runs, began_s = share(planned), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PARTS[part]]
    with busy_machine(2 * PROCESSORS):
        done = [
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(runs)
        ]
    passed = sum(not each.returncode for each in done)
    note(
        f"{part} on a busy machine (`jobs/test_busy_machine.py`)",
        runs,
        planned,
        f"{passed} passed",
        time.monotonic() - began_s,
    )

    assert passed == runs, next(each.stdout[-4000:] for each in done if each.returncode)
