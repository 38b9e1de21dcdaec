"""Write and read segments: pairs of Parquet files with a node's records and steps.

Users can also read these files with DuckDB, pandas or polars. Each file is written under another
name and then renamed, so a killed sidecar leaves no incomplete file. Records that are not yet in a
file are still in the ring files.

The footer of a file lists the processes whose records it contains. The footer also contains each
process's last sequence number and clock anchor, which converts monotonic times to Unix times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.records import PARTS, StepTable
from torchlens_perf.run.ring import Kind, kind_name, record_dtype
from torchlens_perf.store.reader import (
    ParquetFile,
    ParquetFolder,
    UnreadableFileError,
    make_damage_collector,
    map_texts,
    split_dictionary,
)
from torchlens_perf.store.writer import EncodedFile, TableWriter

_COPIED = (
    "step",
    "depth",
    "flags",
    "start_ns",
    "duration_ns",
    "nested_ns",
    "phase_ns",
    "value0",
    "value1",
)
_RECORD = ("process", "kind", "name", *_COPIED)
# Segments are written in pieces of this many rows, because Arrow tables need twice the memory of the
# records.
_MIN_ROWS = 1 << 15
_ORIGIN = ("rank", "attempt", "host")
_KINDS = {kind_name(kind): int(kind) for kind in Kind}
_NO_SPANS = (Kind.THREAD_TIME, Kind.SKETCH, Kind.MERGED, Kind.MEMORY, Kind.OPERATORS)
SPANS = tuple(kind for kind in Kind if kind not in _NO_SPANS)
"""The kinds of records that describe spans."""


@dataclasses.dataclass(frozen=True)
class RecordOrigin:
    """The process that wrote records. Its fields are constant columns of their rows."""

    key: str
    rank: int
    attempt: int
    host: str
    anchor: Anchor


@dataclasses.dataclass(frozen=True)
class RecordChunk:
    """Successive records of one process up to the end of a step, and the steps that they complete."""

    origin: RecordOrigin
    records: npt.NDArray[np.void]
    sequences: npt.NDArray[np.int64]
    names: list[str]
    steps: StepTable


class ProcessRecords(NamedTuple):
    """Records of one process in their order. A name_id is an index in `names`."""

    records: npt.NDArray[np.void]
    names: list[str]


class SegmentWriter(TableWriter):
    """Writer of one node's segments, which removes the oldest segments above a size limit."""

    def __init__(self, run: RunDirectory, node: str, cap_bytes: int) -> None:
        super().__init__([run.spans, run.steps], node)
        self._run, self._cap_bytes = run, cap_bytes
        self._spans, self._steps = EncodedFile(), list[pa.Table]()
        self._footer: dict[str, dict[str, Any]] = {}
        self.encoded_records = 0
        """Number of records that add_chunks() has encoded and that are not in a file yet."""

    def add_chunks(self, chunks: list[RecordChunk]) -> None:
        """Encode chunks for the next segment. After an error, the next segment is empty."""
        try:
            for table in _join_tables(map(_build_span_table, chunks)):
                self._spans.add_rows(table)
            self._steps += map(_build_step_table, chunks)
        except BaseException:
            self.discard_added()
            raise
        for chunk in chunks:
            self.encoded_records += len(chunk.records)
            self._footer[chunk.origin.key] = {
                "last_sequence": int(chunk.sequences[-1]),
                "anchor": list(chunk.origin.anchor),
            }

    def write_added(self) -> dict[str, int]:
        """Write the added chunks as one segment: a file of spans and a file of steps.

        Return the last written sequence number of each process. Raise OSError on a full disk. The
        next call then tries again, and no chunks may be added before.
        """
        if not self.encoded_records:
            return {}
        steps = EncodedFile()
        steps.add_rows(pa.concat_tables(self._steps))
        self.write_files(
            {self._run.spans: self._spans, self._run.steps: steps}, self._cap_bytes, self._footer
        )
        written = {key: int(each["last_sequence"]) for key, each in self._footer.items()}
        self.discard_added()
        return written

    def discard_added(self) -> int:
        """Discard the added chunks. Return the number of their records."""
        records, self.encoded_records = self.encoded_records, 0
        self._spans, self._steps, self._footer = EncodedFile(), [], {}
        return records


