"""The files of a table and the result of a query, for both engines of `query`."""

from __future__ import annotations

import decimal
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from torchlens_perf.store.reader import ParquetFolder

REMOTE = re.compile(r"(s3|gcs|gs|r2|https?)://")


class Rows(NamedTuple):
    """The result of a query."""

    names: list[str]
    rows: list[tuple[Any, ...]]

    def to_json(self) -> str:
        """Return an array of objects as JSON text: decimals as numbers, NaN and infinity as null, and
        times and other values as texts."""
        return json.dumps(
            [dict(zip(self.names, map(_to_json, row), strict=True)) for row in self.rows],
            indent=1,
            default=str,
            allow_nan=False,
        )


def _to_json(value: object) -> object:
    """Return a value for JSON: decimals as floats, and null for NaN and infinity."""
    if not isinstance(value, (float, decimal.Decimal)):
        return value
    return float(value) if math.isfinite(value) else None


def list_local_files(run: str, table: str, notes: list[str]) -> list[Path]:
    """Return the files of a table of a run. Add a line to `notes` for each damaged file."""
    files = ParquetFolder(Path(run) / table, unreadable=lambda error: notes.append(str(error)))
    return list(files.read_each(lambda file: file.path))
