"""Tests of the file of events: what is written is read once, and what is lost is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchlens_perf.errors import RunStoreError
from torchlens_perf.roles.event_file import (
    CAPACITY,
    CODES,
    EventFile,
    encode_id,
    read_new_events,
)

BEGIN, END = CODES["generation_begin"], CODES["generation_end"]


@pytest.fixture
def file(tmp_path: Path) -> EventFile:
    made = EventFile(tmp_path / "rollout-1-1.events")
    made.describe_process("rollout", "engine-1")
    return made


def test_events_are_read_once_with_their_values(file: EventFile) -> None:
    file.write(BEGIN, "7-1", "", -1, -1)
    file.write(END, 12, 7, 30, 500)

    found = read_new_events(file.path, 0, ended=False)

    assert (found.role, found.name, found.lost) == ("rollout", "engine-1", 0)
    assert found.events["code"].tolist() == [BEGIN, END]
    assert found.events["id"].tolist() == [b"7-1", b"12"]
    assert found.events["batch"].tolist() == [b"", b"7"]
    assert found.events["tokens_out"].tolist() == [-1, 500]
    assert found.events["time_ns"][0] <= found.events["time_ns"][1]
    assert not len(read_new_events(file.path, 2, ended=False).events)


def test_overwritten_events_are_counted(file: EventFile) -> None:
    for sample in range(CAPACITY + 100):
        file.write(BEGIN, sample, "", -1, -1)

    found = read_new_events(file.path, 40, ended=False)

    assert found.lost == 60
    assert len(found.events) == CAPACITY
    assert found.events["id"][-1] == str(CAPACITY + 99).encode()


def test_event_that_is_being_written_is_read_later(file: EventFile) -> None:
    """Two threads write: the first has its number, and the second has written already."""
    for sample in range(3):
        file.write(BEGIN, sample, "", -1, -1)
    whole = file._buffer[4096 + 2 * 128 : 4096 + 3 * 128]
    file._buffer[4096 + 2 * 128 : 4096 + 3 * 128] = bytes(127) + b"x"

    assert read_new_events(file.path, 0, ended=False).events["id"].tolist() == [b"0"]

    file._buffer[4096 + 2 * 128 : 4096 + 3 * 128] = whole
    assert read_new_events(file.path, 1, ended=False).events["id"].tolist() == [b"1", b"2"]


def test_event_of_killed_thread_counts_as_lost(file: EventFile) -> None:
    for sample in range(3):
        file.write(BEGIN, sample, "", -1, -1)
    file._buffer[4096 + 2 * 128 + 20] ^= 1

    found = read_new_events(file.path, 0, ended=True)

    assert (found.events["id"].tolist(), found.lost) == ([b"0", b"2"], 1)


def test_long_ids_stay_different() -> None:
    first, second = ("x" * 60 + end for end in "ab")

    assert len(encode_id(first)) == 48
    assert encode_id(first) != encode_id(second)


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.events").write_bytes(b"other")

    with pytest.raises(RunStoreError, match="not a file of events"):
        read_new_events(tmp_path / "a.events", 0, ended=True)


def test_rounds_of_any_size_find_all_events(file: EventFile) -> None:
    """Rounds read a part of the file first, also where it begins again."""
    after, seen = 0, 0
    for count in (500, 1024, 3000, 1, 5000, 1025, 0, 700, 7000):
        for _ in range(count):
            file.write(BEGIN, seen, "", -1, -1)
            seen += 1
        found = read_new_events(file.path, after, ended=False)
        assert (len(found.events), found.lost) == (count, 0)
        after += count
    assert found.events["id"][-1] == str(seen - 1).encode()
