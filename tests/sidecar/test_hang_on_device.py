"""Tests of a hang on a device, from the ranks' rings to the text of the sidecar's finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device_mark import write_device_mark
from tests.support.ranks import HOST, Rank, run_without_traces
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.verdicts.words.hang import build_hang_verdict

MS, STEPS = 1_000_000, 20
WORK = {"forward": 4.0, "backward": 6.0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with run_without_traces(tmp_path) as made:
        yield made


def stand(rank: Rank, place: int, kind: Kind, stood_ms: int) -> None:
    """Set the device's mark at the end of the rank's last step, where the rank is blocked."""
    mark = DeviceMark(
        STEPS - 1, place, int(kind), rank.session.intern("GPT"), False, 0, stood_ms * MS
    )
    write_device_mark(rank.ring, mark)


def hang_text_of(run: RunDirectory, ranks: list[Rank]) -> str:
    """Return the text about the hang 20 s after the last step, or "" without a hang."""
    made = Sidecar(run, HOST, None, lambda *_: None)
    for now_s in (1_000_000.0, 1_000_020.0):
        made.read_rings()
        made.count_records()
        made.judge_ranks(now_s)
    hang = made.state.hang
    made.close()
    for rank in ranks:
        rank.close()
    return "" if hang is None else build_hang_verdict(hang).sentence


def stopped(run: RunDirectory) -> list[Rank]:
    """Return three ranks with the same steps whose hosts wait for the device outside all spans."""
    ranks = [Rank(run, number, 3) for number in range(3)]
    for rank in ranks:
        rank.steps(STEPS, **WORK)
    return ranks


def test_stuck_device_is_found_from_marks_in_the_rings(run: RunDirectory) -> None:
    ranks = stopped(run)
    stand(ranks[0], 3, Kind.BACKWARD, 0)
    stand(ranks[1], 3, Kind.BACKWARD, 0)
    stand(ranks[2], 1, Kind.MODULE, 30)
    text = hang_text_of(run, ranks)
    assert "the device of rank 2" in text
    assert (
        "is in step 19 after the beginning of module GPT, while the furthest device of ranks 0-1 is"
        " in step 19" in text
    )


def test_missing_kernel_is_found_from_groups_in_the_rings(run: RunDirectory) -> None:
    """NCCL's thread writes the rows of groups into the rings' headers."""
    ranks = stopped(run)
    for rank, begun in zip(ranks, (8, 8, 7), strict=True):
        slot = rank.ring.add_group_row("0")
        rank.session.metadata.add_group("0", [0, 1, 2], "")
        words = rank.ring._words
        row = 282 + 3 * slot
        words[row] = words[row] & 0xFFFFFFFF | begun << 32
        words[row + 1] = 8
    text = hang_text_of(run, ranks)
    assert "Ranks 0-2 have entered collective 7 of group 0, but on the device of rank 2" in text
    assert "the operation's kernel has not begun, although it has on ranks 0-1" in text


def test_device_is_not_reported_as_stuck_after_one_sample_of_its_marks(run: RunDirectory) -> None:
    """Hosts look the same in an ordinary pause, which must not raise an alarm."""
    ranks = stopped(run)
    for rank, place in zip(ranks, (3, 3, 1), strict=True):
        stand(rank, place, Kind.FORWARD, 0)
    assert hang_text_of(run, ranks) == ""
