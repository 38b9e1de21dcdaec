"""Tests that Parquet files of a run are complete, readable with other tools, and
limited in size.
"""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from tests.support.ranks import HOST, make_run
from tests.support.recorders import Rig
from tests.support.tables import MS
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.errors import RunStoreError
from torchlens_perf.run import ownership
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Kind
from torchlens_perf.store import frames, segments
from torchlens_perf.store.file_names import list_nodes
from torchlens_perf.store.segments import (
    RecordChunk,
    RecordOrigin,
    SegmentWriter,
    read_chunks,
    read_last_sequences,
)

ANCHOR = Anchor(monotonic_ns=1_000, unix_ns=1_700_000_000_000_001_000, error_ns=50)


def origin(rank: int = 0) -> RecordOrigin:
    return RecordOrigin(f"rank{rank}", rank, 0, HOST, ANCHOR)


def chunk(rig: Rig, steps: int, rank: int = 0) -> RecordChunk:
    """Record new steps in the rig's ring, and read them back as one chunk."""
    for _ in range(steps):
        rig.span(Kind.DATA, "data", 2 * MS)
        rig.recorder.begin(Kind.FORWARD, rig.ring.intern("forward Net"))
        rig.span(Kind.MODULE, "block", 5 * MS)
        rig.recorder.end(Kind.FORWARD, rig.ring.intern("forward Net"))
        rig.recorder.next_step(0, 77, 2)
    batch = rig.reader.read_records()
    return RecordChunk(
        origin(rank),
        batch.records,
        batch.sequences,
        rig.reader.names(),
        assemble_steps(batch.records),
    )


def write_segment(writer: SegmentWriter, chunks: list[RecordChunk]) -> None:
    writer.add_chunks(chunks)
    writer.write_added()


@pytest.fixture
def rig(tmp_path: Path):
    (tmp_path / "rings").mkdir()
    made = Rig(tmp_path / "rings", capacity=65536)
    yield made
    made.close()


def test_records_are_read_as_written(rig: Rig, tmp_path: Path) -> None:
    """Order, names, kinds, times and origin are the same."""
    run = make_run(tmp_path)
    writer = SegmentWriter(run, HOST, 1 << 30)
    first, second = chunk(rig, 3), chunk(rig, 2)
    write_segment(writer, [first])
    write_segment(writer, [second])
    read = list(read_chunks(run, HOST))

    assert [lost for *_, lost in read] == [0, 0]
    assert [each[0] for each in read] == [origin(), origin()]
    for written, (_, records, names, _) in zip((first, second), read, strict=True):
        for field in (
            "kind",
            "step",
            "start_ns",
            "duration_ns",
            "nested_ns",
            "phase_ns",
            "depth",
            "flags",
            "value0",
        ):
            assert (records[field] == written.records[field]).all()
        assert [names[i] for i in records["name_id"]] == [
            written.names[i] for i in written.records["name_id"]
        ]
    assert read_last_sequences(run, HOST) == {"rank0": int(second.sequences[-1])}
    assert list_nodes(run.spans) == [HOST]


def test_segment_has_extremes_of_step_time_and_rank(rig: Rig, tmp_path: Path) -> None:
    """Readers skip files by the extremes of these columns."""
    run = make_run(tmp_path)
    write_segment(SegmentWriter(run, HOST, 1 << 30), [chunk(rig, 5)])
    (path,) = run.spans.glob("*.parquet")
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}

    assert (columns["step"].statistics.min, columns["step"].statistics.max) == (0, 4)
    assert columns["time"].statistics.has_min_max
    assert columns["rank"].statistics.has_min_max
    # Times are all different, so a dictionary would be as long as the column.
    assert {name for name, column in columns.items() if column.has_dictionary_page} == {
        "host",
        "process",
        "kind",
        "name",
    }


