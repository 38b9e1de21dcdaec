"""Time series other than step times: processes, GPUs, network, device memory, CPU contention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.analysis.statistics.hardware import LINK_ERRORS
from torchlens_perf.page.contents import MatrixColumns, TimeSeries
from torchlens_perf.page.gather.thinning import json_size_bytes
from torchlens_perf.store.reader import (
    ParquetFolder,
    concatenate_tables,
    make_error_collector,
    to_floats,
)
from torchlens_perf.store.samples import GPUS, LINKS, PROCESSES

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.page.gather.step_grid import StepGrid
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.verdicts.node_state import ProcessState

    Floats = npt.NDArray[np.float64]

NO_CPU_TITLE = "CPU contention (runnable but not scheduled)"
# Series with more points are averaged over intervals.
MAX_POINTS = 240
# A rank's CPU contention is shown if it reaches this share in any column.
_MIN_CONTENTION = 0.01
_GAUGE, _LEVEL, _RATE, _SHARE, _COUNT = range(5)


class _MeasuredQuantity(NamedTuple):
    title: str
    unit: str
    how: int
    """Conversion of the samples:

    - _GAUGE: unchanged.
    - _LEVEL: a share, to percent.
    - _RATE: a counter, to growth per second.
    - _SHARE: a counter of ns, to percent of the elapsed time; left out if it never grows.
    - _COUNT: a counter, to growth since the first sample; left out if it never grows.
    """


_GPU = {
    "sm_clock_hz": _MeasuredQuantity("SM clock", "Hz", _GAUGE),
    "temperature_c": _MeasuredQuantity("GPU temperature", "Cel", _GAUGE),
    "power_w": _MeasuredQuantity("GPU power", "W", _GAUGE),
    "throttle_thermal_ns": _MeasuredQuantity("Throttled by heat", "%", _SHARE),
    "throttle_hw_thermal_ns": _MeasuredQuantity("Throttled by heat (hardware)", "%", _SHARE),
    "throttle_power_ns": _MeasuredQuantity("Throttled by the power limit", "%", _SHARE),
    "throttle_hw_power_brake_ns": _MeasuredQuantity("Throttled by the power brake", "%", _SHARE),
    "throttle_sync_boost_ns": _MeasuredQuantity("Throttled by sync boost", "%", _SHARE),
    "xids": _MeasuredQuantity("XID errors", "1", _COUNT),
    "ecc_uncorrected": _MeasuredQuantity("Uncorrected ECC errors", "1", _COUNT),
    "sm_active": _MeasuredQuantity("SMs active", "%", _LEVEL),
    "busy": _MeasuredQuantity("GPU busy (any kernel is running)", "%", _LEVEL),
    "others_busy": _MeasuredQuantity("GPU used by other processes", "%", _LEVEL),
    "memory_used_bytes": _MeasuredQuantity("GPU memory used by all processes", "By", _GAUGE),
    "nvlink_received_bytes": _MeasuredQuantity("NVLink received", "By/s", _RATE),
    "pcie_received_bytes": _MeasuredQuantity("PCIe received", "By/s", _RATE),
    "pcie_replays": _MeasuredQuantity("PCIe replays", "1", _COUNT),
    "nvlink_errors": _MeasuredQuantity("NVLink errors", "1", _COUNT),
}
_LINK = {
    "transmitted_bytes": _MeasuredQuantity("Network transmitted", "By/s", _RATE),
    "received_bytes": _MeasuredQuantity("Network received", "By/s", _RATE),
    **{
        name: _MeasuredQuantity(f"Network port: {name.replace('_', ' ')}", "1", _COUNT)
        for name in LINK_ERRORS
    },
}
_PROCESS = {
    "cpu_ns": _MeasuredQuantity("CPU used, in percent of one core", "%", _SHARE),
    "resident_bytes": _MeasuredQuantity("Resident memory, with workers", "By", _GAUGE),
    "read_bytes": _MeasuredQuantity("Disk read", "By/s", _RATE),
    "written_bytes": _MeasuredQuantity("Disk written", "By/s", _RATE),
}
_NAMESPACE = {
    "network_received_bytes": _MeasuredQuantity("Network received, all interfaces", "By/s", _RATE),
    "network_transmitted_bytes": _MeasuredQuantity(
        "Network transmitted, all interfaces", "By/s", _RATE
    ),
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
    rank_of = {gpu["uuid"]: rank for rank in ranks for gpu in processes[rank].gpus}
    found = []
    for (_, uuid), table in _read_tables(
        ParquetFolder(run.path / GPUS, nodes, make_error_collector(notes)), "uuid", _GPU
    ):
        if uuid in rank_of:
            found += _build_series(
                table, _GPU, f"rank {rank_of[uuid]}", rank_of[uuid], begin_unix_ns
            )
    for (host, port), table in _read_tables(
        ParquetFolder(run.path / LINKS, nodes, make_error_collector(notes)), "device", _LINK
    ):
        found += _build_series(table, _LINK, f"{host} {port}", None, begin_unix_ns)
    hosts = set[str]()
    for (host, rank), table in _read_tables(
        ParquetFolder(run.path / PROCESSES, nodes, make_error_collector(notes)),
        "rank",
        _PROCESS | _NAMESPACE,
    ):
        if int(rank) in ranks:
            found += _build_series(table, _PROCESS, f"rank {rank}", int(rank), begin_unix_ns)
        # The ranks of a node share its network interfaces, so only the first rank's samples are
        # used.
        if host not in hosts:
            hosts.add(host)
            found += _build_series(table, _NAMESPACE, host, None, begin_unix_ns)
    return found


def build_rank_series(
    grid: StepGrid,
    columns: MatrixColumns,
    processes: Mapping[int, ProcessState],
    ranks: Sequence[int],
) -> list[TimeSeries]:
    """Return the CPU contention and the device memory of each rank over time."""
    row_of = {rank: row for row, rank in enumerate(sorted(processes))}
    started = np.array([np.nan if each is None else each for each in columns["started_s"]])
    first_steps = np.array(columns["first_steps"])
    known = np.isfinite(started)
    found: list[TimeSeries] = []
    for rank in ranks:
        shares = grid.contention_share(row_of[rank])
        if np.nanmax(shares, initial=0.0) >= _MIN_CONTENTION:
            found.append(
                _average_series(NO_CPU_TITLE, "%", f"rank {rank}", rank, started, 100 * shares)
            )
        readings = processes[rank].statistics.memory.readings
        if not readings or not known.any():
            continue
        at = np.interp([each.step for each in readings], first_steps[known], started[known])
        for name, title in (
            ("allocated_bytes", "Device memory allocated"),
            ("reserved_bytes", "Device memory reserved"),
        ):
            values = np.array(
                [np.nan if (value := getattr(each, name)) is None else value for each in readings]
            )
            if np.isfinite(values).any():
                found.append(_average_series(title, "By", f"rank {rank}", rank, at, values))
    return found


def trim_series(
    series: Sequence[TimeSeries], budget_bytes: int, notes: list[str]
) -> list[TimeSeries]:
    """Return as many series as fit the budget. notes: receives a sentence on left-out series.

    The first quantity of each GPU, link or process is kept before any second quantity.
    """
    places: dict[str, int] = defaultdict(int)
    order = []
    for each in series:
        order.append((places[each["where"]], each))
        places[each["where"]] += 1
    kept, used_bytes = list[TimeSeries](), 0
    for _, each in sorted(order, key=lambda item: item[0]):
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
    files: ParquetFolder, named_by: str, quantities: Collection[str]
) -> Iterator[tuple[tuple[str, str], dict[str, Floats]]]:
    """Yield the numeric columns for each pair of host and name, in time order."""
    needed = ["host", named_by, "time"]
    tables = list(
        files.read_each(
            lambda file: file.read_table([*needed, *(set(file.names) & {"port", *quantities})])
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
    names = [str(name) for name in table.column(named_by).to_pylist()]
    if "port" in columns:
        names = [
            f"{name} port {port:.0f}"
            for name, port in zip(names, columns["port"].tolist(), strict=True)
        ]
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, key in enumerate(zip(table.column("host").to_pylist(), names, strict=True)):
        rows[key].append(at)
    for key, of_key in sorted(rows.items()):
        yield key, {name: values[of_key] for name, values in columns.items()}


def _build_series(
    table: Mapping[str, Floats],
    quantities: Mapping[str, _MeasuredQuantity],
    where: str,
    rank: int | None,
    begin_unix_ns: int,
) -> list[TimeSeries]:
    time_s = (table["time"] - begin_unix_ns) / 1e9
    found = []
    for name, (title, unit, how) in quantities.items():
        values = table.get(name)
        if values is None or not np.isfinite(values).any():
            continue
        if how == _LEVEL:
            values = 100 * values
        elif how != _GAUGE:
            # A decrease means that the counter was reset.
            grown = np.maximum(np.diff(values, prepend=np.nan), 0)
            if how != _RATE and not np.nansum(grown):
                continue
            gone_s = np.diff(time_s, prepend=np.nan)
            with np.errstate(divide="ignore", invalid="ignore"):
                values = {
                    _RATE: grown / gone_s,
                    _SHARE: 100 * grown / 1e9 / gone_s,
                    _COUNT: np.cumsum(np.nan_to_num(grown)),
                }[how]
        # A single sample of a counter has no rate.
        if np.isfinite(values).any():
            found.append(_average_series(title, unit, where, rank, time_s, values))
    return found


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
