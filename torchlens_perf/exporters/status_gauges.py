"""Gauges of current problems, and of quantiles over a job's ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation

from torchlens_perf.exporters import Assessment, semantics
from torchlens_perf.exporters.series import ArrayMeter, Callback
from torchlens_perf.verdicts.finding_log import count_stragglers_by_class
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings

# Number of zeros that are sent after the end of a problem. Without zeros, backends extend the last
# value.
_ZERO_POINTS = 3
MAX_COSTS = 32


class StatusGauges:
    """Gauges of the newest assessment. The sidecar's thread writes, the sender's thread reads."""

    def __init__(self, meter: ArrayMeter, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: Assessment | None = None
        self._hang_found_s = 0.0
        self._hangs_s: Mapping[Any, float] = {}
        # Zeros that are still to be sent, by gauge and key.
        self._pending_zeros: dict[tuple[str, Any], int] = {}
        self._spread_s: Mapping[tuple[str, str], float] = {}
        for name, callback in (
            (semantics.STRAGGLER_COST, self._observe_slow_rank_costs),
            (semantics.STRAGGLERS, self._observe_straggler_counts),
            (semantics.DETECTABLE, self._observe_detectable_slowdown),
            (semantics.HANG_DURATION, self._observe_hang_duration),
            (semantics.GOODPUT, self._observe_goodput),
            (semantics.CRITICAL_PATH, self._observe_critical_path),
            (semantics.RANKS_WORK, self._make_quantile_callback("work")),
            (semantics.RANKS_WAIT, self._make_quantile_callback("wait")),
        ):
            meter.create_number(name, callback)

    def set_rank_quantiles(self, spread_s: Mapping[tuple[str, str], float]) -> None:
        """Set the quantiles over ranks (NodeRole.spread_s)."""
        self._spread_s = spread_s

    def on_assessment(self, assessment: Assessment) -> None:
        with self._lock:
            hang, now_s = assessment.hang, self._clock()
            if self._newest is None or hang is not self._newest.hang:
                self._hang_found_s = now_s
            self._newest = assessment
            self._hangs_s = (
                {hang.kind: hang.since_s + now_s - self._hang_found_s} if hang is not None else {}
            )

    @property
    def _findings(self) -> Findings:
        return NOTHING if self._newest is None else self._newest.findings

    def _make_quantile_callback(self, what: str) -> Callback:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            for (of, quantile), value in self._spread_s.items():
                if of == what:
                    yield Observation(value, {semantics.OVER_RANKS: quantile})

        return read

    def _observe_slow_rank_costs(self, options: CallbackOptions) -> Iterator[Observation]:
        findings = self._findings
        # The job only becomes faster if all ranks of a slow group do, so each rank's point shows
        # the cost of the group.
        joint_ns = {rank: group.cost_ns for group in findings.groups for rank in group.ranks}
        costs_ns = {
            (each.rank, each.phase): joint_ns.get(each.rank, each.cost_ns)
            for each in findings.slow_now
        }
        known_s = {key: cost_ns / 1e9 for key, cost_ns in costs_ns.items() if cost_ns is not None}
        costliest = sorted(known_s, key=lambda key: -known_s[key])[:MAX_COSTS]
        for (rank, phase), value in self._append_zeros(
            "cost", {key: known_s[key] for key in costliest}
        ):
            yield Observation(value, {semantics.RANK: rank, semantics.PHASE: phase})

    def _observe_straggler_counts(self, options: CallbackOptions) -> Iterator[Observation]:
        findings = self._findings
        for name, count in count_stragglers_by_class(findings).items() if findings.compared else ():
            yield Observation(count, {semantics.STRAGGLER_CLASS: name})

    def _observe_detectable_slowdown(self, options: CallbackOptions) -> Iterator[Observation]:
        findings = self._findings
        if findings.compared and findings.detectable_ns is not None:
            yield Observation(findings.detectable_ns / 1e9)

    def _observe_hang_duration(self, options: CallbackOptions) -> Iterator[Observation]:
        for kind, value in self._append_zeros("hang", self._hangs_s):
            yield Observation(value, {semantics.HANG_KIND: kind})

    def _observe_goodput(self, options: CallbackOptions) -> Iterator[Observation]:
        for name, value in (self._newest.goodput_s if self._newest else {}).items():
            yield Observation(value, {semantics.GOODPUT_CLASS: name})

    def _observe_critical_path(self, options: CallbackOptions) -> Iterator[Observation]:
        for name, value in (self._newest.critical_path_s if self._newest else {}).items():
            yield Observation(value, {semantics.CRITICAL_PATH_CLASS: name})

    def _append_zeros(self, gauge: str, values: Mapping[Any, float]) -> list[tuple[Any, float]]:
        """Return the values, and a zero for each key that had a value in a recent export."""
        with self._lock:
            ended = [key for of, key in self._pending_zeros if of == gauge and key not in values]
            for key in ended:
                self._pending_zeros[gauge, key] -= 1
                if not self._pending_zeros[gauge, key]:
                    del self._pending_zeros[gauge, key]
            self._pending_zeros.update(((gauge, key), _ZERO_POINTS) for key in values)
            return [*values.items(), *((key, 0.0) for key in ended)][:MAX_COSTS]
