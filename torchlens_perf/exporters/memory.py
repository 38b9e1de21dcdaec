"""An exporter that keeps what it is given: for tests, the user's and ours."""

from __future__ import annotations

from torchlens_perf.exporters import ExportBatch


class MemoryExporter:
    """Keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[ExportBatch] = []

    def export(self, batch: ExportBatch) -> None:
        self.batches.append(batch)

    def force_flush(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_s: float) -> list[str]:
        return []
