"""The records of a run on disk: Parquet files that DuckDB, pandas or polars read without us.

Each file is written whole under another name and then renamed, so a killed sidecar leaves no torn file; what it had not
written yet is still in the ring files. Footer metadata say which processes' records a file holds, up to which sequence
number, and how to lay their monotonic times on the wall clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.analysis.statistics.steps import kind_name
from torchlens_perf.errors import RunStoreError
from torchlens_perf.page.gather.parquet_file import open_parquet
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Kind, record_dtype
from torchlens_perf.sidecar.rings.bounded_files import BoundedFiles, files_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.directory import RunDirectory

logger = logging.getLogger("torchlens_perf.sidecar")

_FOOTER = b"torchlens_perf"
_SOUGHT_BY = ["rank", "step", "time"]  # readers skip files by their smallest and largest values
_COPIED = ("step", "depth", "flags", "start_ns", "duration_ns", "nested_ns", "phase_ns", "value0", "value1")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose records these are: constant columns of their rows."""

    key: str
    rank: int
    attempt: int
    host: str
    anchor: Anchor


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Records of one process, ending with a whole step, and the steps they finish."""

    origin: Origin
    records: npt.NDArray[np.void]
    sequences: npt.NDArray[np.int64]
    names: list[str]
    steps: StepTable


class SegmentWriter:
    """Writes one node's segments and keeps their total below a cap, the newest kept."""

    def __init__(self, run: RunDirectory, host: str, cap_bytes: int) -> None:
        self._run = run
        self._cap_bytes = cap_bytes
        self._files = BoundedFiles([run.spans, run.steps], host)

    @property
    def dropped_segments(self) -> int:
        """How many had to go for newer ones."""
        return self._files.removed_numbers

    def write(self, chunks: list[Chunk]) -> None:
        """Writes the chunks as one segment: a file of spans and a file of steps. Raises OSError on a full disk."""
        if not chunks:
            return
        kept: dict[str, dict[str, Any]] = {}
        for chunk in chunks:
            kept[chunk.origin.key] = {
                "last_sequence": int(chunk.sequences[-1]),
                "anchor": list(chunk.origin.anchor),
            }
        tables = {
            self._run.spans: pa.concat_tables([_span_table(chunk) for chunk in chunks]),
            self._run.steps: pa.concat_tables([_step_table(chunk) for chunk in chunks]),
        }
        writers = {folder: functools.partial(_write, table=table, kept=kept) for folder, table in tables.items()}
        self._files.write(writers, self._cap_bytes)


def last_sequences(run: RunDirectory, host: str, notes: list[str] | None = None) -> dict[str, int]:
    """The last sequence number of each process that the node's segments hold: where a restarted sidecar goes on.

    notes: gets a line for each segment that is damaged, which is left alone; its records are read again where they are
    still in the rings. None: that is an error. Raises RunStoreError, also where the disk does not answer as it should.
    """
    last: dict[str, int] = {}
    for path in files_of(run.spans, host):
        try:
            for key, kept in _footer(path).items():
                last[key] = max(last.get(key, -1), int(kept["last_sequence"]))
        except DamagedSegmentError as error:
            if notes is None:
                raise
            notes.append(f"{error}: its records are missing")
    return last


def hosts(run: RunDirectory) -> list[str]:
    """The nodes that have written segments."""
    names = {path.stem.rpartition("-") for path in run.spans.glob("*.parquet")}
    return sorted({host for host, _, number in names if number.isdecimal()})


def read_chunks(
    run: RunDirectory, host: str, notes: list[str] | None = None, segment_done: Callable[[], object] = lambda: None
) -> Iterator[tuple[Origin, npt.NDArray[np.void], list[str], int]]:
    """A node's records as they were read from the rings: origin, records, names, and records lost before them.

    notes: gets a line for each segment that is damaged, which is left out; its records are counted as lost where later
    ones follow. None: that is an error. segment_done: called after each segment. Raises RunStoreError, also where the
    disk does not answer as it should.
    """
    expected: dict[str, int] = {}
    for path in files_of(run.spans, host):
        try:
            with _opened(path) as segment:
                chunks = list(_chunks(segment))
        except DamagedSegmentError as error:
            if notes is None:
                raise
            notes.append(f"{error}: its records are missing")
            segment_done()
            continue
        for origin, records, names, sequences in chunks:
            lost = int(sequences[-1]) + 1 - expected.get(origin.key, int(sequences[0])) - len(sequences)
            expected[origin.key] = int(sequences[-1]) + 1
            yield origin, records, names, max(0, lost)
        segment_done()


def write_table(run: RunDirectory, name: str, file: IO[bytes]) -> None:
    """Write a table of the run to an Arrow stream, by rank, attempt, step and time.

    name: a folder of the run directory, such as "steps". Damaged files are left out, with a line in the log. Raise
    RunStoreError where there is no file.
    """
    tables = []
    for path in sorted((run.path / name).glob("[!.]*.parquet")):
        try:
            with _opened(path) as segment:
                tables.append(segment.read().replace_schema_metadata())
        except DamagedSegmentError as error:
            logger.warning("%s: its rows are missing", error)
    if not tables:
        raise RunStoreError(f"{run.path} has no {name} yet")
    table = pa.concat_tables(tables, promote_options="default").unify_dictionaries()
    keys = [key for key in ("rank", "attempt", "step", "sequence", "time") if key in table.schema.names]
    table = table.sort_by([(key, "ascending") for key in keys])
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def _chunks(segment: pq.ParquetFile) -> Iterator[tuple[Origin, npt.NDArray[np.void], list[str], npt.NDArray[np.int64]]]:
    """A segment's, by process: origin, records, names, sequence numbers. Raises whatever damage leads to."""
    table = segment.read()
    anchors = {key: Anchor(*kept["anchor"]) for key, kept in _footer_of(segment).items()}
    processes = table.column("process").cast(pa.string()).combine_chunks().dictionary_encode()
    indices = processes.indices.to_numpy()
    for number, key in enumerate(processes.dictionary.to_pylist()):  # as they come in the file
        part = table.filter(pa.array(indices == number))
        records, names = _records_of(part)
        origin = Origin(
            key=key,
            rank=part.column("rank")[0].as_py(),
            attempt=part.column("attempt")[0].as_py(),
            host=part.column("host")[0].as_py(),
            anchor=anchors.get(key, Anchor(0, 0, 0)),
        )
        yield origin, records, names, part.column("sequence").to_numpy()


