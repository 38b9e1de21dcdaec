"""Read the events of a run directory, and the steps of the trainers that made them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torchlens_perf.roles.causes import RankStep
from torchlens_perf.roles.event_file import FOLDER, UNTIL
from torchlens_perf.roles.iterations import (
    STAGES,
    Event,
    Iteration,
    build_iterations,
    find_smallest_shift,
    name_processes,
    sum_tokens,
)
from torchlens_perf.run import ownership
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, make_error_collector

# The newest events are enough for an answer, which screens show again and again.
_MOST_EVENTS = 200_000
_NS = 1e-9
# Servers that listen on all interfaces have an address of each node.
_OWN_ADDRESSES = ("127.", "localhost", "[::1]", "0.0.0.0", "[::]")
# The note has milliseconds. The times of events are corrected by less, too.
_MIN_NOTED_S = 0.001
# The steps of ranks begin and end at almost the same time.
_TOLERANCE_S = 0.005
_EVENT_COLUMNS = (
    "host", "role", "name", "monotonic_ns", "process", "event", "id", "batch", "tokens_out",
)  # fmt: skip
_STEP_COLUMNS = ("rank", "step", "start_ns", "duration_ns", "own_ns")


@dataclasses.dataclass
class RecordedEvents:
    """The newest events of a run. Processes have names such as "engine-1" or "tool (node-b)".

    Times are of the clock of the node whose trainer collects the batches.
    """

    events: list[Event]
    roles: dict[str, str]
    """Role by process."""
    pids: dict[str, tuple[str, int]]
    """Host and process id by process."""
    detected: list[str]
    """Processes that have not set their role."""
    lost: int
    """Number of events that were overwritten before they were read."""
    shifts: dict[str, float]
    """Seconds that were added to the times of a node, by its name in file names."""
    until_s: float
    """Time until which the events of all nodes are there."""


_time_of = operator.attrgetter("event.time_s")


class _Row(NamedTuple):
    host: str
    process: str
    """Name of its file. Other nodes may have the same names."""
    role: str
    name: str
    event: Event


def read_events(run: RunDirectory, notes: list[str]) -> RecordedEvents:
    """Return the newest events. notes: receives a line for each damaged file, and each wrong clock."""
    nodes: dict[str, list[_Row]] = defaultdict(list)
    offsets_ns: dict[str, int] = {}
    lost: dict[tuple[str, str], int] = {}
    detected: set[str] = set()

    def add(file: ParquetFile) -> None:
        node = _node_of(file.path)
        for process, read in file.footer.items():
            lost[node, process] = max(lost.get((node, process), 0), int(read["lost"]))
            if read.get("detected"):
                detected.add(_key_of(node, process))
        table = file.read_table((*_EVENT_COLUMNS, "time"))
        columns = {name: table.column(name).to_pylist() for name in _EVENT_COLUMNS}
        unix_ns = table.column("time").cast("int64").to_pylist()
        # The newest file is read first.
        offsets_ns.setdefault(node, unix_ns[-1] - columns["monotonic_ns"][-1])
        for host, role, name, time_ns, process, *rest in zip(*columns.values(), strict=True):
            key = _key_of(node, process)
            nodes[node].append(_Row(host, key, role, name, Event(time_ns * _NS, key, *rest)))
        begins_ns[node] = min(unix_ns)

    # The report does not read files that are written after it has listed them.
    untils_ns = _read_untils_ns(run)
    folder = ParquetFolder(run.path / FOLDER, unreadable=make_error_collector(notes))
    unread = {
        node: list(paths)
        for node, paths in itertools.groupby(sorted(folder.paths, key=_node_of), _node_of)
    }
    begins_ns = dict.fromkeys(unread, math.inf)
    # A copy of a run has other times of files, so those of events decide which node's next file is read.
    while (cut := [node for node in unread if unread[node]]) and (
        math.inf in map(begins_ns.get, cut) or sum(map(len, nodes.values())) < _MOST_EVENTS
    ):
        folder.paths = [unread[max(cut, key=begins_ns.__getitem__)].pop()]
        list(folder.read_each(add))
    shifts = _find_shifts(nodes, offsets_ns, notes)
    # From then on, all events of nodes with unread files were read.
    begin_s = max(
        (_time_of(min(nodes[node], key=_time_of)) + shifts[node] for node in cut), default=-math.inf
    )
    rows = [
        each._replace(event=each.event._replace(time_s=each.event.time_s + shift))
        for node, shift in shifts.items()
        for each in nodes[node]
        if each.event.time_s + shift >= begin_s
    ]
    rows.sort(key=_time_of)
    labels = {each.process: each.name or each.role for each in rows}
    if len({each.host for each in rows}) > 1:
        labels |= {
            each.process: f"{labels[each.process]} ({each.host})"
            for each in rows
            if "/" in each.process
        }
    names = name_processes(labels)
    return RecordedEvents(
        [each.event._replace(process=names[each.process]) for each in rows],
        {names[each.process]: each.role for each in rows},
        # What processes record of others has no process id.
        {
            names[each.process]: (each.host, int(each.process.split("-")[-2]))
            for each in rows
            if "@" not in each.process
        },
        sorted(names[process] for process in detected & names.keys()),
        sum(lost.values()),
        shifts,
        min(
            (
                (until_ns - offsets_ns[node]) * _NS + shifts[node]
                for node, until_ns in untils_ns.items()
                if node in shifts
            ),
            default=math.inf,
        ),
    )


def _node_of(path: Path) -> str:
    return path.stem.rpartition("-")[0]


def _key_of(node: str, process: str) -> str:
    """Return a key of a process among those of all nodes.

    An address of a server that several nodes have used is one server, unless it is of the node itself.
    """
    # Servers are recorded as engines. Tools and rewards are functions of the process that records them.
    is_shared = process.endswith("@rollout") and not process.startswith(_OWN_ADDRESSES)
    return process if is_shared else f"{node}/{process}"


def _find_shifts(
    nodes: Mapping[str, Sequence[_Row]], offsets_ns: Mapping[str, int], notes: list[str]
) -> dict[str, float]:
    """Return the seconds to add to the times of each node for times of the lead's clock.

    They are those of the wall clocks, unless something then happens to a sample before it is sent.
    """
    # The node of the trainer that collects the batches.
    lead = max(
        nodes,
        key=lambda node: (
            sum(each.event.name == "batch_complete" for each in nodes[node]),
            len(nodes[node]),
        ),
        default="",
    )
    shifts: dict[str, float] = {}
    for node, rows in nodes.items():
        by_clock_s = (offsets_ns[node] - offsets_ns[lead]) * _NS
        least_s = find_smallest_shift(
            (each.event for each in nodes[lead]), (each.event for each in rows)
        )
        shifts[node] = by_clock_s if node == lead else max(by_clock_s, least_s)
        if shifts[node] - by_clock_s >= _MIN_NOTED_S:
            notes.append(
                f"the clock of {rows[0].host} is {least_s - by_clock_s:.3f} s late or more, by the order of"
                " events: its events of roles were moved by this time"
            )
    return shifts


def _read_untils_ns(run: RunDirectory) -> dict[str, int]:
    """Return until when the events of each node are written, by the clock of the node."""
    found: dict[str, int] = {}
    for path in (run.path / FOLDER).glob(f"*{UNTIL}"):
        # Only a reader that is still running, or was killed, has this file.
        with suppress(OSError, ValueError):
            found[path.stem] = int(ownership.read_regular_file(path, 64))
    return found


def read_iterations(run: RunDirectory, notes: list[str]) -> tuple[RecordedEvents, list[Iteration]]:
    """Return the newest events, and their iterations."""
    recorded = read_events(run, notes)
    # The first iteration contains the warm-up of all processes.
    iterations = build_iterations(recorded.events)[1:]
    found = [each for each in iterations if each.end_s <= recorded.until_s]
    if len(found) < len(iterations):
        notes.append(
            f"left out: the last {len(iterations) - len(found)} of {len(iterations)} iterations, because"
            " another node has not written their events"
        )
    return recorded, found


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
    run: RunDirectory,
    iterations: Sequence[Iteration],
    shifts: Mapping[str, float],
    notes: list[str],
) -> tuple[list[RankStep], float]:
    """Return the steps of all ranks inside of the iterations' optimizer steps, and the number of all
    steps of a rank in an iteration.

    The first step of an iteration contains the wait for its samples, so it is left out. shifts: see
    RecordedEvents. Steps of a node without events are left out, because its clock is not known.
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
        shift_s = shifts[_node_of(file.path)]
        for rank, step, start_ns, duration_ns, own_ns in zip(*columns, strict=True):
            start_s = start_ns * _NS + shift_s
            at = bisect.bisect(windows, (start_s,)) - 1
            if at >= 0 and start_s + duration_ns * _NS <= windows[at][1]:
                found.append(RankStep(windows[at][2], f"rank {rank}", step, own_ns * _NS))
        return max(table["start_ns"], default=0) * _NS + shift_s

    folder = ParquetFolder(run.steps, unreadable=make_error_collector(notes))
    for node, paths in itertools.groupby(reversed(folder.paths), _node_of):
        folder.paths = list(paths) if windows and node in shifts else []
        # The files of a node before its first one without these steps are not read.
        any(last_s < windows[0][0] for last_s in folder.read_each(add))
    return found, 1 + len({(each.batch, each.step) for each in found}) / max(
        1, len({each.batch for each in found})
    )
