"""A meter whose instruments record arrays of values and create data points of the SDK.

The interface resembles OpenTelemetry's Meter. The SDK's own meter is too slow: a step has ten
durations, and ten calls of `record()` take 100 us. This meter records a batch of steps with one
call. Each series of a histogram is a sketch: an exponential histogram of scale 5, or a histogram
with explicit bounds. The sidecar's thread writes, and the sender's thread reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as ExplicitHistogram

from torchlens_perf.exporters import node_semantics, semantics
from torchlens_perf.exporters.semantics import DURATION_BOUNDS_S, RANK
from torchlens_perf.run.sketch import LOWEST_BUCKET, SCALE, Sketch

# Largest number of exemplars per series and export.
_MAX_EXEMPLARS = 10
# The SDK's default limit per point. If there are more buckets, pairs are merged.
MAX_BUCKETS = 160
_DEFINITIONS = {each.name: each for each in (*semantics.METRICS, *node_semantics.METRICS)}
CUMULATIVE, DELTA = AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA

Attributes = Mapping[str, Any]
Points = Iterable[tuple[float, Attributes]]
"""The value and the attributes of each series of a number instrument."""


class ExemplarValue(NamedTuple):
    """A recorded value and the span in which it was measured."""

    value: float
    unix_ns: int
    trace_id: int
    span_id: int


def _series_key(attributes: Attributes) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(attributes.items()))


class _HistogramSeries:
    """The sketch and exemplars of one series of a histogram."""

    def __init__(self) -> None:
        self.sketch = Sketch()
        # The newest exemplar of each octave of values.
        self.examples: dict[int, ExemplarValue] = {}

    def add_exemplars(self, examples: Iterable[ExemplarValue]) -> None:
        for example in examples:
            octave = int(np.floor(np.log2(example.value))) if example.value > 0 else -1000
            self.examples.pop(octave, None)
            self.examples[octave] = example
            if len(self.examples) > _MAX_EXEMPLARS:
                del self.examples[next(iter(self.examples))]


class ArrayHistogram:
    """A histogram of durations for each set of attributes, recorded in ns, sent in seconds."""

    def __init__(self, meter: ArrayMeter, definition: semantics.Metric) -> None:
        self._meter, self.definition = meter, definition
        self._series: dict[tuple[tuple[str, Any], ...], _HistogramSeries] = {}

    def record_ns(self, values_ns: npt.NDArray[np.int64], attributes: Attributes) -> None:
        """Record durations. Negative values are ignored."""
        values_ns = values_ns[values_ns >= 0]
        if len(values_ns):
            with self._meter.lock:
                self._series_of(attributes).sketch.add(values_ns, self._meter.bounds_ns)

    def merge_sketch(self, sketch: Sketch, attributes: Attributes) -> None:
        """Add the counts of another node. Both sketches must have the same bucket bounds."""
        with self._meter.lock:
            self._series_of(attributes).sketch.merge(sketch)

    def add_exemplars(self, attributes: Attributes, examples: Iterable[ExemplarValue]) -> None:
        """Add exemplars, whose values are in seconds."""
        if self._meter.exemplars:
            with self._meter.lock:
                self._series_of(attributes).add_exemplars(examples)

    def sketches(self) -> list[tuple[Attributes, Sketch]]:
        """Return the attributes and sketch of each series."""
        with self._meter.lock:
            return [(dict(key), series.sketch) for key, series in self._series.items()]

    def _series_of(self, attributes: Attributes) -> _HistogramSeries:
        return self._series.setdefault(_series_key(attributes), _HistogramSeries())

    def to_metric(self, unix_ns: int) -> Metric | None:
        """Return the metric, or None if it has no points. The caller must hold the meter's lock."""
        points: list[Any] = []
        since_ns, temporality = self._meter.start_time_ns(grows=True), self._meter.grows
        for key, of_key in self._series.items():
            sketch = of_key.sketch
            if not sketch.count or not self._meter.is_series_sent(key):
                continue
            # With delta temporality, exemplars before `since_ns` were exported earlier.
            examples = [
                Exemplar({}, each.value, each.unix_ns, each.span_id, each.trace_id)
                for each in of_key.examples.values()
                if since_ns <= each.unix_ns <= unix_ns
            ]
            common: dict[str, Any] = {
                "attributes": dict(key), "start_time_unix_nano": since_ns, "time_unix_nano": unix_ns,
                "count": sketch.count, "sum": sketch.sum_ns / 1e9,
                "min": sketch.min_ns / 1e9, "max": sketch.max_ns / 1e9,
                "exemplars": examples,
            }  # fmt: skip
            if self._meter.bounds is not None:
                first, used = sketch.stored_buckets
                after = len(self._meter.bounds) + 1 - first - len(used)
                counts = [0] * first + used.tolist() + [0] * after
                points.append(
                    HistogramDataPoint(
                        bucket_counts=counts, explicit_bounds=self._meter.bounds, **common
                    )
                )
            else:
                points.append(ExponentialHistogramDataPoint(**_bucket_fields(sketch), **common))
            if not self._meter.keeps_examples:
                of_key.examples.clear()
        if temporality == DELTA:
            self._series.clear()
        if not points:
            return None
        of = ExponentialHistogram if self._meter.bounds is None else ExplicitHistogram
        return _to_sdk_metric(self.definition, of(points, temporality))