def read_last_sequences(
    run: RunDirectory, node: str, notes: list[str] | None = None
) -> dict[str, int]:
    """Return each process's last sequence number in the node's segments.

    A restarted sidecar continues after the last sequence numbers. The records of a damaged segment
    are read from the ring files again if possible.

    notes: list to which a line is added for each damaged segment; None to raise an error instead.
    Raise UnreadableFileError if the disk fails.
    """
    last: dict[str, int] = {}
    for footer in ParquetFolder(run.spans, [node], make_damage_collector(notes)).read_each(
        _read_footer
    ):
        for key, kept in footer.items():
            last[key] = max(last.get(key, -1), int(kept["last_sequence"]))
    return last


def read_chunks(
    run: RunDirectory,
    node: str,
    notes: list[str] | None = None,
    segment_done: Callable[[], object] = lambda: None,
) -> Iterator[tuple[RecordOrigin, npt.NDArray[np.void], list[str], int]]:
    """Yield origin, records, names and the number of lost records for each chunk of a node.

    Damaged segments are skipped. Records of a damaged segment count as lost if later records exist.

    notes: list to which a line is added for each damaged segment; None to raise an error instead.
    segment_done: called after each segment. Raise UnreadableFileError if the disk fails.
    """
    expected: dict[str, int] = {}
    segments = ParquetFolder(
        run.spans, [node], lambda error: (make_damage_collector(notes)(error), segment_done())
    )
    for chunks in segments.read_each(_read_segment):
        for origin, (records, names), sequences in chunks:
            lost = (
                int(sequences[-1])
                + 1
                - expected.get(origin.key, int(sequences[0]))
                - len(sequences)
            )
            expected[origin.key] = int(sequences[-1]) + 1
            yield origin, records, names, max(0, lost)
        segment_done()


def find_kept_step_range(run: RunDirectory, nodes: Collection[str]) -> tuple[int, int] | None:
    """Return the first and last step in the span files of these nodes; None without span files.

    Files of the oldest steps may have been removed. Unreadable files are skipped here, because
    functions that read rows report such files.
    """
    found = ParquetFolder(run.spans, nodes, lambda error: None).read_each(
        lambda file: file.read_column_range("step")
    )
    extremes = [each for each in found if each is not None]
    return (
        (min(low for low, _ in extremes), max(high for _, high in extremes)) if extremes else None
    )


def iterate_records(
    run: RunDirectory,
    node_of: Mapping[str, str],
    unreadable: Callable[[UnreadableFileError], object],
    kinds: Collection[Kind] = SPANS,
    steps: Collection[int] | None = None,
) -> Iterator[tuple[str, ProcessRecords]]:
    """Yield key and records of these processes, kinds and steps, in batches in time order.

    node_of: name of the node by key of the process. unreadable: see ParquetFolder. steps: None for
    all.
    """
    where: dict[str, Collection[Any]] = {} if steps is None else {"step": steps}
    where = {**where, "process": list(node_of), "kind": [kind_name(kind) for kind in kinds]}
    files = ParquetFolder(run.spans, node_of.values(), unreadable)
    for pieces in files.read_each(lambda file: _split_by_process(file.read_table(_RECORD, where))):
        yield from pieces.items()


def read_records(
    run: RunDirectory,
    node_of: Mapping[str, str],
    steps: Collection[int],
    unreadable: Callable[[UnreadableFileError], object],
    kinds: Collection[Kind] = SPANS,
) -> dict[str, ProcessRecords]:
    """Return the records of these processes, kinds and steps by the key of their process.

    The arguments are those of iterate_records(). Memory is bounded by the result and by the largest
    row group that contains one of the steps.
    """
    pieces = group_values(iterate_records(run, node_of, unreadable, kinds, steps))
    return {key: _join_pieces(of_process) for key, of_process in pieces.items()}


def _read_footer(file: ParquetFile) -> dict[str, Any]:
    kept: dict[str, Any] = file.footer
    if not all(
        isinstance(each["last_sequence"], int) and len(each["anchor"]) == 3
        for each in kept.values()
    ):
        raise ValueError("its footer is another one's")
    return kept


def _read_segment(
    file: ParquetFile,
) -> list[tuple[RecordOrigin, ProcessRecords, npt.NDArray[np.int64]]]:
    """Return origin, records and sequence numbers of each process in a segment."""
    anchors = {key: Anchor(*kept["anchor"]) for key, kept in _read_footer(file).items()}
    table = file.read_table([*_RECORD, *_ORIGIN, "sequence"])
    codes, keys = split_dictionary(table.column("process"))
    sequences = table.column("sequence").to_numpy()
    found = []
    for key, records in _split_by_process(table).items():
        rows = codes == keys.index(key)
        rank, attempt, host = (table.column(name)[int(rows.argmax())].as_py() for name in _ORIGIN)
        origin = RecordOrigin(key, rank, attempt, host, anchors.get(key, Anchor(0, 0, 0)))
        found.append((origin, records, sequences[rows]))
    return found


