"""An exporter that keeps what it is given, as the SDK's in-memory exporters do: for tests, and as an example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.exporters import Assessment, ExportBatch, JobPart

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTrace
    from torchlens_perf.run.verdicts import Alert


class InMemoryExporter:
    """Keeps every batch, every alert and all of the hardware's samples, and the newest judgement."""

    def __init__(self) -> None:
        self.batches: list[ExportBatch] = []
        self.traced: list[ExportBatch] = []  # steps of those that came once more, with their traces
        self.alerts: list[Alert] = []
        self.hardware: list[Hardware] = []
        self.assessment: Assessment | None = None
        self.part: JobPart | None = None

    def export(self, batch: ExportBatch) -> None:
        (self.traced if batch.again else self.batches).append(batch)

    @property
    def traces(self) -> list[StepTrace]:
        """All that came: with their steps, or after them."""
        return [trace for batch in (*self.batches, *self.traced) for trace in batch.traces]

    def on_assessment(self, assessment: Assessment) -> None:
        self.assessment = assessment
        self.alerts += assessment.alerts

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        self.hardware.append(hardware)

    def take_part(self, part: JobPart) -> bytes:
        self.part = part
        return b""

    def wait_for_room(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_s: float) -> list[str]:
        return []
