"""Reads the run directory's step files, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from torchlens_perf.page.gather.parquet_file import UNREADABLE, open_parquet
from torchlens_perf.page.gather.step_grid import Batch
from torchlens_perf.run.records import PARTS

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.directory import RunDirectory

_ROWS_AT_ONCE = 1 << 16
_PARTS = tuple(f"{part}_ns" for part in PARTS)
_COLUMNS = ("process", "step", "start_ns", "duration_ns", "own_ns", "ready_ns", "memory_bytes", "flags", *_PARTS)
_WORK = "work_ns"  # missing in run directories of earlier versions
_NO_WORK = "Recorded by an earlier version: what is shown as work may hold lack of a CPU."


def step_batches(
    run: RunDirectory, row_of: Mapping[str, int], begin_ns: Mapping[str, int], notes: list[str]
) -> Iterator[Batch]:
    """The steps of these processes. row_of: by key, the grid's row. begin_ns: by key, when the run's first step began,
    by the monotonic clock of its node. notes: gets a line for each file that cannot be read."""
    for path in sorted(run.steps.glob("*.parquet")):
        try:
            with open_parquet(path) as file:
                has_work = _WORK in file.schema_arrow.names
                if not has_work and _NO_WORK not in notes:
                    notes.append(_NO_WORK)
                for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[*_COLUMNS, *([_WORK] if has_work else [])]):
                    found = _batch(batch, row_of, begin_ns)
                    if len(found.row):
                        yield found
        except UNREADABLE as error:
            notes.append(f"{path.name} cannot be read, its steps are missing: {str(error).partition(chr(10))[0]}")


def by_text(column: pa.Array, value_of: Mapping[str, int], missing: int) -> npt.NDArray[np.int64]:
    """What value_of has for each row of a column of texts."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    values = np.array([value_of.get(text, missing) for text in coded.dictionary.to_pylist()] + [missing], np.int64)
    found: npt.NDArray[np.int64] = values[coded.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)]
    return found


def _batch(batch: Any, row_of: Mapping[str, int], begin_ns: Mapping[str, int]) -> Batch:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    row = by_text(columns["process"], row_of, -1)
    begin = by_text(columns["process"], begin_ns, 0)
    ours = row >= 0

    def numbers(name: str) -> npt.NDArray[np.int64]:
        known = columns[name].fill_null(-1)
        found: npt.NDArray[np.int64] = known.to_numpy(zero_copy_only=False)[ours].astype(np.int64)
        return found

    return Batch(
        row=row[ours],
        step=numbers("step"),
        start_ns=numbers("start_ns") - begin[ours],
        duration_ns=numbers("duration_ns"),
        work_ns=numbers(_WORK if _WORK in columns else "own_ns"),
        parts_ns=np.stack([numbers(name) for name in _PARTS], axis=1),
        ready_ns=numbers("ready_ns"),
        memory_bytes=numbers("memory_bytes"),
        flags=numbers("flags"),
    )
