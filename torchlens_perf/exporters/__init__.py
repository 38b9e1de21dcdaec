"""Where finished steps go. An exporter runs in the sidecar, never in a training process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchlens_perf.clock import Anchor
    from torchlens_perf.identity import Identity
    from torchlens_perf.records import StepTable, StepTrace


@dataclasses.dataclass(frozen=True)
class ExportBatch:
    """Finished steps of one process, and all spans of those among them that are sampled."""

    identity: Identity
    anchor: Anchor
    steps: StepTable
    traces: tuple[StepTrace, ...]


UNDELIVERED = "OTLP: "
"""How notes on what was not delivered begin; a replay that delivers everything takes them away."""


class Exporter(Protocol):
    """A sink. Called on the sidecar's only thread."""

    def export(self, batch: ExportBatch) -> None:
        """Takes the batch over. Does not wait for delivery; counts what cannot be delivered."""
        ...

    def force_flush(self, timeout_s: float) -> bool:
        """Waits at most about `timeout_s` for delivery. Returns whether all since the last call was delivered."""
        ...

    def shutdown(self, timeout_s: float) -> list[str]:
        """Ends within about `timeout_s`. Returns notes for the report: what was not delivered, and why."""
        ...
