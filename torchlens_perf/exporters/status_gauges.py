"""Gauges of current problems, and of quantiles over a job's ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchlens_perf.exporters import Assessment, semantics
from torchlens_perf.exporters.series import ArrayMeter, Points
from torchlens_perf.verdicts.stragglers.findings import Findings, count_stragglers_by_class

# Number of zeros that are sent after the end of a problem. Without zeros, backends extend the last
# value.
_ZERO_POINTS = 3
MAX_COSTS = 32


class StatusGauges:
    """Gauges of the newest assessment. The sidecar's thread writes, the sender's thread reads."""

    def __init__(self, meter: ArrayMeter, clock: Callable[[], float]) -> None:
        self._meter, self._clock = meter, clock
        self._newest: Assessment | None = None
        self._hang_found_s = 0.0
        self._hang_s = 0.0
        # Zeros that are still to be sent, by gauge and key.
        self._pending_zeros: dict[tuple[str, Any], int] = {}
        self.spread_s: Mapping[tuple[str, str], float] = {}
        """Quantiles over ranks, see NodeRole."""
        names = (
            semantics.STRAGGLER_COST, semantics.STRAGGLERS, semantics.DETECTABLE, semantics.HANG_DURATION,
            semantics.GOODPUT, semantics.CRITICAL_PATH, semantics.RANKS_WORK, semantics.RANKS_WAIT,
        )  # fmt: skip
        meter.add_observer(names, self._observe)

    def on_assessment(self, assessment: Assessment) -> None:
        with self._meter.lock:
            hang, now_s = assessment.hang, self._clock()
            if self._newest is None or hang is not self._newest.hang:
                self._hang_found_s = now_s
            self._newest = assessment
            if hang is not None:
                self._hang_s = hang.since_s + now_s - self._hang_found_s

    def _observe(self) -> Mapping[str, Points]:
        found: dict[str, Points] = {
            name: [
                (value, {semantics.OVER_RANKS: quantile})
                for (of, quantile), value in self.spread_s.items()
                if of == what
            ]
            for name, what in ((semantics.RANKS_WORK, "work"), (semantics.RANKS_WAIT, "wait"))
        }
        return found if self._newest is None else {**found, **self._observe_problems(self._newest)}

    def _observe_problems(self, newest: Assessment) -> Mapping[str, Points]:
        hang, findings = newest.hang, newest.findings
        costs = self._append_zeros(semantics.STRAGGLER_COST, _largest_costs_s(findings))
        hangs = self._append_zeros(
            semantics.HANG_DURATION, {} if hang is None else {hang.kind: self._hang_s}
        )
        found: dict[str, Points] = {
            semantics.STRAGGLER_COST: [
                (value, {semantics.RANK: rank, semantics.PHASE: phase})
                for (rank, phase), value in costs
            ],
            semantics.HANG_DURATION: _label(hangs, semantics.HANG_KIND),
            semantics.GOODPUT: _label(newest.goodput_s.items(), semantics.GOODPUT_CLASS),
            semantics.CRITICAL_PATH: _label(
                newest.critical_path_s.items(), semantics.CRITICAL_PATH_CLASS
            ),
        }
        if findings.compared:
            counts = count_stragglers_by_class(findings).items()
            found[semantics.STRAGGLERS] = _label(counts, semantics.STRAGGLER_CLASS)
            if findings.detectable_ns is not None:
                found[semantics.DETECTABLE] = [(findings.detectable_ns / 1e9, {})]
        return found

    def _append_zeros(self, gauge: str, values: Mapping[Any, float]) -> list[tuple[Any, float]]:
        """Return the values, and a zero for each key that had a value in a recent export."""
        ended = [key for of, key in self._pending_zeros if of == gauge and key not in values]
        for key in ended:
            self._pending_zeros[gauge, key] -= 1
            if not self._pending_zeros[gauge, key]:
                del self._pending_zeros[gauge, key]
        self._pending_zeros.update(((gauge, key), _ZERO_POINTS) for key in values)
        return [*values.items(), *((key, 0.0) for key in ended)][:MAX_COSTS]


def _label(values: Iterable[tuple[str, float]], name: str) -> Points:
    return [(value, {name: key}) for key, value in values]


def _largest_costs_s(findings: Findings) -> dict[tuple[int, str], float]:
    """Return the cost of each slow rank and phase, largest first."""
    # The job only becomes faster if all ranks of a slow group do, so each rank's point shows the
    # cost of the group.
    joint_ns = {rank: group.cost_ns for group in findings.groups for rank in group.ranks}
    costs_ns = {
        (each.rank, each.phase): joint_ns.get(each.rank, each.cost_ns) for each in findings.slow_now
    }
    known_s = {key: cost_ns / 1e9 for key, cost_ns in costs_ns.items() if cost_ns is not None}
    return {key: known_s[key] for key in sorted(known_s, key=lambda key: -known_s[key])[:MAX_COSTS]}
