"""Tests that a verdict reaches the callbacks of a live job's ranks during training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import SCRIPTS, run_warm, runs, slowdown, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_each_rank_receives_the_verdict_on_a_slow_rank(tmp_path: Path) -> None:
    """Callbacks run within about a second after the sidecar has named the rank.

    Each rank's summary names the slow rank too.
    """
    done = run_warm(torchrun(str(SCRIPTS / "verdicts_heard.py")), tmp_path, 150)
    assert done.returncode == 0, done.stderr
    found = sorted(
        json.loads(line.removeprefix("heard "))
        for line in done.stdout.splitlines()
        if "heard" in line
    )

    assert [rank for rank, *_ in found] == [0, 1]
    for _, ((change, kind, slow, action, late_s),), named, ranks in found:
        assert (change, kind, slow, named, ranks) == ("started", "straggler", 1, 1, 2)
        assert action
        assert 0 <= late_s < 2 * slowdown()
    runs(tmp_path)
