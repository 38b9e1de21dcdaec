"""Keep the newest steps of a node, and send those that it selects as traces.

A node selects steps for all of its ranks, in each process generation anew. The rules are in
exporters/trace_sampling.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlens_perf.exporters import ExportBatch, steps_traced_by_number
from torchlens_perf.exporters.trace_buffer import BufferedSteps, TraceBuffer
from torchlens_perf.exporters.trace_sampling import StepSampler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.run.records import StepTable, TracedStep
    from torchlens_perf.sidecar.rings.source import RingSource
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.verdicts.node_state import NodeState

# Number of selected steps in the node's state. A replay sends these steps.
_MAX_SAVED_STEPS = 512
# `export_limit` is a number of metric series. It also limits the spans in 10 s.
_SERIES_PER_SPAN = 10


class TraceSampler:
    """The steps of one process generation that this node sends as traces. Not thread-safe."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._buffer = TraceBuffer()
        self._sampler: StepSampler | None = None
        self._slow: set[object] | None = None

    @property
    def left_out(self) -> int:
        """Number of steps that were not sent because they exceeded the budget of spans."""
        return 0 if self._sampler is None else self._sampler.left_out

    def add_steps(
        self, source: RingSource, sources: RingSources, records: npt.NDArray[np.void], names: list[str],
        steps: StepTable, now_s: float,
    ) -> set[int]:  # fmt: skip
        """Add complete steps of a process. Return the numbers of the steps to send at once.

        Only steps of other process generations are sent at once: every n-th step, by its number.
        now_s: CLOCK_MONOTONIC.
        """
        every = source.state.facts.settings.trace_every
        if not every or not len(steps):
            return set()
        if source.generation != self._generation or not sources.is_newest(source):
            return steps_traced_by_number(steps.step.tolist(), every)
        identity = source.state.identity
        # They may include records of earlier steps.
        incomplete = source.waiting[0][0] if source.waiting else records[:0]
        self._buffer.append_steps(
            BufferedSteps(
                identity.key, identity.rank, source.state.anchor, records, incomplete, names, steps,
            )
        )  # fmt: skip
        here = {each.state.identity.rank for each in sources.newest_rings()}
        if identity.rank == min(here):
            if self._sampler is None:
                share = min(1.0, len(here) / identity.world_size)
                spans_per_s = sources.settings.export_limit / _SERIES_PER_SPAN * share
                self._sampler = StepSampler(
                    spans_per_s,
                    samples_slow=sources.settings.trace_slow,
                    first_rank=identity.rank,
                )
            self._sampler.add_steps(steps, every, now_s)
        return set()

    def react_to_slow_ranks(self, slow: AbstractSet[object], now_s: float) -> None:
        """Send the newest step if one of this node's ranks has become slow.

        slow: identifies each time at which a rank of this node became slow.
        """
        if self._sampler is None:
            return
        if self._slow is not None and slow - self._slow:
            self._sampler.add_newest_step(now_s)
        self._slow = {*(self._slow or ()), *slow}

    def choose_traces(
        self, state: NodeState, attempt: int, running: frozenset[int], now_s: float, *, final: bool = False
    ) -> list[ExportBatch]:  # fmt: skip
        """Return the traces to send now.

        running: the ranks that still make steps. final: no more steps will come.
        """
        if self._sampler is None:
            return []
        chosen = self._sampler.select_steps(
            attempt, self._buffer.count_spans_by_rank, running, now_s, final=final
        )
        state.traced = [*state.traced, *chosen][-_MAX_SAVED_STEPS:]
        return [batch for each in chosen for batch in self._build_batches(each, state)]

    def _build_batches(self, chosen: TracedStep, state: NodeState) -> Iterator[ExportBatch]:
        for buffered in self._buffer.entries_with_step(chosen.step):
            traces = buffered.build_traces(chosen.step)
            if traces:
                yield ExportBatch(
                    state.processes[buffered.key].identity,
                    buffered.anchor,
                    buffered.steps.select_rows(buffered.steps.step == chosen.step),
                    traces,
                    again=True,
                    chosen={chosen.step: chosen},
                )
