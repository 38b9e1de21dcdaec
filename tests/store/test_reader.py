"""Tests that the reader of Parquet files skips row groups, filters rows, and reports unreadable
files.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.processes import ROOT
from torchlens_perf.run import ownership
from torchlens_perf.store.reader import (
    ParquetFile,
    ParquetFolder,
    UnreadableFileError,
    concatenate_tables,
    make_damage_collector,
    make_error_collector,
    map_texts,
)

ROWS_PER_GROUP = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a file with steps 0 to 999 in one row group and 1000 to 1999 in the other.

    Return the file's folder.
    """
    steps = np.arange(2 * ROWS_PER_GROUP)
    kinds = pa.array([("step", "data")[step % 2] for step in steps.tolist()]).dictionary_encode()
    made = tmp_path / "spans"
    made.mkdir()
    # The file has checksums, because without them a changed bit would be read as another value.
    pq.write_table(
        pa.table({"step": steps, "kind": kinds}), made / "node-000001.parquet",
        row_group_size=ROWS_PER_GROUP, write_page_checksum=True, use_dictionary=["kind"],
    )  # fmt: skip
    return made


def flip_a_bit(path: Path, row_group: int) -> None:
    """Damage the stored values of the steps."""
    chunk = pq.read_metadata(path).row_group(row_group).column(0)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(content)


def steps_of(folder: Path, notes: list[str], *steps: int) -> list[int]:
    files = ParquetFolder(folder, unreadable=make_error_collector(notes))
    return [
        step
        for table in files.read_each(lambda file: file.read_table(["step"], {"step": steps}))
        for step in table["step"].to_pylist()
    ]


def test_filtered_rows_are_returned_in_file_order(folder: Path) -> None:
    where = {"step": [1500, 3, 4], "kind": ["data"]}
    (table,) = ParquetFolder(folder).read_each(lambda file: file.read_table(where=where))
    assert table.to_pylist() == [{"step": 3, "kind": "data"}]
    assert map_texts(table["kind"], {"data": 7}, -1).tolist() == [7]


def test_row_groups_without_wanted_rows_are_not_read(folder: Path) -> None:
    """Damage in the second row group is an error only for a reader of its rows."""
    flip_a_bit(folder / "node-000001.parquet", 1)
    notes: list[str] = []
    assert steps_of(folder, notes, 3, 999) == [3, 999]
    assert notes == []
    assert steps_of(folder, notes, 3, 1000) == []
    (note,) = notes
    assert note.startswith("spans/node-000001.parquet cannot be read, its rows are missing: ")


def test_extremes_are_read_from_the_files_statistics(folder: Path) -> None:
    for row_group in (0, 1):
        flip_a_bit(folder / "node-000001.parquet", row_group)
    assert list(ParquetFolder(folder).read_each(lambda file: file.read_column_range("step"))) == [
        (0, 2 * ROWS_PER_GROUP - 1)
    ]


def test_large_file_is_read_in_batches(folder: Path) -> None:
    steps = np.arange(300_000)
    pq.write_table(pa.table({"step": steps}), folder / "node-000001.parquet")
    (sizes,) = ParquetFolder(folder).read_each(
        lambda file: [batch.num_rows for batch in file.read_batches(["step"])]
    )
    assert sum(sizes) == len(steps)
    assert max(sizes) <= 1 << 16


def test_files_of_selected_nodes_are_listed_in_order(folder: Path) -> None:
    for name in ("node-000002", "node-1-000001", "other-000001", ".hidden-000001", "node-x"):
        (folder / f"{name}.parquet").touch()
    assert [path.stem for path in ParquetFolder(folder, ["other", "node"]).paths] == [
        "other-000001", "node-000001", "node-000002",
    ]  # fmt: skip
    assert len(ParquetFolder(folder).paths) == 5


def test_disk_error_is_not_reported_as_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar raises the error and tries again later. A page omits the file with a note."""

    def failing(path: Path) -> int:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(ownership, "open_to_read", failing)
    notes: list[str] = []
    with pytest.raises(UnreadableFileError, match="Input/output error"):
        list(
            ParquetFolder(folder, unreadable=make_damage_collector(notes)).read_each(
                ParquetFile.read_table
            )
        )
    assert notes == []
    # A page uses make_error_collector(), which treats disk errors like damage.
    assert (
        list(
            ParquetFolder(folder, unreadable=make_error_collector(notes)).read_each(
                ParquetFile.read_table
            )
        )
        == []
    )
    assert len(notes) == 1


def test_file_without_a_wanted_column_is_reported(folder: Path) -> None:
    pq.write_table(pa.table({"rank": [1]}), folder / "node-000002.parquet")
    notes: list[str] = []
    assert steps_of(folder, notes, 5) == [5]
    assert ["node-000002.parquet" in note for note in notes] == [True]


def test_column_missing_in_an_older_table_is_null() -> None:
    older, newer = pa.table({"step": [1]}), pa.table({"step": [2], "work_ns": [3]})
    assert concatenate_tables([older, newer])["work_ns"].to_pylist() == [None, 3]


def test_reading_does_not_import_pandas(folder: Path) -> None:
    program = (
        "import sys; sys.argv[1:] = ['report', 'nowhere']; from torchlens_perf.commands.cli import"
        " main; main(); import pathlib; from torchlens_perf.store.reader import ParquetFolder,"
        f" ParquetFile; (table,) = ParquetFolder(pathlib.Path({str(folder)!r})).read_each(ParquetFile.read_table);"
        " print(len(table), 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"{2 * ROWS_PER_GROUP} False\n"


def test_rows_are_decoded_on_one_thread(tmp_path: Path) -> None:
    """One thread leaves all other CPUs to the job. Arrow's CPU pool would start one thread for each
    CPU.
    """
    columns = {f"column {at}": np.arange(200_000) for at in range(30)}
    pq.write_table(pa.table(columns), tmp_path / "node-000001.parquet", row_group_size=20_000)
    program = f"""
import os, pathlib, pyarrow as pa
from torchlens_perf.store.reader import ParquetFolder, ParquetFile
pa.set_io_thread_count(1)
pa.set_cpu_count(8)
before = len(os.listdir("/proc/self/task"))
(table,) = ParquetFolder(pathlib.Path({str(tmp_path)!r})).read_each(ParquetFile.read_table)
print(len(table), len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    rows, threads = map(int, done.stdout.split())
    assert rows == 200_000
    # Threads that wait for the disk are allowed, because they use no CPU.
    assert threads < 8
