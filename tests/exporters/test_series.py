"""Points of histograms, compared with NumPy, and messages with the sums of other nodes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opentelemetry.sdk.metrics.export import HistogramDataPoint

from torchlens_perf.exporters import MAX_TALLY_BYTES, semantics
from torchlens_perf.exporters.metric_snapshot import EVERY_S, SnapshotAggregator, SnapshotEncoder
from torchlens_perf.exporters.semantics import DURATION_BOUNDS_S
from torchlens_perf.exporters.series import MAX_BUCKETS, ArrayHistogram, ArrayMeter
from torchlens_perf.run.sketch import Sketch, bucket_bounds

Durations = npt.NDArray[np.int64]
HOUR_NS = 3600 * 10**9


def durations(low_ns: float, high_ns: float, count: int = 500, seed: int = 0) -> Durations:
    """Return log-uniform random durations between the two limits."""
    random = np.random.default_rng(seed)
    return np.exp(random.uniform(np.log(low_ns), np.log(high_ns), count)).astype(np.int64)


def histogram(meter: ArrayMeter) -> ArrayHistogram:
    return meter.create_histogram(semantics.STEP_DURATION)


def point_of(meter: ArrayMeter) -> Any:
    """Return the only point that is sent."""
    (metric,) = meter.collect()
    (point,) = metric.data.data_points
    return point


def check(point: Any, values_ns: Durations) -> None:
    """Check that the point has the given durations in the right buckets."""
    values_s = values_ns / 1e9
    assert point.count == len(values_ns)
    assert (point.min, point.max) == (values_s.min(), values_s.max())
    assert point.sum == pytest.approx(values_s.sum(), rel=1e-12)
    if isinstance(point, HistogramDataPoint):
        edges = [-np.inf, *point.explicit_bounds, np.inf]
        assert tuple(point.explicit_bounds) == DURATION_BOUNDS_S
        counts = list(point.bucket_counts)
    else:
        least_s = bucket_bounds()[0] / 1e9
        values_s, zeros = values_s[values_s > least_s], values_s[values_s <= least_s]
        assert point.zero_count == len(zeros)
        counts = list(point.positive.bucket_counts)
        assert len(counts) <= MAX_BUCKETS
        edges = list(
            2.0 ** ((point.positive.offset + np.arange(len(counts) + 1)) / 2.0**point.scale)
        )
    expected = [
        int(((low < values_s) & (values_s <= high)).sum())
        for low, high in itertools.pairwise(edges)
    ]
    assert counts == expected
    assert sum(counts) == len(values_s)


@pytest.mark.parametrize(
    ("values_ns", "scale"),
    [
        (durations(1e6, 2e7), 5),
        (durations(1e6, 2e9), 3),
        (durations(1e3, 1e13), 2),
        (np.array([10**9, 10**9 + 1, 5 * 10**8, 2 * 10**9]), 5),
        (np.array([0, 3, 60, 10**6]), 5),
        (np.array([2, 30 * 24]) * HOUR_NS, 4),
        (np.array([0]), 5),
    ],
    ids=[
        "alike",
        "an epoch's",
        "everything",
        "bounds",
        "no time",
        "longer than a kernel's",
        "zero",
    ],
)
def test_exponential_points_have_exact_count_sum_and_buckets(
    values_ns: Durations, scale: int
) -> None:
    """Minimum and maximum are exact too. A wide distribution has fewer buckets per octave."""
    meter = ArrayMeter()
    series = histogram(meter)
    for some in np.array_split(values_ns, 3):
        series.record_ns(some, {})
    point = point_of(meter)
    assert point.scale == scale
    check(point, values_ns)


def test_duration_on_a_bound_is_in_the_right_explicit_bucket() -> None:
    values_ns = np.concatenate(
        [durations(1e4, 1e12), [round(bound * 1e9) for bound in DURATION_BOUNDS_S], [0]]
    )
    meter = ArrayMeter(explicit_bounds=True)
    histogram(meter).record_ns(values_ns, {})
    check(point_of(meter), values_ns)


def test_negative_durations_are_left_out_of_histograms() -> None:
    """A negative duration comes from a clock that stepped back, and is no measurement."""
    meter = ArrayMeter()
    histogram(meter).record_ns(np.array([-5, 10**9, -1]), {})
    check(point_of(meter), np.array([10**9]))


# -- messages of other nodes


class Node:
    """A node's series and its messages."""

    def __init__(self, now_s: Callable[[], float], *, explicit_bounds: bool = False) -> None:
        meter = ArrayMeter(explicit_bounds=explicit_bounds)
        self.series = histogram(meter)
        self.tally = SnapshotEncoder(
            meter, [self.series], [meter.create_number(semantics.STEPS)], now_s
        )


class Clock:
    """A clock that does not advance."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Node0:
    """Node 0's series, with the sums that other nodes have sent."""

    def __init__(self, clock: Clock, *, explicit_bounds: bool = False, delta: bool = False) -> None:
        self.meter = ArrayMeter(explicit_bounds=explicit_bounds, delta=delta)
        self.series = histogram(self.meter)
        self.heard = SnapshotAggregator(self.meter, [self.series], [], clock)

    def take(self, node: str, data: bytes) -> None:
        self.heard.add_message(node, data)


