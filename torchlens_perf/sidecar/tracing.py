"""Which steps a node's sidecar sends as traces, and what its metrics stand for.

A job's steps are chosen in one place, where all ranks are known: on a job's only node, or by node 0's sidecar, which
says it to the others in the exchange. A node that nobody speaks to chooses by itself, within its share of the budget.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import deque
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.exporters import MAX_STANDING, ExportBatch, JobPart, Part, traced_steps
from torchlens_perf.exporters.choice.budget import SpanBudget
from torchlens_perf.exporters.choice.chooser import Chooser, Known
from torchlens_perf.exporters.choice.said import EVERYTHING, Said
from torchlens_perf.exporters.choice.shelf import Shelf, Shelved

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.analysis.node_state import NodeState
    from torchlens_perf.run.records import StepTable, TracedStep
    from torchlens_perf.sidecar.job import JobView
    from torchlens_perf.sidecar.rings.source import RingSource
    from torchlens_perf.sidecar.rings.sources import RingSources

logger = logging.getLogger("torchlens_perf.sidecar")

_UNHEARD_S = 30.0  # after which a node no longer waits for what node 0 says of a step
_UNKNOWN_S = 15.0  # after which a node whose part in the job is not known is taken to be alone
_KEPT_CHOICES = 512  # in the node's state, for a replay
_SAID_CHOICES = 32
_SERIES_PER_SPAN = 10  # of `export_limit`: as many metric series as spans in 10 s


class Tracing:
    """Belongs to the sidecar's thread."""

    def __init__(self, job: JobView, state: NodeState) -> None:
        self._job, self._state = job, state
        self._shelf = Shelf()
        self._generation = UNRELATED
        self._part: Part | None = None
        self._standing: dict[int, None] = {}  # ranks that stand out, the newest last
        self._heard_standing: frozenset[int] = frozenset()
        self._ready: list[ExportBatch] = []
        self._left_out = 0
        self._export_limit, self._trace_slow = 0, True
        self._unknown_since_s: float | None = None
        self._begin(UNRELATED)

    def _begin(self, generation: int) -> None:
        self._generation = generation
        self._shelf.clear()
        self._chooser: Chooser | None = None
        self._budget_of: tuple[Part | None, float] | None = None
        self._sent: dict[int, None] = {}
        self._said: deque[TracedStep] = deque(maxlen=_SAID_CHOICES)
        self._heard = b""
        self._episodes: set[tuple[int, int]] | None = None
        self._world_size = 1

    # -- from the sidecar

    def add(
        self, source: RingSource, sources: RingSources, records: npt.NDArray[np.void], names: list[str],
        steps: StepTable, now_s: float,
    ) -> set[int]:  # fmt: skip
        """Whole steps of a process. now_s: CLOCK_MONOTONIC.

        Returns those of them that are to be sent at once: of a process that does not belong to those that run together,
        by their numbers alone.
        """
        every = source.state.trace_every
        if not every or not len(steps):
            return set()
        if not sources.is_newest(source):
            return traced_steps(steps.step.tolist(), every)
        if source.generation != self._generation:
            self._ready += self._decide(sources, now_s, final=True)
            self._begin(source.generation)
        who = source.state.identity
        self._world_size = who.world_size
        later = source.later_records()
        self._shelf.add(Shelved(who.key, who.rank, source.state.anchor, records, later, names, steps))
        self._export_limit, self._trace_slow = sources.setting("export_limit"), bool(sources.setting("_trace_slow"))
        if who.rank == min(each.state.identity.rank for each in sources.newest()):
            if self._chooser is None:
                self._chooser = Chooser(0)
                self._budget_of = None
            self._chooser.add_steps(steps, every, now_s)
        return set()

    def part(self, sources: RingSources, now_s: float) -> JobPart | None:
        """What this node's metrics stand for; None while that is not known."""
        world_size = max((each.state.identity.world_size for each in sources), default=1)
        here = len({each.state.identity.rank for each in sources.newest()})
        self._part = self._job.part or self._part
        if self._part is None:
            self._unknown_since_s = now_s if self._unknown_since_s is None else self._unknown_since_s
            if now_s - self._unknown_since_s < _UNKNOWN_S and sources.live():
                return None
            self._part = Part.WHOLE if here >= world_size else Part.ALONE
        tallies = list(self._job.tallies)
        self._job.tallies.clear()
        standing: frozenset[int] | None = None
        if self._part is Part.WHOLE:
            standing = frozenset(self._standing)
        elif self._part is Part.HANDS_ON:
            standing = self._heard_standing
        return JobPart(
            part=self._part,
            share=min(1.0, max(1, here) / world_size),
            max_series=sources.setting("export_limit") or sys.maxsize,
            standing=standing,
            spread_s=self._job.rank_rows.spread_s() if self._part is Part.WHOLE else {},
            tallies=tallies,
            left_out=self._left_out,
        )

    def update(self, sources: RingSources, now_s: float, *, final: bool = False) -> list[ExportBatch]:
        """The traces that are to be sent now. final: nothing more comes, from here or from node 0."""
        found, self._ready = self._ready, []
        return found + self._decide(sources, now_s, final=final)

    @property
    def awaits_word(self) -> bool:
        """Whether node 0 is still to say what is sent of some steps."""
        chooser = self._chooser
        return self._part is Part.HANDS_ON and chooser is not None and chooser.has_candidates

    # -- parts

    def _decide(self, sources: RingSources, now_s: float, *, final: bool) -> list[ExportBatch]:
        chooser = self._chooser
        if chooser is None or (self._part is None and not final):
            return []
        self._set_budget(chooser, sources)
        attempt = self._job.membership.number(self._generation)
        chosen: list[TracedStep] = []
        after_s = 0.0
        if self._part is Part.HANDS_ON:
            chosen += self._hear(chooser, attempt)
            after_s = 0.0 if final else _UNHEARD_S
        elif self._generation != UNRELATED:
            self._look_for_verdicts(chooser, now_s)
        before = chooser.left_out
        chosen += chooser.choose(attempt, self._known(sources), now_s, final=final, after_s=after_s)
        self._left_out += chooser.left_out - before
        if self._part is Part.WHOLE:
            self._said.extend(chosen)
            decided_to = EVERYTHING if final else chooser.decided_to
            said = Said(attempt, decided_to, tuple(self._standing), tuple(self._said))
            self._job.say(said.encode(self._job.room_to_say))
        return self._batches(chosen)

    def _set_budget(self, chooser: Chooser, sources: RingSources) -> None:
        """Of the job, or this node's share of it; once it is known which."""
        share = 1.0
        if self._part in (Part.ALONE, Part.HANDS_ON):
            share = min(1.0, len(list(sources.newest())) / self._world_size)
        budget = self._part, self._export_limit / _SERIES_PER_SPAN * share
        if self._budget_of != budget:
            self._budget_of = budget
            chooser.budget = SpanBudget(budget[1])
            chooser.samples_slow = self._trace_slow and self._part is not Part.HANDS_ON

    def _known(self, sources: RingSources) -> Known:
        running = frozenset(source.state.identity.rank for source in sources.newest() if not source.read_to_end)
        findings = self._state.findings
        slow = [group.lead.rank for group in findings.groups]
        slow += [each.rank for each in findings.slow_now if each.rank not in slow]
        world_size = self._world_size
        if self._part in (Part.ALONE, Part.HANDS_ON):
            world_size = len(list(sources.newest()))
        return Known(self._shelf.spans, running, world_size, self._job.rank_rows, slow, self._job.places)

    def _look_for_verdicts(self, chooser: Chooser, now_s: float) -> None:
        """Steps in which a rank is named are sent; and it has series of its own from now on."""
        open_now = self._state.findings.slow_now
        keys = {each.key for each in open_now}
        if self._episodes is not None and keys - self._episodes:
            chooser.verdict_began(now_s)
        self._episodes = keys if self._episodes is None else self._episodes | keys
        for each in sorted(open_now, key=lambda each: each.cost_ns)[-MAX_STANDING:]:
            self._standing.pop(each.rank, None)
            self._standing[each.rank] = None
        while len(self._standing) > MAX_STANDING:
            del self._standing[next(iter(self._standing))]

    def _hear(self, chooser: Chooser, attempt: int) -> list[TracedStep]:
        """What node 0 has said since the last time."""
        if not self._job.heard or self._job.heard == self._heard:
            return []
        self._heard = self._job.heard
        try:
            said = Said.decode(self._heard)
        except ValueError as error:
            logger.warning("%s", error)
            return []
        self._heard_standing = frozenset(said.standing)
        if said.attempt != attempt:
            return []
        chooser.forget(said.decided_to)
        return [each for each in said.steps if each.step not in self._sent]

    def _batches(self, chosen: list[TracedStep]) -> list[ExportBatch]:
        found = []
        for each in chosen:
            if each.step in self._sent:
                continue
            self._sent[each.step] = None
            while len(self._sent) > 4 * _KEPT_CHOICES:
                del self._sent[next(iter(self._sent))]
            self._state.traced = [*self._state.traced[1 - _KEPT_CHOICES :], each]
            for shelved in self._shelf.of(each.step):
                if each.role(shelved.rank) is None and shelved.rank != 0:
                    continue
                trace = shelved.trace(each.step)
                if trace is not None:
                    identity = self._state.processes[shelved.key].identity
                    table = shelved.steps.where(shelved.steps.step == each.step)
                    batch = ExportBatch(identity, shelved.anchor, table, (trace,), again=True)
                    found.append(dataclasses.replace(batch, chosen={each.step: each}))
        return found
