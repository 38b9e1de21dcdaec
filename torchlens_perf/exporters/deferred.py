"""An exporter that is made when there is something to export: importing the SDK may take longer than a short run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlens_perf.exporters import ExportBatch, Exporter, Judgement
    from torchlens_perf.identity import Identity
    from torchlens_perf.telemetry import Hardware


class DeferredExporter:
    """Hands everything on to the exporter that `make` returns; to none where that is None."""

    def __init__(self, make: Callable[[], Exporter | None]) -> None:
        """make: called once, when something is to be exported."""
        self._make: Callable[[], Exporter | None] | None = make
        self._made: Exporter | None = None

    def export(self, batch: ExportBatch) -> None:
        exporter = self._exporter()
        if exporter is not None:
            exporter.export(batch)

    def judged(self, judgement: Judgement) -> None:
        exporter = self._exporter()
        if exporter is not None:
            exporter.judged(judgement)

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        exporter = self._exporter()
        if exporter is not None:
            exporter.measured(identity, hardware)

    def force_flush(self, timeout_s: float) -> bool:
        return self._made is None or self._made.force_flush(timeout_s)

    def shutdown(self, timeout_s: float) -> list[str]:
        return [] if self._made is None else self._made.shutdown(timeout_s)

    def _exporter(self) -> Exporter | None:
        if self._make is not None:
            make, self._make = self._make, None
            self._made = make()
        return self._made
