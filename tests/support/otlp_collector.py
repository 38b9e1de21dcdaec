"""An OTLP endpoint inside of the test: takes requests, or does not, and hands back what was in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from tests.support.otlp_receiver import ReceivedEvent, ReceivedPoint, ReceivedSpan, events_of, points_of, spans_of
from torchlens_perf.exporters.delivery.answer import Answer, Outcome
from torchlens_perf.exporters.delivery.halves import REQUESTS, count
from torchlens_perf.exporters.delivery.outbox import Outbox
from torchlens_perf.exporters.otlp import OtlpExporter, Signal
from torchlens_perf.exporters.series import Meter

DELIVERED = Answer(Outcome.DELIVERED)


class Collector:
    """One signal's transport."""

    def __init__(
        self, signal: str, answer: Callable[[int], Answer] | Answer = DELIVERED, *, opened: bool = True
    ) -> None:
        """answer: to each request, or by the number of items in it. opened: else requests wait until they are let
        in."""
        self.signal, self.answer = signal, answer
        self.opened = threading.Event()
        if opened:
            self.opened.set()
        self.calls = 0
        self.taken: list[bytes] = []
        self.closed = False

    def send(self, body: bytes) -> Answer:
        self.calls += 1
        assert self.opened.wait(20)
        answer = self.answer if isinstance(self.answer, Answer) else self.answer(count(self.signal, body))
        if answer.outcome is Outcome.DELIVERED:
            self.taken.append(body)
        return answer

    def close(self) -> None:
        self.closed = True

    def spans(self) -> list[ReceivedSpan]:
        return [span for each in self._decoded() for span in spans_of(each)]

    def points(self) -> list[ReceivedPoint]:
        """Of all requests."""
        return [point for each in self._decoded() for point in points_of(each)]

    def last(self, metric: str) -> list[ReceivedPoint]:
        """A metric's points in the last request."""
        *_, newest = [{}, *self._decoded()]
        return [point for point in points_of(newest) if point.metric == metric]

    def events(self) -> list[ReceivedEvent]:
        return [event for each in self._decoded() for event in events_of(each)]

    def _decoded(self) -> list[dict[str, Any]]:
        messages = (REQUESTS[self.signal][0].FromString(body) for body in self.taken)
        return [MessageToDict(message, preserving_proto_field_name=True) for message in messages]


def exporter_to(
    collectors: Mapping[str, Collector], environ: Mapping[str, str] | None = None, meter: Meter | None = None,
    batch_items: int = 512, clock: Callable[[], float] | None = None,
) -> OtlpExporter:  # fmt: skip
    """An exporter whose endpoints are these, by signal. Nothing waits on a disk; metrics come at its end."""
    signals = {
        name: Signal(name, Outbox(None, "node-a", name), collector, batch_items, 3600.0)
        for name, collector in collectors.items()
    }
    options = {} if clock is None else {"clock": clock}
    return OtlpExporter(signals, Meter() if meter is None else meter, environ or {}, **options)
