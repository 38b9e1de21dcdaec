"""Delivery of OTLP requests: results, the outbox of undelivered requests, retries and counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
from torchlens_perf.exporters.delivery.answer import (
    SendOutcome,
    SendResult,
    parse_retry_after,
    retry_result,
)
from torchlens_perf.exporters.delivery.otlp_requests import (
    Item,
    context_with_span,
    count_items,
    decode_request,
    encode_request,
    metrics_of,
    split_in_halves,
)
from torchlens_perf.exporters.delivery.outbox import Outbox, OutboxLimits, list_files, outbox_folder
from torchlens_perf.exporters.delivery.sender import Sender
from torchlens_perf.exporters.otlp import describe_undelivered
from torchlens_perf.exporters.otlp_resource import SCOPE

TOO_LARGE = SendResult(SendOutcome.TOO_LARGE, "HTTP 413")


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


def names_on_disk(path: Path) -> list[str]:
    return names_in(decode_request("traces", path.read_bytes()))


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


# -- results of an attempt


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7.0), (" 0 ", 0.0), ("Thu, 01 Jan 1970 00:00:30 GMT", 20.0), ("Thu, 01 Jan 1970 00:00:05 GMT", 0.0),
        ("soon", None), ("", None), ("-3", None), ("1.5", None),
    ],
)  # fmt: skip
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str, expected: float | None) -> None:
    """Any other value of Retry-After is ignored."""
    assert parse_retry_after(header, unix_s=10.0) == expected


# -- requests


def test_halves_of_a_split_request_contain_every_item_once() -> None:
    """A single span cannot be split, and points of a metric stay together."""
    assert [names_in(half) for half in split_in_halves(spans_of("a", "b", "c"))] == [
        ["a"],
        ["b", "c"],
    ]
    assert split_in_halves(spans_of("alone")) == []
    (first,), (second,) = split_in_halves([METRICS])
    assert isinstance(first, MetricsData)
    assert isinstance(second, MetricsData)
    assert metrics_of(first) + metrics_of(second) == metrics_of(METRICS)
    assert {count_items([first]) + count_items([second]), count_items([METRICS])} == {5}
    assert split_in_halves([MetricsData(first.resource_metrics[:1])])[0] != []


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


@pytest.mark.parametrize("signal", KEPT)
def test_request_read_from_disk_encodes_to_the_same_bytes(signal: str) -> None:
    body = encode_request(signal, KEPT[signal])
    kept = decode_request(signal, body)
    assert encode_request(signal, kept) == body
    assert count_items(kept) == count_items(KEPT[signal])


@pytest.mark.parametrize("signal", KEPT)
def test_invalid_bytes_are_rejected_as_a_stored_request(signal: str) -> None:
    with pytest.raises(ValueError, match=f"not a request of {signal}"):
        decode_request(signal, b"\xff no request")


def test_request_is_due_when_full_or_after_the_delay() -> None:
    """The delay begins with the request's first item."""
    clock = Clock()
    box = Outbox(None, "node", "traces", 3, delay_s=5.0, clock=clock)
    box.put(spans_of("a", "b"))
    assert (box.next_request(), box.seconds_until_due()) == (None, 5.0)
    box.put(spans_of("c", "d"))
    full = box.next_request()
    assert full is not None
    assert (names_in(full.items), full.count, box.count_undelivered(), box.seconds_until_due()) == (
        ["a", "b", "c"],
        3,
        4,
        0.0,
    )
    box.remove(full)
    assert (box.next_request(), box.seconds_until_due()) == (None, 5.0)
    clock.now_s += 5
    rest = box.next_request()
    assert rest is not None
    assert names_in(rest.items) == ["d"]


# -- the outbox


def test_outbox_in_memory_drops_and_counts_the_oldest_requests() -> None:
    box = Outbox(None, "node", "traces", room=OutboxLimits(memory_items=3))
    for name in "abcde":
        box.put(spans_of(name))
    assert (box.count_undelivered(), box.dropped) == (3, 2)
    assert box.write_to_disk() is False
    oldest = box.next_request()
    assert oldest is not None
    assert names_in(oldest.items) == ["c", "d", "e"]


def test_outbox_on_disk_is_sent_by_the_next_process(tmp_path: Path) -> None:
    """The oldest requests are sent first.

    Signals and nodes have separate files, which are private to the user.
    """
    first = Outbox(tmp_path / "outbox", "node-a", "traces", batch_items=1)
    for name in ("x", "y"):
        first.put(spans_of(name))
    assert first.write_to_disk()
    first.put(spans_of("z"))
    assert first.write_to_disk()

    again = Outbox(tmp_path / "outbox", "node-a", "traces")
    taken = []
    while (oldest := again.next_request()) is not None:
        taken += names_in(oldest.items)
        again.remove(oldest)
    assert taken == ["x", "y", "z"]
    assert list((tmp_path / "outbox").iterdir()) == []
    assert Outbox(tmp_path / "outbox", "node-b", "traces").count_undelivered() == 0


def test_oldest_outbox_files_are_deleted_and_counted_above_the_disk_limit(tmp_path: Path) -> None:
    """The items of deleted files are counted."""
    newest = sum(len(encode_request("traces", spans_of(*["a"] * count))) for count in (4, 5))
    box = Outbox(tmp_path, "node", "traces", room=OutboxLimits(disk_bytes=newest))
    for number in range(5):
        box.put(spans_of(*["a"] * (number + 1)))
        assert box.write_to_disk()
    assert (box.count_undelivered(), box.dropped) == (4 + 5, 1 + 2 + 3)
    assert [items for _, items, _ in list_files(tmp_path, "traces")] == [4, 5]


