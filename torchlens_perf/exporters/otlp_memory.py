"""Device memory as metrics: gauges of how full each rank's is, and counters of what went wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.metrics import Meter

from torchlens_perf.exporters import ExportBatch, semantics

_STATES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "inactive": "inactive_bytes",
    "peak": "peak_bytes",
    "limit": "limit_bytes",
}


class DeviceMemory:
    """The instruments, and how a batch's newest reading goes into them. On the sidecar's thread."""

    def __init__(self, meter: Meter) -> None:
        self._bytes = meter.create_gauge(semantics.DEVICE_MEMORY, "By", "Device memory, as its allocator counts it")
        self._counters = {
            "alloc_retries": meter.create_counter(
                semantics.ALLOC_RETRIES,
                "{retry}",
                "Failed cudaMalloc calls, after which the cache was freed",
            ),
            "ooms": meter.create_counter(semantics.OUT_OF_MEMORY, "{error}", "Out-of-memory errors"),
        }
        self._counted: dict[tuple[str, str], int] = {}

    def record(self, batch: ExportBatch, attributes: Mapping[str, Any], *, per_rank: bool) -> None:
        """Adds the reading, if the batch has one. per_rank: else no gauge, as all ranks would write the same one."""
        reading = batch.memory
        if reading is None:
            return
        values = reading._asdict()
        for state, field in _STATES.items():
            if per_rank and values[field] is not None:
                self._bytes.set(values[field], {**attributes, semantics.MEMORY_STATE: state})
        for field, counter in self._counters.items():
            count = values[field]
            if count is not None:
                before = self._counted.get((batch.identity.key, field), 0)
                counter.add(count - before if count >= before else count, attributes)  # the user may have reset it
                self._counted[batch.identity.key, field] = count
