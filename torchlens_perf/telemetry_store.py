"""Samples of GPUs and ports on disk: Parquet files beside those of steps and spans, bounded like them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchlens_perf.errors import RunStoreError
from torchlens_perf.run_directory import RunDirectory
from torchlens_perf.telemetry import GPU_COUNTERS, LINK_COUNTERS, GpuSample, LinkSample, Sample, growth

_SHARE_OF_DISK = 16  # of disk_bytes, telemetry takes at most one part in so many
GPUS, LINKS = "gpus", "links"
_TIMES = ("monotonic_ns", "unix_ns")
_LEFT_OUT = ("grown", *_TIMES)
_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


def telemetry_bytes(disk_bytes: int) -> int:
    """How much of a node's disk_bytes telemetry may take."""
    return disk_bytes // _SHARE_OF_DISK


def _schema(kind: type[Sample]) -> pa.Schema:
    """The columns of all files of a kind: whether or not this node's hardware tells them."""
    fields = [field for field in dataclasses.fields(kind) if field.name not in _LEFT_OUT]
    columns = [(field.name, _TYPES[str(field.type).removesuffix(" | None")]) for field in fields]
    times = [("time", pa.timestamp("ns", tz="UTC")), ("monotonic_ns", pa.int64())]
    return pa.schema([("host", pa.string()), *columns[:1], *times, *columns[1:]])


_SCHEMAS = {GPUS: _schema(GpuSample), LINKS: _schema(LinkSample)}


class TelemetryWriter:
    """Writes one node's samples and keeps their total below a cap, the newest kept."""

    def __init__(self, run: RunDirectory, host: str) -> None:
        self._run = run
        self._host = host
        self._number = max((_number(path) for path in self._files()), default=0)
        self.dropped_files = 0

    def write(self, gpus: Sequence[GpuSample], links: Sequence[LinkSample], cap_bytes: int) -> None:
        """A file for each kind that there are samples of. Raises OSError on a full disk."""
        self._number += 1
        for kind, samples in ((GPUS, gpus), (LINKS, links)):
            if not samples:
                continue
            folder = self._run.path / kind
            folder.mkdir(exist_ok=True)
            path = folder / f"{self._host}-{self._number:06d}.parquet"
            partial = path.with_suffix(".partial")
            try:
                pq.write_table(_table(kind, self._host, samples), partial, compression="zstd", compression_level=1)
                self._make_room(partial.stat().st_size, cap_bytes)
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _make_room(self, needed_bytes: int, cap_bytes: int) -> None:
        """Removes the oldest files until the new one fits below the cap."""
        sizes = {path: path.stat().st_size for path in sorted(self._files(), key=_number)}
        total = sum(sizes.values()) + needed_bytes
        for path, size in sizes.items():
            if total <= cap_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
            self.dropped_files += 1

    def _files(self) -> list[Path]:
        return [path for kind in (GPUS, LINKS) for path in _files(self._run, kind, self._host)]


def read_gpus(run: RunDirectory, host: str) -> dict[str, list[GpuSample]]:
    """A node's samples by GPU, in order. Raises RunStoreError where a file cannot be read."""
    samples: dict[str, list[GpuSample]] = {}
    for row in _rows(run, GPUS, host):
        own = samples.setdefault(row["uuid"], [])
        own.append(GpuSample(**row, grown=growth(vars(own[-1]) if own else None, row, GPU_COUNTERS)))
    return samples


def read_links(run: RunDirectory, host: str) -> dict[str, list[LinkSample]]:
    """A node's samples by port, in order. Raises RunStoreError where a file cannot be read."""
    samples: dict[str, list[LinkSample]] = {}
    for row in _rows(run, LINKS, host):
        own = samples.setdefault(f"{row['device']}/{row['port']}", [])
        own.append(LinkSample(**row, grown=growth(vars(own[-1]) if own else None, row, LINK_COUNTERS)))
    return samples


def _rows(run: RunDirectory, kind: str, host: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in _files(run, kind, host):
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise RunStoreError(f"{path} cannot be read: {error}") from None
        unix_ns = table.column("time").cast(pa.int64()).to_pylist()
        plain = table.drop_columns(["host", "time"]).to_pylist()
        rows += [{**row, "unix_ns": at} for row, at in zip(plain, unix_ns, strict=True)]
    return rows


def _table(kind: str, host: str, samples: Sequence[Sample]) -> pa.Table:
    schema = _SCHEMAS[kind]
    columns = {
        "host": pa.array([host] * len(samples), pa.string()),
        "time": pa.array([sample.unix_ns for sample in samples], pa.int64()).cast(schema.field("time").type),
    }
    for field in schema:
        if field.name not in columns:
            columns[field.name] = pa.array([getattr(sample, field.name) for sample in samples], field.type)
    return pa.table(columns).select(schema.names).cast(schema)


def _files(run: RunDirectory, kind: str, host: str) -> list[Path]:
    return sorted(path for path in (run.path / kind).glob("*.parquet") if path.stem.rpartition("-")[0] == host)


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
