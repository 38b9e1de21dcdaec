"""The spans, metrics and resources that a backend is expected to store for a run.

These values are derived from the run directory alone.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.support.otlp_receiver import ReceivedSpan
from tests.support.recorded_run import Sidecar
from torchlens_perf.exporters import semantics, steps_traced_by_number
from torchlens_perf.exporters.otlp_spans import span_id_of_path, step_trace_id
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts import node_state

RANKS, SLOW_RANK, STEPS, TRACE_EVERY = (0, 1), 1, 160, 40
TRACES = 6
"""Number of traces: of the steps 0, 1, 2, 40, 80 and 120."""
CALLER = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
"""Ids of the trace and the span in TRACEPARENT, which started the run."""
TRACEPARENT = f"00-{CALLER[0]:032x}-{CALLER[1]:016x}-01"
_NO_PARTS = ("start", "duration", "own", "work", "cpu", "ready")
Row = dict[str, Any]
Span = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A finished run of two ranks, of which rank 1 is slow in the forward pass."""

    run: RunDirectory
    folder: Path

    def send(self, **told: str) -> None:
        """Send the whole run again with `torchlens-perf sidecar RUN`, as users do."""
        sent = Sidecar(self.run, self.folder, told)
        assert sent.returncode == 0, sent.log
        assert "OTLP: " not in sent.report

    def rows(self, folder: str) -> list[Row]:
        rows: list[Row] = pq.read_table(self.run.path / folder).to_pylist()
        return [
            row for row in rows if row.get("kind") != "thread_time"
        ]  # Rows of counters are not spans.

    def spans(self) -> list[ReceivedSpan]:
        """Return the spans of the sampled steps, with ids and parents as in
        docs/guides/opentelemetry.md.
        """
        steps = {(row["rank"], row["step"]): row for row in self.rows("steps")}
        sampled = steps_traced_by_number([step for _, step in steps], TRACE_EVERY)
        inside: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for row in self.rows("spans"):
            if row["step"] in sampled and row["kind"] != "step":
                inside[row["rank"], row["step"]].append(row)
        resources, found = self.resources(), []
        for (rank, step), row in steps.items():
            if step in sampled:
                found += _of_step(self.run.run_id, row, inside[rank, step], resources[rank])
        return found

    def resources(self) -> dict[int, dict[str, Any]]:
        """Return the resource of spans by rank."""
        (node,) = node_state.load_all(self.run)
        return {
            process.identity.rank: {
                "service.name": "train_slow_rank",
                "service.instance.id": f"{process.identity.host}/{process.identity.key}",
                "host.name": process.identity.host,
                "process.pid": process.identity.pid,
                semantics.RANK: process.identity.rank,
                semantics.LOCAL_RANK: process.identity.rank,
                semantics.WORLD_SIZE: len(RANKS),
                semantics.RESTART_COUNT: 0,
                semantics.RUN_ID: self.run.run_id,
                "torch.elastic.max_restarts": "0",
                "torch.elastic.run_id": process.identity.attributes["torch.elastic.run_id"],
            }
            for process in node.processes.values()
        }

    def durations_s(self) -> dict[tuple[str, int, str], list[float]]:
        """Return step durations by metric, rank and phase. The phase is "" for a whole step."""
        found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        for row in self.rows("steps"):
            found[semantics.STEP_DURATION, row["rank"], ""].append(row["duration_ns"] / 1e9)
            found[semantics.STEP_OWN_TIME, row["rank"], ""].append(row["own_ns"] / 1e9)
            for column, value in row.items():
                part = column.removesuffix("_ns")
                if part != column and part not in _NO_PARTS and value:
                    found[semantics.PHASE_DURATION, row["rank"], part].append(value / 1e9)
        return found

    def memory_bytes(self) -> dict[int, int]:
        """Return the memory after the last step by rank."""
        return {
            row["rank"]: row["memory_bytes"]
            for row in sorted(self.rows("steps"), key=lambda row: row["step"])
        }


