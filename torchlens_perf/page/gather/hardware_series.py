"""Time series other than step times: processes, GPUs, network, device memory, CPU contention."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.page.contents import MatrixColumns, TimeSeries
from torchlens_perf.page.gather.step_grid import StepGrid
from torchlens_perf.page.gather.thinning import json_size_bytes
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.hardware_samples import GPUS, LINK_ERRORS, LINKS, PROCESSES
from torchlens_perf.store.reader import (
    ParquetFolder,
    concatenate_tables,
    make_error_collector,
    to_floats,
)
from torchlens_perf.verdicts.node_state import ProcessState

Floats = npt.NDArray[np.float64]


NO_CPU_TITLE = "CPU contention (runnable but not scheduled)"
# Series with more points are averaged over intervals.
MAX_POINTS = 240
# A rank's CPU contention is shown if it reaches this share in any column.
_MIN_CONTENTION = 0.01
_GAUGE, _LEVEL, _RATE, _SHARE, _COUNT = "gauge", "level", "rate", "share", "count"
"""Conversion of the samples:

- _GAUGE: unchanged.
- _LEVEL: a share, to percent.
- _RATE: a counter, to growth per second.
- _SHARE: a counter of ns, to percent of the elapsed time; left out if it never grows.
- _COUNT: a counter, to growth since the first sample; left out if it never grows.
"""
_Quantities = Mapping[str, tuple[str, str, str]]
"""Title, unit and conversion of each column of samples."""
_GPU: _Quantities = {
    "sm_clock_hz": ("SM clock", "Hz", _GAUGE),
    "temperature_c": ("GPU temperature", "Cel", _GAUGE),
    "power_w": ("GPU power", "W", _GAUGE),
    "throttle_thermal_ns": ("Throttled by heat", "%", _SHARE),
    "throttle_hw_thermal_ns": ("Throttled by heat (hardware)", "%", _SHARE),
    "throttle_power_ns": ("Throttled by the power limit", "%", _SHARE),
    "throttle_hw_power_brake_ns": ("Throttled by the power brake", "%", _SHARE),
    "throttle_sync_boost_ns": ("Throttled by sync boost", "%", _SHARE),
    "xids": ("XID errors", "1", _COUNT),
    "ecc_uncorrected": ("Uncorrected ECC errors", "1", _COUNT),
    "sm_active": ("SMs active", "%", _LEVEL),
    "busy": ("GPU busy (any kernel is running)", "%", _LEVEL),
    "others_busy": ("GPU used by other processes", "%", _LEVEL),
    "memory_used_bytes": ("GPU memory used by all processes", "By", _GAUGE),
    "nvlink_received_bytes": ("NVLink received", "By/s", _RATE),
    "pcie_received_bytes": ("PCIe received", "By/s", _RATE),
    "pcie_replays": ("PCIe replays", "1", _COUNT),
    "nvlink_errors": ("NVLink errors", "1", _COUNT),
}
_LINK: _Quantities = {
    "transmitted_bytes": ("Network transmitted", "By/s", _RATE),
    "received_bytes": ("Network received", "By/s", _RATE),
    **{name: (f"Network port: {name.replace('_', ' ')}", "1", _COUNT) for name in LINK_ERRORS},
}
_PROCESS: _Quantities = {
    "cpu_ns": ("CPU used, in percent of one core", "%", _SHARE),
    "resident_bytes": ("Resident memory, with workers", "By", _GAUGE),
    "read_bytes": ("Disk read", "By/s", _RATE),
    "written_bytes": ("Disk written", "By/s", _RATE),
}
_NAMESPACE: _Quantities = {
    "network_received_bytes": ("Network received, all interfaces", "By/s", _RATE),
    "network_transmitted_bytes": ("Network transmitted, all interfaces", "By/s", _RATE),
}


def read_hardware_series(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    ranks: Sequence[int],
    begin_unix_ns: int,
    notes: list[str],
) -> list[TimeSeries]:
    """Return series of these ranks' processes and GPUs, and of their nodes' network.

    notes: receives a line for each file that cannot be read.
    """
    nodes = {node_of[rank] for rank in ranks}
    gpus, links, samples = (
        ParquetFolder(run.path / folder, nodes, make_error_collector(notes))
        for folder in (GPUS, LINKS, PROCESSES)
    )
    rank_of = {gpu["uuid"]: rank for rank in ranks for gpu in processes[rank].facts.gpus}
    found, hosts = list[TimeSeries](), set[str]()

    def add_series(
        table: Mapping[str, Floats], quantities: _Quantities, where: str, rank: int | None = None
    ) -> None:
        found.extend(_build_series(table, quantities, where, rank, begin_unix_ns))

    for (_, uuid), table in _read_tables(gpus, ("host", "uuid"), _GPU):
        if uuid in rank_of:
            add_series(table, _GPU, f"rank {rank_of[uuid]}", rank_of[uuid])
    for (host, device, port), table in _read_tables(links, ("host", "device", "port"), _LINK):
        add_series(table, _LINK, f"{host} {device} port {port}")
    for (host, rank), table in _read_tables(samples, ("host", "rank"), {**_PROCESS, **_NAMESPACE}):
        if rank in ranks:
            add_series(table, _PROCESS, f"rank {rank}", rank)
        # The ranks of a node share its network interfaces, so only the first rank's samples are
        # used.
        if host not in hosts:
            hosts.add(host)
            add_series(table, _NAMESPACE, host)
    return found


def build_rank_series(
    grid: StepGrid,
    columns: MatrixColumns,
    processes: Mapping[int, ProcessState],
    ranks: Sequence[int],
) -> list[TimeSeries]:
    """Return the CPU contention and the device memory of each rank over time."""
    contention = grid.mean("ready_ns", "ready_of_ns")
    # None becomes NaN.
    started = np.array(columns["started_s"], np.float64)
    first_steps = np.array(columns["first_steps"])
    known = np.isfinite(started)
    found: list[TimeSeries] = []
    for rank in ranks:
        shares = contention[grid.row_of[rank]]
        if np.nanmax(shares, initial=0.0) >= _MIN_CONTENTION:
            found.append(
                _average_series(NO_CPU_TITLE, "%", f"rank {rank}", rank, started, 100 * shares)
            )
        readings = processes[rank].statistics.memory.readings
        bytes_of = {
            "Device memory allocated": [each.allocated_bytes for each in readings],
            "Device memory reserved": [each.reserved_bytes for each in readings],
        }
        for title, measured in bytes_of.items():
            values = np.array(measured, np.float64)
            if np.isfinite(values).any() and known.any():
                steps = [each.step for each in readings]
                at = np.interp(steps, first_steps[known], started[known])
                found.append(_average_series(title, "By", f"rank {rank}", rank, at, values))
    return found


def trim_series(
    series: Sequence[TimeSeries], budget_bytes: int, notes: list[str]
) -> list[TimeSeries]:
    """Return as many series as fit the budget. notes: receives a sentence on left-out series.

    The first quantity of each GPU, link or process is kept before any second quantity.
    """
    place_of: dict[str, Iterator[int]] = defaultdict(itertools.count)
    kept, used_bytes = list[TimeSeries](), 0
    for each in sorted(series, key=lambda each: next(place_of[each["where"]])):
        used_bytes += json_size_bytes(each)
        if used_bytes > budget_bytes:
            notes.append(
                f"Only {len(kept)} of {len(series)} quantities that were measured over time are"
                " shown."
            )
            break
        kept.append(each)
    return sorted(kept, key=lambda each: each["title"])


def _read_tables(
    files: ParquetFolder, named_by: Sequence[str], quantities: Collection[str]
) -> Iterator[tuple[list[Any], dict[str, Floats]]]:
    """Yield the numeric columns of each measured object, in time order, and the object's names."""
    tables = list(
        files.read_each(
            lambda file: file.read_table([*named_by, "time", *(set(file.names) & {*quantities})])
        )
    )
    if not tables:
        return
    table = concatenate_tables(tables)
    columns = {
        name: found
        for name in table.column_names
        if (found := to_floats(table.column(name))) is not None
    }
    numbered = table.append_column("row", [np.arange(len(table))])
    rows_of = numbered.group_by(list(named_by), use_threads=False).aggregate([("row", "list")])
    for each in sorted(rows_of.to_pylist(), key=lambda each: [str(each[key]) for key in named_by]):
        rows = each["row_list"]
        yield [each[key] for key in named_by], {key: of[rows] for key, of in columns.items()}


