"""Metrics of GPUs and network ports, as listed in semantics.py.

A GPU has one series, even if several processes use it. A quantity that cannot be measured has no
point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torchlens_perf.exporters import semantics
from torchlens_perf.exporters.series import ArrayMeter, Attributes, Points
from torchlens_perf.run.hardware_samples import GPUS, HardwareSamples, Sample

_MAX_SAMPLE_AGE_S = 30.0
# Metric, field of a sample, and the attributes of the point that differ from those of the hardware.
_POINTS = [
    (
        metric,
        field,
        dict(zip(metric.attributes[len(metric.attributes) - len(values) :], values, strict=True)),
    )
    for metric in semantics.METRICS
    for field, *values in metric.fields
]
_COUNTERS = [each for each in _POINTS if each[0].instrument == "counter"]
_GAUGES = [each for each in _POINTS if each[0].instrument != "counter"]
_MEANS = [field for metric, field, _ in _GAUGES if metric.is_mean]


class HardwareMetrics:
    """The hardware's instruments. The sidecar's thread writes, and the sender's thread reads."""

    def __init__(self, meter: ArrayMeter, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        # Time of arrival, sample and attributes, by the hardware's id.
        self._newest: dict[str, tuple[float, Sample, Attributes]] = {}
        # Sum and number of the values since the last export, by (id, field).
        self._recent: dict[tuple[str, str], tuple[float, int]] = {}
        counters = dict.fromkeys(metric.name for metric, _, _ in _COUNTERS)
        self._counters = {name: meter.create_number(name) for name in counters}
        meter.add_observer(dict.fromkeys(metric.name for metric, _, _ in _GAUGES), self._observe)

    def record_samples(self, hardware: HardwareSamples) -> None:
        for sample in hardware.samples:
            attributes = _describe(sample, hardware.names)
            key = attributes[semantics.HARDWARE_ID]
            for metric, field, more in _COUNTERS:
                if field in sample.grown:
                    grown = sample.grown[field] * metric.scale
                    self._counters[metric.name].add(grown, {**attributes, **more})
            with self._meter.lock:
                self._newest[key] = self._clock(), sample, attributes
                for field in _MEANS:
                    value = sample[field]
                    if value is not None:
                        total, count = self._recent.get((key, field), (0.0, 0))
                        self._recent[key, field] = total + value, count + 1

    def _observe(self) -> Mapping[str, Points]:
        found: dict[str, list[tuple[float, Attributes]]] = defaultdict(list)
        now_s = self._clock()
        for key, (came_s, sample, attributes) in self._newest.items():
            for metric, field, more in _GAUGES if now_s - came_s <= _MAX_SAMPLE_AGE_S else ():
                value = sample[field]
                if recent := self._recent.pop((key, field), None):
                    value = recent[0] / recent[1]
                if value is not None:
                    found[metric.name].append((value * metric.scale, {**attributes, **more}))
        return found


def _describe(sample: Sample, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of all points of a GPU or a port. names: products by UUID of the GPU."""
    kind = "gpu" if sample.kind == GPUS else "network"
    found = {semantics.HARDWARE_ID: sample.name, semantics.HARDWARE_TYPE: kind}
    if sample.name in names:
        found[semantics.HARDWARE_NAME] = names[sample.name]
    return found
