"""Requests on their way: what an answer means, what waits where, what is tried again, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.otlp_collector import DELIVERED, Collector
from torchlens_perf.exporters.delivery.answer import Answer, Outcome, later, wait_of
from torchlens_perf.exporters.delivery.batches import Batches
from torchlens_perf.exporters.delivery.halves import count, halves
from torchlens_perf.exporters.delivery.outbox import Outbox, Room, found, outbox
from torchlens_perf.exporters.delivery.sender import Sender
from torchlens_perf.exporters.delivery.wire import item, request, scope
from torchlens_perf.exporters.otlp import notes

SCOPE = scope("tests", "1")
TOO_LARGE = Answer(Outcome.TOO_LARGE, "HTTP 413")


def body_of(*names: str, resource: bytes = b"") -> bytes:
    """A request with these spans."""
    return request([(resource, [item(Span(name=name).SerializeToString()) for name in names])], SCOPE)


def names_in(body: bytes) -> list[str]:
    message = ExportTraceServiceRequest.FromString(body)
    return [span.name for of in message.resource_spans for each in of.scope_spans for span in each.spans]


def delivered(endpoint: Collector) -> list[str]:
    return [name for body in endpoint.taken for name in names_in(body)]


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it holds within some seconds."""
    deadline_s = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return holds()


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# -- answers


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("7", 7.0), (" 0 ", 0.0), ("Thu, 01 Jan 1970 00:00:30 GMT", 20.0), ("Thu, 01 Jan 1970 00:00:05 GMT", 0.0),
        ("soon", None), ("", None), ("-3", None), ("1.5", None),
    ],
)  # fmt: skip
def test_retry_after(header: str, expected: float | None) -> None:
    """Seconds, or a date; what is neither says nothing."""
    assert wait_of(header, unix_s=10.0) == expected


# -- requests


def test_halves_hold_everything_once() -> None:
    """Both halves have their resource and scope; nothing is in both, nothing in none; one item has no halves."""
    two = body_of("a", "b", resource=b"\x0a\x02\x0a\x00") + body_of("c")
    parts = halves("traces", two)
    assert [names_in(body) for body, _ in parts] == [["a"], ["b", "c"]]
    assert [items for _, items in parts] == [1, 2]
    assert all(
        ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].scope.name for body, _ in parts
    )
    assert count("traces", two) == 3
    assert halves("traces", body_of("alone")) == []


def test_batches_fill_and_wait() -> None:
    """A request is due once it is full, or its first item has waited; a resource is in it once."""
    clock = Clock()
    batches = Batches(SCOPE, max_items=3, delay_s=5.0, clock=clock)
    span = item(Span(name="s").SerializeToString())
    assert batches.add(b"", [span, span]) is False
    assert batches.due(False) == ([], 5.0)
    assert batches.add(b"", [span, span]) is True
    (full,), left_s = batches.due(False)
    assert (full[1], left_s, batches.waiting()) == (3, 5.0, 1)
    clock.now_s += 5
    (rest,), left_s = batches.due(False)
    assert (rest[1], left_s) == (1, float("inf"))
    batches.add(b"", [span])
    batches.add(b"\x0a\x00", [span])
    (whole,) = batches.due(True)[0]
    assert len(ExportTraceServiceRequest.FromString(whole[0]).resource_spans) == 2


# -- the outbox


def test_outbox_in_memory_drops_the_oldest_and_counts() -> None:
    """Without a disk, the newest are kept."""
    box = Outbox(None, "node", "traces", Room(memory_bytes=250))
    for number in range(5):
        box.put(bytes(100), number + 1)
    assert (box.waiting(), box.dropped) == (4 + 5, 1 + 2 + 3)
    assert box.to_disk() is False


def test_outbox_on_disk_survives_its_process(tmp_path: Path) -> None:
    """Another process goes on with the oldest; signals and nodes do not mix; files are the user's alone."""
    first = Outbox(tmp_path / "outbox", "node-a", "traces")
    for name in ("x", "y"):
        first.put(body_of(name), 1)
    assert first.to_disk()
    first.put(body_of("z"), 1)
    assert first.to_disk()

    again = Outbox(tmp_path / "outbox", "node-a", "traces")
    taken = []
    while (oldest := again.oldest()) is not None:
        taken += names_in(oldest.body)
        again.remove(oldest)
    assert taken == ["x", "y", "z"]
    assert list((tmp_path / "outbox").iterdir()) == []
    assert Outbox(tmp_path / "outbox", "node-b", "traces").waiting() == 0


def test_outbox_makes_room_on_the_disk(tmp_path: Path) -> None:
    """Beyond its bytes the oldest files go, and what was in them is counted."""
    box = Outbox(tmp_path, "node", "traces", Room(disk_bytes=250))
    for number in range(5):
        box.put(bytes(100), number + 1)
        assert box.to_disk()
    assert (box.waiting(), box.dropped) == (4 + 5, 1 + 2 + 3)
    assert [items for _, items, _ in found(tmp_path, "traces")] == [4, 5]


def test_damaged_file_of_the_outbox_is_counted(tmp_path: Path) -> None:
    """What cannot be read any more is not in the way."""
    box = Outbox(tmp_path, "node", "traces")
    for name in ("x", "y"):
        box.put(body_of(name), 1)
    box.to_disk()
    (path, _, _), _ = found(tmp_path, "traces")
    path.unlink()
    oldest = box.oldest()
    assert oldest is not None
    assert names_in(oldest.body) == ["y"]
    assert box.dropped == 1


# -- the sender