def deliver_messages(
    clock: Clock, node: Node, take: Callable[[bytes], object], times: int = 30
) -> None:
    """Deliver each message at once.

    A message can contain only some series, so messages are sent until each series was in one.
    """
    for _ in range(times):
        clock.now_s += EVERY_S
        data = node.tally.next_message(0)
        assert 0 < len(data) <= MAX_TALLY_BYTES
        take(data)


@pytest.mark.parametrize("explicit_bounds", [False, True])
def test_series_of_node_0_has_the_durations_of_all_nodes(explicit_bounds: bool) -> None:
    """The distributions may be wide."""
    clock = Clock()
    nodes = {name: Node(clock, explicit_bounds=explicit_bounds) for name in ("a", "b")}
    node_0, everything = Node0(clock, explicit_bounds=explicit_bounds), []
    for seed in range(3):
        for number, (name, node) in enumerate(nodes.items()):
            everything.append(durations(1e2, 1e13, 2000, seed=2 * seed + number))
            node.series.record_ns(everything[-1], {})
            deliver_messages(clock, node, functools.partial(node_0.take, name))
    check(point_of(node_0.meter), np.concatenate(everything))


def test_counts_of_months_fit_into_a_message() -> None:
    """The node in this test has run for months."""
    clock = Clock()
    node, node_0 = Node(clock), Node0(clock)
    counts = [10**12] * 1800
    node.series.merge_sketch(Sketch.from_numbers([10**18, 0, 61, 10**18, 1, *counts]), {})
    deliver_messages(clock, node, functools.partial(node_0.take, "a"), 300)
    assert point_of(node_0.meter).count == sum(counts)


def test_counts_of_lost_messages_arrive_with_later_messages() -> None:
    clock = Clock()
    node, node_0 = Node(clock), Node0(clock)
    values_ns = durations(1e3, 1e12, 3000)
    delivered = itertools.cycle([True, False, False])
    for some in np.split(values_ns, 6):
        node.series.record_ns(some, {})
        deliver_messages(
            clock, node, lambda data: node_0.take("a", data) if next(delivered) else None
        )
    deliver_messages(clock, node, functools.partial(node_0.take, "a"))
    check(point_of(node_0.meter), values_ns)


def test_message_without_new_counts_adds_no_sum() -> None:
    """A delta export would lose a sum without counts."""
    clock = Clock()
    node, node_0 = Node(clock), Node0(clock, delta=True)
    parts_ns = durations(1e2, 1e13, 3000), durations(1e7, 2e7)
    sums_s = []

    def take_and_export(data: bytes) -> None:
        node_0.take("a", data)
        sums_s.extend(
            point.sum for metric in node_0.meter.collect() for point in metric.data.data_points
        )

    for values_ns in parts_ns:
        node.series.record_ns(values_ns, {})
        deliver_messages(clock, node, take_and_export)
    assert sum(sums_s) == pytest.approx(np.concatenate(parts_ns).sum() / 1e9, rel=1e-9)
    assert sum(sums_s[-1:]) == pytest.approx(parts_ns[1].sum() / 1e9, rel=1e-9)


def test_counts_before_and_after_a_sidecar_restart_are_added() -> None:
    clock = Clock()
    node_0, values_ns = Node0(clock), durations(1e6, 1e9, 300)
    for life in np.split(values_ns, 3):
        node = Node(clock)
        node.series.record_ns(life, {})
        deliver_messages(clock, node, functools.partial(node_0.take, "a"))
    check(point_of(node_0.meter), values_ns)


def test_restarted_node_0_does_not_send_old_counts_again() -> None:
    """Only new counts are added, also in buckets that were empty before."""
    clock = Clock()
    node = Node(clock)
    node.series.record_ns(durations(1e6, 1e9), {})
    clock.now_s += 100
    node_0 = Node0(clock)
    deliver_messages(clock, node, functools.partial(node_0.take, "a"))
    assert node_0.meter.collect() == []
    later_ns = durations(1e5, 1e11, seed=1)
    node.series.record_ns(later_ns, {})
    deliver_messages(clock, node, functools.partial(node_0.take, "a"))
    point = point_of(node_0.meter)
    assert (point.count, point.sum) == (len(later_ns), pytest.approx(later_ns.sum() / 1e9))


def test_histograms_of_nodes_with_other_bounds_are_ignored() -> None:
    """A node with explicit bounds adds nothing to exponential histograms."""
    clock = Clock()
    node, node_0 = Node(clock, explicit_bounds=True), Node0(clock)
    node.series.record_ns(durations(1e6, 1e9), {})
    deliver_messages(clock, node, functools.partial(node_0.take, "a"))
    assert node_0.meter.collect() == []


def test_invalid_histogram_messages_are_dropped_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    node, node_0 = Node(clock), Node0(clock)
    node.series.record_ns(np.array([10**9]), {})
    data = node.tally.next_message(0)
    for broken in (data[:-1], data[:-2] + b"\xdc\x00\x41" + b"\x01" * 65):
        node_0.heard.add_message("a", broken)
    assert len(caplog.records) == 2
    assert node_0.meter.collect() == []
