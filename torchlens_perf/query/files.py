"""The files of a table and the result of a query, for both engines of `query`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from torchlens_perf.store.reader import ParquetFolder

REMOTE = re.compile(r"(s3|gcs|gs|r2|https?)://")


class Rows(NamedTuple):
    """The result of a query."""

    names: list[str]
    rows: list[tuple[Any, ...]]


def list_local_files(run: str, table: str, notes: list[str]) -> list[Path]:
    """Return the files of a table of a run. Add a line to `notes` for each damaged file."""
    files = ParquetFolder(Path(run) / table, unreadable=lambda error: notes.append(str(error)))
    return list(files.read_each(lambda file: file.path))
