"""Gauges of what is wrong now, and of how the ranks of a job differ."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.metrics import CallbackOptions, Observation

from torchlens_perf.exporters import Assessment, semantics
from torchlens_perf.exporters.series import Callback, Meter
from torchlens_perf.verdicts.finding_log import stragglers_by_class

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.hang import OpenHang

# How often a gauge is 0 after its end: a series that just stops is taken to have kept its last value for minutes.
_ZERO_POINTS = 3
MAX_COSTS = 32  # points: of more slow ranks, the costliest


class Standing:
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
        self._spread_s: Mapping[tuple[str, str], float] = {}
        for name, callback in (
            (semantics.STRAGGLER_COST, self._cost),
            (semantics.STRAGGLERS, self._count),
            (semantics.DETECTABLE, self._detectable),
            (semantics.HANG_DURATION, self._duration),
            (semantics.RANKS_WORK, self._spread("work")),
            (semantics.RANKS_WAIT, self._spread("wait")),
        ):
            meter.create_observable_gauge(name, [callback])

    def differ(self, spread_s: Mapping[tuple[str, str], float]) -> None:
        """How the job's ranks differ now: see JobPart."""
        self._spread_s = spread_s

    def _spread(self, what: str) -> Callback:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            for (of, quantile), value in self._spread_s.items():
                if of == what:
                    yield Observation(value, {semantics.OVER_RANKS: quantile})

        return read

    def on_assessment(self, assessment: Assessment) -> None:
        findings, hang = assessment.findings, assessment.hang
        slow = findings.slow_now
        # Without one of the ranks of a slow node the job waits for the others: each has what all of them cost together.
        shared_ns = {rank: each.cost_ns for each in findings.groups for rank in each.ranks}
        costs_ns = {(each.rank, each.phase): shared_ns.get(each.rank, each.cost_ns) for each in slow}
        with self._lock:
            known_s = {key: cost_ns / 1e9 for key, cost_ns in costs_ns.items() if cost_ns is not None}
            costliest = sorted(known_s, key=lambda key: -known_s[key])[:MAX_COSTS]
            self._costs_s.update({key: known_s[key] for key in costliest})
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
        return points[:MAX_COSTS]
