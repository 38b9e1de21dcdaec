"""Where finished steps go. An exporter runs in the sidecar, never in a training process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.analysis.statistics.device import phase_durations_ns
from torchlens_perf.analysis.statistics.memory import newest_reading
from torchlens_perf.analysis.statistics.steps import step_traces

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.analysis.alerts.alert import Alert
    from torchlens_perf.analysis.causes.straggler_groups import StragglerGroup
    from torchlens_perf.analysis.node_state import ProcessState
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.analysis.statistics.memory import MemoryReading
    from torchlens_perf.analysis.stragglers.detector import Findings
    from torchlens_perf.analysis.words.hang import OpenHang
    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTable, StepTrace


@dataclasses.dataclass(frozen=True)
class ExportBatch:
    """Finished steps of one process, and all spans of those among them that are sampled."""

    identity: Identity
    anchor: Anchor
    steps: StepTable
    traces: tuple[StepTrace, ...]
    device_ns: Mapping[str, npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    """By phase, the device times received since the last batch. They belong to these steps or to earlier ones."""
    memory: MemoryReading | None = None
    """The latest reading of the device's allocator; None if there was no reading since the last batch."""


@dataclasses.dataclass(frozen=True)
class Assessment:
    """What a sidecar holds to be wrong at this moment, and what has changed since the last time."""

    identity: Identity
    """Of any process of the node, in the attempt that was judged."""
    findings: Findings
    hang: OpenHang | None
    """None while steps are made."""
    alerts: tuple[Alert, ...]
    whole_job: bool = True
    """Whether this sidecar judges all ranks. If another one does, this one's findings are only its own ranks'."""
    together: Sequence[StragglerGroup] = ()
    """Who is slow now, and together with whom: for what they cost, which of several is not that of one of them."""
    ended: bool = False
    """Whether no process of the node runs any more."""


UNDELIVERED = "OTLP: "
"""How notes on what was not delivered begin; a replay that delivers everything takes them away."""


class Exporter(Protocol):
    """A sink. Called on the sidecar's only thread."""

    def export(self, batch: ExportBatch) -> None:
        """Takes the batch over. Does not wait for delivery; counts what cannot be delivered."""

    def on_assessment(self, assessment: Assessment) -> None:
        """Takes the judgement over; called in every round of the sidecar, after the batches. Does not wait either."""

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        """Takes over new samples of GPUs and network ports, each once. identity: of any process of the node."""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until little is left to deliver, at most about `timeout_s`. Returns whether the endpoint takes it."""

    def shutdown(self, timeout_s: float) -> list[str]:
        """Ends within about `timeout_s`. Returns notes for the report: what was not delivered, and why."""


FIRST_TRACED_STEPS = 3


def traced_steps(steps: list[int], every: int) -> set[int]:
    """Which of these steps are exported span by span: the first ones, and one of `every`; none if it is 0."""
    return {step for step in steps if every and (step < FIRST_TRACED_STEPS or step % every == 0)}


def export_batch(
    process: ProcessState,
    records: npt.NDArray[np.void],
    names: list[str],
    steps: StepTable,
    later: npt.NDArray[np.void] | None = None,
) -> ExportBatch:
    """records: of whole steps, those of the table `steps`. later: records after them, which may be about them."""
    traced = traced_steps(steps.step.tolist(), process.trace_every)
    traces = step_traces(records, names, traced, later)
    device_ns, memory = phase_durations_ns(records), newest_reading(records, names)
    return ExportBatch(process.identity, process.anchor, steps, tuple(traces), device_ns, memory)
