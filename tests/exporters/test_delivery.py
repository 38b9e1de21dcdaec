"""Delivery of OTLP requests: the queue, retries, sources of undelivered items and counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from tests.support.otlp_collector import DELIVERED, Collector
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult, retry_result
from torchlens_perf.exporters.delivery.sender import Item, QueueLimits, Sender
from torchlens_perf.exporters.otlp import describe_undelivered
from torchlens_perf.exporters.otlp_resource import SCOPE
from torchlens_perf.exporters.otlp_spans import context_with_span
from torchlens_perf.run.undelivered import UndeliveredStep, WholeRun

RESOURCE = Resource({"host.name": "node-a", "list": ["a", "b"], "share": 0.5, "is": True})


def spans_of(*names: str) -> list[Item]:
    """Return spans with the given names."""
    return [
        ReadableSpan(
            name,
            SpanContext(7, 1 + index, False),
            resource=RESOURCE,
            start_time=1,
            end_time=2,
            instrumentation_scope=SCOPE,
        )
        for index, name in enumerate(names)
    ]


def names_in(items: Sequence[Item]) -> list[str]:
    return [item.name for item in items if isinstance(item, ReadableSpan)]


def delivered(endpoint: Collector) -> list[str]:
    return [name for items in endpoint.taken for name in names_in(items)]


def eventually(holds: Callable[[], bool]) -> bool:
    """Return True if the condition becomes true within some seconds."""
    deadline_s = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return holds()


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


_TIMES = {"start_time_unix_nano": 10, "time_unix_nano": 20}
_EXEMPLARS = [Exemplar({}, 0.5, 15, 3, 4)]
_CONTEXT = SpanContext(1 << 127, 5, False, TraceFlags(1), TraceState([("vendor", "a1")]))
_CALLER = SpanContext(1 << 127, 6, True, TraceFlags(1))
_NUMBERS = [
    sdk.NumberDataPoint({"rank": 3}, 10, 20, 7),
    sdk.NumberDataPoint({"share": 0.5}, 10, 20, 7.5),
]
METRICS = MetricsData(
    [
        sdk.ResourceMetrics(
            RESOURCE,
            [
                sdk.ScopeMetrics(
                    SCOPE,
                    [
                        sdk.Metric("steps", "Steps", "{step}", sdk.Sum(_NUMBERS, AggregationTemporality.DELTA, True)),
                        sdk.Metric("power", "Power", "W", sdk.Gauge(_NUMBERS[1:])),
                        sdk.Metric(
                            "explicit", "", "s",
                            sdk.Histogram(
                                [
                                    sdk.HistogramDataPoint(
                                        {}, **_TIMES, count=2, sum=1.5, bucket_counts=[2, 0], explicit_bounds=[1.0],
                                        min=0.5, max=1.0, exemplars=_EXEMPLARS,
                                    )
                                ],
                                AggregationTemporality.CUMULATIVE,
                            ),
                        ),
                        sdk.Metric(
                            "exponential", "", "s",
                            sdk.ExponentialHistogram(
                                [
                                    sdk.ExponentialHistogramDataPoint(
                                        {}, **_TIMES, count=3, sum=1.5, scale=5, zero_count=1,
                                        positive=sdk.Buckets(-40, [1, 0, 1]), negative=sdk.Buckets(0, []), flags=0,
                                        min=0.0, max=1.0, exemplars=_EXEMPLARS,
                                    )
                                ],
                                AggregationTemporality.CUMULATIVE,
                            ),
                        ),
                    ],
                    "",
                )
            ],
            "",
        )
    ]
)  # fmt: skip
KEPT: dict[str, list[Item]] = {
    "traces": [
        ReadableSpan(
            "run", _CONTEXT, _CALLER, RESOURCE, {"step": 1, "own": 0.5, "is": False},
            links=[Link(_CALLER, {"step": 2})], status=Status(StatusCode.ERROR), start_time=1, end_time=2,
            instrumentation_scope=SCOPE,
        ),
        *spans_of("a"),
    ],
    "logs": [
        ReadableLogRecord(
            LogRecord(
                timestamp=1, observed_timestamp=2, context=context, severity_text="WARN",
                severity_number=SeverityNumber.WARN, body="rank 3 is slow", attributes={"causes": ["a", "b"]},
                event_name="torch.train.straggler.began",
            ),
            RESOURCE, SCOPE,
        )
        for context in (context_with_span(_CONTEXT), None)
    ],
    "metrics": [METRICS],
}  # fmt: skip


def sender_to(
    endpoint: Collector,
    batch_items: int = 512,
    max_items: int = 16384,
    clock: Clock | None = None,
    *,
    delay_s: float = 0.0,
    replaces: bool = False,
) -> Sender:
    """Return a sender with this transport."""
    limits = QueueLimits(batch_items, delay_s, max_items, replaces)
    return Sender(endpoint.signal, endpoint, limits, clock=clock or time.monotonic)


def source(step: int, spans: int = 1) -> UndeliveredStep:
    return UndeliveredStep("rank00000-attempt0-node-a", step, spans)


def notes_of(sender: Sender) -> list[str]:
    return describe_undelivered(sender, keeps_sources=True)


# -- the queue


def test_request_is_sent_when_full_or_after_the_delay() -> None:
    """The delay begins with the request's first item."""
    clock, endpoint = Clock(), Collector("traces")
    sender = sender_to(endpoint, 3, clock=clock, delay_s=5.0)
    sender.queue_items(spans_of("a", "b"))
    sender.queue_items(spans_of("c"))
    assert eventually(lambda: delivered(endpoint) == ["a", "b", "c"])
    sender.queue_items(spans_of("d"))
    assert sender.flush(5)
    assert delivered(endpoint) == ["a", "b", "c"]
    clock.now_s += 5
    sender.wake()
    assert eventually(lambda: delivered(endpoint) == ["a", "b", "c", "d"])
    sender.close(10)


