"""Summaries: what a rank's sidecar tells node 0's, packed and unpacked."""

from __future__ import annotations

import numpy as np
import pytest

from torchlens_perf import summary
from torchlens_perf.hang import Progress
from torchlens_perf.records import OWN_PARTS
from torchlens_perf.step_rows import Rows
from torchlens_perf.straggler import Findings, Judge, Place

MS = 1e6


def rows(count: int, slow_from: int | None = None, seed: int = 0, first: int = 0) -> Rows:
    """Rows of one step each, 40 ms of work with noise; 8 ms more in backward from a row on."""
    random = np.random.default_rng(seed)
    work = np.array([1, 12, 0, 24, 2, 1]) * MS * (1 + 0.02 * random.standard_normal((count, len(OWN_PARTS))))
    if slow_from is not None:
        work[slow_from:, OWN_PARTS.index("backward")] += 8 * MS
    return Rows(
        width=1, step=np.arange(first, first + count), duration_ns=np.full(count, 50 * MS), work_ns=work,
        wait_ns=50 * MS - work.sum(axis=1), ready_ns=np.full(count, np.nan), workload=np.full(count, np.nan),
        flags=np.zeros(count, np.int64),
    )  # fmt: skip


def progress(rank: int = 3, **changed: object) -> Progress:
    values: dict[str, object] = {
        "rank": rank, "host": "node-b", "step": 57, "since_step_s": 0.25, "told_s": 0.0, "usual_step_s": 0.05,
        "issued": {"0": 41, "7": -1}, "inside": ("forward GPT", "blocks.3", "wait"), "state": "running",
        "since_mark_s": 0.125,
    }  # fmt: skip
    return Progress(**{**values, **changed})  # type: ignore[arg-type]


def packed(rank: int, of: Rows | None, **changed: object) -> bytes:
    place = Place("node-b", "abc/pp1", {"dp": 2, "pp": 1})
    return summary.pack(summary.Summary(2, 8, place, progress(rank, **changed), 4321, of, [1e6, 2e6]))


def test_round_trip() -> None:
    """What is packed comes out: place, progress, rows and modules; at most 1024 bytes."""
    text = packed(3, rows(5, first=100))
    assert len(text) == summary.LAYOUT.itemsize <= summary.MOST_BYTES
    (value,) = summary.unpack([text])

    assert (int(value["rank"]), int(value["attempt"]), int(value["pid"])) == (3, 2, 4321)
    assert summary.place(value, "node-b") == Place("node-b", "abc/pp1", {"dp": 2, "pp": 1})
    told = summary.progress(value, "node-b", 1.5)
    assert (told.issued, told.inside, told.state) == ({"0": 41, "7": -1}, progress().inside, "running")
    assert (told.since_step_s, told.told_s, told.since_mark_s) == (1.75, 1.5, 0.125)
    ((population, block),) = summary.blocks(summary.unpack([text]))
    assert population == "abc/pp1"
    assert block.key[0, :5].tolist() == [100, 101, 102, 103, 104]
    assert (block.key[0, 5:] == -1).all()
    assert block.parts_ns[0, :5] == pytest.approx(rows(5).work_ns, rel=1e-6)
    assert summary.sections_ns(summary.unpack([text]))[0, :3] == pytest.approx([1e6, 2e6, 0], rel=0.01)


def test_too_much_is_cut() -> None:
    """Long names, deep stacks and many groups are cut, and the surplus of groups is told of; the size stays."""
    text = packed(
        1, None, inside=tuple(f"{i}-{'n' * 300}" for i in range(60)), issued={f"group-{i}": i for i in range(40)}
    )
    (value,) = summary.unpack([text])
    told = summary.progress(value, "h", 0.0)

    assert len(text) == summary.LAYOUT.itemsize
    assert (told.inside[0][:2], told.inside[-1][:3], len(told.inside)) == ("0-", "59-", summary.INSIDE)
    assert told.issued == {f"group-{i}": i for i in range(39, 33, -1)}
    assert not told.all_groups
    assert list(summary.blocks(summary.unpack([text]))) == []


def test_another_version_is_refused() -> None:
    """A node with another version of us is refused, not misread."""
    text = bytearray(packed(1, None))
    text[0] = 99
    with pytest.raises(ValueError, match="version"):
        summary.unpack([bytes(text)])
    with pytest.raises(ValueError, match="size"):
        summary.unpack([packed(1, None)[:-1]])


def test_judging_what_was_sent_is_judging_what_was_seen() -> None:
    """Rows that went through windows and bytes give the same episodes as rows that did not."""
    recorded = {rank: rows(200, 80 if rank == 2 else None, seed=rank) for rank in range(4)}
    direct, sent = Judge(), Judge()
    for rank, each in recorded.items():
        direct.add(rank, each)
        for part in summary.windows(each):
            for population, block in summary.blocks(summary.unpack([packed(rank, part)])):
                sent.add_block(population, block)
    found: list[Findings] = [judge.judge(final=True) for judge in (direct, sent)]

    for each in found:
        assert [(e.rank, e.phase, e.until_step) for e in each.episodes] == [(2, "backward", None)]
    assert found[0].episodes[0].since_step == found[1].episodes[0].since_step
    assert found[0].episodes[0].excess_ns == pytest.approx(found[1].episodes[0].excess_ns, rel=1e-4)
