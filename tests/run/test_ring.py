"""Tests of the ring file: its layout, its reader, and the count of missed records."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.device_mark import write_device_mark
from tests.support.native_facts import read_layout
from tests.support.recorders import Rig
from torchlens_perf.errors import RingError
from torchlens_perf.run import ring
from torchlens_perf.run.clock import DeviceMark, read_device_mark
from torchlens_perf.run.ring import Kind, RingFile, RingReader, State


def test_ring_offsets_equal_those_of_the_c_structures() -> None:
    offsets = read_layout()
    words = {
        "head": ring.HEAD, "step": ring.STEP, "unbalanced": ring.UNBALANCED, "too_deep": ring.TOO_DEEP,
        "tool_ns": ring.TOOL_NS, "state": ring.STATE, "gc_ns": ring.GC_NS,
        "names_used": ring.NAMES_USED, "names_lost": ring.NAMES_LOST,
        "metadata_revision": ring.METADATA_REVISION, "metadata_used": ring.METADATA_USED,
        "device_since_ns": ring.DEVICE_MARK[0], "device_step": ring.DEVICE_MARK[1], "device_mark": ring.DEVICE_MARK[2],
        "device_looked_ns": ring.DEVICE_MARK[3],
        "groups": ring.GROUPS, "recent": ring.RECENT,
        "internal_errors": ring.INTERNAL_ERRORS, "stack": ring.DEPTH, "capacity": 2, "records_offset": 7,
    }  # fmt: skip

    assert {name: 8 * word for name, word in words.items()} == {
        name: offsets[f"Header.{name}"] for name in words
    }

    dtype = ring.record_dtype()
    fields = (
        "name_id",
        "step",
        "start_ns",
        "duration_ns",
        "nested_ns",
        "phase_ns",
        "value0",
        "value1",
    )

    assert {name: dtype.fields[name][1] for name in fields} == {
        name: offsets[f"Record.{name}"] for name in fields
    }
    assert dtype.itemsize == ring.RECORD_BYTES
    assert offsets["Header.stack"] + offsets["Stack.frames"] == 8 * ring.FRAMES


def test_device_mark_is_read_as_written(tmp_path: Path) -> None:
    made = ring.RingFile(tmp_path / "ring", 64)
    reader = ring.RingReader(made.path)
    assert read_device_mark(reader) is None
    mark = DeviceMark(0, 300, int(ring.Kind.MODULE), made.intern("blocks.3"), True, 5, 1 << 60)
    write_device_mark(made, mark)
    assert read_device_mark(reader) == (mark, "blocks.3")
    reader.close()
    made.close()


def test_new_ring_file_is_private_and_has_reserved_blocks(tmp_path: Path) -> None:
    """With reserved blocks, writing to the mapped file cannot fail on a full disk."""
    made = RingFile(tmp_path / "r", 1024)
    status = os.stat(made.path)
    made.close()

    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (
        status.st_blocks * 512 >= status.st_size == ring.RECORDS_OFFSET + 1024 * ring.RECORD_BYTES
    )


def test_creating_a_ring_at_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "r").symlink_to(tmp_path / "target")

    with pytest.raises(FileExistsError):
        RingFile(tmp_path / "r", 1024)
    assert (tmp_path / "target").read_text() == "mine"


def test_full_disk_raises_at_creation_and_leaves_no_file() -> None:
    folder = Path("/dev/shm")
    free = os.statvfs(folder)
    too_many = 1 << (free.f_bavail * free.f_frsize // ring.RECORD_BYTES + 1).bit_length()
    path = folder / f"torchlens-perf-test-{os.getpid()}"

    with pytest.raises(OSError, match="No space left"):
        RingFile(path, too_many)
    assert not path.exists()


def test_name_interned_twice_is_stored_once(tmp_path: Path) -> None:
    made = RingFile(tmp_path / "r", 1024)
    names = ["blocks.0", "emoji \N{SNOWMAN}", "</script>\x1b[31m", "lone \ud800", "x" * 1000, ""]
    ids = [made.intern(name) for name in names]
    reader = RingReader(made.path)

    assert [made.intern(name) for name in names] == ids == [1, 2, 3, 4, 5, 6]
    assert reader.names()[1:4] == names[:3]
    assert reader.names()[4:] == ["lone \\ud800", "x" * ring.LONGEST_NAME, ""]
    reader.close()
    made.close()


def test_names_beyond_the_tables_size_share_id_0_and_are_counted(tmp_path: Path) -> None:
    """Earlier names stay."""
    made = RingFile(tmp_path / "r", 1024)
    ids = [made.intern(f"{i:0250d}") for i in range(2000)]
    reader = RingReader(made.path)
    kept = sum(name_id > 0 for name_id in ids)

    assert kept == (ring.NAMES_BYTES - 2 - len(ring.OTHER_NAMES)) // 252
    assert reader.read_counter(ring.NAMES_LOST) == 2000 - kept
    assert made.intern(f"{5:0250d}") == ids[5]
    reader.close()
    made.close()


def test_metadata_are_replaced_atomically(tmp_path: Path) -> None:
    """The reader sees no metadata during the replacement."""
    made = RingFile(tmp_path / "r", 1024)
    reader = RingReader(made.path)

    assert reader.read_metadata() == {}
    made.set_metadata({"rank": 3})
    made.set_metadata({"rank": 4, "host": "a"})
    assert reader.read_metadata() == {"rank": 4, "host": "a"}

    made._words[ring.METADATA_REVISION] += 1
    assert reader.read_metadata() == {}
    made.set_metadata({"rank": 5})
    assert reader.read_metadata() == {"rank": 5}, "an odd revision is repaired"

    # The content differs from the stored content, whatever the revision is.
    made.buffer[ring.METADATA_OFFSET + 2] ^= 1
    assert reader.read_metadata() == {}
    made.set_metadata({"rank": 6})
    assert reader.read_metadata() == {"rank": 6}
    reader.close()
    made.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "too short"),
        (lambda data: data[:4096], "too short"),
        (lambda data: b"ELF" + data[3:], "not a ring file"),
        (lambda data: data[:8] + struct.pack("<I", 99) + data[12:], "not a ring file"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "does not match"),
        (lambda data: data[:16] + struct.pack("<Q", 1000) + data[24:], "does not match"),
        (lambda data: data[:-64], "does not match"),
    ],
)
def test_damaged_file_raises_an_error_with_the_reason(
    tmp_path: Path, damage: object, message: str
) -> None:
    made = RingFile(tmp_path / "r", 1024)
    made.close()
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "damaged").write_bytes(damage(data))

    with pytest.raises(RingError, match=message):
        RingReader(tmp_path / "damaged")


def test_state_shows_whether_the_writer_closed_the_ring(tmp_path: Path) -> None:
    """A killed writer leaves the state OPEN."""
    made = RingFile(tmp_path / "r", 1024)
    reader = RingReader(made.path)

    assert reader.read_counter(ring.STATE) == State.OPEN
    made.close()
    assert reader.read_counter(ring.STATE) == State.CLOSED
    reader.close()


class TestReading:
    def test_each_read_returns_only_new_records(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path)
        rig.span(Kind.DATA, "a", 5)
        rig.span(Kind.DATA, "b", 5)
        first = rig.reader.read_records()
        rig.span(Kind.DATA, "c", 5)
        second = rig.reader.read_records()

        assert first.sequences.tolist() == [0, 1]
        assert second.sequences.tolist() == [2]
        assert (first.lost, second.lost, len(rig.reader.read_records().records)) == (0, 0, 0)
        rig.close()

    def test_overwritten_records_are_counted_as_missed(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path)
        rig.span(Kind.DATA, "first", 5)
        rig.reader.read_records()
        for _ in range(3000):
            rig.span(Kind.DATA, "a", 5)
        batch = rig.reader.read_records()

        assert len(batch.records) == 1024
        assert batch.lost == 3000 - 1024
        assert batch.sequences.tolist() == list(range(3001 - 1024, 3001))
        rig.close()

    def test_unfinished_record_is_read_after_it_is_finished(self, tmp_path: Path) -> None:
        """In the ring of a dead writer, such a record is counted as lost."""
        rig = Rig(tmp_path)
        for _ in range(5):
            rig.span(Kind.DATA, "a", 5)
        slot = ring.RECORDS_OFFSET + 3 * ring.RECORD_BYTES
        stamp = rig.ring.buffer[slot : slot + 4]
        rig.ring.buffer[slot : slot + 4] = b"\0\0\0\0"
        early = rig.reader.read_records()

        assert (len(early.records), early.lost, rig.reader.cursor) == (3, 0, 3)

        rig.ring.buffer[slot : slot + 4] = stamp
        late = rig.reader.read_records()

        assert (late.sequences.tolist(), late.lost) == ([3, 4], 0)

        rig.ring.buffer[slot : slot + 4] = b"\0\0\0\0"
        again = RingReader(rig.ring.path)
        final = again.read_records(final=True)

        assert (final.sequences.tolist(), final.lost) == ([0, 1, 2, 4], 1)
        again.close()
        rig.close()

    def test_open_spans_of_a_killed_process_are_read(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path)
        rig.recorder.begin(Kind.FORWARD, rig.ring.intern("forward Net"))
        rig.clock.advance(7)
        rig.recorder.begin(Kind.WAIT, rig.ring.intern("wait"))
        spans = rig.reader.read_open_spans()

        assert [(span.kind, span.name) for span in spans[1:]] == [
            (Kind.FORWARD, "forward Net"),
            (Kind.WAIT, "wait"),
        ]
        assert spans[2].start_ns - spans[1].start_ns == 7
        rig.recorder.end(Kind.WAIT, rig.ring.intern("wait"))
        assert [span.name for span in rig.reader.read_open_spans()[1:]] == ["forward Net"]
        rig.close()


WRITER = """
import sys
from pathlib import Path
from torchlens_perf.recorder.recorder import Recorder
from torchlens_perf.run.ring import Kind, RingFile
made = RingFile(Path(sys.argv[1]), 1024)
recorder = Recorder(made.buffer, made.intern)
name = made.intern("a")
print("ready", flush=True)
for i in range(int(sys.argv[2])):
    recorder.record_span(Kind.SECTION, name, i, i + 1, 0, i + 2, i + 3)