def _records_of(table: pa.Table) -> tuple[npt.NDArray[np.void], list[str]]:
    records = np.zeros(table.num_rows, record_dtype())
    for column in _COPIED:
        records[column] = table.column(column).to_numpy()
    kinds = {kind_name(kind): int(kind) for kind in Kind}
    kind_column = table.column("kind").combine_chunks().dictionary_encode()
    name_column = table.column("name").combine_chunks().dictionary_encode()
    kind_ids = np.array([kinds.get(name, 0) for name in kind_column.dictionary.to_pylist()], np.uint8)
    records["kind"] = kind_ids[kind_column.indices.to_numpy()]
    records["name_id"] = name_column.indices.to_numpy()
    return records, name_column.dictionary.to_pylist()


def _span_table(chunk: Chunk) -> pa.Table:
    records = chunk.records
    kinds, kind_codes = np.unique(records["kind"], return_inverse=True)
    columns: dict[str, Any] = {
        **_origin_columns(chunk.origin, len(records)),
        "kind": pa.DictionaryArray.from_arrays(
            pa.array(kind_codes, pa.int32()), pa.array([kind_name(int(kind)) for kind in kinds], pa.string())
        ),
        "name": _name_column(records["name_id"], chunk.names),
        "time": _times(records["start_ns"], chunk.origin.anchor),
        "sequence": chunk.sequences,
    }
    columns.update({name: np.ascontiguousarray(records[name]) for name in _COPIED})
    return pa.table(columns)


def _name_column(name_ids: npt.NDArray[np.uint32], names: list[str]) -> pa.DictionaryArray:
    known = [*names, "(unknown)"]
    codes = np.minimum(name_ids, len(names)).astype(np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(known, pa.string()))


def _step_table(chunk: Chunk) -> pa.Table:
    steps = chunk.steps
    columns: dict[str, Any] = {
        **_origin_columns(chunk.origin, len(steps)),
        "step": steps.step,
        "time": _times(steps.start_ns, chunk.origin.anchor),
        "start_ns": steps.start_ns,
        "duration_ns": steps.duration_ns,
        "own_ns": steps.own_ns,
        "work_ns": steps.work_ns,
    }
    columns.update({f"{part}_ns": np.ascontiguousarray(steps.parts_ns[:, i]) for i, part in enumerate(PARTS)})
    columns.update(memory_bytes=steps.memory_bytes, micro_steps=steps.micro_steps, flags=steps.flags)
    columns["workload"] = _known(steps.workload)
    for name in ("cpu_ns", "ready_ns"):
        times = getattr(steps, name)
        columns[name] = _known(np.where(times[:, 0] < 0, -1, times.sum(axis=1)))
    return pa.table(columns)


def _known(values: npt.NDArray[np.int64]) -> pa.Array:
    """Null where nothing was measured."""
    return pa.array(values, mask=values < 0)


def _origin_columns(origin: Origin, rows: int) -> dict[str, Any]:
    def constant(text: str) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text], pa.string()))

    return {
        "rank": np.full(rows, origin.rank, np.int32),
        "attempt": np.full(rows, origin.attempt, np.int32),
        "host": constant(origin.host),
        "process": constant(origin.key),
    }


def _times(monotonic_ns: npt.NDArray[np.int64], anchor: Anchor) -> pa.Array:
    unix_ns = np.asarray(monotonic_ns, np.int64) + (anchor.unix_ns - anchor.monotonic_ns)
    return pa.array(unix_ns, pa.timestamp("ns", tz="UTC"))


def _write(path: Path, table: pa.Table, kept: dict[str, Any]) -> None:
    table = table.unify_dictionaries().replace_schema_metadata({_FOOTER: json.dumps(kept).encode()})
    # No two times are the same: dictionaries of them would make a file two thirds larger and take half as long again.
    texts = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    with open(path, "wb") as file:  # pyarrow opens no path whose bytes are not UTF-8
        pq.write_table(
            table, file, compression="zstd", compression_level=1, use_dictionary=texts, write_statistics=_SOUGHT_BY,
            write_page_checksum=True,  # a changed bit would be another time
        )  # fmt: skip


def _footer(path: Path) -> dict[str, Any]:
    with _opened(path) as segment:
        return _footer_of(segment)


def _footer_of(segment: pq.ParquetFile) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((segment.schema_arrow.metadata or {})[_FOOTER])
    if not all(isinstance(each["last_sequence"], int) and len(each["anchor"]) == 3 for each in kept.values()):
        raise ValueError("its footer is another one's")
    return kept


class DamagedSegmentError(RunStoreError):
    """A file that can be read and is no segment of this version's."""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with open_parquet(path) as segment:
            yield segment
    except RunStoreError:
        raise
    except Exception as error:  # whatever somebody has put there
        by_disk = isinstance(error, OSError) and error.errno is not None  # Arrow's own have none
        kind = RunStoreError if by_disk else DamagedSegmentError
        raise kind(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from None