def test_endpoint_that_is_away_loses_nothing(tmp_path: Path) -> None:
    """While it is away, what comes goes to the disk; once it is back, all is delivered by itself, in order, once."""
    endpoint = Collector("traces", later("away"))
    sender = Sender("traces", Outbox(outbox(tmp_path), "node", "traces"), endpoint)
    for name in "abc":
        sender.send(body_of(name), 1)
        assert eventually(lambda: sender.failing)
    assert eventually(lambda: len(found(outbox(tmp_path), "traces")) == 3)
    endpoint.answer = DELIVERED
    assert eventually(lambda: not sender.outbox.waiting())
    sender.close(10)
    assert delivered(endpoint) == ["a", "b", "c"]
    assert (sender.delivered, notes(sender)) == (3, [])
    assert found(outbox(tmp_path), "traces") == []


def test_what_is_left_waits_on_the_disk(tmp_path: Path) -> None:
    """At the end a dead endpoint gets one try; the rest waits for another process, which the notes say."""
    endpoint = Collector("traces", later("away"))
    sender = Sender("traces", Outbox(outbox(tmp_path), "node", "traces"), endpoint)
    for name in "abc":
        sender.send(body_of(name), 1)
    sender.close(10)
    assert notes(sender) == [
        "OTLP: 3 of 3 spans were not delivered",
        "OTLP: 3 of these spans wait in the run directory; to send them: torchlens-perf sidecar RUN_DIR",
    ]
    endpoint = Collector("traces")
    replayed = Sender("traces", Outbox(outbox(tmp_path), "", "traces"), endpoint)
    replayed.close(10)
    assert sorted(delivered(endpoint)) == ["a", "b", "c"]
    assert notes(replayed) == []


def test_stuck_endpoint_does_not_keep_the_end_waiting(tmp_path: Path) -> None:
    """An endpoint that neither takes nor refuses costs the timeout; what it may have taken is kept as well."""
    endpoint = Collector("traces", opened=False)
    sender = Sender("traces", Outbox(outbox(tmp_path), "node", "traces"), endpoint)
    sender.send(body_of("a"), 1)
    assert eventually(lambda: endpoint.calls == 1)
    sender.send(body_of("b"), 1)
    sender.close(0.05)
    assert [items for _, items, _ in found(outbox(tmp_path), "traces")] == [1, 1]
    endpoint.opened.set()
    sender._thread.join(10)
    assert [items for _, items, _ in found(outbox(tmp_path), "traces")] == [1, 1]
    assert "2 of 2 spans" in notes(sender)[0]


def test_pauses_grow_and_obey_the_endpoint(tmp_path: Path) -> None:
    """Ever longer pauses, up to a minute or so; as long as it asks, where that is longer."""
    clock, endpoint = Clock(), Collector("traces", later("away"))
    sender = Sender("traces", Outbox(None, "node", "traces"), endpoint, clock=clock)
    sender.send(body_of("a"), 1)
    pauses = []
    for number in range(1, 10):
        assert eventually(lambda number=number: sender._failed == number)  # type: ignore[misc]
        pauses.append(sender._next_try_s - clock.now_s)
        if number == 8:
            endpoint.answer = later("busy", after_s=300)
        clock.now_s = sender._next_try_s + 0.01
    sender.close(10)
    assert all(0.8 * 2**n <= pause <= 1.2 * 2**n for n, pause in enumerate(pauses[:6]))
    assert 48 <= pauses[7] <= 72
    assert pauses[8] == pytest.approx(300)


def test_too_large_is_halved_until_it_is_taken() -> None:
    """An endpoint that takes two spans at most gets all of eight; one that takes none is said to have refused them."""
    endpoint = Collector("traces", lambda items: DELIVERED if items <= 2 else TOO_LARGE)
    sender = Sender("traces", Outbox(None, "node", "traces"), endpoint)
    sender.send(body_of(*"abcdefgh"), 8)
    sender.close(10)
    assert delivered(endpoint) == list("abcdefgh")
    assert notes(sender) == []

    sender = Sender("traces", Outbox(None, "node", "traces"), Collector("traces", TOO_LARGE))
    sender.send(body_of("a", "b"), 2)
    sender.close(10)
    assert notes(sender) == [
        "OTLP: 2 of 2 spans were not delivered",
        "OTLP: 2 of these spans were in requests that the endpoint refused for good",
    ]


def test_refused_requests_are_not_in_the_way() -> None:
    """A request that is refused for good is counted, and the next one is sent. So are items that are rejected."""
    answers = iter([Answer(Outcome.REFUSED, "HTTP 400"), Answer(Outcome.DELIVERED, rejected=1), DELIVERED])
    endpoint = Collector("traces", lambda items: next(answers))
    sender = Sender("traces", Outbox(None, "node", "traces"), endpoint)
    for names in ("ab", "cde", "f"):
        sender.send(body_of(*names), len(names))
    sender.close(10)
    assert (sender.put, sender.delivered, sender.rejected, sender.refused) == (6, 3, 1, 2)
    assert notes(sender)[0] == "OTLP: 3 of 6 spans were not delivered"


def test_one_request_is_in_flight() -> None:
    """So at most one comes twice."""
    inside, most, lock = [0], [0], threading.Lock()

    def answer(items: int) -> Answer:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        with lock:
            inside[0] -= 1
        return DELIVERED

    sender = Sender("traces", Outbox(None, "node", "traces"), Collector("traces", answer))
    for number in range(20):
        sender.send(body_of(str(number)), 1)
    sender.close(10)
    assert (most[0], sender.delivered) == (1, 20)
