"""Tests in which each system call at a watch's start and end fails in turn.

Training must have the same results as without the package.

The short form of the test fails the first call of each line of the package. The long form of the
test fails every call.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python
from tests.support.failing_calls import library
from tests.support.figures import note, share
from tests.support.long import long
from tests.support.processes import ROOT, SCRIPTS
from torchlens_perf.errors import RAISE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
USUAL = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE,
    errno.ENOMEM, errno.ENFILE, errno.EPERM,
)  # fmt: skip
STARTS = 1000
# These errors have a special meaning for some of our code.
MISLEADING = (errno.ENOENT, errno.EAGAIN, errno.EEXIST)


def unavoidable(call: str) -> bool:
    """Return True for calls whose failure always leaves a file: removals, and a lock with an
    unknown owner.
    """
    return call.startswith(("unlink", "rmdir")) or call.endswith("sidecar.lock")


def cases(
    folder: Path,
    sidecar: str,
    phase: str,
    errors: tuple[int, ...],
    timeout_s: float = 550,
    **environment: str,
) -> tuple[list[dict[str, Any]], Any]:
    """Return the result of each case, and of a later watch without failures."""
    (folder / "tmp").mkdir()
    environ = {
        **os.environ, "LD_PRELOAD": str(library()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "tmp"), RAISE: "0", **environment,
    }  # fmt: skip
    script = [
        sys.executable,
        str(SCRIPTS / "each_call_fails.py"),
        str(folder / "runs"),
        sidecar,
        phase,
    ]
    done = warm_python.run([*script, *map(str, errors)], timeout_s, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    *found, last = map(json.loads, done.stdout.splitlines())
    return found, last


@pytest.mark.parametrize(
    ("sidecar", "errors", "which"),
    [
        ("sidecar", USUAL, ""),
        *long(("sidecar", USUAL, "all"), ("none", USUAL, "all"), ("sidecar", MISLEADING, "all")),
    ],
    ids=["usual", "each call", "without a sidecar", "misleading"],
)
def test_failing_system_call_at_the_start_does_not_change_training(
    sidecar: str, errors: tuple[int, ...], which: str, tmp_path: Path
) -> None:
    """Nothing is raised, the parameters are bit-equal, and no hook stays. A later watch works.

    If recording is off, one line reports it, and no file is left.
    """
    found, last = cases(tmp_path, sidecar, "start", errors, CASES=which)
    off = [case for case in found if not case["recording"]]
    calls = " ".join(case["call"] for case in off)

    assert last["afterwards"]["recording"]
    for case in found:
        assert case.keys() <= {"nth", "errno", "call", "count", "recording", "lines", "left"}, case
        assert case["recording"] or case["left"] == [] or unavoidable(case["call"]), case
    for case in off:
        assert len(case["lines"]) == 1, case
        assert case["lines"][0].startswith("torchlens_perf is off: "), case
        assert "mistake" not in case["lines"][0], case
    # With a sidecar, the ring file may be in another folder, and another process creates the
    # folders.
    for part in (
        ("gethostname", "pipe2", "sidecar.log")
        if sidecar == "sidecar"
        else ("mkdir", "posix_fallocate", "mmap")
    ):
        assert part in calls, f"{part} did not fail where it matters"
    assert len(found) >= 30
    assert len(off) > 10
    assert len(off) < len(found), "some calls do not matter"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_training_is_unchanged_in_a_thousand_faulty_starts(tmp_path: Path) -> None:
    """In the long form, each system call fails once with each error.

    The job trains to its end with the same bits and exits with 0.
    """
    began_s, number = time.monotonic(), share(STARTS)
    found, last = cases(tmp_path, "sidecar", "start", USUAL, timeout_s=3000, CASES=str(number))
    off = sum(not case["recording"] for case in found)

    assert last["afterwards"]["recording"]
    for case in found:
        assert case.keys() <= {"nth", "errno", "call", "count", "recording", "lines", "left"}, case
        assert case["recording"] or len(case["lines"]) == 1, case
    counted = f"0 exits and 0 parameters changed, {off:,} not recorded, each said so in one line"
    note("faulty starts", len(found), STARTS, counted, time.monotonic() - began_s)


@pytest.mark.parametrize("which", long("", "all"))
def test_failing_system_call_at_the_end_leaves_no_hook_and_at_most_one_message(
    which: str, tmp_path: Path
) -> None:
    """Nothing is raised."""
    found, last = cases(tmp_path, "sidecar", "end", USUAL, CASES=which)

    assert last["afterwards"]["recording"]
    assert len(found) >= 8
    for case in found:
        assert case.keys() <= {"nth", "errno", "call", "count", "recording", "lines"}, case
        assert case["recording"]
        assert len(case["lines"]) <= 1, case