def _split_by_process(table: pa.Table) -> dict[str, ProcessRecords]:
    """Split the rows of a span table by process, in the order of each process's first row."""
    records = np.zeros(table.num_rows, record_dtype())
    for column in _COPIED:
        records[column] = table.column(column).to_numpy()
    records["kind"] = map_texts(table.column("kind"), _KINDS, 0)
    records["name_id"], names = split_dictionary(table.column("name"))
    codes, keys = split_dictionary(table.column("process"))
    _, firsts = np.unique(codes, return_index=True)
    return {
        keys[code]: ProcessRecords(records[codes == code], names)
        for code in codes[np.sort(firsts)].tolist()
    }


def _join_pieces(pieces: list[ProcessRecords]) -> ProcessRecords:
    records, names = [], list[str]()
    for piece in pieces:
        piece.records["name_id"] += len(names)
        names += piece.names
        records.append(piece.records)
    return ProcessRecords(np.concatenate(records), names)


def _join_tables(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join small tables to tables of at least _MIN_ROWS rows, except for the last one."""
    joined: list[pa.Table] = []
    for table in tables:
        joined.append(table)
        if sum(map(len, joined)) >= _MIN_ROWS:
            yield pa.concat_tables(joined)
            joined.clear()
    if joined:
        yield pa.concat_tables(joined)


def _build_span_table(chunk: RecordChunk) -> pa.Table:
    records = chunk.records
    kinds, kind_codes = np.unique(records["kind"], return_inverse=True)
    return pa.table(
        {
            **_build_origin_columns(chunk.origin, len(records)),
            "kind": _encode_texts(kind_codes, [kind_name(int(kind)) for kind in kinds]),
            "name": _encode_texts(
                np.minimum(records["name_id"], len(chunk.names)), [*chunk.names, "(unknown)"]
            ),
            "time": _to_timestamps(records["start_ns"], chunk.origin.anchor),
            "sequence": chunk.sequences,
            **{name: np.ascontiguousarray(records[name]) for name in _COPIED},
        }
    )


def _build_step_table(chunk: RecordChunk) -> pa.Table:
    steps = chunk.steps
    return pa.table(
        {
            **_build_origin_columns(chunk.origin, len(steps)),
            "step": steps.step,
            "time": _to_timestamps(steps.start_ns, chunk.origin.anchor),
            "start_ns": steps.start_ns,
            "duration_ns": steps.duration_ns,
            "own_ns": steps.own_ns,
            "work_ns": steps.work_ns,
            **{
                f"{part}_ns": np.ascontiguousarray(steps.parts_ns[:, i])
                for i, part in enumerate(PARTS)
            },
            # A process that computes needs memory, so 0 means that it was not measured.
            "memory_bytes": pa.array(steps.memory_bytes, mask=steps.memory_bytes <= 0),
            "micro_steps": steps.micro_steps,
            "flags": steps.flags,
            "workload": _null_if_negative(steps.workload),
            "cpu_ns": _sum_phases(steps.cpu_ns),
            "ready_ns": _sum_phases(steps.ready_ns),
            **{
                f"{part}_ready_ns": _null_if_negative(steps.ready_ns[:, i])
                for i, part in enumerate(PARTS)
            },
        }
    )


def _sum_phases(times_ns: npt.NDArray[np.int64]) -> pa.Array:
    """Return the sum of each step's phases; null if the times were not measured."""
    return _null_if_negative(np.where(times_ns[:, 0] < 0, -1, times_ns.sum(axis=1)))


def _null_if_negative(values: npt.NDArray[np.int64]) -> pa.Array:
    """Convert values to an Arrow array with null for negative values, which were not measured."""
    return pa.array(values, mask=values < 0)


def _build_origin_columns(origin: RecordOrigin, rows: int) -> dict[str, Any]:
    return {
        "rank": np.full(rows, origin.rank, np.int32),
        "attempt": np.full(rows, origin.attempt, np.int32),
        "host": _encode_texts(np.zeros(rows), [origin.host]),
        "process": _encode_texts(np.zeros(rows), [origin.key]),
    }


def _encode_texts(codes: npt.NDArray[Any], texts: list[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        pa.array(codes.astype(np.int32)), pa.array(texts, pa.string())
    )


def _to_timestamps(monotonic_ns: npt.NDArray[np.int64], anchor: Anchor) -> pa.Array:
    unix_ns = np.asarray(monotonic_ns, np.int64) + anchor.offset_ns
    return pa.array(unix_ns, pa.timestamp("ns", tz="UTC"))
