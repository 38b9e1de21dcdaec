"""An exporter that keeps what it is given; the smallest that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.exporters import Assessment, ExportBatch

if TYPE_CHECKING:
    from torchlens_perf.analysis.alerts.alert import Alert
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.run.identity import Identity


class MemoryExporter:
    """Keeps every batch, every alert and all of the hardware's samples, and the newest judgement."""

    def __init__(self) -> None:
        self.batches: list[ExportBatch] = []
        self.alerts: list[Alert] = []
        self.hardware: list[Hardware] = []
        self.assessment: Assessment | None = None

    def export(self, batch: ExportBatch) -> None:
        self.batches.append(batch)

    def on_assessment(self, assessment: Assessment) -> None:
        self.assessment = assessment
        self.alerts += assessment.alerts

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        self.hardware.append(hardware)

    def wait_for_room(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_s: float) -> list[str]:
        return []
