"""OTLP metrics of device memory."""

from __future__ import annotations

from typing import Any

from tests.exporters.test_exporters import batch_of, identity
from torchlens_perf.analysis.statistics.memory import MemoryReading
from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.otlp_metrics import StepInstruments
from torchlens_perf.exporters.series import ArrayMeter


def sent(
    readings: list[MemoryReading | None], *, per_rank: bool = True
) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Return attributes and values of points of the device's memory, by metric."""
    meter = ArrayMeter()
    instruments = StepInstruments(meter)
    steps = batch_of(identity(), [3])
    for reading in readings:
        full = ExportBatch(steps.identity, steps.anchor, steps.steps, (), {}, reading)
        instruments.record_batch(full, {}, None if per_rank else frozenset())
    return {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for metric in meter.collect()
        if metric.name
        in (semantics.DEVICE_MEMORY, semantics.ALLOC_RETRIES, semantics.OUT_OF_MEMORY)
    }


def test_memory_gauges_are_current_and_counters_survive_a_reset() -> None:
    """The user resets the allocator's statistics. Gauges have the newest reading."""
    points = sent(
        [MemoryReading(0, 5, 9, 1, 7, 80, 3, 0), None, MemoryReading(16, 4, 10, 2, 8, 80, 1, 1)]
    )

    assert {attributes[semantics.MEMORY_STATE]: value for attributes, value in points[semantics.DEVICE_MEMORY]} == {
        "allocated": 4, "reserved": 10, "inactive": 2, "peak": 8, "limit": 80,
    }  # fmt: skip
    assert all(attributes[semantics.RANK] == 0 for attributes, _ in points[semantics.DEVICE_MEMORY])
    assert points[semantics.ALLOC_RETRIES] == [({semantics.RANK: 0}, 4)]
    assert points[semantics.OUT_OF_MEMORY] == [({semantics.RANK: 0}, 1)]


def test_unmeasured_memory_is_not_sent_as_zero() -> None:
    """A large job has no gauge, because all ranks would write to the same series."""
    points = sent([MemoryReading(0, allocated_bytes=5)])
    assert [
        attributes[semantics.MEMORY_STATE] for attributes, _ in points[semantics.DEVICE_MEMORY]
    ] == ["allocated"]
    assert semantics.ALLOC_RETRIES not in points
    assert sent([None]) == {}
    assert set(sent([MemoryReading(0, 5, 9, 1, 7, 80, 3, 0)], per_rank=False)) == {
        semantics.ALLOC_RETRIES, semantics.OUT_OF_MEMORY,
    }  # fmt: skip
