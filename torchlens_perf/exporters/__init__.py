"""Where finished steps go. An exporter runs in the sidecar, never in a training process."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.analysis.statistics.device import phase_durations_ns
from torchlens_perf.analysis.statistics.memory import newest_reading
from torchlens_perf.analysis.statistics.steps import step_traces
from torchlens_perf.exporters.choice.chooser import FIRST_TRACED_STEPS as FIRST_TRACED_STEPS
from torchlens_perf.exporters.choice.chooser import reason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.analysis.statistics.memory import MemoryReading
    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTable, StepTrace, TracedStep
    from torchlens_perf.run.verdicts import Alert
    from torchlens_perf.verdicts.node_state import ProcessState
    from torchlens_perf.verdicts.stragglers.findings import Findings
    from torchlens_perf.verdicts.words.hang import OpenHang


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
    again: bool = False
    """Its steps were in an earlier batch: this one is here for their traces."""
    chosen: Mapping[int, TracedStep] = dataclasses.field(default_factory=dict)
    """By step that is traced, why it is and what of it is sent. A step that is not in here is sent whole."""


class Part(enum.Enum):
    """What a sidecar's metrics of many ranks stand for."""

    WHOLE = "whole"
    """The job: this sidecar sees all its ranks, or others hand theirs on to it."""
    HANDS_ON = "hands on"
    """Nothing: they are handed on to node 0's."""
    ALONE = "alone"
    """This node's ranks: no other sidecar knows of them."""


@dataclasses.dataclass(frozen=True)
class JobPart:
    """What this node is in its job, as far as that decides who sends what."""

    part: Part = Part.WHOLE
    share: float = 1.0
    """Of the job's ranks, those on this node."""
    max_series: int = 2000
    """Of metrics, of the whole job."""
    standing: frozenset[int] | None = None
    """Ranks that stand out, and have series of their own; None: as this sidecar judges."""
    spread_s: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """How the job's ranks differ now: by "work" or "wait" in a step, and quantile over ranks."""
    tallies: Sequence[tuple[str, bytes]] = ()
    """What other nodes have handed on since the last time, with the node's name."""
    left_out: int = 0
    """Steps that were to be sent as traces, and for which there was no room."""


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

    def take_part(self, part: JobPart) -> bytes:
        """Takes over what this node is in its job, and what others hand on. Called in every round, before the batches.

        Returns what is to be handed on to node 0's sidecar, at most MAX_TALLY_BYTES; b"" for nothing.
        """

    def wait_for_room(self, timeout_s: float) -> bool:
        """Waits until little is left to deliver, at most about `timeout_s`. Returns whether the endpoint takes it."""

    def shutdown(self, timeout_s: float) -> list[str]:
        """Ends within about `timeout_s`. Returns notes for the report: what was not delivered, and why."""


MAX_STANDING = 16  # ranks of a large job that have series of their own
MAX_TALLY_BYTES = 1000
TALLY_MARK = b"\xf1"  # what is handed on begins so; no summary of a rank does, see sidecar/nodes/summary.py


def traced_steps(steps: list[int], every: int) -> set[int]:
    """Which of these steps are sent by their number: the first ones, and one of `every`; none if it is 0."""
    return {step for step in steps if reason(step, every)}


def export_batch(
    process: ProcessState,
    records: npt.NDArray[np.void],
    names: list[str],
    steps: StepTable,
    traced: Collection[int] = (),
    chosen: Mapping[int, TracedStep] | None = None,
) -> ExportBatch:
    """records: of whole steps, those of the table `steps`. traced: steps that are sent as traces. chosen: see
    ExportBatch."""
    traces = step_traces(records, names, set(traced)) if traced else []
    device_ns, memory = phase_durations_ns(records), newest_reading(records, names)
    return ExportBatch(
        process.identity, process.anchor, steps, tuple(traces), device_ns, memory, chosen=dict(chosen or {})
    )
