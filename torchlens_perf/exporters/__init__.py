"""Where finished steps go. An exporter runs in the sidecar, never in a training process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.alert import Alert
    from torchlens_perf.clock import Anchor
    from torchlens_perf.culprits import Culprit
    from torchlens_perf.identity import Identity
    from torchlens_perf.memory_statistics import MemoryReading
    from torchlens_perf.records import StepTable, StepTrace
    from torchlens_perf.straggler import Findings
    from torchlens_perf.telemetry import Hardware


@dataclasses.dataclass(frozen=True)
class ExportBatch:
    """Finished steps of one process, and all spans of those among them that are sampled."""

    identity: Identity
    anchor: Anchor
    steps: StepTable
    traces: tuple[StepTrace, ...]
    device_ns: Mapping[str, npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    """By phase, the device times that were told since the last batch: of these steps, or of some before them."""
    memory: MemoryReading | None = None
    """What the device's allocator told last; None where it has told nothing since the last batch."""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a sidecar holds to be wrong at this moment, and what has changed since the last time."""

    identity: Identity
    """Of any process of the node, in the attempt that was judged."""
    findings: Findings
    hang: Mapping[str, Any] | None
    """As the node's state has it; None while steps are made."""
    alerts: tuple[Alert, ...]
    whole_job: bool = True
    """Whether this sidecar judges all ranks. If another one does, this one's findings are only its own ranks'."""
    together: Sequence[Culprit] = ()
    """Who is slow now, and together with whom: for what they cost, which of several is not that of one of them."""


UNDELIVERED = "OTLP: "
"""How notes on what was not delivered begin; a replay that delivers everything takes them away."""


class Exporter(Protocol):
    """A sink. Called on the sidecar's only thread."""

    def export(self, batch: ExportBatch) -> None:
        """Takes the batch over. Does not wait for delivery; counts what cannot be delivered."""
        ...

    def judged(self, judgement: Judgement) -> None:
        """Takes the judgement over; called in every round of the sidecar, after the batches. Does not wait either."""
        ...

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        """Takes over what GPUs and network ports have just told, each once. identity: of any process of the node."""
        ...

    def force_flush(self, timeout_s: float) -> bool:
        """Waits at most about `timeout_s` for delivery. Returns whether all since the last call was delivered."""
        ...

    def shutdown(self, timeout_s: float) -> list[str]:
        """Ends within about `timeout_s`. Returns notes for the report: what was not delivered, and why."""
        ...
