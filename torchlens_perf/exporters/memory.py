"""An exporter that keeps what it is given: for tests, the user's and ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.exporters import ExportBatch, Judgement

if TYPE_CHECKING:
    from torchlens_perf.alert import Alert
    from torchlens_perf.identity import Identity
    from torchlens_perf.telemetry import Hardware


class MemoryExporter:
    """Keeps every batch, every alert and all of the hardware's samples, and the newest judgement."""

    def __init__(self) -> None:
        self.batches: list[ExportBatch] = []
        self.alerts: list[Alert] = []
        self.hardware: list[Hardware] = []
        self.judgement: Judgement | None = None

    def export(self, batch: ExportBatch) -> None:
        self.batches.append(batch)

    def judged(self, judgement: Judgement) -> None:
        self.judgement = judgement
        self.alerts += judgement.alerts

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        self.hardware.append(hardware)

    def force_flush(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_s: float) -> list[str]:
        return []
