"""Write samples of a node's hardware to Parquet files, with a folder for each kind of sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import QUANTITIES, Sample
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.store.writer import EncodedFile, TableWriter

_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


class SampleWriter(TableWriter):
    """Writer of one node's samples, which removes the oldest files above a size limit."""

    def __init__(self, run: RunDirectory, node: str) -> None:
        super().__init__([run.path / kind for kind in QUANTITIES], node)
        self._run = run

    def write(self, samples: Sequence[Sample], cap_bytes: int) -> None:
        """Write one file for each kind of the samples. Raise OSError on a full disk."""
        host = host_of_node(self._node)
        files: dict[Path, EncodedFile] = {}
        for kind in dict.fromkeys(sample.kind for sample in samples):
            file = files[self._run.path / kind] = EncodedFile()
            rows = [_build_row(host, sample) for sample in samples if sample.kind == kind]
            file.add_rows(pa.Table.from_pylist(rows, build_schema(kind)))
        if files:
            self.write_files(files, cap_bytes)


def build_schema(kind: str) -> pa.Schema:
    """Return the schema of a kind of samples, including columns that this hardware lacks."""
    columns = [(name, _TYPES[type_]) for name, (type_, _) in QUANTITIES[kind].items()]
    times = [("time", pa.timestamp("ns", tz="UTC")), ("monotonic_ns", pa.int64())]
    return pa.schema([("host", pa.string()), *columns[:1], *times, *columns[1:]])


def _build_row(host: str, sample: Sample) -> dict[str, Any]:
    times = {"time": sample.unix_ns, "monotonic_ns": sample.monotonic_ns}
    return {**sample.values, **times, "host": host}
