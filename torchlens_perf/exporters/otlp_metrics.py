"""Steps as metrics: histograms of durations, a counter and a gauge; and gauges of what is wrong now.

Their size does not grow with the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, Observation

from torchlens_perf.analysis.alerts.log import stragglers_by_class
from torchlens_perf.exporters import Assessment, ExportBatch, semantics
from torchlens_perf.exporters.delivery.wire import item
from torchlens_perf.exporters.otlp_hardware import HardwareMetrics
from torchlens_perf.exporters.series import Example, Meter
from torchlens_perf.run.records import PARTS

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.analysis.words.hang import OpenHang

Sampled = Mapping[int, tuple[int, int]]
"""By step that is also sent as spans: the ids of its trace and of the rank's step span in it."""
# Of a device's memory, by the attribute that tells them apart.
_MEMORY_STATES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "inactive": "inactive_bytes",
    "peak": "peak_bytes",
    "limit": "limit_bytes",
}
# How often a gauge is 0 after its end: a series that just stops is taken to have kept its last value for minutes.
_ZERO_POINTS = 3


class NodeMetrics:
    """A node's metrics. Written on the sidecar's thread; encode() on the sender's."""

    def __init__(self, meter: Meter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._meter = Meter() if meter is None else meter
        self._instruments = _Instruments(self._meter, clock)
        self._hardware = HardwareMetrics(self._meter, clock)

    def export(self, batch: ExportBatch, sampled: Sampled) -> None:
        """Adds the batch's steps. sampled: steps whose spans are sent too."""
        self._instruments.record(batch, sampled)

    def on_assessment(self, assessment: Assessment) -> None:
        """Sets the gauges of what is wrong now."""
        self._instruments.on_assessment(assessment)

    def measured(self, hardware: Hardware) -> None:
        self._hardware.measured(hardware)

    def encode(self) -> tuple[list[bytes], int]:
        """All metrics as they lie in a request, and how many points they have."""
        metrics = self._meter.collect()
        count = sum(len(getattr(each, str(each.WhichOneof("data"))).data_points) for each in metrics)
        return [item(each.SerializeToString()) for each in metrics], count


class _Instruments:
    """The instruments, and how a batch goes into them."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        duration = meter.create_histogram
        self._step = duration(semantics.STEP_DURATION, "s", "Time from one step's end to the next")
        self._own = duration(semantics.STEP_OWN_TIME, "s", "Step time without the time blocked in communication")
        self._phase = duration(semantics.PHASE_DURATION, "s", "Time of one phase in one step, without nested phases")
        self._device = duration(semantics.DEVICE_DURATION, "s", "Time of a phase, or a step, on the device")
        self._steps = meter.create_counter(semantics.STEPS, "{step}", "Steps finished")
        self._memory = meter.create_gauge(semantics.MEMORY, "By", "Memory at the end of the last step")
        self._memory_bytes: dict[int, int] = {}
        self._device_memory = DeviceMemory(meter)
        self._standing = _Standing(meter, clock)
        self._named: frozenset[int] = frozenset()

    def on_assessment(self, assessment: Assessment) -> None:
        """Takes the judgement over. On the sidecar's thread."""
        self._named = frozenset(each.rank for each in assessment.findings.episodes if each.until_step is None)
        if assessment.whole_job:
            self._standing.on_assessment(assessment)

    def record(self, batch: ExportBatch, sampled: Sampled) -> None:
        """Adds a batch's steps. On the sidecar's thread."""
        steps = batch.steps
        if not len(steps):
            return
        attributes: dict[str, Any] = {}
        rank = batch.identity.rank
        # A rank that stands out has series of its own in any job; then its steps are not in the others' series.
        per_rank = batch.identity.world_size <= semantics.MAX_RANK_SERIES or rank in self._named
        if per_rank:
            attributes[semantics.RANK] = rank
        step_s, own_s = steps.duration_ns / 1e9, steps.own_ns / 1e9
        rows = [row for row, step in enumerate(steps.step.tolist()) if step in sampled]
        of_step = [self._example(batch, row, float(step_s[row]), sampled) for row in rows]
        self._step.record(step_s, attributes, of_step)
        of_own = [each._replace(value=float(own_s[row])) for row, each in zip(rows, of_step, strict=True)]
        self._own.record(own_s, attributes, of_own)
        for part, part_ns in zip(PARTS, steps.parts_ns.T, strict=True):
            had = part_ns[part_ns != 0]  # a phase that the step did not have is no phase of 0 s
            self._phase.record(had / 1e9, {**attributes, semantics.PHASE: part})
        for phase, durations_ns in batch.device_ns.items():
            self._device.record(durations_ns / 1e9, {**attributes, semantics.PHASE: phase})
        self._device_memory.record(batch, attributes, per_rank=per_rank)
        self._steps.add(len(steps), attributes)
        if steps.memory_bytes[-1]:
            self._memory_bytes[rank] = memory_bytes = int(steps.memory_bytes[-1])
            # Without a series for each rank, the node's fullest rank is the one to know about.
            unnamed = [value for each, value in self._memory_bytes.items() if each not in self._named]
            self._memory.set(memory_bytes if per_rank else max(unnamed), attributes)

    @staticmethod
    def _example(batch: ExportBatch, row: int, value: float, sampled: Sampled) -> Example:
        """What leads from a bucket to the rank's span."""
        steps, anchor = batch.steps, batch.anchor
        ended_ns = int(steps.start_ns[row] + steps.duration_ns[row]) + anchor.unix_ns - anchor.monotonic_ns
        return Example(value, ended_ns, *sampled[int(steps.step[row])])


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
        for state, field in _MEMORY_STATES.items():
            if per_rank and values[field] is not None:
                self._bytes.set(values[field], {**attributes, semantics.MEMORY_STATE: state})
        for field, counter in self._counters.items():
            count = values[field]
            if count is not None:
                before = self._counted.get((batch.identity.key, field), 0)
                counter.add(count - before if count >= before else count, attributes)  # the user may have reset it
                self._counted[batch.identity.key, field] = count


class _Standing:
    """Gauges of what is wrong now. Written on the sidecar's thread, read on the metric reader's."""

    def __init__(self, meter: Meter, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._costs_s = ZeroBeforeDrop()
        self._hangs_s = ZeroBeforeDrop()
        self._classes: Mapping[str, int] = {}
        self._detectable_s: float | None = None
        self._hang: OpenHang | None = None
        self._hang_found_s = 0.0
        for name, unit, description, callback in (
            (
                semantics.STRAGGLER_COST,
                "s",
                "How much sooner a step would end without it, and those slow with it",
                self._cost,
            ),
            (semantics.STRAGGLERS, "{rank}", "Ranks that are slow now", self._count),
            (semantics.DETECTABLE, "s", "The smallest excess a step that would be named by now", self._detectable),
            (semantics.HANG_DURATION, "s", "How long no rank has made a step, while that is too long", self._duration),
        ):
            meter.create_observable_gauge(name, [callback], unit, description)

    def on_assessment(self, assessment: Assessment) -> None:
        findings, hang = assessment.findings, assessment.hang
        slow = [each for each in findings.episodes if each.until_step is None]
        # Without one of the ranks of a slow node the job waits for the others: each has what all of them cost together.
        shared_ns = {rank: each.cost_ns for each in assessment.together for rank in each.ranks}
        costs_ns = {(each.rank, each.phase): shared_ns.get(each.rank, each.cost_ns) for each in slow}
        with self._lock:
            self._costs_s.update({key: cost_ns / 1e9 for key, cost_ns in costs_ns.items() if cost_ns is not None})
            self._classes = stragglers_by_class(findings) if findings.compared else {}
            detectable_ns = findings.detectable_ns if findings.compared else None
            self._detectable_s = None if detectable_ns is None else detectable_ns / 1e9
            if hang is not self._hang:
                self._hang, self._hang_found_s = hang, self._clock()
            since_found_s = self._clock() - self._hang_found_s
            self._hangs_s.update({hang.kind: hang.since_s + since_found_s} if hang is not None else {})

    def _cost(self, options: CallbackOptions) -> Iterator[Observation]:
        with self._lock:
            points = self._costs_s.points()
        for (rank, phase), value in points:
            yield Observation(value, {semantics.RANK: rank, semantics.PHASE: phase})

    def _count(self, options: CallbackOptions) -> Iterator[Observation]:
        with self._lock:
            classes = self._classes
        for name, count in classes.items():
            yield Observation(count, {semantics.STRAGGLER_CLASS: name})

    def _detectable(self, options: CallbackOptions) -> Iterator[Observation]:
        with self._lock:
            value = self._detectable_s
        if value is not None:
            yield Observation(value)

    def _duration(self, options: CallbackOptions) -> Iterator[Observation]:
        with self._lock:
            points = self._hangs_s.points()
        for kind, value in points:
            yield Observation(value, {semantics.HANG_KIND: kind})


class ZeroBeforeDrop:
    """Values by key; one that is gone is a few times 0 before it is gone."""

    def __init__(self) -> None:
        self._values: dict[Any, float] = {}
        self._zeros: dict[Any, int] = {}

    def update(self, values: Mapping[Any, float]) -> None:
        """These there are now, and no others."""
        self._zeros.update(dict.fromkeys(self._values.keys() - values.keys(), _ZERO_POINTS))
        for key in values:
            self._zeros.pop(key, None)
        self._values = dict(values)

    def points(self) -> list[tuple[Any, float]]:
        points = [*self._values.items(), *((key, 0.0) for key in self._zeros)]
        self._zeros = {key: left - 1 for key, left in self._zeros.items() if left > 1}
        return points
