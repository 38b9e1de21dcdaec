"""Build spans again that an outage of the endpoint has delayed, from the run directory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.trace import ReadableSpan

from torchlens_perf.analysis.statistics.steps import assemble_steps, build_step_traces
from torchlens_perf.exporters import ExportBatch
from torchlens_perf.exporters.otlp_spans import SpanBuilder
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.run.undelivered import UndeliveredStep
from torchlens_perf.store import segments
from torchlens_perf.verdicts import node_state


class StepReader:
    """Builds the spans of a node's traced steps from its segments. Not thread-safe."""

    def __init__(
        self, run: RunDirectory, node: str, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._run, self._node = run, node
        self._spans = SpanBuilder(environ)

    def read_spans(
        self, steps: Sequence[UndeliveredStep]
    ) -> Iterator[tuple[UndeliveredStep, list[ReadableSpan]]]:
        """Yield the spans of each step whose records are in the run directory.

        Ids and times are those of the first attempt to send. Raises RunStoreError if the node's
        state cannot be read, UnreadableFileError if the disk fails.
        """
        if not steps:
            return
        wanted: dict[str, dict[int, UndeliveredStep]] = defaultdict(dict)
        for each in steps:
            wanted[each.process][each.step] = each
        processes = node_state.load_or_new(self._run, self._node).processes
        found = segments.read_records(
            self._run,
            dict.fromkeys(wanted.keys() & processes.keys(), self._node),
            {each.step for each in steps},
            lambda error: None,
            tuple(Kind),
        )
        for key, (records, names) in found.items():
            of_process = wanted[key]
            batch = ExportBatch(
                processes[key].identity,
                processes[key].anchor,
                assemble_steps(records),
                tuple(build_step_traces(records, names, set(of_process))),
                chosen={step: each.chosen for step, each in of_process.items() if each.chosen},
                again=True,
            )
            for step, (spans, _, _) in self._spans.build_spans(batch).items():
                yield of_process[step], spans
