"""Write samples of a node's hardware to Parquet files, with a folder for each kind of sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.store.writer import EncodedFile, TableWriter

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory

GPUS, LINKS, PROCESSES = "gpus", "links", "processes"
_LEFT_OUT = ("grown", "monotonic_ns", "unix_ns")
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


class SampleWriter(TableWriter):
    """Writer of one node's samples, which removes the oldest files above a size limit."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        super().__init__([run.path / folder for folder in (GPUS, LINKS, PROCESSES)], node)
        self._run = run

    def write(self, samples: Mapping[str, Sequence[Any]], cap_bytes: int) -> None:
        """Write one file of samples to each folder, such as GPUS. Raise OSError on a full disk.

        samples: for each folder, dataclasses of one class with `monotonic_ns` and `unix_ns`.
        """
        host = host_of_node(self._node)
        files = {self._run.path / folder: EncodedFile() for folder, each in samples.items() if each}
        for path, file in files.items():
            file.add_rows(_build_table(host, samples[path.name]))
        if files:
            self.write_files(files, cap_bytes)


def build_schema(kind: type[Any]) -> pa.Schema:
    """Return the schema of a kind of samples, including columns that this hardware lacks."""
    fields = [field for field in dataclasses.fields(kind) if field.name not in _LEFT_OUT]
    columns = [(field.name, _TYPES[str(field.type).removesuffix(" | None")]) for field in fields]
    times = [("time", pa.timestamp("ns", tz="UTC")), ("monotonic_ns", pa.int64())]
    return pa.schema([("host", pa.string()), *columns[:1], *times, *columns[1:]])


def _build_table(host: str, samples: Sequence[Any]) -> pa.Table:
    rows = [{**vars(sample), "host": host, "time": sample.unix_ns} for sample in samples]
    return pa.Table.from_pylist(rows, build_schema(type(samples[0])))
