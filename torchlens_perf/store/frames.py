"""Write tables of a run as Arrow streams, for pandas, polars or pyarrow in another process."""

from __future__ import annotations

from typing import IO

import pyarrow as pa

from torchlens_perf.errors import RunStoreError
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.reader import (
    ParquetFile,
    ParquetFolder,
    concatenate_tables,
    make_damage_collector,
)

_SORTED_BY = ("rank", "attempt", "step", "sequence", "time")


def write_table(run: RunDirectory, name: str, file: IO[bytes]) -> None:
    """Write a table of the run to an Arrow stream, sorted by rank, attempt, step and time.

    Damaged files are skipped and logged. name: a folder of the run directory, such as "steps".
    Raise RunStoreError if there is no file or the disk fails.
    """
    notes: list[str] = []
    tables = list(
        ParquetFolder(run.path / name, unreadable=make_damage_collector(notes)).read_each(
            ParquetFile.read_table
        )
    )
    for note in notes:
        logger.warning("%s", note)
    if not tables:
        raise RunStoreError(f"{run.path} has no {name} yet")
    table = concatenate_tables(tables)
    table = table.sort_by([(key, "ascending") for key in _SORTED_BY if key in table.schema.names])
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