def _bucket_fields(sketch: Sketch) -> dict[str, Any]:
    """Return the fields of a data point that describe the buckets.

    The sketch's first bucket has no lower bound, so its count becomes `zero_count`.
    """
    first, counts = sketch.stored_buckets
    zeros = int(counts[0]) if first == 0 and len(counts) else 0
    if first == 0:
        end, counts = len(counts), np.trim_zeros(counts[1:], "f")
        first = end - len(counts)
    number, scale = first + LOWEST_BUCKET, SCALE
    while len(counts) > MAX_BUCKETS:
        counts = np.pad(counts, (number % 2, (number + len(counts)) % 2))
        counts, number = counts[::2] + counts[1::2], number >> 1
        scale -= 1
    positive = Buckets(number if len(counts) else 0, counts.tolist())
    return {
        "scale": scale,
        "zero_count": zeros,
        "positive": positive,
        "negative": Buckets(0, []),
        "flags": 0,
    }


class NumberInstrument:
    """A counter, up-down counter or gauge, with one value per set of attributes."""

    def __init__(
        self, meter: ArrayMeter, definition: semantics.Metric, *, is_observed: bool
    ) -> None:
        """is_observed: True if the meter's observers set the values."""
        self._meter, self.definition, self.is_observed = meter, definition, is_observed
        self._values: dict[tuple[tuple[str, Any], ...], float] = {}

    def add(self, value: float, attributes: Attributes) -> None:
        with self._meter.lock:
            key = _series_key(attributes)
            self._values[key] = self._values.get(key, 0) + value

    def set(self, value: float, attributes: Attributes) -> None:
        with self._meter.lock:
            self._values[_series_key(attributes)] = value

    def sum_of_values(self) -> float:
        """Return the sum of the values over all attributes."""
        with self._meter.lock:
            return sum(self._values.values())

    def replace(self, points: Points) -> None:
        """Replace the values of all series. The caller must hold the meter's lock."""
        self._values = {_series_key(attributes): value for value, attributes in points}

    def to_metric(self, unix_ns: int) -> Metric | None:
        """Return the metric, or None if it has no points. The caller must hold the meter's lock."""
        if not self._values:
            return None
        counts = self.definition.instrument == "counter"
        since_ns = self._meter.start_time_ns(grows=counts)
        points = [
            NumberDataPoint(dict(key), since_ns, unix_ns, value)
            for key, value in self._values.items()
            if self.is_observed or self._meter.is_series_sent(key)
        ]
        if counts and self._meter.grows == DELTA:
            self._values.clear()
        if not points:
            return None
        grows = self._meter.grows if counts else CUMULATIVE
        is_gauge = self.definition.instrument == "gauge"
        data = Gauge(points) if is_gauge else Sum(points, grows, counts)
        return _to_sdk_metric(self.definition, data)


