"""Replay a finished run: compute statistics from its saved records, and export them again."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterator

from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.analysis.statistics.restarts import GenerationNumbers
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.exporters import (
    ITEM_NAMES,
    UNDELIVERED,
    ExportBatch,
    Exporter,
    build_export_batch,
    steps_traced_by_number,
)
from torchlens_perf.exporters.otlp_environment import SIGNALS
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.identity import Identity, digest_module_names
from torchlens_perf.run.records import StepTrace
from torchlens_perf.run.undelivered import Undelivered, WholeRun, join_undelivered
from torchlens_perf.sidecar.alerts import AlertManager
from torchlens_perf.sidecar.job_generation import JobGeneration
from torchlens_perf.store import segments
from torchlens_perf.store.file_names import list_node_files, list_nodes
from torchlens_perf.store.segments import RecordOrigin
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.finding_log import FindingLog
from torchlens_perf.verdicts.latest_attempt import (
    latest_processes,
    latest_slow_links,
)
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.slow_links import build_slow_link_verdict
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.judged_steps import JudgedSteps

_FLUSH_TIMEOUT_S = 60.0
_SPANS_PER_FLUSH = 512


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Result of a replay."""

    steps: int
    records: int
    notes: list[str]


def replay(
    run: RunDirectory,
    exporter: Exporter | None,
    trace_every: int | None = None,
    advanced: Callable[[int, int], object] = lambda done, total: None,
    signals: Collection[str] = SIGNALS,
    patience_s: float = 30.0,
) -> ReplayResult:
    """Export a run's saved records. Create the states of nodes without a saved state.

    If the live run left undelivered data, send only the exporter's part of that data.

    trace_every: send every n-th step as spans, with all ranks. If it is None or equals the setting
    of the live run, send the steps and ranks that the live run has sent. If the live run has sent
    no spans, send every n-th step by its setting.
    signals: the signals that the exporter sends.
    advanced: called with the number of processed segments and the total number of segments.
    patience_s: total time to wait for an endpoint that accepts no data.

    Saved statistics of a node stay unchanged, because they may include records that were deleted to
    save space. Undelivered data, and a node's notes on it, are removed after its delivery.
    """
    steps = records = 0
    sending = _BatchSender(exporter, patience_s) if exporter is not None else None
    job, rebuilt_states, saved_states = JobGeneration(), list[NodeState](), list[NodeState]()
    judged_steps: dict[str, JudgedSteps] = {}
    damaged: list[str] = []
    hosts = list_nodes(run.spans)
    pending = find_undelivered(run)
    done, total = itertools.count(1), sum(len(list_node_files(run.spans, host)) for host in hosts)
    for host in hosts:
        saved = node_state.load_or_new(run, host)
        saved_states.append(saved)
        replaced = _find_replaced_processes(saved)
        rebuilt = NodeState(host)
        as_live = trace_every is None or {
            each.facts.settings.trace_every for each in saved.processes.values()
        } == {trace_every}
        traced = saved.traced if as_live else []
        for origin, kept, names, lost in segments.read_chunks(
            run, host, damaged, lambda: advanced(next(done), total)
        ):
            process = rebuilt.processes.get(origin.key)
            if process is None:
                process = rebuilt.processes[origin.key] = _new_process_state(run, origin, saved)
            table = assemble_steps(kept)
            process.add_records(kept, table, names, lost)
            facts = process.facts
            facts.model = facts.model or digest_module_names(process.statistics.modules)
            judged = judged_steps.setdefault(origin.key, JudgedSteps(process.judged_by))
            newly = process.add_judged_steps(judged, kept, table)
            # As in a live run, judge only the newest attempt.
            if origin.key not in replaced and origin.attempt >= job.generation:
                if origin.attempt > job.generation:
                    job = JobGeneration(origin.attempt)
                if newly is not None:
                    job.add_steps(process.identity, process.placement, newly)
                if origin.rank == 0:
                    job.windows.add_records(kept, process.identity.world_size)
            steps, records = steps + len(table), records + len(kept)
            if sending is not None:
                attempt = process.identity.attempt
                chosen = {each.step: each for each in traced if each.attempt == attempt}
                if pending.signals:
                    left = [each for each in pending.steps if each.process == origin.key]
                    chosen = {each.step: each.chosen for each in left if each.chosen}
                    sent = {each.step for each in left}
                elif traced:
                    sent = set(chosen)
                else:
                    every = (
                        process.facts.settings.trace_every if trace_every is None else trace_every
                    )
                    sent = steps_traced_by_number(table.step.tolist(), every)
                sending.send(build_export_batch(process, kept, names, table, sent, chosen))
        for key, process in rebuilt.processes.items():
            rest = process.add_judged_steps(judged_steps[key])
            if (
                rest is not None
                and key not in replaced
                and process.identity.attempt == job.generation
            ):
                job.add_steps(process.identity, process.placement, rest)
        if not saved.processes:
            rebuilt.notes += ["rebuilt from the records that are kept", *damaged]
            rebuilt_states.append(rebuilt)
    findings = job.add_groups_and_causes(job.judge_ranks(final=True) or NOTHING)
    for state in rebuilt_states:
        state.findings = findings
        state.save(run)
    if sending is None:
        return ReplayResult(steps, records, damaged)
    sending.send_assessment(run, job, findings, saved_states, pending)
    notes = sending.finish()
    if not notes:
        unknown = {(each.process, each.step) for each in pending.steps} - sending.traced
        notes = _clear_undelivered(run, signals, len(unknown) if "traces" in signals else 0)
    return ReplayResult(steps, records, [*damaged, *notes])


