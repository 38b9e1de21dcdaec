"""An in-process OTLP endpoint that accepts or rejects requests and stores their contents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from tests.support.otlp_receiver import (
    ReceivedEvent,
    ReceivedPoint,
    ReceivedSpan,
    events_of,
    points_of,
    spans_of,
)
from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult
from torchlens_perf.exporters.delivery.local import build_message
from torchlens_perf.exporters.delivery.sender import Item, QueueLimits, count_items
from torchlens_perf.exporters.otlp import OtlpExporter, SignalDelivery
from torchlens_perf.exporters.series import ArrayMeter

DELIVERED = SendResult(SendOutcome.DELIVERED)


class Collector:
    """Replaces the transport of one signal."""

    def __init__(
        self,
        signal: str,
        answer: Callable[[int], SendResult] | SendResult = DELIVERED,
        *,
        opened: bool = True,
    ) -> None:
        """Set the answer to each request, or a function of its number of items.

        With opened=False, requests wait until `self.opened` is set.
        """
        self.signal, self.answer = signal, answer
        self.opened = threading.Event()
        if opened:
            self.opened.set()
        self.calls = 0
        self.taken: list[Sequence[Item]] = []
        self.closed = False

    def send(self, items: Sequence[Item]) -> SendResult:
        self.calls += 1
        assert self.opened.wait(20)
        answer = (
            self.answer if isinstance(self.answer, SendResult) else self.answer(count_items(items))
        )
        if answer.outcome is SendOutcome.DELIVERED:
            self.taken.append(items)
        return answer

    def close(self) -> None:
        self.closed = True

    def spans(self) -> list[ReceivedSpan]:
        return [span for each in self._decoded() for span in spans_of(each)]

    def points(self) -> list[ReceivedPoint]:
        """Return the metric points of all requests."""
        return [point for each in self._decoded() for point in points_of(each)]

    def last(self, metric: str) -> list[ReceivedPoint]:
        """Return a metric's points in the last request."""
        *_, newest = [{}, *self._decoded()]
        return [point for point in points_of(newest) if point.metric == metric]

    def events(self) -> list[ReceivedEvent]:
        return [event for each in self._decoded() for event in events_of(each)]

    def _decoded(self) -> list[dict[str, Any]]:
        messages = (build_message(self.signal, items) for items in self.taken)
        return [MessageToDict(each, preserving_proto_field_name=True) for each in messages]


def exporter_to(
    collectors: Mapping[str, Collector], environ: Mapping[str, str] | None = None, meter: ArrayMeter | None = None,
    batch_items: int = 512, clock: Callable[[], float] | None = None,
) -> OtlpExporter:  # fmt: skip
    """Return an exporter with the given endpoints by signal.

    The exporter stores nothing on disk, and sends metrics when it is closed.
    """
    signals = {
        name: SignalDelivery(collector, QueueLimits(batch_items, 3600.0), 3600.0)
        for name, collector in collectors.items()
    }
    options = {} if clock is None else {"clock": clock}
    return OtlpExporter(signals, ArrayMeter() if meter is None else meter, environ or {}, **options)
