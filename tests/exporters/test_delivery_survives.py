"""Delivery continues with a nearly full disk, unexpected exceptions, endless responses and
Ctrl-C.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.exporters.test_delivery import delivered, eventually, spans_of
from tests.exporters.test_exporters import batch_of, identity
from tests.support.endpoints import refusing, serving
from tests.support.otlp_collector import Collector, exporter_to
from torchlens_perf.exporters.delivery import sdk_exporters
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult
from torchlens_perf.exporters.delivery.local import FileTransport
from torchlens_perf.exporters.delivery.sender import Item, QueueLimits, Sender
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.node_state import NodeState, load

SPAN = "x" * 400


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Limit the size of files. Writes become partial, as on a nearly full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# -- a nearly full disk


def test_partially_written_request_is_removed_from_the_file(tmp_path: Path) -> None:
    """The file has only complete requests, and a retry does not append to a partial line."""
    path = tmp_path / "spans.jsonl"
    transport = FileTransport("traces", path)
    with room_for(1000):
        answers = [transport.send(spans_of(SPAN)).outcome for _ in range(3)]
    assert answers == [SendOutcome.DELIVERED, SendOutcome.LATER, SendOutcome.LATER]
    assert transport.send(spans_of(SPAN)).outcome is SendOutcome.DELIVERED
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


def test_partially_written_state_does_not_replace_the_old_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create()
    state = NodeState("node-a")
    state.save(run)
    state.notes = [SPAN] * 20
    with room_for(4000), pytest.raises(OSError, match="large"):
        state.save(run)
    assert load(run.node_state_path("node-a")).notes == []


# -- unexpected failures


class Failing(Collector):
    """A transport whose first attempts raise."""

    def send(self, items: Sequence[Item]) -> SendResult:
        if self.calls < 2:
            self.calls += 1
            raise UnicodeError("on purpose")
        return super().send(items)


def test_unexpected_exception_of_a_transport_is_retried() -> None:
    """The exception does not end the sender's thread."""
    endpoint = Failing("traces")
    sender = Sender("traces", endpoint, QueueLimits())
    sender.queue_items(spans_of("a"))
    assert eventually(lambda: sender.is_failing)
    sender.flush(5)
    assert eventually(lambda: sender.flush(5))
    sender.close(20)
    assert delivered(endpoint) == ["a"]
    assert not sender.waiting


def test_queue_stays_within_its_limits_while_a_request_is_in_flight() -> None:
    """The steps that the queue drops wait in the run directory."""
    endpoint = Collector("traces", opened=False)
    exporter = exporter_to({"traces": endpoint})
    exporter.export(batch_of(identity(), [0], spans_a_step=510))
    assert eventually(lambda: endpoint.calls == 1)
    for step in range(1, 41):
        exporter.export(batch_of(identity(), [step], spans_a_step=510))
    sender = exporter._senders["traces"]
    assert sender._count_queued() == 16384
    assert sender.waiting == sender.put == 512 * 41
    assert [each.step for each in exporter.find_undelivered().steps] == [
        *range(1, 9),
        0,
        *range(9, 41),
    ]
    endpoint.opened.set()


class Endless(BaseHTTPRequestHandler):
    """A server whose response never ends."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(int(self.headers["X-Status"]))
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * 64)
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "outcome"), [("200", SendOutcome.DELIVERED), ("503", SendOutcome.LATER)]
)
def test_endless_response_is_cut_off(
    status: str, outcome: SendOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the start of the response is read."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-status={status}")
    with serving(Endless) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        transport = sdk_exporters.create_transport("traces", "http/protobuf")
        answer = transport.send(spans_of("a"))
        transport.close()
    assert answer.outcome is outcome
    assert len(answer.reason) < 300


# -- settings


@pytest.mark.parametrize(
    ("protocol", "header"),
    [
        ("http/protobuf", "key=%E2%82%AC-token"),
        ("http/protobuf", "key=a%0Atoken"),
        ("grpc", "key=t%C3%B6-token"),
        ("grpc", "key=a%0Atoken"),
    ],
)
def test_request_with_invalid_headers_is_retried(
    protocol: str, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data is kept, because the user can correct the headers."""
    with refusing() as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
        sender = Sender("traces", sdk_exporters.create_transport("traces", protocol), QueueLimits())
        sender.queue_items(spans_of("a"))
        assert eventually(lambda: sender.is_failing)
        sender.close(10)
    assert sender.waiting == 1


# -- Ctrl-C

_WAITS = """
import signal, sys, threading, time
from torchlens_perf.exporters.delivery.sender import QueueLimits, Sender
class Silent:
    def send(self, items):
        time.sleep(1)  # by then the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # not to the main thread
        time.sleep(60)
    def close(self):
        pass
sender = Sender("traces", Silent(), QueueLimits())
sender.queue_items([object()])
try:
    sender.flush(60) if sys.argv[1] == "flush" else sender.close(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("waits_in", ["flush", "close"])
def test_ctrl_c_interrupts_waiting_for_delivery(waits_in: str) -> None:
    """The signal may be received by another thread than the waiting one."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _WAITS, waits_in], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, time.monotonic() - began_s < 50) == ("interrupted\n", True), done.stderr
