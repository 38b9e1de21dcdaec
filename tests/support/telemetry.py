"""Functions that make samples of hardware, and that read the samples in telemetry files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import (
    COUNTERS,
    GPUS,
    LINKS,
    QUANTITIES,
    Sample,
    counter_increases,
)
from torchlens_perf.store.file_names import list_node_files


def gpu_sample(uuid: str, monotonic_ns: int, unix_ns: int = 0, **values: Any) -> Sample:
    """Return a sample of a GPU. `grown` may be one of the values."""
    grown = values.pop("grown", {})
    assert values.keys() <= QUANTITIES[GPUS].keys()
    return Sample(GPUS, uuid, monotonic_ns, unix_ns, {"uuid": uuid, **values}, grown)


def port_sample(
    device: str, port: int, monotonic_ns: int = 0, unix_ns: int = 0, **values: Any
) -> Sample:
    """Return a sample of a network port. `grown` may be one of the values."""
    grown = values.pop("grown", {})
    values |= {"device": device, "port": port}
    assert values.keys() <= QUANTITIES[LINKS].keys()
    return Sample(LINKS, f"{device}/{port}", monotonic_ns, unix_ns, values, grown)


def read_samples(run: RunDirectory, kind: str, host: str) -> dict[str, list[Sample]]:
    """Return a node's samples of GPUS or LINKS by their names, in order of time."""
    samples: dict[str, list[Sample]] = {}
    for path in list_node_files(run.path / kind, host):
        table = pq.read_table(path)
        unix_ns = table.column("time").cast(pa.int64()).to_pylist()
        rows = table.drop_columns(["host", "time"]).to_pylist()
        for row, at_ns in zip(rows, unix_ns, strict=True):
            monotonic_ns = row.pop("monotonic_ns")
            name = row["uuid"] if kind == GPUS else f"{row['device']}/{row['port']}"
            values = {quantity: value for quantity, value in row.items() if value is not None}
            own = samples.setdefault(name, [])
            grown = counter_increases(own[-1].values, values, COUNTERS[kind]) if own else {}
            own.append(Sample(kind, name, monotonic_ns, at_ns, values, grown))
    return samples
