"""Opens Parquet files of a run directory, in which anything may lie. What they declare is checked before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.run import ownership

UNREADABLE = (OSError, ValueError, KeyError, MemoryError, pa.ArrowException)
"""What reading a file raises that somebody has damaged, or another version has written."""
MAX_ROWS = 1 << 23
"""In one file; the sidecar's have fewer than a million."""
MAX_DECODED_BYTES = 1 << 31
"""Of one file's columns, as far as the file declares them."""
_MAX_METADATA_BYTES = 1 << 26
_BYTES_OF_A_VALUE = 8


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a regular file without waiting for another process. Raises one of UNREADABLE, also for a file that would
    take too much memory."""
    descriptor = ownership.open_to_read(path)
    file = os.fdopen(descriptor, "rb")
    try:
        _check_metadata_size(descriptor)
        # A short text that is repeated in millions of rows stays one text.
        texts = [field.name for field in pq.read_schema(file) if _is_text(field.type)]
        opened = pq.ParquetFile(file, page_checksum_verification=True, read_dictionary=texts)
        _check_declared(opened.metadata)
    except BaseException:
        file.close()
        raise
    return opened


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _check_metadata_size(descriptor: int) -> None:
    """The last 8 bytes are the metadata's length and a mark. Arrow itself checks them once they are of a usual size."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 4, max(0, size - 8)), "little")
    if length > _MAX_METADATA_BYTES and os.pread(descriptor, 4, max(0, size - 4)) == b"PAR1":
        raise ValueError(f"its metadata have {length} bytes, more than {_MAX_METADATA_BYTES}")


def _check_declared(metadata: pq.FileMetaData) -> None:
    rows = metadata.num_rows
    if not 0 <= rows <= MAX_ROWS:
        raise ValueError(f"it declares {rows} rows, more than {MAX_ROWS}")
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    # Encoded bytes may be far fewer than the values, and far more where there are few rows.
    columns = [group.column(at) for group in groups for at in range(group.num_columns)]
    encoded = sum(max(0, column.total_uncompressed_size) for column in columns)
    decoded = max(encoded, sum(group.num_rows * group.num_columns * _BYTES_OF_A_VALUE for group in groups))
    if decoded > MAX_DECODED_BYTES:
        raise ValueError(f"it declares {decoded} bytes, more than {MAX_DECODED_BYTES}")
