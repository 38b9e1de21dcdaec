"""Functions that read the samples in telemetry files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.analysis.statistics.hardware import (
    GPU_COUNTERS,
    LINK_COUNTERS,
    GpuSample,
    LinkSample,
    counter_increases,
)
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.file_names import list_node_files
from torchlens_perf.store.samples import GPUS, LINKS


def read_gpus(run: RunDirectory, host: str) -> dict[str, list[GpuSample]]:
    """Return a node's samples by GPU, in order of time."""
    samples: dict[str, list[GpuSample]] = {}
    for row in _rows(run, GPUS, host):
        own = samples.setdefault(row["uuid"], [])
        own.append(
            GpuSample(
                **row, grown=counter_increases(vars(own[-1]) if own else None, row, GPU_COUNTERS)
            )
        )
    return samples


def read_links(run: RunDirectory, host: str) -> dict[str, list[LinkSample]]:
    """Return a node's samples by port, in order of time."""
    samples: dict[str, list[LinkSample]] = {}
    for row in _rows(run, LINKS, host):
        own = samples.setdefault(f"{row['device']}/{row['port']}", [])
        own.append(
            LinkSample(
                **row, grown=counter_increases(vars(own[-1]) if own else None, row, LINK_COUNTERS)
            )
        )
    return samples


def _rows(run: RunDirectory, kind: str, host: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in list_node_files(run.path / kind, host):
        table = pq.read_table(path)
        unix_ns = table.column("time").cast(pa.int64()).to_pylist()
        plain = table.drop_columns(["host", "time"]).to_pylist()
        rows += [{**row, "unix_ns": at} for row, at in zip(plain, unix_ns, strict=True)]
    return rows