def _of_step(
    run_id: str, row: Row, inside: list[Row], resource: dict[str, Any]
) -> list[ReceivedSpan]:
    """Yield a step's root span (if the rank is 0), the rank's span, and the spans inside it."""
    rank, step, in_trace = (
        row["rank"],
        row["step"],
        step_trace_id(run_id, row["attempt"], row["step"]),
    )
    root_id, rank_id = span_id_of_path(in_trace, "root"), span_id_of_path(in_trace, rank)
    common = {semantics.RUN_ID: run_id, semantics.STEP: step, semantics.RANK: rank}

    def span(
        number: int, parent: int | None, name: str, of: Row, more: dict[str, Any], **others: Any
    ) -> ReceivedSpan:
        start_ns = of["time"].value
        return ReceivedSpan(
            in_trace, number, parent, name, start_ns, start_ns + of["duration_ns"], {**common, **more},
            resource, "torchlens_perf", **{"status": "", "links": (), **others},
        )  # fmt: skip

    of_rank = {
        semantics.SPAN_KIND: "step",
        semantics.OWN_SECONDS: row["own_ns"] / 1e9,
        semantics.MICRO_STEPS: row["micro_steps"],
    }
    found = [span(rank_id, root_id, f"{semantics.SPAN_RANK} {rank}", row, of_rank)]
    if rank == 0:
        found.append(span(root_id, None, semantics.SPAN_STEP, row, {}, links=(CALLER,)))
    ordered = sorted(
        inside, key=lambda each: (each["start_ns"], -each["duration_ns"], each["depth"])
    )
    for index, each in enumerate(ordered):
        more = {semantics.SPAN_KIND: each["kind"]}
        if each["kind"] == "collective":
            more |= {
                semantics.BYTES: each["value0"],
                semantics.SEQUENCE: each["value1"] & 0xFFFFFFFF,
            }
        around = _around(each, ordered[:index])
        parent = rank_id if around is None else span_id_of_path(in_trace, rank, around)
        status = "STATUS_CODE_ERROR" if each["flags"] & Flag.EXCEPTION else ""
        found.append(
            span(
                span_id_of_path(in_trace, rank, index),
                parent,
                each["name"],
                each,
                more,
                status=status,
            )
        )
    return found


def _around(row: Row, before: list[Row]) -> int | None:
    """Return the shortest of the earlier records that contain the row.

    A record contains a collective if the collective starts inside it.
    """
    end_ns = row["start_ns"] + (0 if row["kind"] == "collective" else row["duration_ns"])
    holders = [
        (each["duration_ns"], -index)
        for index, each in enumerate(before)
        if each["start_ns"] + each["duration_ns"] >= end_ns
        and each["kind"] != "collective"
        and (row["flags"] & Flag.OTHER_THREAD or not each["flags"] & Flag.OTHER_THREAD)
    ]
    return -min(holders)[1] if holders else None


def by_id(spans: Iterable[Span]) -> dict[tuple[int, int], Span]:
    """Return spans as tuples that begin with trace id and span id.

    Check that each span occurs once.
    """
    listed = list(spans)
    found: dict[tuple[int, int], Span] = {(each[0], each[1]): each for each in listed}
    assert len(found) == len(listed), f"{len(listed) - len(found)} spans are there twice"
    return found


def exactly(ns: int) -> int:
    return ns


def in_microseconds(ns: int) -> datetime.datetime:
    """Round to the nearest microsecond, as backends do that store times as Python's datetime."""
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.timezone.utc)


def as_tuple(span: ReceivedSpan, time: Callable[[int], Any] = exactly) -> Span:
    """Return a span without resource and links. time: converts times as the backend does."""
    times = time(span.start_ns), time(span.end_ns)
    attributes = tuple(sorted(span.attributes.items()))
    return (
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.name,
        *times,
        bool(span.status),
        attributes,
    )


def subset(expected: Mapping[str, Any], of: Mapping[str, Any]) -> bool:
    return expected.items() <= of.items()
