"""Write the Parquet files of a run directory, and remove the oldest files above a size limit."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.run import ownership
from torchlens_perf.run.grouping import group_values
from torchlens_perf.store.file_names import build_file_path, list_node_files, parse_file_number

FOOTER = b"torchlens_perf"
"""Key of this package's JSON footer in the metadata of a Parquet file."""
_SOUGHT_BY = ("rank", "step", "time")


class TableWriter:
    """Writer of one node's tables. Files that belong together have the same number. One thread."""

    def __init__(self, folders: Sequence[Path], node: str) -> None:
        """folders: all folders whose files count towards the size limit. They may not exist yet."""
        self._node = node
        # No other process writes or removes these files, so their sizes are read from the disk only
        # once.
        self._sizes: dict[Path, int] = {}
        for path in (path for folder in folders for path in list_node_files(folder, node)):
            with contextlib.suppress(FileNotFoundError):
                self._sizes[path] = path.stat().st_size
        self._number = max(map(parse_file_number, self._sizes), default=0)
        self.dropped_segments = 0
        """Number of file numbers whose files were removed to make space for newer files."""
        self.dropped_files = 0
        """Number of files that were removed to make space for newer files."""

    def write_files(
        self,
        files: Mapping[Path, EncodedFile],
        cap_bytes: int,
        footer: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a file to each folder. On an error, no file is written.

        Files are renamed after all are complete, so a killed process leaves no incomplete file.

        cap_bytes: size limit. footer: JSON value for `ParquetFile.footer`. Raise OSError on a full
        disk. After an error, the same files can be written again.
        """
        self._number += 1
        partials: dict[Path, Path] = {}
        try:
            for folder, encoded in files.items():
                folder.mkdir(exist_ok=True)
                path = build_file_path(folder, self._node, self._number)
                partials[path] = path.with_suffix(".partial")
                descriptor = ownership.create_private_file(partials[path])
                with open(descriptor, "wb", buffering=0) as file:
                    ownership.write_all(file, encoded.finish(footer))
            sizes = {path: partial.stat().st_size for path, partial in partials.items()}
            self._remove_oldest_files(sum(sizes.values()), cap_bytes)
            for path, partial in partials.items():
                os.replace(partial, path)
                self._sizes[path] = sizes[path]
        except BaseException:
            for partial in partials.values():
                partial.unlink(missing_ok=True)
            raise

    def _remove_oldest_files(self, needed_bytes: int, cap_bytes: int) -> None:
        """Remove the oldest files, one number at a time, until new files fit the size limit."""
        numbered = group_values((parse_file_number(path), path) for path in self._sizes)
        total = sum(self._sizes.values()) + needed_bytes
        for each in sorted(numbered):
            if total <= cap_bytes:
                break
            for path in numbered[each]:
                path.unlink(missing_ok=True)
                total -= self._sizes.pop(path)
            self.dropped_segments += 1
            self.dropped_files += len(numbered[each])


def text_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the text columns.

    Texts repeat often, so these columns are dictionary-encoded in files and in memory.
    """
    kinds = (pa.types.is_dictionary, pa.types.is_string, pa.types.is_binary)
    return [field.name for field in schema if any(is_kind(field.type) for is_kind in kinds)]


class EncodedFile:
    """The content of a Parquet file in memory. Compressed rows take a third of the memory."""

    def __init__(self) -> None:
        self._content = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None

    def add_rows(self, table: pa.Table) -> None:
        """Encode rows. After an error, the file is unusable."""
        table = table.unify_dictionaries()
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._content,
                table.schema,
                compression="zstd",
                compression_level=1,
                # Times are all different: dictionaries make files two thirds larger, and
                # writing takes 50 % longer.
                use_dictionary=text_columns(table.schema),
                write_statistics=[name for name in _SOUGHT_BY if name in table.schema.names],
                # Without a checksum, a flipped bit would change a value unnoticed.
                write_page_checksum=True,
            )
        self._writer.write_table(table)

    def finish(self, footer: Mapping[str, Any] | None) -> memoryview:
        """Return the complete file. No rows may be added later. Needs at least one row."""
        assert self._writer is not None
        if self._writer.is_open:
            if footer is not None:
                self._writer.add_key_value_metadata({FOOTER: json.dumps(footer)})
            self._writer.close()
        return self._content.getbuffer()
