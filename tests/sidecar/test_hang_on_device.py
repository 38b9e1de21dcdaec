"""A hang on a device, from the ranks' rings to the sidecar's words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ranks import HOST, Rank, run_without_traces
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar

MS, STEPS = 1_000_000, 20
WORK = {"forward": 4.0, "backward": 6.0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with run_without_traces(tmp_path) as made:
        yield made


def stand(rank: Rank, place: int, kind: Kind, stood_ms: int) -> None:
    """What the rank's training thread saw of its device at the end of its last step; it is blocked since."""
    mark = DeviceMark(STEPS - 1, place, int(kind), rank.session.intern("GPT"), False, 0, stood_ms * MS)
    rank.ring.set_device_mark(mark.words())


def said(run: RunDirectory, ranks: list[Rank]) -> str:
    """The hang in words, 20 s after the last step; "": there is none."""
    made = Sidecar(run, HOST, None, lambda *_: None)
    for now_s in (1_000_000.0, 1_000_020.0):
        made.poll()
        made.account()
        made.judge(now_s)
    hang = made.state.hang
    made.close()
    for rank in ranks:
        rank.close()
    return "" if hang is None else hang.text


def stopped(run: RunDirectory) -> list[Rank]:
    """Three ranks that have made the same steps, and whose hosts wait for the device, outside of all that is timed."""
    ranks = [Rank(run, number, 3) for number in range(3)]
    for rank in ranks:
        rank.steps(STEPS, **WORK)
    return ranks


def test_the_device_that_stands_is_named(run: RunDirectory) -> None:
    """By the marks in the rings' headers."""
    ranks = stopped(run)
    stand(ranks[0], 3, Kind.BACKWARD, 0)
    stand(ranks[1], 3, Kind.BACKWARD, 0)
    stand(ranks[2], 1, Kind.MODULE, 30)
    text = said(run, ranks)
    assert "the device of rank 2" in text
    assert "stands in step 19 after the beginning of module GPT, while ranks 0-1 were seen further, in step 19" in text


def test_a_kernel_that_has_not_begun_is_named(run: RunDirectory) -> None:
    """By the rows of groups in the rings' headers, where NCCL's thread has it written."""
    ranks = stopped(run)
    for rank, begun in zip(ranks, (8, 8, 7), strict=True):
        slot = rank.ring.add_group("0")
        rank.session.metadata.add_group("0", [0, 1, 2], "")
        words = rank.ring._words
        row = 282 + 3 * slot
        words[row] = words[row] & 0xFFFFFFFF | begun << 32
        words[row + 1] = 8
    text = said(run, ranks)
    assert "Ranks 0-2 have entered collective 7 of group 0, but on the device of rank 2" in text
    assert "its kernel has not begun, as it has on ranks 0-1" in text


def test_nothing_is_made_up_of_devices_that_were_not_seen_to_stand(run: RunDirectory) -> None:
    """The same marks, each seen once: the hosts look as in a pause, which is no alarm."""
    ranks = stopped(run)
    for rank, place in zip(ranks, (3, 3, 1), strict=True):
        stand(rank, place, Kind.FORWARD, 0)
    assert said(run, ranks) == ""
