"""Tests of the spool, which keeps records that the ring overwrites before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.recorders import IDS, IMPLEMENTATIONS, Rig
from torchlens_perf.run import ring
from torchlens_perf.run.ring import Kind, RingReader
from torchlens_perf.run.rings import memory, spool
from torchlens_perf.run.rings.spool import SpoolWriter, count_spooled, spool_path

CAPACITY, MOST = 1024, 1 << 20


def writer_of(rig: Rig) -> SpoolWriter:
    path = str(rig.ring.path)
    return SpoolWriter(path, memory.open_to_read(path), CAPACITY)


def write(rig: Rig, count: int) -> int:
    """Write records, and return the position of the ring's writer."""
    for _ in range(count):
        rig.span(Kind.DATA, "a", 5)
    return rig.reader.read_counter(ring.HEAD)


def test_ring_layout_in_spool_py_equals_that_in_ring_py() -> None:
    """spool.py repeats the numbers, because importing run/ring.py takes long."""
    mine = (spool.RECORD_BYTES, spool.RECORDS_OFFSET, spool.IN_FLIGHT)

    assert mine == (ring.RECORD_BYTES, ring.RECORDS_OFFSET, ring.IN_FLIGHT)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IDS)
def test_reader_returns_spooled_records_and_then_those_of_the_ring(
    implementation: object, tmp_path: Path
) -> None:
    """The ring is overwritten five times. The copies wrap around its end."""
    rig = Rig(implementation, tmp_path, capacity=CAPACITY)
    writer = writer_of(rig)
    for _ in range(10):
        head = write(rig, CAPACITY // 2 + 7)
        writer.copy_new_records(head, MOST)
    write(rig, 100)
    batch = RingReader(rig.ring.path).read_records()
    again = RingReader(rig.ring.path)
    again.cursor = 3000
    rest = again.read_records(final=True)

    total = 10 * (CAPACITY // 2 + 7) + 100
    assert batch.sequences.tolist() == list(range(total))
    assert batch.lost == 0
    assert [int(step) for step in batch.records["start_ns"][:3]] == [1000, 1005, 1010]
    assert rest.sequences.tolist() == list(range(3000, total))
    assert again.read_records(final=True).sequences.tolist() == []
    rig.close()


def test_records_that_the_ring_has_overwritten_are_not_spooled_but_counted_as_lost(
    tmp_path: Path,
) -> None:
    rig = Rig(IMPLEMENTATIONS[0], tmp_path, capacity=CAPACITY)
    writer = writer_of(rig)
    first = write(rig, CAPACITY // 2)
    assert writer.copy_new_records(first, MOST) == CAPACITY // 2 - spool.IN_FLIGHT
    head = write(rig, 2 * CAPACITY)
    with pytest.raises(OSError, match="overwritten"):
        writer.copy_new_records(head, MOST)
    batch = RingReader(rig.ring.path).read_records()

    assert len(batch.records) == CAPACITY // 2 - spool.IN_FLIGHT + CAPACITY
    assert batch.lost == head - len(batch.records)
    rig.close()


def test_newest_records_and_records_beyond_the_limit_stay_in_the_ring(tmp_path: Path) -> None:
    """A thread may still be writing one of the newest records."""
    rig = Rig(IMPLEMENTATIONS[0], tmp_path, capacity=CAPACITY)
    writer = writer_of(rig)
    few = writer.copy_new_records(write(rig, spool.IN_FLIGHT), MOST)
    limited = writer.copy_new_records(write(rig, 300), 200)

    assert (few, limited, writer.end) == (0, 200, 200)
    assert len(RingReader(rig.ring.path).read_records().records) == spool.IN_FLIGHT + 300
    rig.close()


def test_next_sidecar_continues_a_spool_and_saved_records_are_removed(tmp_path: Path) -> None:
    rig = Rig(IMPLEMENTATIONS[0], tmp_path, capacity=CAPACITY)
    path = spool_path(str(rig.ring.path))
    writer_of(rig).copy_new_records(write(rig, 300), MOST)
    writer_of(rig).copy_new_records(write(rig, 300), MOST)
    reader = RingReader(rig.ring.path)

    assert count_spooled(path) == 600 - spool.IN_FLIGHT
    assert reader.read_records().sequences.tolist() == list(range(600))
    reader.drop_spool(kept=100)
    assert os.path.exists(path)
    reader.drop_spool(kept=599)
    assert not os.path.exists(path)
    rig.close()


def test_spool_is_removed_with_its_ring(tmp_path: Path) -> None:
    rig = Rig(IMPLEMENTATIONS[0], tmp_path, capacity=CAPACITY)
    writer_of(rig).copy_new_records(write(rig, 300), MOST)
    memory.remove_ring_paths(str(rig.ring.path))

    assert not list(tmp_path.iterdir())
    rig.close()


def test_full_memory_leaves_the_spool_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's DataLoaders need the same memory, so the spool takes a small part of it."""
    rig = Rig(IMPLEMENTATIONS[0], tmp_path, capacity=CAPACITY)
    writer = writer_of(rig)
    writer.copy_new_records(write(rig, 300), MOST)
    monkeypatch.setattr(spool, "_SHARE_OF_FREE", 1 << 60)
    with pytest.raises(OSError, match="too little memory"):
        writer.copy_new_records(write(rig, 300), MOST)

    assert count_spooled(spool_path(str(rig.ring.path))) == 300 - spool.IN_FLIGHT
    assert RingReader(rig.ring.path).read_records().lost == 0
    rig.close()
