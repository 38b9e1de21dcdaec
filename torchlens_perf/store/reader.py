"""Read the Parquet files of a run directory.

A file in a run directory may come from any source. The reader therefore checks the sizes that a
file declares before it reads the rows, and converts all errors to UnreadableFileError.
`pyarrow.dataset` reads the rows on one thread and uses statistics to skip row groups.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.run import ownership
from torchlens_perf.store.file_names import list_node_files
from torchlens_perf.store.writer import FOOTER, text_columns

MAX_ROWS = 1 << 23
"""Largest number of rows of a file. Files of a sidecar have fewer than a million rows."""
MAX_DECODED_BYTES = 1 << 31
"""Largest decoded size of all columns that a file may declare."""
_MAX_METADATA_BYTES = 1 << 26
_BYTES_OF_A_VALUE = 8
_ROWS_AT_ONCE = 1 << 16
_T = TypeVar("_T")


class UnreadableFileError(RunStoreError):
    """The file is damaged, of another version, or on a disk that fails."""

    def __init__(self, path: Path, error: Exception) -> None:
        why = f"cannot be read, its rows are missing: {str(error).partition(chr(10))[0]}"
        super().__init__(f"{path} {why}")
        self.in_run = f"{path.parent.name}/{path.name} {why}"
        """The same message without the run's folder."""
        # Arrow's own errors have no errno.
        self.by_disk = isinstance(error, OSError) and error.errno is not None
        """True if the disk has failed. The file may be readable later."""