def find_undelivered(run: RunDirectory) -> Undelivered:
    """Return the data of all nodes that the live run could not deliver."""
    nodes = (node_state.load_or_new(run, host) for host in list_nodes(run.spans))
    return join_undelivered(node.undelivered for node in nodes)


def _clear_undelivered(run: RunDirectory, signals: Collection[str], lost_steps: int) -> list[str]:
    """Remove the delivered signals from the nodes' undelivered data, and the notes on them.

    lost_steps: number of traced steps without records. Return a note on these steps.
    """
    lost = [
        f"{UNDELIVERED}the spans of {lost_steps} traced steps are lost, because their records are no"
        " longer in the run directory"
    ]
    items = [f" {ITEM_NAMES[signal]} " for signal in signals]
    for path in run.nodes.glob("*.json"):
        state = node_state.load(path)
        state.undelivered.clear(signals)
        state.notes = [
            note
            for note in state.notes
            if not (note.startswith(UNDELIVERED) and any(item in note for item in items))
        ]
        state.notes += lost if lost_steps else []
        state.save(run)
    return lost if lost_steps else []


def _new_process_state(run: RunDirectory, origin: RecordOrigin, saved: NodeState) -> ProcessState:
    """Return a process without statistics. The saved state provides data that records lack."""
    known = saved.processes.get(origin.key)
    if known is None:
        process = ProcessState(_derive_identity(run, origin), origin.anchor, RankStatistics())
    else:
        process = dataclasses.replace(known, anchor=origin.anchor, statistics=RankStatistics())
    process.ended = "closed"
    return process


