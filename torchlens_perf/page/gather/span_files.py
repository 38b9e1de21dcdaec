"""Reads single steps' records out of the run directory's span files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from torchlens_perf.analysis.statistics.steps import kind_name
from torchlens_perf.page.gather.parquet_file import UNREADABLE, open_parquet
from torchlens_perf.page.gather.step_files import by_text
from torchlens_perf.run.ring import Kind, record_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.directory import RunDirectory

_COPIED = ("step", "depth", "flags", "start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1")
_LEFT_OUT = {Kind.THREAD_TIME, Kind.SKETCH, Kind.MERGED, Kind.MEMORY}
KINDS = {kind_name(kind): int(kind) for kind in Kind if kind not in _LEFT_OUT}
"""Those that are spans, by their names in the files."""
COLLECTIVES = {kind_name(Kind.COLLECTIVE): int(Kind.COLLECTIVE)}


class Records(NamedTuple):
    """Records of one process, in their order; a name_id is a position in `names`."""

    records: npt.NDArray[np.void]
    names: list[str]


def files_of_node(run: RunDirectory, node: str) -> list[Path]:
    """The node's span files, the oldest first."""
    return sorted(path for path in run.spans.glob("*.parquet") if path.stem.rpartition("-")[0] == node)


def kept_steps(run: RunDirectory, nodes: Collection[str]) -> tuple[int, int] | None:
    """From which step to which one some node has span files; None where there are none. The oldest may be gone."""
    lows, highs = [], []
    for node in nodes:
        for path in files_of_node(run, node):
            try:
                with open_parquet(path) as file:
                    column = file.schema_arrow.names.index("step")
                    for group in range(file.metadata.num_row_groups):
                        found = file.metadata.row_group(group).column(column).statistics
                        if found is not None and found.has_min_max:
                            lows.append(found.min)
                            highs.append(found.max)
            except UNREADABLE:
                continue  # whoever reads its rows says so
    return (min(lows), max(highs)) if lows else None


def size_bytes(run: RunDirectory) -> int:
    """Of all span files."""
    return sum(path.stat().st_size for path in run.spans.glob("*.parquet"))


def records_of(
    run: RunDirectory,
    node_of: Mapping[str, str],
    steps: Collection[int],
    notes: list[str],
    kinds: Mapping[str, int] = KINDS,
) -> dict[str, Records]:
    """The records of these processes in these steps, by key. node_of: each process's node, as in names of files.

    notes: gets a line for each file that cannot be read. kinds: those that are wanted, of KINDS. A row group is read
    whole where it has one of them: memory is bounded by the longest of those.
    """
    parts: dict[str, list[pa.Table]] = defaultdict(list)
    wanted = np.array(sorted(steps), np.int64)
    places = {key: index for index, key in enumerate(node_of)}
    for node in dict.fromkeys(node_of.values()):
        for path in files_of_node(run, node):
            try:
                with open_parquet(path) as file:
                    for group in range(file.metadata.num_row_groups):
                        for key, table in _of_group(file, group, wanted, places, kinds):
                            parts[key].append(table)
            except UNREADABLE as error:
                notes.append(f"{path.name} cannot be read, its records are missing: {str(error).partition(chr(10))[0]}")
    return {key: _records(pa.concat_tables(tables)) for key, tables in parts.items()}


def all_records(
    run: RunDirectory, node_of: Mapping[str, str], notes: list[str], kinds: Mapping[str, int]
) -> Iterator[tuple[str, Records]]:
    """The records of these processes, of these kinds: by key, a piece after the other in the order of time.

    Arguments as for records_of().
    """
    places = {key: index for index, key in enumerate(node_of)}
    for node in dict.fromkeys(node_of.values()):
        for path in files_of_node(run, node):
            try:
                with open_parquet(path) as file:
                    pieces = [
                        (key, _records(table, kinds))
                        for group in range(file.metadata.num_row_groups)
                        for key, table in _of_group(file, group, None, places, kinds)
                    ]
            except UNREADABLE as error:
                notes.append(f"{path.name} cannot be read, its records are missing: {str(error).partition(chr(10))[0]}")
            else:
                yield from pieces


def _of_group(
    file: pa.parquet.ParquetFile,
    group: int,
    wanted: npt.NDArray[np.int64] | None,
    places: Mapping[str, int],
    kinds: Mapping[str, int],
) -> list[tuple[str, pa.Table]]:
    sought = file.read_row_group(group, columns=["step", "process", "kind"])
    chosen = np.ones(sought.num_rows, bool)
    if wanted is not None:
        chosen = np.isin(sought.column("step").to_numpy(), wanted)
        if not chosen.any():
            return []
    process = by_text(sought.column("process").combine_chunks(), places, -1)
    chosen &= (process >= 0) & (by_text(sought.column("kind").combine_chunks(), kinds, -1) >= 0)
    if not chosen.any():
        return []
    rows = file.read_row_group(group, columns=["kind", "name", *_COPIED]).take(pa.array(np.flatnonzero(chosen)))
    process = process[chosen]
    keys = list(places)
    return [(keys[at], rows.filter(pa.array(process == at))) for at in np.unique(process).tolist()]


def _records(table: pa.Table, kinds: Mapping[str, int] = KINDS) -> Records:
    records = np.zeros(table.num_rows, record_dtype())
    for column in _COPIED:
        records[column] = table.column(column).to_numpy()
    records["kind"] = by_text(table.column("kind").combine_chunks(), kinds, 0)
    names = table.column("name").combine_chunks()
    if not pa.types.is_dictionary(names.type):
        names = names.dictionary_encode()
    records["name_id"] = names.indices.to_numpy()
    return Records(records, names.dictionary.to_pylist())
