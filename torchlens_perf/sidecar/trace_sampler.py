"""Choose the steps that a node's sidecar sends as traces, for one process generation.

The sidecar that has data of all ranks chooses the steps for the whole job. In a job with several
nodes, this is the sidecar of node 0, which sends its choice to the other nodes. A node without
contact to node 0 chooses its own steps, within its share of the budget.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from typing import TYPE_CHECKING

from torchlens_perf.exporters import CoveredRanks, ExportBatch, steps_traced_by_number
from torchlens_perf.exporters.sampling.budget import SpanBudget
from torchlens_perf.exporters.sampling.decision import EVERYTHING, TraceDecision
from torchlens_perf.exporters.sampling.step_sampler import JobSnapshot, StepSampler
from torchlens_perf.exporters.sampling.trace_buffer import BufferedSteps, TraceBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.exporters.sampling.rank_rows import RecentRankTimes
    from torchlens_perf.run.records import StepTable, TracedStep
    from torchlens_perf.sidecar.export_role import ExportRole
    from torchlens_perf.sidecar.rings.source import RingSource
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.verdicts.node_state import NodeState
    from torchlens_perf.verdicts.stragglers.placement import Placement

logger = logging.getLogger("torchlens_perf.sidecar")

# Longest time for which a node waits for node 0's choice about a step.
_NODE_0_TIMEOUT_S = 30.0
# Number of choices in the node's state. A replay uses these choices.
_MAX_SAVED_CHOICES = 512
_MAX_SENT_CHOICES = 32
# `export_limit` is a number of metric series. It also limits the spans in 10 s.
_SERIES_PER_SPAN = 10


class TraceSampler:
    """Sampler of the steps to send as traces, for one process generation. Not thread-safe."""

    def __init__(
        self, generation: int, rows: RecentRankTimes, places: Mapping[int, Placement]
    ) -> None:
        """rows, places: data of all judged ranks.

        The caller updates them while the processes run.
        """
        self._generation = generation
        self._rows, self._places = rows, places
        self._buffer = TraceBuffer()
        self._sampler: StepSampler | None = None
        self._budget_of: tuple[CoveredRanks | None, float] | None = None
        self._sent: dict[int, None] = {}
        self._chosen: deque[TracedStep] = deque(maxlen=_MAX_SENT_CHOICES)
        self._received = b""
        self._episodes: set[tuple[int, int]] | None = None
        self._world_size = 1
        self._export_limit, self._samples_slow = 0, True

    def add_steps(
        self, source: RingSource, sources: RingSources, records: npt.NDArray[np.void], names: list[str],
        steps: StepTable, now_s: float,
    ) -> set[int]:  # fmt: skip
        """Add complete steps of a process. Return the numbers of the steps to send at once.

        Only steps of other process generations are sent at once: every n-th step, by its number.
        now_s: CLOCK_MONOTONIC.
        """
        every = source.state.trace_every
        if not every or not len(steps):
            return set()
        if source.generation != self._generation or not sources.is_newest(source):
            return steps_traced_by_number(steps.step.tolist(), every)
        identity = source.state.identity
        self._world_size = identity.world_size
        later = source.incomplete_records()
        self._buffer.append_steps(
            BufferedSteps(
                identity.key, identity.rank, source.state.anchor, records, later, names, steps
            )
        )
        self._export_limit, self._samples_slow = (
            sources.read_setting("export_limit"),
            bool(sources.read_setting("_trace_slow")),
        )
        if identity.rank == min(each.state.identity.rank for each in sources.newest_rings()):
            if self._sampler is None:
                self._sampler, self._budget_of = StepSampler(0), None
            self._sampler.add_steps(steps, every, now_s)
        return set()

    @property
    def has_candidates(self) -> bool:
        """True if there are steps that are neither chosen nor rejected yet."""
        return self._sampler is not None and self._sampler.has_candidates

    def choose_traces(
        self, role: ExportRole, state: NodeState, attempt: int, here: int, running: frozenset[int], received: bytes,
        now_s: float, *, final: bool = False,
    ) -> list[ExportBatch]:  # fmt: skip
        """Return the traces to send now.

        here: number of ranks of these processes on this node.
        running: the ranks that still make steps.
        received: the newest choice of node 0, see encode_choice().
        final: no more steps or choices will come.
        """
        sampler = self._sampler
        if sampler is None or (role.part is None and not final):
            return []
        of_job = (
            here if role.part in (CoveredRanks.ALONE, CoveredRanks.FORWARDER) else self._world_size
        )
        self._update_budget(sampler, role.part, min(1.0, of_job / self._world_size))
        chosen: list[TracedStep] = []
        after_s = 0.0
        if role.part is CoveredRanks.FORWARDER:
            chosen += self._decode_received_choice(sampler, received, role, attempt)
            after_s = 0.0 if final else _NODE_0_TIMEOUT_S
        else:
            self._react_to_verdicts(sampler, role, state, now_s)
        slow = [group.lead.rank for group in state.findings.groups]
        slow += [each.rank for each in state.findings.slow_now if each.rank not in slow]
        known = JobSnapshot(
            self._buffer.count_spans_by_rank, running, of_job, self._rows, slow, self._places
        )
        before = sampler.left_out
        chosen += sampler.select_steps(attempt, known, now_s, final=final, after_s=after_s)
        role.left_out += sampler.left_out - before
        self._chosen.extend(chosen)
        return [batch for each in chosen for batch in self._build_batches(each, state)]

    def encode_choice(
        self, attempt: int, slow_ranks: tuple[int, ...], max_bytes: int, *, final: bool
    ) -> bytes:
        """Return the newest choice for other nodes, or b"" before the first step."""
        if self._sampler is None:
            return b""
        decided_to = EVERYTHING if final else self._sampler.decided_to
        return TraceDecision(attempt, decided_to, slow_ranks, tuple(self._chosen)).encode(max_bytes)

    # -- parts

    def _update_budget(self, sampler: StepSampler, part: CoveredRanks | None, share: float) -> None:
        """Set the span budget if it has changed. share: this node's share of the job's budget."""
        budget = part, self._export_limit / _SERIES_PER_SPAN * share
        if self._budget_of != budget:
            self._budget_of = budget
            sampler.budget = SpanBudget(budget[1])
            sampler.samples_slow = self._samples_slow and part is not CoveredRanks.FORWARDER

    def _react_to_verdicts(
        self, sampler: StepSampler, role: ExportRole, state: NodeState, now_s: float
    ) -> None:
        """Trace steps when a verdict begins, and give slow ranks their own metric series."""
        open_now = state.findings.slow_now
        keys = {each.key for each in open_now}
        if self._episodes is not None and keys - self._episodes:
            sampler.add_newest_step(now_s)
        self._episodes = keys if self._episodes is None else self._episodes | keys
        role.add_slow_ranks(open_now)

    def _decode_received_choice(
        self, sampler: StepSampler, received: bytes, role: ExportRole, attempt: int
    ) -> list[TracedStep]:
        """Return the steps that node 0 has chosen since the last call."""
        if not received or received == self._received:
            return []
        self._received = received
        try:
            said = TraceDecision.decode(self._received)
        except ValueError as error:
            logger.warning("%s", error)
            return []
        role.slow_elsewhere = frozenset(said.standing)
        if said.attempt != attempt:
            return []
        sampler.drop_candidates_until(said.decided_to)
        return [each for each in said.steps if each.step not in self._sent]

    def _build_batches(self, chosen: TracedStep, state: NodeState) -> list[ExportBatch]:
        if chosen.step in self._sent:
            return []
        self._sent[chosen.step] = None
        while len(self._sent) > 4 * _MAX_SAVED_CHOICES:
            del self._sent[next(iter(self._sent))]
        state.traced = [*state.traced[1 - _MAX_SAVED_CHOICES :], chosen]
        found = []
        for shelved in self._buffer.entries_with_step(chosen.step):
            if chosen.role_of_rank(shelved.rank) is None and shelved.rank != 0:
                continue
            trace = shelved.build_trace(chosen.step)
            if trace is not None:
                identity = state.processes[shelved.key].identity
                table = shelved.steps.select_rows(shelved.steps.step == chosen.step)
                batch = ExportBatch(identity, shelved.anchor, table, (trace,), again=True)
                found.append(dataclasses.replace(batch, chosen={chosen.step: chosen}))
        return found