def test_no_request_has_more_items_than_its_limit() -> None:
    """The items of one call may be sent in several requests."""
    endpoint = Collector("traces")
    sender = sender_to(endpoint, 3)
    sender.queue_items(spans_of(*"abcdefgh"))
    sender.close(10)
    assert [names_in(items) for items in endpoint.taken] == [[*"abc"], [*"def"], [*"gh"]]


def test_full_queue_keeps_the_sources_of_the_oldest_items() -> None:
    """Items without a source are lost, and counted."""
    endpoint = Collector("traces", retry_result("away"))
    sender = sender_to(endpoint, 1, max_items=3)
    for step, name in enumerate("abcde"):
        sender.queue_items(spans_of(name), source(step) if name != "b" else None)
    assert eventually(lambda: sender.is_failing)
    sender.close(10)
    assert sender.undelivered_sources() == [source(0), source(2), source(3), source(4)]
    assert (sender.put, sender.waiting, sender.lost) == (5, 4, 1)
    assert notes_of(sender) == [
        "OTLP: 5 of 5 spans were not delivered",
        (
            "OTLP: 4 of these spans wait in the run directory; to send them: torchlens-perf sidecar"
            " RUN_DIR"
        ),
        (
            "OTLP: 1 of these spans were dropped, because the queue was full or their records are no"
            " longer in the run directory"
        ),
    ]


def test_number_of_items_and_sources_in_memory_is_bounded() -> None:
    """The outage is much longer than the queue and than the list of sources."""
    endpoint = Collector("traces", retry_result("away"))
    sender = sender_to(endpoint, 2, max_items=10)
    for step in range(20_000):
        sender.queue_items(spans_of("a", "b"), source(step, 2))
    sender.close(10)
    assert sender._count_queued() <= 10
    assert len(sender.undelivered_sources()) <= 8192 + 5
    assert sender.waiting + sender.lost == sender.put == 40_000


def test_dropped_items_are_queued_again_after_the_outage() -> None:
    """`collect` builds the items from their sources, and each item arrives once."""
    endpoint = Collector("traces", retry_result("away"))

    def collect(sender: Sender) -> float:
        for each in sender.find_dropped_sources():
            sender.queue_items(spans_of(f"step {each.step}"), each)
        return float("inf")

    sender = Sender("traces", endpoint, QueueLimits(1, max_items=2), collect)
    for step in range(9):
        sender.queue_items(spans_of(f"step {step}"), source(step))
    assert eventually(lambda: sender.is_failing)
    endpoint.answer = DELIVERED
    sender.close(20)
    assert sorted(delivered(endpoint)) == [f"step {step}" for step in range(9)]
    assert (sender.put, sender.delivered, notes_of(sender)) == (9, 9, [])