def _build_series(
    table: Mapping[str, Floats],
    quantities: _Quantities,
    where: str,
    rank: int | None,
    begin_unix_ns: int,
) -> Iterator[TimeSeries]:
    time_s = (table["time"] - begin_unix_ns) / 1e9
    gone_s = np.diff(time_s, prepend=np.nan)
    for name, (title, unit, how) in quantities.items():
        if name not in table or not np.isfinite(table[name]).any():
            continue
        # A decrease means that the counter was reset.
        grown = np.maximum(np.diff(table[name], prepend=np.nan), 0)
        if how in (_SHARE, _COUNT) and not np.nansum(grown):
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            values = {
                _GAUGE: table[name],
                _LEVEL: 100 * table[name],
                _RATE: grown / gone_s,
                _SHARE: 100 * grown / 1e9 / gone_s,
                _COUNT: np.cumsum(np.nan_to_num(grown)),
            }[how]
        # A single sample of a counter has no rate.
        if np.isfinite(values).any():
            yield _average_series(title, unit, where, rank, time_s, values)


def _average_series(
    title: str, unit: str, where: str, rank: int | None, time_s: Floats, values: Floats
) -> TimeSeries:
    """Return a series with at most MAX_POINTS points.

    If there are more samples, points are means of intervals.
    """
    known = np.isfinite(time_s)
    time_s, values = time_s[known], values[known]
    if len(values) > MAX_POINTS:
        starts = np.linspace(0, len(values), MAX_POINTS, endpoint=False).astype(np.int64)
        there = np.isfinite(values)
        counts = np.add.reduceat(there.astype(np.int64), starts)
        sums = np.add.reduceat(np.where(there, values, 0.0), starts)
        values = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        time_s = np.add.reduceat(time_s, starts) / np.diff(starts, append=len(time_s))
    return {
        "title": title,
        "unit": unit,
        "where": where,
        "rank": rank,
        "time_s": [float(f"{each:.6g}") for each in time_s.tolist()],
        "value": [float(f"{each:.5g}") if np.isfinite(each) else None for each in values.tolist()],
    }
