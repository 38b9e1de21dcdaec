"""Tests of real ranks, one of them slowed by its environment.

The verdict contains the rank and the cause.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.limited_group import LimitedGroup
from benchmarks.planted_causes import RANKS, judge, record

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 150


def why_no_disk_is_throttled(folder: Path) -> str:
    """Return the reason why disks cannot be throttled here, or an empty string."""
    try:
        (folder / "file").touch()
        group = LimitedGroup("io", 1 << 20, folder / "file")
        group.enter()
        group.leave()
    except OSError as error:
        return f"no disk can be throttled here: {error}"
    return ""


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < RANKS, reason="each of the two ranks needs a CPU of its own"
)
@pytest.mark.long  # On a busy machine, neither of the two ranks has a CPU of its own.
def test_planted_garbage_collection_and_disk_throttling_are_named_as_causes(tmp_path: Path) -> None:
    """One case collects a large heap in every step, and the other one throttles a disk."""
    reason = why_no_disk_is_throttled(tmp_path)
    kinds = ["gc"] if reason else ["gc", "slow_storage"]
    record([(kind, 1) for kind in kinds], tmp_path, STEPS)

    for kind in kinds:
        suspect, named, causes, text = judge(tmp_path / f"{kind}-1")
        assert (named, causes[:1]) == (suspect, [kind]), text
    if reason:
        pytest.skip(reason)