def test_ranks_of_a_node_are_stored_in_one_segment(rig: Rig, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    one, two = chunk(rig, 2, rank=0), chunk(rig, 3, rank=1)
    write_segment(SegmentWriter(run, HOST, 1 << 30), [one, two])

    assert [(o.rank, len(records)) for o, records, _, _ in read_chunks(run, HOST)] == [
        (0, 8),
        (1, 12),
    ]
    assert len(list(run.spans.iterdir())) == 1


def test_segment_that_is_written_in_pieces_is_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece has its own names."""
    run = make_run(tmp_path)
    folders = [tmp_path / f"ring{rank}" for rank in range(3)]
    for folder in folders:
        folder.mkdir()
    rigs = [Rig(folder) for folder in folders]
    for rank, rig in enumerate(rigs):
        rig.ring.intern(f"only {rank}")
    monkeypatch.setattr(segments, "_MIN_ROWS", 8)
    made = [chunk(rig, 2, rank) for rank, rig in enumerate(rigs)]
    write_segment(SegmentWriter(run, HOST, 1 << 30), made)
    (file,) = run.spans.iterdir()
    read = list(read_chunks(run, HOST))

    assert pq.read_metadata(file).num_row_groups == 3
    assert [o.rank for o, *_ in read] == [0, 1, 2]
    for each, (_, records, names, _) in zip(made, read, strict=True):
        assert [names[code] for code in records["name_id"]] == [
            each.names[code] for code in each.records["name_id"]
        ]
        assert records["start_ns"].tolist() == each.records["start_ns"].tolist()
    assert len(pd.read_parquet(run.steps)) == 6
    for rig in rigs:
        rig.close()


def test_gap_between_segments_counts_as_lost_records(rig: Rig, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    writer = SegmentWriter(run, HOST, 1 << 30)
    write_segment(writer, [chunk(rig, 1)])
    # Three steps with four records each are read from the ring but never written.
    chunk(rig, 3)
    write_segment(writer, [chunk(rig, 1)])

    assert [lost for *_, lost in read_chunks(run, HOST)] == [0, 12]


def test_duckdb_and_pandas_can_read_the_files(rig: Rig, tmp_path: Path) -> None:
    """Step times by rank and UTC times need no code of this package."""
    run = make_run(tmp_path)
    made = chunk(rig, 4, rank=3)
    write_segment(SegmentWriter(run, HOST, 1 << 30), [made])
    files = f"'{run.steps}/*.parquet'"
    query = (
        f"SELECT rank, count(*), min(duration_ns), sum(forward_ns), any_value(host) FROM {files}"
        " GROUP BY 1"
    )

    assert duckdb.sql(query).fetchall() == [(3, 4, 7 * MS, 4 * 5 * MS, HOST)]

    spans = pd.read_parquet(run.spans)
    assert spans.groupby("kind", observed=True).size().to_dict() == {
        "data": 4,
        "forward": 4,
        "module": 4,
        "step": 4,
    }
    assert spans["time"].iloc[0] == pd.Timestamp(
        ANCHOR.unix_ns - 1_000 + made.records["start_ns"][0], tz="UTC"
    )

    steps = pd.read_parquet(run.steps)
    assert (steps[[f"{part}_ns" for part in PARTS]].sum(axis=1) == steps["duration_ns"]).all()
    assert set(steps["micro_steps"]) == {2}


def test_steps_of_all_nodes_are_one_sorted_stream(
    rig: Rig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rows of the stream are sorted by rank and step and have the columns of the files.

    Only the rows of a damaged file are missing.
    """
    run = make_run(tmp_path)
    with pytest.raises(RunStoreError, match="has no steps yet"):
        frames.write_table(run, "steps", io.BytesIO())
    writer = SegmentWriter(run, HOST, 1 << 30)
    early, late = chunk(rig, 3), chunk(rig, 2)
    write_segment(writer, [late])
    write_segment(
        SegmentWriter(run, "node-b", 1 << 30), [dataclasses.replace(early, origin=origin(1)), early]
    )
    write_segment(writer, [early])
    files = sorted(run.steps.glob(f"{HOST}-*.parquet"))
    stream = io.BytesIO()
    frames.write_table(run, "steps", stream)
    with pyarrow.ipc.open_stream(stream.getvalue()) as reader:
        table = reader.read_all()

    assert table.column_names == pq.read_schema(files[0]).names
    rows = list(zip(table["rank"].to_pylist(), table["step"].to_pylist(), strict=True))
    assert rows == sorted(
        [*[(0, step) for step in (0, 0, 1, 1, 2, 2, 3, 4)], *[(1, step) for step in range(3)]]
    )
    files[0].write_bytes(files[0].read_bytes()[:-20])
    stream = io.BytesIO()
    frames.write_table(run, "steps", stream)
    with pyarrow.ipc.open_stream(stream.getvalue()) as reader:
        assert reader.read_all().num_rows == 9
    assert f"{files[0]} cannot be read" in caplog.text


def test_oldest_segments_are_deleted_above_the_size_limit(rig: Rig, tmp_path: Path) -> None:
    """Spans and steps are deleted together. The newest segment stays even above the limit."""
    run = make_run(tmp_path)
    measured = SegmentWriter(run, "measured", 1 << 30)
    write_segment(measured, [chunk(rig, 100)])
    size = sum(
        path.stat().st_size for folder in (run.spans, run.steps) for path in folder.iterdir()
    )
    # Three segments of this size are within the limit.
    writer = SegmentWriter(run, HOST, cap_bytes=int(3.5 * size))
    for _ in range(10):
        write_segment(writer, [chunk(rig, 100)])
    kept = sorted(path.name for path in run.spans.glob(f"{HOST}*"))

    assert kept == [f"{HOST}-{number:06d}.parquet" for number in (8, 9, 10)]
    assert sorted(path.name for path in run.steps.glob(f"{HOST}*")) == kept
    assert writer.dropped_segments == 7
    # A writer deletes only files of its own node.
    assert len(list(run.spans.glob("measured*"))) == 1

    tiny = SegmentWriter(run, HOST, cap_bytes=1)
    write_segment(tiny, [chunk(rig, 1)])
    assert [path.name for path in run.spans.glob(f"{HOST}*")] == [f"{HOST}-000011.parquet"]


def test_failed_write_leaves_no_file(
    rig: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spans are not kept without their steps. The next segment has a new number."""
    run = make_run(tmp_path)
    writer, write_all = SegmentWriter(run, HOST, 1 << 30), ownership.write_all

    # The disk becomes full after the spans and before the end of the steps.
    def fill_disk(file: Any, content: Any) -> None:
        is_steps = Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).parent == run.steps
        write_all(file, content[:9] if is_steps else content)
        if is_steps:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(ownership, "write_all", fill_disk)
    made = chunk(rig, 1)
    with pytest.raises(OSError, match="No space"):
        write_segment(writer, [made])
    assert [*run.spans.iterdir(), *run.steps.iterdir()] == []
    monkeypatch.setattr(ownership, "write_all", write_all)
    assert writer.write_added() == {made.origin.key: int(made.sequences[-1])}

    assert [path.name for path in (*run.spans.iterdir(), *run.steps.iterdir())] == [
        f"{HOST}-000002.parquet"
    ] * 2


def test_host_whose_name_begins_with_another_hosts_name_has_its_own_segments(
    rig: Rig,
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    for host in ("gpu-1", "gpu-1-000001", "gpu"):
        write_segment(SegmentWriter(run, host, 1 << 30), [chunk(rig, 1)])

    assert list_nodes(run.spans) == ["gpu", "gpu-1", "gpu-1-000001"]
    assert [len(list(read_chunks(run, host))) for host in list_nodes(run.spans)] == [1, 1, 1]


def test_error_message_names_the_damaged_file(rig: Rig, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_segment(SegmentWriter(run, HOST, 1 << 30), [chunk(rig, 50)])
    (path,) = run.spans.iterdir()
    # A Parquet file ends with its footer, and is unreadable without it.
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(RunStoreError, match=path.name):
        list(read_chunks(run, HOST))


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.recorders import Rig
from tests.support.ranks import HOST, make_run
from tests.store.test_segments import chunk
from torchlens_perf.store.segments import SegmentWriter
folder = Path(sys.argv[1])
(folder / "rings").mkdir()
rig = Rig(folder / "rings", capacity=65536)
writer = SegmentWriter(make_run(folder, "run"), HOST, 1 << 30)
while True:
    made = chunk(rig, 50)
    writer.add_chunks([made])
    writer.write_added()
    print(int(made.sequences[-1]), flush=True)
"""


def test_killed_writer_leaves_only_complete_files(tmp_path: Path) -> None:
    """After SIGKILL at random times every file can be read.

    The files contain at least all records that were reported as written.
    """
    random = np.random.default_rng(7)
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), os.getcwd()],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(random.uniform(0.0, 0.1))
        writer.send_signal(signal.SIGKILL)
        reported = [int(line) for line in writer.stdout.read().split()]
        writer.wait()
        run = make_run(folder, "run")
        total = sum(len(records) for _, records, _, _ in read_chunks(run, HOST))

        assert total == read_last_sequences(run, HOST)["rank0"] + 1
        assert total > max(reported, default=0)
        assert all(path.suffix in (".parquet", ".partial") for path in run.spans.iterdir())