recorder.close()
made.close()
"""


@pytest.mark.slow
def test_reader_gets_no_torn_record_from_a_running_writer(tmp_path: Path) -> None:
    """The writer overwrites the ring many times during the test. All missed records are counted."""
    count = 3_000_000
    path = tmp_path / "r"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(count)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    reader, seen, lost, batches = RingReader(path), 0, 0, 0
    while True:
        ended = writer.poll() is not None
        batch = reader.read_records(final=ended)
        start = batch.records["start_ns"]
        assert (start == batch.sequences).all()
        for offset, field in enumerate(("duration_ns", "value0", "value1"), start=1):
            assert (batch.records[field] == batch.sequences + offset).all()
        seen, lost, batches = (
            seen + len(batch.records),
            lost + batch.lost,
            batches + (len(batch.records) > 0),
        )
        if ended:
            break
        if batches % 4 == 0:
            # The writer can overwrite the whole ring in this time.
            time.sleep(0.003)
    reader.close()

    assert seen + lost == count
    # The reader must have read during writes, even on busy processors.
    assert batches > 5
    # The writer must have overwritten unread records.
    assert lost > 0


def test_hooks_of_other_threads_write_nothing_into_a_closed_ring(tmp_path: Path) -> None:
    """A watch may end in one thread while another one's hook runs."""
    made = RingFile(tmp_path / "ring", 1024)
    known = made.intern("known")
    made.close()

    assert (made.intern("known"), made.intern("new")) == (known, 0)
    assert made.add_group_row("group") == ring.MAX_GROUPS
    made.set_metadata({"rank": 1})
    made.count(ring.INTERNAL_ERRORS)
    made.count(ring.GC_NS, 1)
    made.close()
