"""Metrics of GPUs and network ports. Names follow OpenTelemetry's hardware conventions, if defined.

A GPU has one series, even if several processes use it. A quantity that cannot be measured has no
point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from torchlens_perf.analysis.statistics.hardware import (
    GpuSample,
    HardwareSamples,
    LinkSample,
    Sample,
)
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.series import ArrayMeter, Callback

_MAX_SAMPLE_AGE_S = 30.0


class _FieldMapping(NamedTuple):
    """Mapping of a field of a sample to a metric. Units are in semantics.py."""

    metric: str
    field: str
    more: Mapping[str, str] = {}
    """Additional attributes of the points."""
    mean: bool = False
    """True for fast-changing gauges, which are sent as means since the last export."""
    scale: float = 1


_GPU, _NETWORK = "gpu", "network"
_SM, _MEMORY = {semantics.GPU_CLOCK_OF: "sm"}, {semantics.GPU_CLOCK_OF: "memory"}
_GPU_NOW = (
    _FieldMapping(semantics.GPU_BUSY, "busy", {semantics.GPU_TASK: "general"}, True),
    _FieldMapping(semantics.GPU_SM_ACTIVE, "sm_active", mean=True),
    _FieldMapping(semantics.GPU_SM_OCCUPANCY, "sm_occupancy", mean=True),
    _FieldMapping(semantics.GPU_TENSOR_ACTIVE, "tensor_active", mean=True),
    _FieldMapping(semantics.GPU_DRAM_ACTIVE, "dram_active", mean=True),
    _FieldMapping(semantics.GPU_CLOCK, "sm_clock_hz", _SM, True),
    _FieldMapping(semantics.GPU_CLOCK, "memory_clock_hz", _MEMORY, True),
    _FieldMapping(semantics.GPU_CLOCK_LIMIT, "sm_clock_max_hz", _SM),
    _FieldMapping(semantics.POWER, "power_w", mean=True),
    _FieldMapping(semantics.POWER_LIMIT, "power_limit_w"),
    _FieldMapping(semantics.TEMPERATURE, "temperature_c", {semantics.SENSOR: "gpu"}),
    _FieldMapping(semantics.TEMPERATURE, "memory_temperature_c", {semantics.SENSOR: "memory"}),
    _FieldMapping(semantics.GPU_MEMORY, "memory_used_bytes"),
    _FieldMapping(semantics.GPU_MEMORY_LIMIT, "memory_total_bytes"),
)
_LINK_NOW = (
    _FieldMapping(semantics.NETWORK_UP, "active"),
    _FieldMapping(semantics.NETWORK_LIMIT, "rate_bits", scale=1 / 8),
)


def _map_throttle_time(field: str, reason: str) -> _FieldMapping:
    return _FieldMapping(
        semantics.GPU_THROTTLED, field, {semantics.THROTTLE_REASON: reason}, scale=1e-9
    )


def _map_io_bytes(field: str, link: str, direction: str) -> _FieldMapping:
    return _FieldMapping(
        semantics.GPU_IO, field, {semantics.GPU_LINK: link, semantics.DIRECTION: direction}
    )


def _map_error_count(field: str, kind: str) -> _FieldMapping:
    return _FieldMapping(semantics.ERRORS, field, {semantics.ERROR_TYPE: kind})


# Monotonic counters.
_GPU_GROWS = (
    _FieldMapping(semantics.ENERGY, "energy_j"),
    _map_throttle_time("throttle_power_ns", "power"),
    _map_throttle_time("throttle_thermal_ns", "thermal"),
    _map_throttle_time("throttle_sync_boost_ns", "sync_boost"),
    _map_throttle_time("throttle_board_limit_ns", "board_limit"),
    _map_throttle_time("throttle_reliability_ns", "reliability"),
    _map_throttle_time("throttle_sw_thermal_ns", "sw_thermal"),
    _map_throttle_time("throttle_hw_thermal_ns", "hw_thermal"),
    _map_throttle_time("throttle_hw_power_brake_ns", "hw_power_brake"),
    _map_io_bytes("pcie_transmitted_bytes", "pcie", "transmit"),
    _map_io_bytes("pcie_received_bytes", "pcie", "receive"),
    _map_io_bytes("nvlink_transmitted_bytes", "nvlink", "transmit"),
    _map_io_bytes("nvlink_received_bytes", "nvlink", "receive"),
    _map_error_count("xids", "xid"),
    _map_error_count("ecc_corrected", "ecc_corrected"),
    _map_error_count("ecc_uncorrected", "ecc_uncorrected"),
    _map_error_count("remapped_rows", "remapped_row"),
    _map_error_count("pcie_replays", "pcie_replay"),
    _map_error_count("nvlink_replays", "nvlink_replay"),
    _map_error_count("nvlink_recoveries", "nvlink_recovery"),
    _map_error_count("nvlink_errors", "nvlink_error"),
)
_SENT, _RECEIVED = {semantics.DIRECTION: "transmit"}, {semantics.DIRECTION: "receive"}
_LINK_GROWS = (
    _FieldMapping(semantics.NETWORK_IO, "transmitted_bytes", _SENT),
    _FieldMapping(semantics.NETWORK_IO, "received_bytes", _RECEIVED),
    _FieldMapping(semantics.NETWORK_PACKETS, "transmitted_packets", _SENT),
    _FieldMapping(semantics.NETWORK_PACKETS, "received_packets", _RECEIVED),
    _map_error_count("symbol_errors", "symbol_error"),
    _map_error_count("link_recoveries", "link_recovery"),
    _map_error_count("link_downs", "link_down"),
    _map_error_count("receive_errors", "receive_error"),
    _map_error_count("transmit_discards", "transmit_discard"),
    _map_error_count("integrity_errors", "link_integrity"),
    _map_error_count("out_of_sequence", "out_of_sequence"),
    _map_error_count("sequence_errors", "packet_sequence"),
    _map_error_count("ack_timeouts", "ack_timeout"),
    _map_error_count("rnr_retries", "receiver_not_ready"),
    _map_error_count("retries_exceeded", "retries_exceeded"),
)


class HardwareMetrics:
    """The hardware's instruments. The sidecar's thread writes, and the sender's thread reads."""

    def __init__(self, meter: ArrayMeter, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[
            str, tuple[float, Sample, dict[str, Any]]
        ] = {}  # arrival, sample, attributes
        self._means: dict[tuple[str, str], tuple[float, int]] = {}  # by (id, field): (sum, count)
        self._counters = {
            name: meter.create_number(name)
            for name in dict.fromkeys(each.metric for each in (*_GPU_GROWS, *_LINK_GROWS))
        }
        for kind, quantities in ((GpuSample, _GPU_NOW), (LinkSample, _LINK_NOW)):
            for metric in dict.fromkeys(each.metric for each in quantities):
                same = [each for each in quantities if each.metric == metric]
                meter.create_number(metric, self._make_callback(kind, same))

    def record_samples(self, hardware: HardwareSamples) -> None:
        for gpu in hardware.gpus:
            attributes = {semantics.HARDWARE_ID: gpu.uuid, semantics.HARDWARE_TYPE: _GPU}
            if gpu.uuid in hardware.names:
                attributes[semantics.HARDWARE_NAME] = hardware.names[gpu.uuid]
            self._store_sample(gpu.uuid, gpu, attributes)
            self._add_increases(gpu.grown, _GPU_GROWS, attributes)
        for link in hardware.links:
            attributes = {semantics.HARDWARE_ID: link.name, semantics.HARDWARE_TYPE: _NETWORK}
            self._store_sample(link.name, link, attributes)
            self._add_increases(link.grown, _LINK_GROWS, attributes)

    def _store_sample(self, name: str, sample: Sample, attributes: dict[str, Any]) -> None:
        with self._lock:
            self._newest[name] = self._clock(), sample, attributes
            for each in _GPU_NOW if isinstance(sample, GpuSample) else ():
                value = getattr(sample, each.field)
                if each.mean and value is not None:
                    total, count = self._means.get((name, each.field), (0.0, 0))
                    self._means[name, each.field] = total + value, count + 1

    def _add_increases(
        self,
        grown: Mapping[str, float],
        grows: tuple[_FieldMapping, ...],
        attributes: dict[str, Any],
    ) -> None:
        for each in grows:
            if each.field in grown:
                self._counters[each.metric].add(
                    grown[each.field] * each.scale, {**attributes, **each.more}
                )

    def _make_callback(self, kind: type[Sample], quantities: list[_FieldMapping]) -> Callback:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            with self._lock:
                points = list(self._observe_samples(kind, quantities))
            yield from points

        return read

    def _observe_samples(
        self, kind: type[Sample], quantities: list[_FieldMapping]
    ) -> Iterator[Observation]:
        now_s = self._clock()
        for name, (came_s, sample, attributes) in self._newest.items():
            if not isinstance(sample, kind) or now_s - came_s > _MAX_SAMPLE_AGE_S:
                continue
            for each in quantities:
                value = getattr(sample, each.field)
                if each.mean and (name, each.field) in self._means:
                    total, count = self._means.pop((name, each.field))
                    value = total / count
                if value is not None:
                    yield Observation(value * each.scale, {**attributes, **each.more})
