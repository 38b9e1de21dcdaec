"""What became of the batches that the OpenTelemetry SDK hands to an exporter: spans, metrics and alerts alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("torchlens_perf.sidecar")


class CountingExporter:
    """Passes batches on to an exporter of the SDK's, and counts. Runs on the SDK's thread.

    The exporters have no type in common, and each version of the SDK asks them for other things.
    """

    def __init__(self, exporter: Any, what: str, size: Callable[[Any], int] = len) -> None:
        """what: is exported, for the log. size: of a batch."""
        self._exporter = exporter
        self._what = what
        self._size = size
        self._failing = self._gave_up = False
        self.ending = False
        """No more is to come: gives up at the first batch that fails."""
        self.tried = 0
        self.seen = 0
        """Of those tried, how many were delivered or have failed; the rest is on its way."""
        self.succeeded = 0

    def export(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """What the exporter returns; None once it has given up."""
        size, taken = self._size(batch), False
        self.tried += size
        try:
            # At the end a dead endpoint costs one timeout, not one for each batch that is left.
            if self._gave_up:
                return None
            result = self._exporter.export(batch, *arguments, **options)
            taken = result.name == "SUCCESS"
            return result
        finally:
            self.seen += size
            if taken:
                self.succeeded += size
                if self._failing:
                    lacks = self.seen - self.succeeded
                    logger.info("the OTLP endpoint takes %s again; it lacks %d", self._what, lacks)
            self._failing = not taken
            self._gave_up = self.ending and not taken

    def shutdown(self, *arguments: Any, **options: Any) -> None:
        self._exporter.shutdown(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        """All else is the exporter's own, as what a reader of metrics asks it for."""
        return getattr(self._exporter, name)


class BatchSender:
    """What senders have in common that feed a batch processor of the SDK's, which they set."""

    _processor: Any

    def __init__(self, exporter: Any, what: str, rejected: Callable[[], int]) -> None:
        self._counter = CountingExporter(exporter, what)
        self._rejected = rejected

    def force_flush(self) -> None:
        """Blocks until everything so far was delivered or has failed: up to 10 s for each batch of the queue."""
        self._processor.force_flush()

    def shutdown(self) -> None:
        """As force_flush(), but gives up at the first batch that fails."""
        self._counter.ending = True
        self._processor.shutdown()