def _to_sdk_metric(definition: semantics.Metric, data: Any) -> Metric:
    return Metric(definition.name, definition.meaning, definition.unit, data)


class ArrayMeter:
    """The instruments of a node, with all of their series."""

    def __init__(
        self,
        *,
        explicit_bounds: bool = False,
        delta: bool = False,
        exemplars: bool = True,
        keeps_examples: bool = False,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """- explicit_bounds: histograms have DURATION_BOUNDS_S instead of exponential buckets.
        - delta: True if points count from the last export.
        - keeps_examples: exports include exemplars that were exported before, because several
          clients may scrape.
        - clock_ns: returns UNIX time.
        """
        self.bounds = DURATION_BOUNDS_S if explicit_bounds else None
        self.bounds_ns = (
            np.rint(np.multiply(DURATION_BOUNDS_S, 1e9)).astype(np.int64)
            if explicit_bounds
            else None
        )
        self.grows = DELTA if delta else CUMULATIVE
        self.exemplars, self.keeps_examples = exemplars, keeps_examples
        self.lock = threading.Lock()
        self.shown_ranks: frozenset[int] | None = None
        """Ranks whose own series are sent; None for all ranks."""
        self._collected = False
        self._clock_ns = clock_ns
        self._began_ns = self._last_ns = clock_ns()
        self._instruments: list[ArrayHistogram | NumberInstrument] = []
        self._observers: list[Callable[[], Mapping[str, Points]]] = []

    def is_series_sent(self, key: tuple[tuple[str, Any], ...]) -> bool:
        """Return True if the series with this key is sent."""
        return self.shown_ranks is None or all(
            value in self.shown_ranks for name, value in key if name == RANK
        )

    def move_start_back(self, unix_ns: int) -> None:
        """Set the start of all series to the first step, which was long ago in a replay."""
        with self.lock:
            if not self._collected and unix_ns < self._began_ns:
                self._began_ns = self._last_ns = unix_ns

    def start_time_ns(self, *, grows: bool) -> int:
        """Return the start time of a data point."""
        return self._last_ns if grows and self.grows == DELTA else self._began_ns

    def create_histogram(self, name: str) -> ArrayHistogram:
        found = ArrayHistogram(self, _DEFINITIONS[name])
        self._instruments.append(found)
        return found

    def create_number(self, name: str, *, is_observed: bool = False) -> NumberInstrument:
        """Create a counter, up-down counter or gauge. is_observed: see NumberInstrument."""
        found = NumberInstrument(self, _DEFINITIONS[name], is_observed=is_observed)
        self._instruments.append(found)
        return found

    def add_observer(
        self, names: Iterable[str], observe: Callable[[], Mapping[str, Points]]
    ) -> None:
        """Create instruments whose values are read at each export.

        names: names of the metrics. observe: returns the current points by metric. It is called
        with the meter's lock, on the sender's thread. Counters have no delta temporality.
        """
        for name in names:
            self.create_number(name, is_observed=True)
        self._observers.append(observe)

    def collect(self) -> list[Metric]:
        """Return all metrics that have data points."""
        unix_ns = self._clock_ns()
        with self.lock:
            observed = {
                name: points for observe in self._observers for name, points in observe().items()
            }
            for each in self._instruments:
                if isinstance(each, NumberInstrument) and each.is_observed:
                    each.replace(observed.get(each.definition.name, ()))
            found = [each.to_metric(unix_ns) for each in self._instruments]
            self._last_ns = unix_ns
            self._collected = True
        return [each for each in found if each is not None]
