"""Replaying a finished run: its records go through statistics and export once more, as when it was live."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf import node_state, run_store
from torchlens_perf.alerts import AlertLog
from torchlens_perf.config import Config
from torchlens_perf.culprits import culprits, name
from torchlens_perf.device_statistics import phase_durations_ns
from torchlens_perf.exporters import UNDELIVERED, ExportBatch, Exporter, Judgement
from torchlens_perf.generations import Generations
from torchlens_perf.identity import Identity, model_digest
from torchlens_perf.memory_statistics import newest_reading
from torchlens_perf.node_judge import NodeJudge, place_of
from torchlens_perf.node_state import NodeState, ProcessState
from torchlens_perf.rank_statistics import RankStatistics
from torchlens_perf.report.build import for_alerts, slow_link_verdict
from torchlens_perf.ring import Kind
from torchlens_perf.sidecar import traced_steps
from torchlens_perf.site import site
from torchlens_perf.standing import standing
from torchlens_perf.statistics import assemble_steps, step_traces

if TYPE_CHECKING:
    from torchlens_perf.culprits import Culprit
    from torchlens_perf.diagnosis import Diagnosis
    from torchlens_perf.records import StepTable, StepTrace
    from torchlens_perf.run_directory import RunDirectory
    from torchlens_perf.run_store import Origin
    from torchlens_perf.straggler import Findings

_FLUSH_TIMEOUT_S = 60.0
_PATIENCE_S = 30.0
_SPANS_A_FLUSH = 512
_MODULES = (int(Kind.MODULE), int(Kind.FORWARD))


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a replay did."""

    steps: int
    records: int
    notes: list[str]


def replay(run: RunDirectory, exporter: Exporter | None, trace_every: int | None = None) -> Replayed:
    """Sends a run's kept records through the exporter, and writes the state of nodes that have none.

    trace_every: which steps are sent as spans; None: those that were when the run was live.

    A node's saved statistics are left alone: they also count records that were removed since to save space. Its notes
    on what was not delivered go once this has delivered it.
    """
    steps = records = 0
    sending = _Sending(exporter) if exporter is not None else None
    judge, rebuilt_states, saved_states = NodeJudge(), [], []
    for host in run_store.hosts(run):
        saved = _saved(run, host)
        saved_states.append(saved)
        before = _replaced(saved)
        rebuilt = NodeState(host)
        for origin, kept, names, lost in run_store.read_chunks(run, host):
            process = rebuilt.processes.get(origin.key)
            if process is None:
                identity = (
                    saved.processes[origin.key].identity if origin.key in saved.processes else _identity(run, origin)
                )
                process = ProcessState(identity, origin.anchor, RankStatistics(), ended="closed")
                known = saved.processes.get(origin.key)
                process.trace_every = known.trace_every if known is not None else Config.trace_every
                process.groups = known.groups if known is not None else {}
                process.model = known.model if known is not None else ""
                process.device = known.device if known is not None else {}
                process.out_of_memory = known.out_of_memory if known is not None else None
                if trace_every is not None:
                    process.trace_every = trace_every
                rebuilt.processes[origin.key] = process
            table = assemble_steps(kept)
            process.statistics.add(kept, table, names, lost)
            if origin.key not in before:
                model = process.model or model_digest(process.statistics.modules)
                where = site(process.identity.attributes)
                place = place_of(origin.rank, origin.host, model, process.groups, where)
                judge.add_steps(origin.attempt, origin.rank, place, table)
            steps, records = steps + len(table), records + len(kept)
            if sending is not None:
                wanted = traced_steps(table.step.tolist(), process.trace_every)
                traces = step_traces(origin.key, kept, names, wanted)
                device_ns, memory = phase_durations_ns(kept), newest_reading(kept, names)
                sending.send(ExportBatch(process.identity, origin.anchor, table, tuple(traces), device_ns, memory))
        if not saved.processes:
            rebuilt.notes.append("rebuilt from the records that are kept")
            rebuilt_states.append(rebuilt)
    if rebuilt_states:
        findings = judge.judge(final=True)
        for state in rebuilt_states:
            state.findings, state.named = findings, name(findings, judge.places)
            state.save(run)
    if sending is not None:
        sending.judged(run, judge, saved_states)
    notes = sending.end() if sending is not None else []
    if sending is not None and not notes:
        _forget_undelivered(run)
    return Replayed(steps, records, notes)


def judged(run: RunDirectory) -> Findings:
    """What the judge of this version says of a run's kept records. Sends and changes nothing."""
    judge = NodeJudge()
    modules: dict[str, set[str]] = {}
    for host in run_store.hosts(run):
        saved = _saved(run, host)
        for origin, kept, names, _ in run_store.read_chunks(run, host):
            known = saved.processes.get(origin.key)
            used = {names[i] for i in np.unique(kept["name_id"][np.isin(kept["kind"], _MODULES)]).tolist()}
            modules.setdefault(origin.key, used)
            model = known.model if known is not None else model_digest(modules[origin.key])
            place = place_of(origin.rank, origin.host, model, known.groups if known is not None else {})
            judge.add_steps(origin.attempt, origin.rank, place, assemble_steps(kept))
    return judge.judge(final=True)


