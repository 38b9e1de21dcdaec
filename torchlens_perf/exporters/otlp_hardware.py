"""Metrics of GPUs and network ports. Names follow OpenTelemetry's hardware conventions, if defined.

A GPU has one series, even if several processes use it. A quantity that cannot be measured has no
point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from torchlens_perf.analysis.statistics.hardware import GpuSample, Hardware, LinkSample, Sample
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.series import Callback, Meter

_MAX_SAMPLE_AGE_S = 30.0


class _Metric(NamedTuple):
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
    _Metric(semantics.GPU_BUSY, "busy", {semantics.GPU_TASK: "general"}, True),
    _Metric(semantics.GPU_SM_ACTIVE, "sm_active", mean=True),
    _Metric(semantics.GPU_SM_OCCUPANCY, "sm_occupancy", mean=True),
    _Metric(semantics.GPU_TENSOR_ACTIVE, "tensor_active", mean=True),
    _Metric(semantics.GPU_DRAM_ACTIVE, "dram_active", mean=True),
    _Metric(semantics.GPU_CLOCK, "sm_clock_hz", _SM, True),
    _Metric(semantics.GPU_CLOCK, "memory_clock_hz", _MEMORY, True),
    _Metric(semantics.GPU_CLOCK_LIMIT, "sm_clock_max_hz", _SM),
    _Metric(semantics.POWER, "power_w", mean=True),
    _Metric(semantics.POWER_LIMIT, "power_limit_w"),
    _Metric(semantics.TEMPERATURE, "temperature_c", {semantics.SENSOR: "gpu"}),
    _Metric(semantics.TEMPERATURE, "memory_temperature_c", {semantics.SENSOR: "memory"}),
)
# These are up-down counters in the conventions, because they may be summed over components.
_GPU_SUMS = (
    _Metric(semantics.GPU_MEMORY, "memory_used_bytes"),
    _Metric(semantics.GPU_MEMORY_LIMIT, "memory_total_bytes"),
)
_LINK_SUMS = (
    _Metric(semantics.NETWORK_UP, "active"),
    _Metric(semantics.NETWORK_LIMIT, "rate_bits", scale=1 / 8),
)


def _throttled(field: str, reason: str) -> _Metric:
    return _Metric(semantics.GPU_THROTTLED, field, {semantics.THROTTLE_REASON: reason}, scale=1e-9)


def _io(field: str, link: str, direction: str) -> _Metric:
    return _Metric(
        semantics.GPU_IO, field, {semantics.GPU_LINK: link, semantics.DIRECTION: direction}
    )


def _errors(field: str, kind: str) -> _Metric:
    return _Metric(semantics.ERRORS, field, {semantics.ERROR_TYPE: kind})


# Monotonic counters.
_GPU_GROWS = (
    _Metric(semantics.ENERGY, "energy_j"),
    _throttled("throttle_power_ns", "power"),
    _throttled("throttle_thermal_ns", "thermal"),
    _throttled("throttle_sync_boost_ns", "sync_boost"),
    _throttled("throttle_board_limit_ns", "board_limit"),
    _throttled("throttle_reliability_ns", "reliability"),
    _throttled("throttle_sw_thermal_ns", "sw_thermal"),
    _throttled("throttle_hw_thermal_ns", "hw_thermal"),
    _throttled("throttle_hw_power_brake_ns", "hw_power_brake"),
    _io("pcie_transmitted_bytes", "pcie", "transmit"),
    _io("pcie_received_bytes", "pcie", "receive"),
    _io("nvlink_transmitted_bytes", "nvlink", "transmit"),
    _io("nvlink_received_bytes", "nvlink", "receive"),
    _errors("xids", "xid"),
    _errors("ecc_corrected", "ecc_corrected"),
    _errors("ecc_uncorrected", "ecc_uncorrected"),
    _errors("remapped_rows", "remapped_row"),
    _errors("pcie_replays", "pcie_replay"),
    _errors("nvlink_replays", "nvlink_replay"),
    _errors("nvlink_recoveries", "nvlink_recovery"),
    _errors("nvlink_errors", "nvlink_error"),
)
_SENT, _RECEIVED = {semantics.DIRECTION: "transmit"}, {semantics.DIRECTION: "receive"}
_LINK_GROWS = (
    _Metric(semantics.NETWORK_IO, "transmitted_bytes", _SENT),
    _Metric(semantics.NETWORK_IO, "received_bytes", _RECEIVED),
    _Metric(semantics.NETWORK_PACKETS, "transmitted_packets", _SENT),
    _Metric(semantics.NETWORK_PACKETS, "received_packets", _RECEIVED),
    _errors("symbol_errors", "symbol_error"),
    _errors("link_recoveries", "link_recovery"),
    _errors("link_downs", "link_down"),
    _errors("receive_errors", "receive_error"),
    _errors("transmit_discards", "transmit_discard"),
    _errors("integrity_errors", "link_integrity"),
    _errors("out_of_sequence", "out_of_sequence"),
    _errors("sequence_errors", "packet_sequence"),
    _errors("ack_timeouts", "ack_timeout"),
    _errors("rnr_retries", "receiver_not_ready"),
    _errors("retries_exceeded", "retries_exceeded"),
)


class HardwareMetrics:
    """The hardware's instruments. The sidecar's thread writes, and the sender's thread reads."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[
            str, tuple[float, Sample, dict[str, Any]]
        ] = {}  # arrival, sample, attributes
        self._means: dict[tuple[str, str], tuple[float, int]] = {}  # by (id, field): (sum, count)
        grows = (*_GPU_GROWS, *_LINK_GROWS)
        self._counters = {
            name: meter.create_counter(name)
            for name in dict.fromkeys(each.metric for each in grows)
        }
        for quantities, kind, create in (
            (_GPU_NOW, GpuSample, meter.create_observable_gauge),
            (_GPU_SUMS, GpuSample, meter.create_observable_up_down_counter),
            (_LINK_SUMS, LinkSample, meter.create_observable_up_down_counter),
        ):
            for metric in dict.fromkeys(each.metric for each in quantities):
                same = [each for each in quantities if each.metric == metric]
                create(metric, [self._reading(kind, same)])

    def measured(self, hardware: Hardware) -> None:
        for gpu in hardware.gpus:
            attributes = {semantics.HARDWARE_ID: gpu.uuid, semantics.HARDWARE_TYPE: _GPU}
            if gpu.uuid in hardware.names:
                attributes[semantics.HARDWARE_NAME] = hardware.names[gpu.uuid]
            self._take(gpu.uuid, gpu, attributes)
            self._count(gpu.grown, _GPU_GROWS, attributes)
        for link in hardware.links:
            attributes = {semantics.HARDWARE_ID: link.name, semantics.HARDWARE_TYPE: _NETWORK}
            self._take(link.name, link, attributes)
            self._count(link.grown, _LINK_GROWS, attributes)

    def _take(self, name: str, sample: Sample, attributes: dict[str, Any]) -> None:
        with self._lock:
            self._newest[name] = self._clock(), sample, attributes
            for each in _GPU_NOW if isinstance(sample, GpuSample) else ():
                value = getattr(sample, each.field)
                if each.mean and value is not None:
                    total, count = self._means.get((name, each.field), (0.0, 0))
                    self._means[name, each.field] = total + value, count + 1

    def _count(
        self, grown: Mapping[str, float], grows: tuple[_Metric, ...], attributes: dict[str, Any]
    ) -> None:
        for each in grows:
            if each.field in grown:
                self._counters[each.metric].add(
                    grown[each.field] * each.scale, {**attributes, **each.more}
                )

    def _reading(self, kind: type[Sample], quantities: list[_Metric]) -> Callback:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            with self._lock:
                points = list(self._points(kind, quantities))
            yield from points

        return read

    def _points(self, kind: type[Sample], quantities: list[_Metric]) -> Iterator[Observation]:
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
