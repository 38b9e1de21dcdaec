"""Find slow ranks, their causes, and hangs, and raise alerts.

In a job with several nodes, every sidecar sends its ranks' step times to node 0's sidecar, which
judges all ranks together. After an error in this module, the sidecar still reads and saves records,
and the report notes that results are missing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.config import EXCHANGE_TOKEN
from torchlens_perf.exporters import Assessment, NodeRole
from torchlens_perf.run import ring
from torchlens_perf.sidecar.alerts import AlertManager, SlowLinkMonitor
from torchlens_perf.sidecar.cluster import ClusterLink
from torchlens_perf.sidecar.export_role import ExportRole
from torchlens_perf.sidecar.job_generation import JobGeneration
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.progress import read_progress
from torchlens_perf.sidecar.rank_metrics import RankMetrics
from torchlens_perf.sidecar.rings.source import USUAL_STEPS, RingSource
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.stragglers.findings import NOTHING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.analysis.statistics.restarts import GenerationNumbers
    from torchlens_perf.exporters import ExportBatch
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.contained_errors import ContainedErrors
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.sidecar.telemetry.log import TelemetryLog
    from torchlens_perf.verdicts.node_state import NodeState
    from torchlens_perf.verdicts.verdict import Verdict

_JUDGING = "judging the ranks"
SIGNALS = "looking for causes"


class JobMonitor:
    """Monitor of the job that writes its findings into the node's state. Not thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        state: NodeState,
        generations: GenerationNumbers,
        telemetry: TelemetryLog,
        errors: ContainedErrors,
        clock: Callable[[], float],
    ) -> None:
        """state: the node's saved state, or a new one.

        generations: the process generations, with the processes in `state` already added.
        clock: a monotonic clock in seconds.
        """
        self.cluster = ClusterLink(state.host, run.run_id, clock=clock)
        self.metrics = RankMetrics(telemetry)
        self.alerts = AlertManager(FindingLog(run.run_id, state.records, state.findings))
        self.role = ExportRole()
        self.job = JobGeneration(generations.newest, state.findings, clock)
        self._last_traces: list[ExportBatch] = []  # traces of replaced generations
        self._state = state
        self._folder = run.nodes
        self._links = SlowLinkMonitor()
        self._errors = errors
        self._clock = clock
        for process in state.processes.values():
            generation = generations.generation_of(process.identity)
            if generation != UNRELATED:
                self.cluster.add_generation(process.identity, generation, process.identity.attempt)

    def begin_generation(self, identity: Identity, generation: int) -> None:
        """Start a new generation because new processes have started.

        Discard findings about old processes.

        identity: identity of one of the new processes.
        """
        before, self.job = self.job, JobGeneration(generation, clock=self._clock)
        self.cluster.add_generation(identity, generation)
        with self._errors.contain("exporting"):
            self._last_traces += self._choose_traces(before, frozenset(), self._clock(), final=True)
        self.cluster.finish_generation(before)
        self._state.findings, self._state.hang = NOTHING, None

    def assign_attempts(self, sources: RingSources) -> None:
        """Set the run's id and attempt in the identity of each process."""
        membership = self.cluster.membership
        for source in sources:
            if source.generation != UNRELATED:
                identity = source.state.identity
                attempt = membership.generation_number(source.generation)
                if (identity.attempt, identity.run_id) != (attempt, membership.run_id):
                    source.state.identity = dataclasses.replace(
                        identity,
                        attempt=attempt,
                        run_id=membership.run_id,
                        launcher_restarts=identity.restarts,
                    )

    def add_steps(
        self, source: RingSource, records: npt.NDArray[np.void], steps: StepTable, *, newest: bool
    ) -> None:
        """Add finished steps of a process, assembled from these records.

        newest: True if no newer process has replaced this process.
        """
        with self._errors.contain(_JUDGING):
            judged = source.state.add_judged_steps(source.judged, records, steps)
            if newest:
                self._add_judged_steps(source, judged)
                if source.state.identity.rank == 0:
                    self.job.windows.add_records(records, source.state.identity.world_size)
        if newest:
            source.durations_ns.extend(steps.duration_ns[-USUAL_STEPS:].tolist())
            with self._errors.contain(SIGNALS):
                self.metrics.add_steps(source, records, steps)

    def end_process(self, source: RingSource) -> None:
        """Mark one of the newest processes as ended, after all its records were counted."""
        with self._errors.contain(_JUDGING):
            self._add_judged_steps(source, source.state.add_judged_steps(source.judged))
            self.job.end_rank(source.state.identity)

    def _add_judged_steps(self, source: RingSource, judged: StepTable | None) -> None:
        if judged is not None:
            facts, token = source.state.facts, os.environ.get(EXCHANGE_TOKEN, "")
            places = Endpoints.from_setting(
                facts.job_store, facts.settings.exchange, self._folder, token
            )
            self.job.add_steps(source.state.identity, source.state.placement, judged, places)
            self.job.stacks.add_steps(source.state.identity.rank, judged)

    def judge_job(self, sources: RingSources, now_s: float, *, final: bool = False) -> None:
        """Judge the ranks, exchange data with other nodes, and search for hangs."""
        newest = list(sources.newest_rings())
        with self._errors.contain(_JUDGING):
            uncomparable = self._state.join.uncomparable_groups()
            for source in newest:
                with source.reader.frozen_header():
                    state, progress = source.state, read_progress(source, uncomparable, now_s)
                modules_ns = state.statistics.mean_module_times_ns()
                self.job.set_progress(
                    state.identity,
                    state.placement,
                    progress,
                    state.facts,
                    modules_ns,
                )
        with self._errors.contain(SIGNALS):
            self._update_metrics(newest, now_s)
        with self._errors.contain(_JUDGING):
            self.cluster.exchange_data(self.job, now_s, final=final)
            findings = self.job.judge_ranks(final=final)
            # After a restart of the sidecar, keep the saved findings until new steps have been
            # judged.
            if findings is not None and (findings.rows or not self._state.findings.rows):
                details = self._create_details_lookup(newest)
                self._state.findings = self.job.add_groups_and_causes(
                    findings, self._state.findings, details
                )
        self._state.hang = self.job.hang
        # Alerts contain the job's attempt, which node 0 may not have reported yet.
        if not self.cluster.awaits_node_0(self.job) or not sources.unfinished_rings():
            self._update_alerts(newest, sources.unfinished_rings())

    def update_export_part(self, sources: RingSources, now_s: float) -> NodeRole | None:
        """Return the part of the job that this node exports, or None while it is not known."""
        self.role.add_slow_ranks(self._state.findings.slow_now)
        self.cluster.publish_slow_ranks(self.role.slow_ranks)
        self.role.slow_elsewhere = self.cluster.received_slow_ranks
        part, tallies = self.cluster.export_part(self.job), self.cluster.take_tallies()
        return self.role.update_part(part, self.job.rank_rows, tallies, sources, now_s)

    def take_traces(
        self, sources: RingSources, now_s: float, *, final: bool = False
    ) -> list[ExportBatch]:
        """Return the traces to send now. final: no more steps will follow."""
        found, self._last_traces = self._last_traces, []
        running = frozenset(
            each.state.identity.rank for each in sources.newest_rings() if not each.read_to_end
        )
        return found + self._choose_traces(self.job, running, now_s, final=final)

    def _choose_traces(
        self, job: JobGeneration, running: frozenset[int], now_s: float, *, final: bool
    ) -> list[ExportBatch]:
        attempt = self.cluster.membership.generation_number(job.generation)
        slow: set[object] = {*self.role.slow_elsewhere & job.ranks.keys()}
        slow |= {each.key for each in self._state.findings.slow_now if each.rank in job.ranks}
        job.traces.react_to_slow_ranks(slow, now_s)
        before = job.traces.left_out
        found = job.traces.choose_traces(self._state, attempt, running, now_s, final=final)
        self.role.left_out += job.traces.left_out - before
        return found

    def _update_metrics(self, newest: Sequence[RingSource], now_s: float) -> None:
        sampled = self.metrics.take_signals(newest, now_s)
        self.job.add_metrics(sampled, now_s)
        for source in newest:
            if signals := sampled.get(source.state.identity.rank):
                self.metrics.add_cpu_use(source, signals)

    def _update_alerts(self, newest: list[RingSource], live: list[RingSource]) -> None:
        if not newest:
            return
        identity, alone = newest[0].state.identity, self.cluster.judges_alone
        found = Assessment(identity, self._state.findings, self._state.hang, (), alone)
        judge = "" if alone else self._state.host if self.cluster.is_cut_off else None
        links: Verdict | None = None
        with self._errors.contain("looking for slow links"):
            links = self._links.update_verdict(
                self._state, self.cluster, self.job, self._clock(), final=not live
            )
        if judge is not None or self.alerts.log.records.open_findings:
            with self._errors.contain("raising alerts"):
                last_steps = [source.state.statistics.last_step for source in newest]
                details = self._create_details_lookup(newest)
                found = self.alerts.update_alerts(
                    identity, identity.attempt, found.findings, self.job.places, [self._state], time.time_ns(),
                    links=links,
                    diagnosed=lambda group: self.job.diagnose_straggler(group, details(group.lead.rank)),
                    hang=found.hang,
                    at_step=max((source.reader.read_counter(ring.STEP) for source in live), default=None),
                    last_step=max((each for each in last_steps if each is not None), default=None),
                    judge=judge,
                )  # fmt: skip
        self.alerts.queue_assessment(found)

    def _create_details_lookup(
        self, newest: Iterable[RingSource]
    ) -> Callable[[int], Mapping[str, str]]:
        by_rank = {source.state.identity.rank: source for source in newest}
        return lambda rank: self.metrics.diagnosis_details(by_rank[rank]) if rank in by_rank else {}