def _diagnosed(saved: list[NodeState], culprit: Culprit) -> Diagnosis | None:
    """What was found when the run was live: the signals themselves are not kept."""
    found = (state.named.diagnosis(culprit.lead.key) for state in saved)
    return next((each for each in found if each is not None), None)


def _forget_undelivered(run: RunDirectory) -> None:
    for host in run_store.hosts(run):
        state = node_state.load(run.node_state(host))
        state.notes = [note for note in state.notes if not note.startswith(UNDELIVERED)]
        state.save(run)


class _Sending:
    """Feeds an exporter no faster than it delivers, and stops when the endpoint is dead."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._waited_s = 0.0  # for flushes that failed
        self._not_sent = 0
        self._last: ExportBatch | None = None

    def send(self, batch: ExportBatch) -> None:
        self._last = batch if len(batch.steps) else self._last
        for part in _parts(batch):
            if self._waited_s > _PATIENCE_S:
                self._not_sent += len(part.steps)
                continue
            self._exporter.export(part)
            started_s = time.monotonic()
            if not self._exporter.force_flush(_FLUSH_TIMEOUT_S):
                self._waited_s += time.monotonic() - started_s

    def judged(self, run: RunDirectory, judge: NodeJudge, saved: list[NodeState]) -> None:
        """The alerts of the whole run, with the ids that they had when it was live. saved: the nodes' states."""
        if self._last is None:
            return
        findings = judge.judge(final=True)
        ended_ns = self._last.anchor.unix_ns - self._last.anchor.monotonic_ns
        ended_ns += int(self._last.steps.start_ns[-1] + self._last.steps.duration_ns[-1])
        alerts = AlertLog(run.run_id).changes(
            judge.attempt, findings, None, judge.places, ended_ns,
            generation=_generation(saved, judge.attempt),
            verdicts=standing(findings, name(findings, judge.places), slow_link_verdict(saved)),
            report=lambda: for_alerts(saved),
            diagnosed=lambda culprit: _diagnosed(saved, culprit),
        )  # fmt: skip
        slow = [episode for episode in findings.episodes if episode.until_step is None]
        together = culprits(slow, judge.places)
        self._exporter.judged(Judgement(self._last.identity, findings, None, alerts, True, together))

    def end(self) -> list[str]:
        notes = self._exporter.shutdown(_FLUSH_TIMEOUT_S)
        if self._not_sent:
            notes.append(f"{self._not_sent} more steps were not sent, because the endpoint did not take those before")
        return notes


def _parts(batch: ExportBatch) -> Iterator[ExportBatch]:
    """The batch in pieces of about so many spans, so that no exporter's queue runs over."""
    steps = batch.steps.step.tolist()
    traces: list[StepTrace] = []
    first = spans = 0
    for trace in batch.traces:
        traces.append(trace)
        spans += len(trace.spans)
        if spans >= _SPANS_A_FLUSH:
            end = steps.index(trace.step, first) + 1
            yield dataclasses.replace(batch, steps=_rows(batch.steps, first, end), traces=tuple(traces))
            first, spans, traces = end, 0, []
    yield dataclasses.replace(batch, steps=_rows(batch.steps, first, len(steps)), traces=tuple(traces))


def _rows(table: StepTable, first: int, end: int) -> StepTable:
    columns = {field.name: getattr(table, field.name)[first:end] for field in dataclasses.fields(table)}
    return dataclasses.replace(table, **columns)


def _saved(run: RunDirectory, host: str) -> NodeState:
    path = run.node_state(host)
    return node_state.load(path) if path.exists() else NodeState(host)


def _replaced(saved: NodeState) -> set[str]:
    """Processes that others have replaced, or that ran beside them: live they are not judged together with those."""
    generations = Generations()
    of = {key: generations.of(process.identity) for key, process in saved.processes.items()}
    return {key for key, generation in of.items() if generation != generations.newest}


def _generation(saved: list[NodeState], attempt: int) -> int:
    """How often the processes were started anew within the attempt, as the node of rank 0 has counted, which judges."""
    for state in saved:
        generations = Generations()
        of = {key: generations.of(process.identity) for key, process in state.processes.items()}
        newest = [state.processes[key].identity for key in of if of[key] == generations.newest]
        if any(identity.rank == 0 and identity.attempt == attempt for identity in newest):
            return generations.again(attempt)
    return 0


def _identity(run: RunDirectory, origin: Origin) -> Identity:
    """What the records alone tell of a rank."""
    keys = [key for host in run_store.hosts(run) for key in run_store.last_sequences(run, host)]
    ranks = {int(key.removeprefix("rank").partition("-")[0]) for key in keys}  # a key: rank00003-attempt0-...
    world_size = 1 + max(ranks)
    return Identity(
        run_id=run.run_id, rank=origin.rank, local_rank=origin.rank, world_size=world_size,
        local_world_size=world_size, attempt=origin.attempt, host=origin.host, pid=0, process_started=0,
        launcher_pid=0, elastic=False, program="", traceparent="", attributes={},
    )  # fmt: skip
