"""Metrics of GPUs and network ports, as listed in semantics.py.

A GPU has one series, even if several processes use it. A quantity that cannot be measured has no
point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torchlens_perf.analysis.statistics.hardware import GpuSample, HardwareSamples, LinkSample
from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.series import ArrayMeter, Attributes, Points

_MAX_SAMPLE_AGE_S = 30.0
_HARDWARE = [each for each in semantics.METRICS if each.fields]
_COUNTERS = [each for each in _HARDWARE if each.instrument == "counter"]
_GAUGES = [each for each in _HARDWARE if each.instrument != "counter"]
_MEANS = [field for each in _GAUGES if each.is_mean for field, *_ in each.fields]


class HardwareMetrics:
    """The hardware's instruments. The sidecar's thread writes, and the sender's thread reads."""

    def __init__(self, meter: ArrayMeter, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        # Time of arrival, sample and attributes, by the hardware's id.
        self._newest: dict[str, tuple[float, GpuSample | LinkSample, Attributes]] = {}
        # Sum and number of the values since the last export, by (id, field).
        self._recent: dict[tuple[str, str], tuple[float, int]] = {}
        self._counters = {each.name: meter.create_number(each.name) for each in _COUNTERS}
        meter.add_observer([each.name for each in _GAUGES], self._observe)

    def record_samples(self, hardware: HardwareSamples) -> None:
        samples: tuple[GpuSample | LinkSample, ...] = (*hardware.gpus, *hardware.links)
        for sample in samples:
            attributes = _describe(sample, hardware.names)
            key = attributes[semantics.HARDWARE_ID]
            for metric in _COUNTERS:
                for field, *values in metric.fields:
                    if field in sample.grown:
                        point = _add_attributes(attributes, metric, values)
                        self._counters[metric.name].add(sample.grown[field] * metric.scale, point)
            with self._meter.lock:
                self._newest[key] = self._clock(), sample, attributes
                for field in _MEANS:
                    value = getattr(sample, field, None)
                    if value is not None:
                        total, count = self._recent.get((key, field), (0.0, 0))
                        self._recent[key, field] = total + value, count + 1

    def _observe(self) -> Mapping[str, Points]:
        found: dict[str, list[tuple[float, Attributes]]] = defaultdict(list)
        now_s = self._clock()
        for key, (came_s, sample, attributes) in self._newest.items():
            for metric in _GAUGES if now_s - came_s <= _MAX_SAMPLE_AGE_S else ():
                for field, *values in metric.fields:
                    value = getattr(sample, field, None)
                    if recent := self._recent.pop((key, field), None):
                        value = recent[0] / recent[1]
                    if value is not None:
                        point = _add_attributes(attributes, metric, values)
                        found[metric.name].append((value * metric.scale, point))
        return found


def _describe(sample: GpuSample | LinkSample, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of all points of a GPU or a port. names: products by UUID of the GPU."""
    if not isinstance(sample, GpuSample):
        return {semantics.HARDWARE_ID: sample.name, semantics.HARDWARE_TYPE: "network"}
    found = {semantics.HARDWARE_ID: sample.uuid, semantics.HARDWARE_TYPE: "gpu"}
    if sample.uuid in names:
        found[semantics.HARDWARE_NAME] = names[sample.uuid]
    return found


def _add_attributes(
    attributes: Attributes, metric: semantics.Metric, values: list[str]
) -> Attributes:
    """Add the attributes of one point. values: those of the metric's last attributes."""
    names = metric.attributes[len(metric.attributes) - len(values) :]
    return {**attributes, **dict(zip(names, values, strict=True))}
