"""What a node's sidecar concludes from what it reads: who is slow and why, hangs, alerts, and what is to be captured.

Whatever fails in here, the records are read and kept, and the report says that something is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.hang import Progress
from torchlens_perf.analysis.collectives.semantics import sole_operations
from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.config import EXCHANGE_TOKEN
from torchlens_perf.errors import RunStoreError, guard, swallowed
from torchlens_perf.exporters import Assessment
from torchlens_perf.run import ring
from torchlens_perf.run.clock import device_mark
from torchlens_perf.sidecar.assessment import Assessor, LinkWatch
from torchlens_perf.sidecar.captures import CaptureRelay, LiveRank
from torchlens_perf.sidecar.host.stacks import process_state
from torchlens_perf.sidecar.job import JobView
from torchlens_perf.sidecar.local_rank import usual_step_s
from torchlens_perf.sidecar.nodes.places import Places
from torchlens_perf.sidecar.rank_metrics import RankMetrics
from torchlens_perf.sidecar.rings.source import USUAL_STEPS, RingSource
from torchlens_perf.verdicts.causes.straggler_groups import with_groups
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.stragglers.merged_windows import MergedWindows, held_against
from torchlens_perf.verdicts.words.hang import device_place

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from torchlens_perf.analysis.node_state import NodeState
    from torchlens_perf.analysis.statistics.restarts import Generations
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.run.verdicts import Alert
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.sidecar.telemetry.log import TelemetryLog
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis, Findings, StragglerGroup
    from torchlens_perf.verdicts.words.evidence import JudgedVerdict

_JUDGING = "judging the ranks"
_SIGNALS = "looking for causes"
_NEWEST_ALERTS = 32  # for who begins to listen later


class Conclusions:
    """Belongs to the sidecar's thread. Writes what it finds into the node's state."""

    def __init__(
        self, run: RunDirectory, host: str, state: NodeState, generations: Generations, telemetry: TelemetryLog
    ) -> None:
        """state: as an earlier sidecar has left it. generations: knows its processes."""
        self.job = JobView(host, run_id=run.run_id)
        self.signals = RankMetrics(telemetry)
        self._host = host
        self._state = state
        for process in state.processes.values():
            generation = generations.of(process.identity)
            if generation != UNRELATED:
                self.job.began(process.identity, generation, process.identity.attempt)
        self._generation = generations.newest  # that the state's findings and hang are of
        self.job.begin(generations.newest, earlier=state.findings)
        self._windows = MergedWindows()
        self._links = LinkWatch(run, host)
        self._captures = CaptureRelay(run)
        self._folder = run.nodes
        self._assessor = Assessor(FindingLog(run.run_id, state.records, state.findings))
        self._assessment: Assessment | None = None  # the newest, with all alerts that no exporter has taken
        self.newest_alerts: deque[Alert] = deque(maxlen=_NEWEST_ALERTS)
        self.alerts_raised = 0

    def begin(self, identity: Identity, generation: int) -> None:
        """Other processes begin, of which this is one: what was found before holds of none of them."""
        self._generation = generation
        self._windows = MergedWindows()
        self.job.begin(generation, identity)
        self._state.findings, self._state.hang = NOTHING, None

    def number(self, sources: RingSources) -> None:
        """Gives processes their places in the job: the run's id, and which of its generations they are of."""
        membership = self.job.membership
        for source in sources:
            if source.generation != UNRELATED:
                who = source.state.identity
                attempt = membership.number(source.generation)
                if (who.attempt, who.run_id) != (attempt, membership.run_id):
                    source.state.identity = dataclasses.replace(
                        who, attempt=attempt, run_id=membership.run_id, launcher_restarts=who.restarts
                    )

    def sample(self, sources: RingSources, now_s: float) -> None:
        """What ranks wait for at this instant; in every round."""
        with self.going_on(_SIGNALS):
            self.signals.update(sources, now_s)

    def add_steps(self, source: RingSource, records: npt.NDArray[np.void], steps: StepTable, *, newest: bool) -> None:
        """Finished steps of a process, which these records make. newest: no other process has replaced it."""
        with self.going_on(_JUDGING):
            judged = source.state.judge_by(source.judged, records, steps)
            if newest:
                self._judge(source, judged)
                if source.state.identity.rank == 0:
                    self._windows.add(records, source.state.identity.world_size)
        if newest:
            source.durations_ns.extend(steps.duration_ns[-USUAL_STEPS:].tolist())
            with self.going_on(_SIGNALS):
                self.signals.add_steps(source, steps)

    def end(self, source: RingSource) -> None:
        """One of the newest processes has ended, and all of it is counted."""
        with self.going_on(_JUDGING):
            self._judge(source, source.state.judge_by(source.judged))
            self.job.end(source.state.identity)

    def _judge(self, source: RingSource, judged: StepTable | None) -> None:
        if judged is not None:
            exchange, token = source.settings.get("exchange", "auto"), os.environ.get(EXCHANGE_TOKEN, "")
            places = Places.of(source.job_store, exchange, self._folder, token)
            self.job.add_steps(source.state.identity, source.state.place, judged, places)

    def update(self, sources: RingSources, now_s: float, *, final: bool = False) -> None:
        """Judges the ranks, exchanges windows with other nodes, and looks for hangs."""
        with self.going_on(_JUDGING):
            for source in sources.newest():
                identity, groups, now = source.state.identity, source.state.groups, self._progress(source, now_s)
                modules_ns = source.state.statistics.modules_ns()
                self.job.progress(identity, source.state.place, now, groups, source.stack_file, modules_ns)
        with self.going_on(_SIGNALS):
            sampled = self.signals.sample(sources.newest(), now_s)
            self.job.add_signals(sampled, now_s)
            for source in sources.newest():
                signals = sampled.get(source.state.identity.rank, {})
                if signals:
                    self.signals.add_cpu_users(source, signals)
                share = signals.get("cpu_wait_share")
                if share is not None:
                    waited, samples = source.state.cpu_wait
                    source.state.cpu_wait = [waited + share, samples + 1]
        with self.going_on(_JUDGING):
            self._take_over(self.job.update(now_s, final=final), sources)
        self._state.hang = self.job.hang
        if not self.job.awaits_node_0() or not sources.live():  # alerts are of the job's attempt, which it says
            self._assess(sources)

    def assessment(self) -> Assessment | None:
        """For an exporter, what holds now and what has changed since the last call; None while no process is known."""
        found, self._assessment = self._assessment, None
        if found is not None:
            self._assessment = dataclasses.replace(found, alerts=())
        return found

    def _assess(self, sources: RingSources) -> None:
        who = next((source.state.identity for source in sources.newest()), None)
        if who is None:
            return
        found = Assessment(who, self._state.findings, self._state.hang, (), self.job.judges_alone)
        judge = "" if self.job.judges_alone else self._host if self.job.is_cut_off else None
        if judge is not None or self._assessor.log.are_open:
            run_on = sources.live()
            links: JudgedVerdict | None = None
            with self.going_on("looking for slow links"):
                links = self._links.update(self._state, time.monotonic(), final=not run_on)
            with self.going_on("raising alerts"):
                last_steps = [source.state.statistics.last_step for source in sources.newest()]
                found = self._assessor.assess(
                    who, who.attempt, found.findings, self.job.places, [self._state], time.time_ns(),
                    links=links,
                    diagnosed=lambda group: self._diagnosed(group, sources),
                    hang=found.hang,
                    at_step=max((source.reader.counter(ring.STEP) for source in run_on), default=None),
                    last_step=max((each for each in last_steps if each is not None), default=None),
                    judge=judge,
                )  # fmt: skip
                self.newest_alerts.extend(found.alerts)
                self.alerts_raised += len(found.alerts)
        not_taken = self._assessment.alerts if self._assessment is not None else ()
        self._assessment = dataclasses.replace(found, alerts=(*not_taken, *found.alerts))

    def relay_captures(self, sources: RingSources, now_s: float, *, final: bool = False) -> None:
        """Hands on what is asked of this node's ranks, and asks itself where one is named. final: the run has ended."""
        with self.going_on("capturing"):
            ranks, on_verdict = {}, False
            for source in sources.newest():
                who, setting = source.state.identity, source.settings["capture"]
                if not source.read_to_end:
                    step = source.reader.counter(ring.STEP)
                    ranks[who.rank] = LiveRank(source.path, who.pid, who.attempt, step, refuses=setting == "off")
                    on_verdict |= setting == "verdict"
            if on_verdict and self.job.judges_alone:
                self._captures.ask_after_verdict(self._state.findings, self.job.places, ranks)
            self._captures.update(ranks, now_s)
            self._state.notes += [note for note in self._captures.notes if note not in self._state.notes]
            if final:
                self._captures.close()

    @contextlib.contextmanager
    def going_on(self, place: str) -> Iterator[None]:
        """Around each part of a round: whatever fails there, the others are done."""
        before = swallowed.by_place[place]
        try:
            with guard(place):
                yield
        except (OSError, RunStoreError) as error:  # guard() raises in tests, but a disk that fails is no mistake
            swallowed.add(place, error)
        note = f"{place} failed in the sidecar, and its results are missing: see nodes/{self._host}.log"
        if swallowed.by_place[place] > before and note not in self._state.notes:
            self._state.notes.append(note)

    # -- parts

    def _take_over(self, findings: Findings, sources: RingSources) -> None:
        if self.job.generation != self._generation:
            return  # no step of the newest processes has been made
        findings = held_against(findings, self._windows, self.job.places)
        if findings.rows or not self._state.findings.rows:
            self._state.findings = with_groups(
                findings, self.job.places, self.job.module_times.excess_ns,
                diagnosed=lambda group: self._diagnosed(group, sources),
                before=self._state.findings,
            )  # fmt: skip

    def _diagnosed(self, group: StragglerGroup, sources: RingSources) -> Diagnosis:
        of = (source for source in sources.newest() if source.state.identity.rank == group.lead.rank)
        source = next(of, None)
        return self.job.diagnose(group, self.signals.details(source) if source is not None else {})

    def _progress(self, source: RingSource, now_s: float) -> Progress:
        reader, state = source.reader, source.state
        source.seen(reader.counter(ring.STEP), reader.counter(ring.HEAD), now_s)
        uncomparable = self._state.join.uncomparable()
        groups = [group for group in reader.groups() if " peer=" not in group.name]
        numbers = {group.name: group.issued - 1 for group in groups}
        issued = {group: number for group, number in numbers.items() if group not in uncomparable}
        mark = device_mark(reader)
        ended = {"died": "dead", "closed": "closed"}.get(state.ended)
        return Progress(
            rank=state.identity.rank,
            host=state.identity.host,
            step=reader.counter(ring.STEP),
            since_step_s=now_s - source.step_s,
            report_age_s=0.0,
            usual_step_s=usual_step_s(source.durations_ns),
            issued=issued,
            inside=tuple(span.name for span in reader.open_spans()[1:]),
            state=ended or process_state(state.identity.pid, state.identity.process_started),
            operations=sole_operations(issued, reader.names()),
            since_mark_s=now_s - source.mark_s,
            all_groups=reader.counter(ring.GROUPS_USED) < ring.MAX_GROUPS and len(issued) == len(numbers),
            began={group.name: group.began - 1 for group in groups if group.began and group.name in issued},
            device=device_place(*mark) if mark is not None else None,
        )
