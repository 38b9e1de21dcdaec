"""Read the events of a run directory, and the steps of the trainers that made them."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterator, Sequence

from torchlens_perf.roles.causes import RankStep
from torchlens_perf.roles.event_file import FOLDER
from torchlens_perf.roles.iterations import (
    STAGES,
    Event,
    Iteration,
    build_iterations,
    name_processes,
    sum_tokens,
)
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, make_error_collector

# The newest events are enough for an answer, which screens show again and again.
_MOST_EVENTS = 200_000
_NS = 1e-9
# The steps of ranks begin and end at almost the same time.
_TOLERANCE_S = 0.005
_EVENT_COLUMNS = (
    "host", "role", "name", "monotonic_ns", "process", "event", "id", "batch", "tokens_out",
)  # fmt: skip
_STEP_COLUMNS = ("rank", "step", "start_ns", "duration_ns", "own_ns")


@dataclasses.dataclass
class RecordedEvents:
    """The newest events of a run. Processes have names such as "engine-1" or "tool"."""

    events: list[Event]
    roles: dict[str, str]
    """Role by process."""
    pids: dict[str, int]
    """Process id by process."""
    detected: list[str]
    """Processes that have not set their role."""
    lost: int
    """Number of events that were overwritten before they were read."""


def read_events(run: RunDirectory, notes: list[str]) -> RecordedEvents:
    """Return the newest events. notes: receives a line for each damaged file.

    Only the node with the most events counts, because the clocks of nodes differ.
    """
    hosts: dict[str, list[tuple[str, str, str, Event]]] = {}
    lost: dict[str, int] = {}
    detected: set[str] = set()

    def add(file: ParquetFile) -> None:
        for process, read in file.footer.items():
            lost[process] = max(lost.get(process, 0), int(read["lost"]))
            if read.get("detected"):
                detected.add(process)
        table = file.read_table(_EVENT_COLUMNS).to_pydict()
        columns = (table[name] for name in _EVENT_COLUMNS)
        for host, role, name, time_ns, process, *rest in zip(*columns, strict=True):
            event = Event(time_ns * _NS, process, *rest)
            hosts.setdefault(host, []).append((process, role, name, event))

    folder = ParquetFolder(run.path / FOLDER, unreadable=make_error_collector(notes))
    folder.paths.reverse()
    for _ in folder.read_each(add):
        if max(map(len, hosts.values()), default=0) >= _MOST_EVENTS:
            break
    newest = max(hosts.values(), key=len, default=[])
    newest.sort(key=lambda each: each[-1].time_s)
    names = name_processes({process: name or role for process, role, name, _ in newest})
    return RecordedEvents(
        [event._replace(process=names[process]) for process, _, _, event in newest],
        {names[process]: role for process, role, _, _ in newest},
        # What processes record of others has no process id.
        {
            name: int(process.split("-")[-2])
            for process, name in names.items()
            if "@" not in process
        },
        sorted(names[process] for process in detected & names.keys()),
        sum(lost.values()),
    )


def read_iterations(run: RunDirectory, notes: list[str]) -> tuple[RecordedEvents, list[Iteration]]:
    """Return the newest events, and their iterations."""
    recorded = read_events(run, notes)
    # The first iteration contains the warm-up of all processes.
    return recorded, build_iterations(recorded.events)[1:]


QUERY_TABLES = {
    "iterations": {
        "run": "VARCHAR", "batch": "VARCHAR", "seconds": "DOUBLE", "rollout_s": "DOUBLE", "steps_s": "DOUBLE",
        "weights_s": "DOUBLE", "other_s": "DOUBLE", "samples": "BIGINT", "tokens": "BIGINT", "last_sample": "VARCHAR",
    },
    "samples": {
        "run": "VARCHAR", "batch": "VARCHAR", "id": "VARCHAR", "engine": "VARCHAR", "tokens": "BIGINT",
        "seconds": "DOUBLE", "wait_s": "DOUBLE", "generation_s": "DOUBLE", "tool_s": "DOUBLE",
        "logprobs_s": "DOUBLE", "reward_s": "DOUBLE",
    },
}  # fmt: skip
"""Tables of `torchlens-perf query`: columns and their types."""


def query_rows(run: RunDirectory, tables: Collection[str]) -> Iterator[tuple[str, list[object]]]:
    """Yield the rows of these tables of QUERY_TABLES, each with the name of its table.

    The events are read once. The rows have the iterations of the report.
    """
    for each in read_iterations(run, [])[1] if QUERY_TABLES.keys() & tables else ():
        if "iterations" in tables:
            yield "iterations", [
                run.run_id, each.batch, each.seconds, each.rollout_s, each.steps_s, each.weights_s, each.other_s,
                len(each.samples), sum_tokens(one.tokens for one in each.samples), each.last_sample.id,
            ]  # fmt: skip
        for sample in each.samples if "samples" in tables else ():
            yield "samples", [
                run.run_id, each.batch, sample.id, sample.engine, sample.tokens, sample.done_s - sample.sent_s,
                sum(segment.seconds for segment in sample.segments if segment.waiting),
                *(sample.seconds(stage) for stage in STAGES),
            ]  # fmt: skip


def read_trainer_steps(
    run: RunDirectory, iterations: Sequence[Iteration], notes: list[str]
) -> tuple[list[RankStep], float]:
    """Return the steps of all ranks inside of the iterations' optimizer steps, and the number of all
    steps of a rank in an iteration.

    The first step of an iteration contains the wait for its samples, so it is left out.
    """
    found: list[RankStep] = []
    windows = sorted(
        (part.begin_s - _TOLERANCE_S, part.end_s + _TOLERANCE_S, each.batch)
        for each in iterations
        for part in each.steps
    )

    def add(file: ParquetFile) -> float:
        table = file.read_table(_STEP_COLUMNS).to_pydict()
        columns = (table[name] for name in _STEP_COLUMNS)
        for rank, step, start_ns, duration_ns, own_ns in zip(*columns, strict=True):
            at = bisect.bisect(windows, (start_ns * _NS,)) - 1
            if at >= 0 and (start_ns + duration_ns) * _NS <= windows[at][1]:
                found.append(RankStep(windows[at][2], f"rank {rank}", step, own_ns * _NS))
        return max(table["start_ns"], default=0) * _NS

    folder = ParquetFolder(run.steps, unreadable=make_error_collector(notes))
    folder.paths.reverse()
    for last_s in folder.read_each(add) if windows else ():
        if last_s < windows[0][0]:
            break
    kept = len({(each.batch, each.step) for each in found})
    return found, 1 + kept / max(1, len({each.batch for each in found}))
