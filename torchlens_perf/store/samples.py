"""Samples of a node's hardware in Parquet files: one folder for each kind, one column for each
field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.store.writer import TableWriter

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory

GPUS, LINKS, PROCESSES = "gpus", "links", "processes"
_LEFT_OUT = ("grown", "monotonic_ns", "unix_ns")
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


class SampleWriter:
    """Write one node's samples, and keep the newest files below a size limit."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        self._run = run
        self._node = node
        self._writer = TableWriter([run.path / folder for folder in (GPUS, LINKS, PROCESSES)], node)

    @property
    def dropped_files(self) -> int:
        """Number of files that were removed for newer ones."""
        return self._writer.removed_files

    def write(self, samples: Mapping[str, Sequence[Any]], cap_bytes: int) -> None:
        """Write a file into each of these folders, such as GPUS, that has samples. Raise OSError on
        a full disk.

        samples: dataclasses of one class for each folder, with `monotonic_ns` and `unix_ns`.
        """
        host = host_of_node(self._node)
        tables = {
            self._run.path / folder: _build_table(host, each)
            for folder, each in samples.items()
            if each
        }
        if tables:
            self._writer.write(tables, cap_bytes)


def build_schema(kind: type[Any]) -> pa.Schema:
    """Return the columns of all files of a kind of samples, also of those that this node's hardware
    does not report.
    """
    fields = [field for field in dataclasses.fields(kind) if field.name not in _LEFT_OUT]
    columns = [(field.name, _TYPES[str(field.type).removesuffix(" | None")]) for field in fields]
    times = [("time", pa.timestamp("ns", tz="UTC")), ("monotonic_ns", pa.int64())]
    return pa.schema([("host", pa.string()), *columns[:1], *times, *columns[1:]])


def _build_table(host: str, samples: Sequence[Any]) -> pa.Table:
    rows = [{**vars(sample), "host": host, "time": sample.unix_ns} for sample in samples]
    return pa.Table.from_pylist(rows, build_schema(type(samples[0])))
