"""Metrics of training steps: histograms of durations, counters and gauges.

The number of series is bounded. In a small job, each rank has series of its own. In a large job,
only slow ranks have their own. All other ranks share one set of series: each node forwards its sums
to the sidecar of node 0, which exports the total.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import Metric, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource

from torchlens_perf.exporters import (
    MAX_SLOW_RANKS,
    Assessment,
    CoveredRanks,
    ExportBatch,
    NodeRole,
    keep_newest_ranks,
    semantics,
)
from torchlens_perf.exporters.metric_snapshot import SnapshotAggregator, SnapshotEncoder
from torchlens_perf.exporters.otlp_hardware import HardwareMetrics
from torchlens_perf.exporters.otlp_resource import SCOPE
from torchlens_perf.exporters.series import (
    ArrayHistogram,
    ArrayMeter,
    ExemplarValue,
    NumberInstrument,
)
from torchlens_perf.exporters.series_room import (
    compute_series_limits,
    limit_points,
    max_ranks_with_own_series,
)
from torchlens_perf.exporters.status_gauges import StatusGauges
from torchlens_perf.run.records import PARTS

Sampled = Mapping[int, tuple[int, int]]
"""For each traced step, the ids of its trace and of the rank's span."""
# For each value of the state attribute, the field of a memory reading.
_MEMORY_STATES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "inactive": "inactive_bytes",
    "peak": "peak_bytes",
    "limit": "limit_bytes",
}


class NodeMetrics:
    """All OTLP metrics of a node. The sidecar's thread writes, and the sender's thread collects."""

    def __init__(
        self, meter: ArrayMeter | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meter = ArrayMeter() if meter is None else meter
        self._clock = clock
        self._steps = StepInstruments(self._meter)
        # The sums that are forwarded to node 0 have a meter of their own, which is not exported
        # here.
        tallied = ArrayMeter(explicit_bounds=self._meter.bounds is not None)
        self._forwarded = StepInstruments(tallied)
        self._tally = SnapshotEncoder(
            tallied, self._forwarded.histograms, self._forwarded.counters, clock
        )
        self._received = SnapshotAggregator(
            self._meter, self._steps.histograms, self._steps.counters, clock
        )
        self._status = StatusGauges(self._meter, clock)
        self._not_traced = self._meter.create_number(semantics.STEPS_NOT_TRACED)
        self._counted_left_out = 0
        self.hardware = HardwareMetrics(self._meter, clock)
        self._part = NodeRole()
        self._world_size = 1
        self._named: frozenset[int] = frozenset()
        self._forms: dict[str, int] = {}
        # Ranks that were found slow, the most recent last.
        self._shown: tuple[int, ...] = ()

    def update_role(self, part: NodeRole) -> bytes:
        """Apply this node's role. Return the message for node 0's sidecar; b"" if none is due."""
        self._part = part
        for node, data in part.tallies:
            self._received.add_message(node, data)
        self._status.spread_s = part.spread_s if self._is_large_job else {}
        self._update_shown_ranks()
        if part.left_out > self._counted_left_out:
            self._not_traced.add(part.left_out - self._counted_left_out, {})
            self._counted_left_out = part.left_out
        if part.part is CoveredRanks.WHOLE and self._received.memory_bytes:
            self._steps.set_memory_of_other_nodes(self._received.memory_bytes)
        hands_on = part.part is CoveredRanks.FORWARDER and self._is_large_job
        return (
            self._tally.next_message(self._forwarded.largest_shared_memory_bytes)
            if hands_on
            else b""
        )

    def export(self, batch: ExportBatch, sampled: Sampled) -> None:
        """Add the steps of a batch. sampled: ids of the steps whose spans are also sent."""
        self._world_size = batch.identity.world_size
        # Steps of a rank that has series of its own are not added to the shared series.
        own = self._ranks_with_series if self._is_large_job else None
        hands_on = (
            own is not None
            and batch.identity.rank not in own
            and self._part.part is CoveredRanks.FORWARDER
        )
        (self._forwarded if hands_on else self._steps).record_batch(batch, sampled, own)

    def on_assessment(self, assessment: Assessment) -> None:
        """Update the gauges of current problems and the slow ranks with their own series."""
        slow = sorted(assessment.findings.slow_now, key=lambda each: -each.excess_ns)[
            :MAX_SLOW_RANKS
        ]
        self._named = frozenset(each.rank for each in slow)
        self._update_shown_ranks()
        if assessment.whole_job:
            self._status.on_assessment(assessment)

    def collect(self, resource: Resource) -> MetricsData | None:
        """Return all metrics, or None if no metric has points. resource: the node's resource."""
        metrics = self._limit_series(self._meter.collect())
        if not metrics:
            return None
        return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])

    # -- parts

    def _update_shown_ranks(self) -> None:
        """Select the ranks whose series are sent: those that were found slow most recently."""
        self._shown = keep_newest_ranks([*self._shown, *self._ranks_with_series])
        shown = frozenset(self._shown) if self._part.standing is None else self._part.standing
        self._meter.shown_ranks = shown if self._is_large_job else None

    @property
    def _is_large_job(self) -> bool:
        """True if the job has too many ranks for series of each rank."""
        return self._world_size > max_ranks_with_own_series(self._part.max_series)

    @property
    def _ranks_with_series(self) -> frozenset[int]:
        """Ranks of a large job that have series of their own."""
        return self._part.standing if self._part.standing is not None else self._named

    def _limit_series(self, metrics: list[Metric]) -> list[Metric]:
        """Reduce metrics to this node's share of the job's series."""
        hardware_room, room = compute_series_limits(self._world_size, self._part)
        hardware = [each for each in metrics if each.name.startswith("hw.")]
        others = [each for each in metrics if not each.name.startswith("hw.")]
        if room is not None:
            others = limit_points(others, room, self._forms)
        return [*others, *limit_points(hardware, hardware_room, self._forms)]


