"""Tests of hangs in loops that read their loss in each step, with a kernel that never ends.

In such loops all hosts wait in the same way, and the progress of the devices is unknown.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.device import device
from tests.distributed.test_hang_live import STARTED_S, hang
from tests.support.live_ranks import LiveRanks
from tests.support.processes import SCRIPTS
from torchlens_perf.sidecar.host.stacks import find_py_spy

pytestmark = [
    pytest.mark.distributed, pytest.mark.slow,
    pytest.mark.skipif(device.missing() is not None, reason=str(device.missing())),
    pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed"),
]  # fmt: skip


@pytest.mark.long
def test_hang_verdict_shows_the_host_that_waits_for_its_device(tmp_path: Path) -> None:
    """Rank 0 reads its loss, and rank 1 runs the endless kernel.

    Rank 0 is behind in the collective, and the verdict shows that rank 0 waits for its device.
    """
    device.build()
    stuck = {
        "HANG_RANK": "1",
        "HANG_AT": "60",
        "ITEM": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with LiveRanks(tmp_path, 2, script=str(SCRIPTS / "hang_device_ranks.py"), **stuck) as job:
        text = job.wait_for(
            lambda report: (
                (found := hang(report)) and "for its device" in found["text"] and found["text"]
            ),
            2 * STARTED_S,
        )

    assert "rank 0 " in text
    assert (
        "last in code outside all phases and sections, waiting for its device in `return loss.item()`,"
        " print_loss" in text
    )
    assert "or a collective's kernel that waits for another rank's device" in text


@pytest.mark.long
def test_no_rank_is_named_when_all_hosts_wait_for_devices(tmp_path: Path) -> None:
    """The alarm shows the source line and says that the rank is unknown. The alarm does not say
    that the job may just be paused.
    """
    device.build()
    stuck = {
        "HANG_RANK": "1",
        "HANG_AT": "60",
        "ITEM": "all",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with LiveRanks(tmp_path, 2, script=str(SCRIPTS / "hang_device_ranks.py"), **stuck) as job:
        found = job.wait_for(hang, 2 * STARTED_S)

    assert (found["evidence"]["kind"], found["evidence"]["ranks"]) == ("blocked", [])
    assert found["evidence"]["waiting"] == [0, 1]
    assert "in `return loss.item()`, print_loss (hang_device_ranks.py:" in found["text"]
    assert "by the stacks of ranks 0-1. It is not known what the devices execute" in found["text"]