class ParquetFile:
    """One open Parquet file. If the file is damaged, methods may raise any exception.

    ParquetFolder.read_each() converts these exceptions.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        # Arrow opens the file again. A thread of Arrow that still held a Python file at the end of
        # the interpreter would abort the process.
        self._file = pa.OSFile(f"/proc/self/fd/{descriptor}")
        self._opened = pq.ParquetFile(self._file)
        _check_declared_size(self._opened.metadata)
        self.names: list[str] = self._opened.schema_arrow.names

    @property
    def footer(self) -> Any:
        """The JSON value that was passed to TableWriter.write()."""
        return json.loads((self._opened.metadata.metadata or {})[FOOTER])

    def read_column_range(self, column: str) -> tuple[Any, Any] | None:
        """Return a column's smallest and largest value; None if the file lacks statistics."""
        at, metadata = self.names.index(column), self._opened.metadata
        groups = [
            metadata.row_group(group).column(at).statistics
            for group in range(metadata.num_row_groups)
        ]
        if not groups or not all(found is not None and found.has_min_max for found in groups):
            return None
        return min(found.min for found in groups), max(found.max for found in groups)

    def read_batches(self, columns: Collection[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows in batches. Text columns are dictionary arrays. columns: None for all."""
        yield from self._scanner(columns, {}).to_batches()

    def read_table(
        self,
        columns: Collection[str] | None = None,
        where: Mapping[str, Collection[Any]] | None = None,
    ) -> pa.Table:
        """Return the rows in their order. Text columns are dictionary arrays.

        columns: None for all. where: for each column, the values of the requested rows. Row groups
        without such values are skipped.
        """
        return self._scanner(columns, where or {}).to_table().replace_schema_metadata()

    def _scanner(
        self, columns: Collection[str] | None, where: Mapping[str, Collection[Any]]
    ) -> Any:
        # This import takes 50 ms. A sidecar that only writes files does not need pyarrow.dataset.
        import pyarrow.dataset as ds

        fragment = ds.ParquetFileFormat(
            read_options=ds.ParquetReadOptions(
                dictionary_columns=text_columns(self._opened.schema_arrow)
            ),
            default_fragment_scan_options=ds.ParquetFragmentScanOptions(
                pre_buffer=False, page_checksum_verification=True
            ),
        ).make_fragment(self._file)
        conditions = [ds.field(name).isin(list(values)) for name, values in where.items()]
        return fragment.scanner(
            columns=None if columns is None else list(columns),
            filter=functools.reduce(operator.and_, conditions) if conditions else None,
            batch_size=_ROWS_AT_ONCE,
            batch_readahead=0,  # Leave memory and processors to the job.
            use_threads=False,
        )


class ParquetFolder:
    """The Parquet files of one folder, such as `run.spans`, by node and oldest first."""

    def __init__(
        self,
        folder: Path,
        nodes: Collection[str] | None = None,
        unreadable: Callable[[UnreadableFileError], object] | None = None,
    ) -> None:
        """nodes: the nodes whose files are read; None for all files. unreadable: function that is
        called with the error of each skipped file; None to raise the error in read_each()."""
        self._unreadable = unreadable
        if nodes is None:
            self.paths = sorted(folder.glob("[!.]*.parquet"))
        else:
            self.paths = [
                path for node in dict.fromkeys(nodes) for path in list_node_files(folder, node)
            ]

    def size_bytes(self) -> int:
        """Return the total size of all files that still exist."""
        size = 0
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def read_each(self, use: Callable[[ParquetFile], _T]) -> Iterator[_T]:
        """Call `use` with each file and yield the results. An error in it means a damaged file."""
        for path in self.paths:
            try:
                if path.parent.is_symlink():
                    raise RunStoreError(f"{path.parent} is a link")
                with open(ownership.open_to_read(path), "rb") as file:
                    _check_metadata_size(file.fileno())
                    found = use(ParquetFile(path, file.fileno()))
            except (OSError, RunStoreError, pa.ArrowException, *DAMAGED_DATA) as error:
                why = UnreadableFileError(path, error)
                if self._unreadable is None:
                    raise why from None
                self._unreadable(why)
            else:
                yield found


def make_error_collector(notes: list[str]) -> Callable[[UnreadableFileError], None]:
    """Return a function for ParquetFolder's `unreadable` that adds each error to `notes`."""
    return lambda error: notes.append(error.in_run)


def make_damage_collector(notes: list[str] | None) -> Callable[[UnreadableFileError], None]:
    """Return a function for ParquetFolder's `unreadable` that adds damaged files to `notes`.

    The function raises errors of a failing disk. If `notes` is None, it raises every error.
    """

    def note(error: UnreadableFileError) -> None:
        if notes is None or error.by_disk:
            raise error
        notes.append(str(error))

    return note


def concatenate_tables(tables: Collection[pa.Table]) -> pa.Table:
    """Concatenate the rows of all tables. Each text column gets one dictionary.

    If a table lacks a column, the values of its rows are null.
    """
    return pa.concat_tables(tables, promote_options="default").unify_dictionaries()


def map_texts(
    column: pa.Array | pa.ChunkedArray, value_of: Mapping[str, int], missing: int
) -> npt.NDArray[np.int64]:
    """Replace each text of a column by its value in `value_of`, or by `missing`."""
    codes, texts = split_dictionary(column)
    values = np.array([value_of.get(text, missing) for text in texts], np.int64)
    return values[codes]


def split_dictionary(column: pa.Array | pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return the codes of a text column, and the list of texts into which the codes are indexes."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        raise ValueError("a text is missing")
    return array.indices.to_numpy(), array.dictionary.to_pylist()


def to_floats(column: pa.ChunkedArray) -> npt.NDArray[np.float64] | None:
    """Convert a numeric or time column to floats, with NaN for null; None for other columns."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return None
    return np.asarray(column.to_numpy(), np.float64)


def _check_metadata_size(descriptor: int) -> None:
    """Raise ValueError if a file's metadata are too long. The last 8 bytes contain their length."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 4, max(0, size - 8)), "little")
    if length > _MAX_METADATA_BYTES and os.pread(descriptor, 4, max(0, size - 4)) == b"PAR1":
        raise ValueError(f"its metadata have {length} bytes, more than {_MAX_METADATA_BYTES}")


def _check_declared_size(metadata: pq.FileMetaData) -> None:
    rows = metadata.num_rows
    if not 0 <= rows <= MAX_ROWS:
        raise ValueError(f"it declares {rows} rows, more than {MAX_ROWS}")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    # The encoded size may be far smaller than the decoded size, or far larger if rows are few.
    columns = [group.column(at) for group in groups for at in range(group.num_columns)]
    encoded = sum(max(0, column.total_uncompressed_size) for column in columns)
    decoded = max(
        encoded, sum(group.num_rows * group.num_columns * _BYTES_OF_A_VALUE for group in groups)
    )
    if decoded > MAX_DECODED_BYTES:
        raise ValueError(f"it declares {decoded} bytes, more than {MAX_DECODED_BYTES}")
