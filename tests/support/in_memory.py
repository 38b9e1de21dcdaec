"""An exporter that keeps everything in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.exporters import Assessment, ExportBatch, Exporter, NodeRole

if TYPE_CHECKING:
    from torchlens_perf.run.hardware_samples import HardwareSamples
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTrace
    from torchlens_perf.run.verdicts import Alert


class InMemoryExporter(Exporter):
    """Stores all batches, alerts and hardware samples, and the newest assessment."""

    def __init__(self) -> None:
        self.batches: list[ExportBatch] = []
        # Batches that add traces to earlier steps.
        self.traced: list[ExportBatch] = []
        self.alerts: list[Alert] = []
        self.hardware: list[HardwareSamples] = []
        self.assessment: Assessment | None = None
        self.part: NodeRole | None = None

    def export(self, batch: ExportBatch) -> None:
        (self.traced if batch.again else self.batches).append(batch)

    @property
    def traces(self) -> list[StepTrace]:
        """All traces, including those that arrived after their steps."""
        return [trace for batch in (*self.batches, *self.traced) for trace in batch.traces]

    def on_assessment(self, assessment: Assessment) -> None:
        self.assessment = assessment
        self.alerts += assessment.alerts

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        self.hardware.append(hardware)

    def update_role(self, part: NodeRole) -> bytes:
        self.part = part
        return b""