class _BatchSender:
    """Sender of batches that waits for the exporter, and stops if the endpoint accepts no data."""

    def __init__(self, exporter: Exporter, patience_s: float) -> None:
        self._exporter = exporter
        self._patience_s = patience_s
        self._waited_s = 0.0  # total time of failed flushes
        self._not_sent = 0
        self._last: ExportBatch | None = None
        self.traced: set[tuple[str, int]] = set()
        """Key of the process and number of each step that was sent as a trace."""

    def send(self, batch: ExportBatch) -> None:
        self.traced |= {(batch.identity.key, trace.step) for trace in batch.traces}
        self._last = batch if len(batch.steps) else self._last
        for part in _split_batch(batch):
            if self._waited_s > self._patience_s:
                self._not_sent += len(part.steps)
                continue
            self._exporter.export(part)
            started_s = time.monotonic()
            # Only the time of failed flushes counts.
            if not self._exporter.wait_for_room(_FLUSH_TIMEOUT_S):
                self._waited_s += time.monotonic() - started_s

    def send_assessment(
        self,
        run: RunDirectory,
        job: JobGeneration,
        findings: Findings,
        saved: list[NodeState],
        pending: Undelivered,
    ) -> None:
        """Send the final assessment with the alerts of the whole run, or the undelivered alerts.

        Alerts have the same ids as in the live run.
        """
        last = self._last
        if last is None:
            return
        last_step_ns = int(last.steps.start_ns[-1] + last.steps.duration_ns[-1])
        assessment = AlertManager(FindingLog(run.run_id)).update_alerts(
            last.identity, job.generation, findings, job.places, saved, last.anchor.offset_ns + last_step_ns,
            links=build_slow_link_verdict(
                latest_slow_links(saved), [each.statistics for each in latest_processes(saved).values()]
            ),
            # A replay has no signals to make its own diagnosis.
            diagnosed=lambda group: next(
                filter(None, (state.findings.diagnosis(group.lead.key) for state in saved)), None
            ),
        )  # fmt: skip
        if pending.signals:
            assessment = dataclasses.replace(assessment, alerts=tuple(pending.alerts))
        has_ended = not pending.signals or WholeRun.SPAN in pending.whole_run
        self._exporter.on_assessment(dataclasses.replace(assessment, ended=has_ended))

    def finish(self) -> list[str]:
        notes = self._exporter.shutdown(_FLUSH_TIMEOUT_S)
        if self._not_sent:
            notes.append(
                f"{self._not_sent} more steps were not sent, because the endpoint did not take"
                " those before"
            )
        return notes


def _split_batch(batch: ExportBatch) -> Iterator[ExportBatch]:
    """Split a batch into pieces of about _SPANS_PER_FLUSH spans, to fit into export queues."""
    steps = batch.steps.step.tolist()
    traces: list[StepTrace] = []
    first = spans = 0
    for trace in batch.traces:
        traces.append(trace)
        spans += len(trace.spans)
        if spans >= _SPANS_PER_FLUSH:
            end = steps.index(trace.step, first) + 1
            yield dataclasses.replace(
                batch, steps=batch.steps.select_rows(slice(first, end)), traces=tuple(traces)
            )
            first, spans, traces = end, 0, []
    yield dataclasses.replace(
        batch, steps=batch.steps.select_rows(slice(first, None)), traces=tuple(traces)
    )


def _find_replaced_processes(saved: NodeState) -> set[str]:
    """Return the keys of the processes that do not belong to the newest generation.

    As in a live run, these processes are not judged together with the newest processes.
    """
    generations = GenerationNumbers()
    by_key = {
        key: generations.generation_of(process.identity) for key, process in saved.processes.items()
    }
    return {key for key, generation in by_key.items() if generation != generations.newest}


def _derive_identity(run: RunDirectory, origin: RecordOrigin) -> Identity:
    """Derive a rank's identity from the records alone."""
    keys = [
        key for host in list_nodes(run.spans) for key in segments.read_last_sequences(run, host, [])
    ]
    # A key looks like "rank00003-attempt0-...".
    world_size = 1 + max({int(key.removeprefix("rank").partition("-")[0]) for key in keys})
    return Identity(
        run_id=run.run_id, rank=origin.rank, local_rank=origin.rank, world_size=world_size,
        local_world_size=world_size, attempt=origin.attempt, host=origin.host, pid=0, process_started=0,
        launcher_pid=0, elastic=False, program="", traceparent="", attributes={}, node=origin.host,
    )  # fmt: skip
