"""The interface of exporters, which run in the sidecar, never in a training process."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torchlens_perf.analysis.statistics.device import phase_durations_ns
from torchlens_perf.analysis.statistics.memory import newest_reading
from torchlens_perf.analysis.statistics.steps import step_traces
from torchlens_perf.exporters.sampling.step_sampler import FIRST_TRACED_STEPS as FIRST_TRACED_STEPS
from torchlens_perf.exporters.sampling.step_sampler import reason

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
    """Finished steps of one process, with all spans of the sampled steps."""

    identity: Identity
    anchor: Anchor
    steps: StepTable
    traces: tuple[StepTrace, ...]
    device_ns: Mapping[str, npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    """Device times by phase, received since the last batch, of these or of earlier steps."""
    memory: MemoryReading | None = None
    """The latest reading of the device's allocator; None if there was no reading since
    the last batch.
    """
    again: bool = False
    """True if an earlier batch had these steps already. This batch only adds their traces."""
    chosen: Mapping[int, TracedStep] = dataclasses.field(default_factory=dict)
    """Reason and selected ranks by traced step. All ranks of a step without an entry are sent."""


class Part(enum.Enum):
    """The set of ranks that a sidecar's aggregated metrics describe."""

    WHOLE = "whole"
    """The whole job: this sidecar reads all ranks, or receives the sums of other nodes."""
    FORWARDER = "hands on"
    """No ranks: the sums are forwarded to the sidecar of node 0, which sends them."""
    ALONE = "alone"
    """This node's ranks: no other sidecar receives their sums."""


@dataclasses.dataclass(frozen=True)
class JobPart:
    """The role of this node in its job, which decides what each node sends."""

    part: Part = Part.WHOLE
    share: float = 1.0
    """This node's share of the job's ranks."""
    max_series: int = 2000
    """Maximum number of metric series of the whole job."""
    standing: frozenset[int] | None = None
    """Slow ranks that get series of their own; None: the ranks that this sidecar finds slow."""
    spread_s: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Quantiles over the job's ranks, by "work" or "wait" of a step and name of the quantile."""
    tallies: Sequence[tuple[str, bytes]] = ()
    """Messages that other nodes forwarded since the last call, as (node name, payload)."""
    left_out: int = 0
    """Number of steps selected as traces but left out, because they exceeded the span budget."""


@dataclasses.dataclass(frozen=True)
class Assessment:
    """The problems that a sidecar finds now, and the changes since the last assessment."""

    identity: Identity
    """Identity of any process of the node, in the attempt that was assessed."""
    findings: Findings
    hang: OpenHang | None
    """None while the job finishes steps."""
    alerts: tuple[Alert, ...]
    whole_job: bool = True
    """True if the sidecar compares all ranks of the job, False if only those of this node."""
    ended: bool = False
    """True if all processes of the node have ended."""


UNDELIVERED = "OTLP: "
"""Prefix of notes on undelivered data. A replay that delivers everything removes these notes."""


class Exporter(Protocol):
    """A receiver of steps, assessments and hardware samples, on the sidecar's main thread."""

    def export(self, batch: ExportBatch) -> None:
        """Accept a batch without waiting for its delivery. Count what cannot be delivered."""

    def on_assessment(self, assessment: Assessment) -> None:
        """Accept an assessment without waiting. Called in every round, after the batches."""

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        """Accept new samples of GPUs and network ports. identity: of any process of the node."""

    def update_role(self, part: JobPart) -> bytes:
        """Accept this node's role and the other nodes' messages. Called in every round, before the
        batches.

        Return a message of at most MAX_TALLY_BYTES for the sidecar of node 0; b"" if none is due.
        """

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait about `timeout_s` until little data is left. Return True if data is accepted."""

    def shutdown(self, timeout_s: float) -> list[str]:
        """Stop within about `timeout_s`. Return notes for the report about undelivered data."""


# At most this many slow ranks of a large job have metric series of their own.
MAX_SLOW_RANKS = 16
MAX_TALLY_BYTES = 1000
# Forwarded metrics begin with this byte, which rank summaries never do (nodes/summary.py).
TALLY_MARK = b"\xf1"


def traced_steps(steps: list[int], every: int) -> set[int]:
    """Return the first steps and one in `every`, which are traced because of their number."""
    return {step for step in steps if reason(step, every)}


def export_batch(
    process: ProcessState,
    records: npt.NDArray[np.void],
    names: list[str],
    steps: StepTable,
    traced: Collection[int] = (),
    chosen: Mapping[int, TracedStep] | None = None,
) -> ExportBatch:
    """Build a batch from `records` of the complete steps `steps`. traced: steps to trace."""
    traces = step_traces(records, names, set(traced)) if traced else []
    device_ns, memory = phase_durations_ns(records), newest_reading(records, names)
    return ExportBatch(
        process.identity,
        process.anchor,
        steps,
        tuple(traces),
        device_ns,
        memory,
        chosen=dict(chosen or {}),
    )