def test_cumulative_metrics_replace_older_ones_in_an_outage() -> None:
    """The newest request has the values of all older ones, so only its points count."""
    endpoint = Collector("metrics", retry_result("away"))
    sender = sender_to(endpoint, 1, replaces=True)
    for _ in range(4):
        sender.queue_items([METRICS], WholeRun.METRICS)
        assert eventually(lambda: sender.is_failing)
    assert (sender.put, sender.waiting, sender.lost) == (5, 5, 0)
    endpoint.answer = DELIVERED
    sender.close(10)
    assert (len(endpoint.taken), sender.put, notes_of(sender)) == (1, 5, [])


# -- the sender


def test_nothing_is_lost_in_an_outage_of_the_endpoint() -> None:
    """All items are delivered once and in order after the outage."""
    endpoint = Collector("traces", retry_result("away"))
    sender = sender_to(endpoint, 1)
    for name in "abc":
        sender.queue_items(spans_of(name))
        assert eventually(lambda: sender.is_failing)
    endpoint.answer = DELIVERED
    assert eventually(lambda: not sender.waiting)
    sender.close(10)
    assert delivered(endpoint) == ["a", "b", "c"]
    assert (sender.delivered, notes_of(sender)) == (3, [])


def test_dead_endpoint_gets_one_last_attempt_at_shutdown() -> None:
    endpoint = Collector("traces", retry_result("away"))
    sender = sender_to(endpoint, 1)
    for step, name in enumerate("abc"):
        sender.queue_items(spans_of(name), source(step))
    assert eventually(lambda: sender.is_failing)
    attempts = endpoint.calls
    sender.close(10)
    assert endpoint.calls <= attempts + 1
    assert sender.undelivered_sources() == [source(0), source(1), source(2)]
    assert notes_of(sender)[0] == "OTLP: 3 of 3 spans were not delivered"


def test_shutdown_waits_for_a_stuck_endpoint_for_its_timeout_only() -> None:
    """The endpoint never answers. The request in progress counts as undelivered."""
    endpoint = Collector("traces", opened=False)
    sender = sender_to(endpoint, 1)
    sender.queue_items(spans_of("a"), source(0))
    assert eventually(lambda: endpoint.calls == 1)
    sender.queue_items(spans_of("b"), source(1))
    sender.close(0.05)
    assert sender.undelivered_sources() == [source(0), source(1)]
    assert notes_of(sender)[0] == "OTLP: 2 of 2 spans were not delivered"
    endpoint.opened.set()
    sender._thread.join(10)


def test_retry_pauses_grow_or_are_those_requested_by_the_endpoint() -> None:
    """Pauses grow up to about a minute."""
    clock, endpoint = Clock(), Collector("traces", retry_result("away"))
    sender = sender_to(endpoint, clock=clock)
    sender.queue_items(spans_of("a"))
    pauses = []
    for number in range(1, 10):
        assert eventually(lambda number=number: sender._total_failures == number)  # type: ignore[misc]
        pauses.append(sender._next_try_s - clock.now_s)
        if number == 8:
            endpoint.answer = retry_result("busy", after_s=300)
        clock.now_s = sender._next_try_s + 0.01
        sender.wake()
    sender.close(10)
    assert all(0.8 * 2**n <= pause <= 1.2 * 2**n for n, pause in enumerate(pauses[:6]))
    assert 48 <= pauses[7] <= 72
    assert pauses[8] == pytest.approx(300)


def test_refused_request_is_counted_and_the_next_one_is_sent() -> None:
    """Rejected items of an accepted request are counted too."""
    answers = iter(
        [
            SendResult(SendOutcome.REFUSED, "HTTP 400"),
            SendResult(SendOutcome.DELIVERED, rejected=1),
            DELIVERED,
        ]
    )
    endpoint = Collector("traces", lambda items: next(answers))
    sender = sender_to(endpoint, 2)
    for names in ("ab", "cd", "ef"):
        sender.queue_items(spans_of(*names))
    sender.close(10)
    assert (sender.put, sender.delivered, sender.rejected, sender.refused) == (6, 3, 1, 2)
    assert notes_of(sender)[0] == "OTLP: 3 of 6 spans were not delivered"


def test_at_most_one_request_is_in_flight() -> None:
    """Therefore, a failure can cause at most one request to be delivered twice."""
    inside, most, lock = [0], [0], threading.Lock()

    def answer(items: int) -> SendResult:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        with lock:
            inside[0] -= 1
        return DELIVERED

    sender = sender_to(Collector("traces", answer))
    for number in range(20):
        sender.queue_items(spans_of(str(number)))
    sender.close(10)
    assert (most[0], sender.delivered) == (1, 20)
