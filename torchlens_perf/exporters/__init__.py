"""The interface of exporters, which run in the sidecar, never in a training process."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchlens_perf.analysis.statistics.device import phase_durations_ns
from torchlens_perf.analysis.statistics.memory import MemoryReading, find_newest_reading
from torchlens_perf.analysis.statistics.steps import build_step_traces
from torchlens_perf.diagnosis.utilization import StepFlops, measure_step_flops
from torchlens_perf.exporters.trace_sampling import FIRST_TRACED_STEPS as FIRST_TRACED_STEPS
from torchlens_perf.exporters.trace_sampling import reason_from_step_number
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.hardware_samples import HardwareSamples
from torchlens_perf.run.identity import Identity
from torchlens_perf.run.records import StepTable, StepTrace, TracedStep
from torchlens_perf.run.undelivered import Undelivered
from torchlens_perf.run.verdicts import Alert
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.stragglers.findings import Findings
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.hang import HangEvidence


@dataclasses.dataclass(frozen=True)
class ExportBatch:
    """Finished steps of one process, with all spans of the traced steps."""

    identity: Identity
    anchor: Anchor
    steps: StepTable
    traces: tuple[StepTrace, ...]
    device_ns: Mapping[str, npt.NDArray[np.int64]] = dataclasses.field(default_factory=dict)
    """Device times by phase since the last batch, possibly of earlier steps."""
    memory: MemoryReading | None = None
    """The newest reading of the device's allocator since the last batch, if any."""
    flops: StepFlops | None = None
    """Operations of a mean step; None if not known."""
    has_tokens: bool = False
    """True if the workload of the steps is in tokens."""
    again: bool = False
    """True if an earlier batch contained these steps. This batch only adds traces of the steps."""
    chosen: Mapping[int, TracedStep] = dataclasses.field(default_factory=dict)
    """Reason of each traced step, if known."""


class CoveredRanks(enum.Enum):
    """The set of ranks that a sidecar's aggregated metrics describe."""

    WHOLE = "whole"
    """All ranks of the job. This sidecar reads all ranks, or receives the sums of other nodes."""
    FORWARDER = "hands on"
    """No ranks. This sidecar forwards its sums to the sidecar of node 0, which exports them."""
    ALONE = "alone"
    """This node's ranks, because no other sidecar receives their sums."""


@dataclasses.dataclass(frozen=True)
class NodeRole:
    """The role of this node in its job, which determines the data that the node exports."""

    part: CoveredRanks = CoveredRanks.WHOLE
    share: float = 1.0
    """This node's share of the job's ranks."""
    max_series: int = 2000
    """Maximum number of metric series of the whole job."""
    standing: frozenset[int] | None = None
    """Slow ranks with series of their own; None for those that this sidecar finds slow."""
    spread_s: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Quantiles over the job's ranks, by ("work" or "wait", name of the quantile)."""
    tallies: Sequence[tuple[str, bytes]] = ()
    """Messages that other nodes forwarded since the last call, as (node name, payload)."""
    left_out: int = 0
    """Number of steps selected as traces, but left out to keep the budget of spans."""


@dataclasses.dataclass(frozen=True)
class Assessment:
    """The current problems of the job, and the changes since the last assessment."""

    identity: Identity
    """Identity of one of the node's processes in the assessed attempt."""
    findings: Findings
    hang: HangEvidence | None
    """The open hang; None while the job finishes steps."""
    alerts: tuple[Alert, ...]
    whole_job: bool = True
    """True if the sidecar compares all ranks of the job, False for ranks of its node."""
    ended: bool = False
    """True if all processes of the node have ended."""
    goodput_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Time of the job by class, see diagnosis/goodput.py. Classes that are not measured are missing.
    """
    critical_path_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Critical path of a mean step by class, see diagnosis/lost_time.py; empty if not known."""
    crash: Verdict | None = None
    """The verdict on the rank that failed or died first; None without one, or while ranks run."""


UNDELIVERED = "OTLP: "
"""Prefix of notes on undelivered data. A replay that delivers the data of a signal removes its notes."""
ITEM_NAMES = {"traces": "spans", "metrics": "metric points", "logs": "alerts"}
"""What each signal consists of, in these notes."""


class Receiver:
    """Receives steps, assessments and hardware samples on the sidecar's main thread.

    The methods of this class drop all data. A subclass overrides the methods that it needs.
    """

    def export(self, batch: ExportBatch) -> None:
        """Accept a batch without waiting for its delivery. Count undelivered items."""

    def on_assessment(self, assessment: Assessment) -> None:
        """Accept an assessment without waiting. Called after export() in each round."""

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        """Accept new samples of GPUs and network ports.

        identity: identity of one of the node's processes.
        """

    def send_spans(self, spans: Sequence[Any]) -> None:
        """Accept the spans (ReadableSpan) of one trace, the root first."""


class Exporter(Receiver):
    """A receiver that sends them elsewhere."""

    spans_sent: Mapping[int, tuple[int, int]] = {}
    """Ids of the trace and of the rank's span, for each step of the last batch that is sent as
    spans."""

    def update_role(self, part: NodeRole) -> bytes:
        """Accept this node's role and the other nodes' messages. Called before export() in each
        round.

        Return a message of at most MAX_TALLY_BYTES for the sidecar of node 0; b"" if none is due.
        """
        return b""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until little undelivered data is left. Return True if data is accepted."""
        return True

    def shutdown(self, timeout_s: float) -> list[str]:
        """Stop within about `timeout_s`. Return notes for the report about undelivered data."""
        return []

    def find_undelivered(self) -> Undelivered | None:
        """Return the data to send again after an outage; None if that has not changed."""
        return None


# Largest number of slow ranks of a large job that have metric series of their own.
MAX_SLOW_RANKS = 16
MAX_TALLY_BYTES = 1000
# First byte of forwarded metrics. Rank summaries never start with this byte (nodes/summary.py).
TALLY_MARK = b"\xf1"


def keep_newest_ranks(ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the last MAX_SLOW_RANKS different ranks, in the order of their last occurrence."""
    newest_first = dict.fromkeys(reversed([*ranks]))
    return tuple(reversed([*newest_first][:MAX_SLOW_RANKS]))


def steps_traced_by_number(steps: list[int], every: int) -> set[int]:
    """Return the steps to trace by number: the first steps, and one in `every`."""
    return {step for step in steps if reason_from_step_number(step, every)}


def build_export_batch(
    process: ProcessState,
    records: npt.NDArray[np.void],
    names: list[str],
    steps: StepTable,
    traced: Collection[int] = (),
    chosen: Mapping[int, TracedStep] | None = None,
) -> ExportBatch:
    """Build a batch of complete steps from their records. traced: steps to trace."""
    traces = build_step_traces(records, names, set(traced)) if traced else []
    device_ns, memory = phase_durations_ns(records), find_newest_reading(records, names)
    return ExportBatch(
        process.identity,
        process.anchor,
        steps,
        tuple(traces),
        device_ns,
        memory,
        measure_step_flops(process),
        process.statistics.operators.has_tokens,
        chosen=dict(chosen or {}),
    )
