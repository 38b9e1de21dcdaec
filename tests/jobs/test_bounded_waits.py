"""Tests of limits on the time that a watch blocks the training thread.

The limits are 2 s at the start of a watch, 1.5 s at its end, and no blocking in steps.

Only time in which the training thread sleeps counts, as reported by the kernel. Computations, waits
for a processor, and other programs do not affect the measured time.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python
from tests.support.endpoints import silent
from tests.support.failing_calls import kill_all_at_end, library
from tests.support.leftovers import remove_local
from tests.support.long import long_except
from tests.support.processes import SCRIPTS, slowdown

pytestmark = pytest.mark.slow
LONGEST_START_S, LONGEST_END_S = 2.0, 1.5
# Seconds that the thread sleeps on an idle machine until the children have started.
CHILDREN_S = 0.2
TRIES = 3

# For each fault: the script's arguments, the disk's failure ("hang" or an errno), and whether it
# fails at the start or the end.
FAULTS: dict[str, tuple[list[str], str, str]] = {
    "none": ([], "", ""),
    "disk hangs": ([], "hang", "start"),
    "disk hangs at the end": ([], "hang", "end"),
    "disk is full": ([], str(errno.ENOSPC), "start"),
    "disk is full at the end": ([], str(errno.ENOSPC), "end"),
    "no child answers": (["no-answer"], "", ""),
    "no child answers, ring in memory": (["no-answer", "anonymous"], "", ""),
    "sidecar is stopped": (["stopped"], "", ""),
    "sidecar is stopped, ring in memory": (["stopped", "anonymous"], "", ""),
    "sidecar was killed": (["killed"], "", ""),
    "alone, ring in memory, disk hangs at the end": (["alone", "anonymous"], "hang", "end"),
    "alone, ring in memory, late answer": (["alone", "anonymous", "late-answer"], "", ""),
    "endpoint is silent": ([], "", ""),
}
QUICK = {
    "none",
    "disk hangs",
    "no child answers, ring in memory",
    "sidecar is stopped",
    "alone, ring in memory, late answer",
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with kill_all_at_end(str(tmp_path)):
        yield tmp_path


def waits(folder: Path, name: str, endpoint: str) -> dict[str, Any]:
    """Return the script's output for a fault."""
    told, error, since = FAULTS[name]
    flag = folder / "flag"
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library()), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "TEST": str(folder),
    }  # fmt: skip
    if error:
        environ |= {"FAILING_PATHS": str(folder / "disk"), "FAILING_WITH": error}
    if since == "end":
        environ["FAILING_WHILE"] = str(flag)
        told = [*told, f"flag={flag}"]
    command = [sys.executable, str(SCRIPTS / "watch_waits.py"), str(folder), *told]
    done = warm_python.run(command, 150, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", long_except(QUICK, FAULTS))
def test_time_that_training_waits_for_a_fault_is_limited(name: str, folder: Path) -> None:
    """The test is repeated, because a fault's delay recurs in each try, and a delay by the machine
    does not.
    """
    tried = []
    for number in range(TRIES):
        (place := folder / str(number)).mkdir()
        with silent() as address:
            found = waits(place, name, address if name == "endpoint is silent" else "")
        remove_local(found["run"])
        slack_s = CHILDREN_S * (slowdown() - 1)
        tried.append(found)
        if (
            found["start_s"] <= LONGEST_START_S + slack_s
            and found["end_s"] <= LONGEST_END_S + slack_s
            and found["slept"] <= 2
        ):
            break
    else:
        pytest.fail(f"{name}: {tried}")
    print(name, tried)