def test_damaged_outbox_file_is_counted_and_later_files_are_sent(tmp_path: Path) -> None:
    box = Outbox(tmp_path, "node", "traces", batch_items=1)
    for name in ("x", "y", "z"):
        box.put(spans_of(name))
    box.write_to_disk()
    (gone, _, _), (damaged, _, _), _ = list_files(tmp_path, "traces")
    gone.unlink()
    damaged.write_bytes(b"\xff no request")
    oldest = box.next_request()
    assert oldest is not None
    assert (names_in(oldest.items), box.dropped, damaged.exists()) == (["z"], 2, False)


# -- the sender


def test_nothing_is_lost_in_an_outage_of_the_endpoint(tmp_path: Path) -> None:
    """Requests are written to disk during the outage.

    After the outage, all requests are delivered once and in order.
    """
    endpoint = Collector("traces", retry_result("away"))
    sender = Sender(Outbox(outbox_folder(tmp_path), "node", "traces", 1), endpoint)
    for name in "abc":
        sender.queue_items(spans_of(name))
        assert eventually(lambda: sender.is_failing)
    assert eventually(lambda: len(list_files(outbox_folder(tmp_path), "traces")) == 3)
    endpoint.answer = DELIVERED
    assert eventually(lambda: not sender.outbox.count_undelivered())
    sender.close(10)
    assert delivered(endpoint) == ["a", "b", "c"]
    assert (sender.delivered, describe_undelivered(sender)) == (3, [])
    assert list_files(outbox_folder(tmp_path), "traces") == []


def test_undelivered_requests_stay_on_disk_at_shutdown_and_are_noted(tmp_path: Path) -> None:
    """A dead endpoint gets one last attempt at shutdown."""
    endpoint = Collector("traces", retry_result("away"))
    sender = Sender(Outbox(outbox_folder(tmp_path), "node", "traces", 1), endpoint)
    for name in "abc":
        sender.queue_items(spans_of(name))
    sender.close(10)
    assert describe_undelivered(sender) == [
        "OTLP: 3 of 3 spans were not delivered",
        (
            "OTLP: 3 of these spans wait in the run directory; to send them: torchlens-perf sidecar"
            " RUN_DIR"
        ),
    ]
    endpoint = Collector("traces")
    replayed = Sender(Outbox(outbox_folder(tmp_path), "", "traces"), endpoint)
    replayed.close(10)
    assert sorted(delivered(endpoint)) == ["a", "b", "c"]
    assert describe_undelivered(replayed) == []


def test_shutdown_waits_for_a_stuck_endpoint_for_its_timeout_only(tmp_path: Path) -> None:
    """The endpoint never answers. The request in progress is also kept on disk."""
    endpoint = Collector("traces", opened=False)
    sender = Sender(Outbox(outbox_folder(tmp_path), "node", "traces", 1), endpoint)
    sender.queue_items(spans_of("a"))
    assert eventually(lambda: endpoint.calls == 1)
    sender.queue_items(spans_of("b"))
    sender.close(0.05)
    assert [items for _, items, _ in list_files(outbox_folder(tmp_path), "traces")] == [1, 1]
    endpoint.opened.set()
    sender._thread.join(10)
    assert [items for _, items, _ in list_files(outbox_folder(tmp_path), "traces")] == [1, 1]
    assert "2 of 2 spans" in describe_undelivered(sender)[0]


def test_retry_pauses_grow_or_are_those_requested_by_the_endpoint(tmp_path: Path) -> None:
    """Pauses grow up to about a minute."""
    clock, endpoint = Clock(), Collector("traces", retry_result("away"))
    sender = Sender(Outbox(None, "node", "traces"), endpoint, clock=clock)
    sender.queue_items(spans_of("a"))
    pauses = []
    for number in range(1, 10):
        assert eventually(lambda number=number: sender._total_failures == number)  # type: ignore[misc]
        pauses.append(sender._next_try_s - clock.now_s)
        if number == 8:
            endpoint.answer = retry_result("busy", after_s=300)
        clock.now_s = sender._next_try_s + 0.01
    sender.close(10)
    assert all(0.8 * 2**n <= pause <= 1.2 * 2**n for n, pause in enumerate(pauses[:6]))
    assert 48 <= pauses[7] <= 72
    assert pauses[8] == pytest.approx(300)


def test_too_large_request_is_halved_until_it_is_accepted() -> None:
    """Eight spans are sent to an endpoint that accepts two at a time.

    If the endpoint accepts none, the spans count as refused.
    """
    endpoint = Collector("traces", lambda items: DELIVERED if items <= 2 else TOO_LARGE)
    sender = Sender(Outbox(None, "node", "traces"), endpoint)
    sender.queue_items(spans_of(*"abcdefgh"))
    sender.close(10)
    assert delivered(endpoint) == list("abcdefgh")
    assert describe_undelivered(sender) == []

    sender = Sender(Outbox(None, "node", "traces"), Collector("traces", TOO_LARGE))
    sender.queue_items(spans_of("a", "b"))
    sender.close(10)
    assert describe_undelivered(sender) == [
        "OTLP: 2 of 2 spans were not delivered",
        "OTLP: 2 of these spans were in requests that the endpoint refused for good",
    ]


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
    sender = Sender(Outbox(None, "node", "traces", 2), endpoint)
    for names in ("ab", "cd", "ef"):
        sender.queue_items(spans_of(*names))
    sender.close(10)
    assert (sender.put, sender.delivered, sender.rejected, sender.refused) == (6, 3, 1, 2)
    assert describe_undelivered(sender)[0] == "OTLP: 3 of 6 spans were not delivered"


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

    sender = Sender(Outbox(None, "node", "traces"), Collector("traces", answer))
    for number in range(20):
        sender.queue_items(spans_of(str(number)))
    sender.close(10)
    assert (most[0], sender.delivered) == (1, 20)