class StepInstruments:
    """The instruments of steps, such as the histogram of step durations."""

    def __init__(self, meter: ArrayMeter) -> None:
        duration = meter.create_histogram
        self._meter = meter
        self._step = duration(semantics.STEP_DURATION)
        self._own = duration(semantics.STEP_OWN_TIME)
        self._phase = duration(semantics.PHASE_DURATION)
        self._device = duration(semantics.DEVICE_DURATION)
        self._steps = meter.create_number(semantics.STEPS)
        self._tokens = meter.create_number(semantics.TOKENS)
        self._flops = meter.create_number(semantics.MODEL_FLOPS)
        self._mfu = meter.create_number(semantics.MFU)
        self._memory = meter.create_number(semantics.MEMORY)
        self._memory_bytes: dict[int, int] = {}
        self._others_bytes = 0
        self._device_bytes = meter.create_number(semantics.DEVICE_MEMORY)
        self._memory_counters = {
            "alloc_retries": meter.create_number(semantics.ALLOC_RETRIES),
            "ooms": meter.create_number(semantics.OUT_OF_MEMORY),
        }
        self._counted: dict[tuple[str, str], int] = {}
        self._ranks_with_series: frozenset[int] = frozenset()

    @property
    def histograms(self) -> tuple[ArrayHistogram, ...]:
        return self._step, self._own, self._phase, self._device

    @property
    def counters(self) -> tuple[NumberInstrument, ...]:
        return (self._steps, self._tokens, self._flops, *self._memory_counters.values())

    @property
    def largest_shared_memory_bytes(self) -> int:
        """Largest memory of a rank that has no series of its own; 0 if unknown."""
        return max(
            (
                value
                for rank, value in self._memory_bytes.items()
                if rank not in self._ranks_with_series
            ),
            default=0,
        )

    def set_memory_of_other_nodes(self, memory_bytes: int) -> None:
        """Set the memory of the rank, of all other nodes, that uses most."""
        self._others_bytes = memory_bytes
        self._memory.set(max(memory_bytes, self.largest_shared_memory_bytes), {})

    def record_batch(
        self, batch: ExportBatch, sampled: Sampled, own: frozenset[int] | None
    ) -> None:
        """Add the steps of a batch, or only their exemplars if the steps were added before.

        Call it on the sidecar's thread. own: ranks that have series of their own; None for all
        ranks.
        """
        steps = batch.steps
        if not len(steps):
            return
        rank = batch.identity.rank
        self._ranks_with_series, per_rank = own or frozenset(), own is None or rank in own
        attributes: dict[str, Any] = {semantics.RANK: rank} if per_rank else {}
        rows = [row for row, step in enumerate(steps.step.tolist()) if step in sampled]
        of_step = [
            self._make_exemplar(batch, row, steps.duration_ns[row] / 1e9, sampled) for row in rows
        ]
        of_own = [
            each._replace(value=steps.own_ns[row] / 1e9)
            for row, each in zip(rows, of_step, strict=True)
        ]
        self._step.add_exemplars(attributes, of_step)
        self._own.add_exemplars(attributes, of_own)
        if batch.again:
            return
        self._meter.move_start_back(int(steps.start_ns[0]) + batch.anchor.offset_ns)
        self._step.record_ns(steps.duration_ns, attributes)
        self._own.record_ns(steps.own_ns, attributes)
        for part, part_ns in zip(PARTS, steps.parts_ns.T, strict=True):
            # 0 means that the step did not have this phase.
            had = part_ns[part_ns != 0]
            self._phase.record_ns(had, {**attributes, semantics.PHASE: part})
        for phase, durations_ns in batch.device_ns.items():
            self._device.record_ns(durations_ns, {**attributes, semantics.PHASE: phase})
        self._record_device_memory(batch, attributes, per_rank=per_rank)
        self._steps.add(len(steps), attributes)
        self._record_utilization(batch, attributes, per_rank=per_rank)
        if steps.memory_bytes[-1]:
            self._memory_bytes[rank] = memory_bytes = int(steps.memory_bytes[-1])
            # The shared gauge shows the rank that uses most memory, which will run out of memory
            # first.
            self._memory.set(
                memory_bytes
                if per_rank
                else max(self.largest_shared_memory_bytes, self._others_bytes),
                attributes,
            )

    def _record_utilization(
        self, batch: ExportBatch, attributes: Mapping[str, Any], *, per_rank: bool
    ) -> None:
        steps, flops = batch.steps, batch.flops
        if batch.has_tokens:
            self._tokens.add(int(steps.workload.clip(min=0).sum()), attributes)
        if flops is not None:
            self._flops.add(round(flops.model * len(steps)), attributes)
            if flops.at_peak_s is not None and per_rank:
                self._mfu.set(flops.at_peak_s * 1e9 / float(steps.duration_ns.mean()), attributes)

    @staticmethod
    def _make_exemplar(
        batch: ExportBatch, row: int, value: float, sampled: Sampled
    ) -> ExemplarValue:
        """Build an exemplar that links a histogram bucket to the rank's span."""
        steps, anchor = batch.steps, batch.anchor
        ended_ns = int(steps.start_ns[row] + steps.duration_ns[row]) + anchor.offset_ns
        return ExemplarValue(value, ended_ns, *sampled[int(steps.step[row])])

    def _record_device_memory(
        self, batch: ExportBatch, attributes: Mapping[str, Any], *, per_rank: bool
    ) -> None:
        if batch.memory is None:
            return
        values = batch.memory._asdict()
        for state, field in _MEMORY_STATES.items():
            if per_rank and values[field] is not None:
                self._device_bytes.set(values[field], {**attributes, semantics.MEMORY_STATE: state})
        for field, counter in self._memory_counters.items():
            count = values[field]
            if count is not None:
                before = self._counted.get((batch.identity.key, field), 0)
                # The count decreases if the training script resets the allocator's statistics.
                counter.add(count - before if count >= before else count, attributes)
                self._counted[batch.identity.key, field] = count
