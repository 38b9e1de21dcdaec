"""Write a run's recorded steps as a trace for Perfetto (https://ui.perfetto.dev).

Each rank is a process with a track for phases and modules, tracks for collectives, other threads and
the device, and counters (trace_writer.py). Arrows connect the spans of one collective on its ranks. Findings are
instants above the ranks. Clocks of several nodes are aligned by the ends of shared collectives; the
first instant states how exactly.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchlens_perf.errors import RunStoreError, printable
from torchlens_perf.page.contents import JoinedCollective, SlowPeriod
from torchlens_perf.page.gather.node_clocks import NodeClocks, RankRecords
from torchlens_perf.page.gather.run_contents import collect_ranks
from torchlens_perf.page.gather.step_choice import choose_ranks
from torchlens_perf.page.gather.step_collectives import join_collectives_by_step
from torchlens_perf.page.gather.step_trace import LANES
from torchlens_perf.page.gather.whole_steps import read_rank_records
from torchlens_perf.report.run_report import load_report_and_states
from torchlens_perf.roles.slices import read_slices
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.hardware_samples import GPUS
from torchlens_perf.store.reader import ParquetFile, ParquetFolder, make_error_collector
from torchlens_perf.store.segments import find_kept_step_range
from torchlens_perf.timeline.slices import MatchedCollective, Slice, Track, build_tracks
from torchlens_perf.timeline.trace_writer import TraceWriter
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.report import Report
from torchlens_perf.view.headline import Headline, build_headlines

DEFAULT_LIMIT_BYTES = 20_000_000
MAX_RANKS = 64
"""In larger jobs, the trace has only the ranks that the page shows, unless ranks are named."""
_BYTES_PER_SPAN = 18
# Steps of this many ranks are in memory at once.
_RANK_STEPS_AT_ONCE = 2048
# Of the chosen window, this share precedes the first step of a slow rank.
_BEFORE = 0.25


@dataclasses.dataclass(frozen=True)
class Written:
    """Contents of a trace that was written."""

    size_bytes: int
    ranks: list[int]
    steps: tuple[int, int]
    """First and last step."""
    notes: list[str]
    """Sentences on what is left out."""


def write_trace(
    run: RunDirectory,
    path: Path,
    *,
    ranks: Collection[int] | None = None,
    steps: tuple[int, int] | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    advanced: Callable[[int, int], object] = lambda done, total: None,
) -> Written:
    """Write a trace and return what it contains.

    ranks, steps (first, last): None chooses what matters within the size limit. Raise RunStoreError
    if there is no such step, or the file cannot be written. The limit is approximate.
    """
    report, states = load_report_and_states(run)
    processes, node_of, slow, uncomparable = collect_ranks(states)
    notes: list[str] = []
    chosen = _choose_ranks(report, slow, node_of, ranks, notes)
    kept = find_kept_step_range(run, {node_of[rank] for rank in chosen})
    if kept is None:
        raise RunStoreError(f"{run.path} has no recorded steps of these ranks")
    first, last = steps or kept
    first, last = max(first, kept[0]), min(last, kept[1])
    if first > last:
        raise RunStoreError(
            f"no such steps are recorded: {run.path} has steps {kept[0]} to {kept[1]}"
        )
    source = _TraceSource(run, processes, node_of, chosen, uncomparable, notes)
    if steps is None:
        begins = sorted(each["since_step"] for each in slow)
        first, last = _choose_window(source, first, last, begins, limit_bytes, notes)
    partial = path.parent / f".{path.name}.partial"
    try:
        heads = build_headlines(report, str(run.path))
        _write_events(partial, source, report, heads, first, last, advanced)
        size = partial.stat().st_size
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunStoreError(f"{path} cannot be written: {error.strerror or error}") from None
    return Written(size, chosen, (first, last), notes)


@dataclasses.dataclass(frozen=True)
class _TraceSource:
    """The records of the chosen ranks."""

    run: RunDirectory
    processes: Mapping[int, ProcessState]
    node_of: Mapping[int, str]
    ranks: Sequence[int]
    uncomparable: Collection[str]
    notes: list[str]

    def read(self, steps: range) -> list[RankRecords]:
        """Return the records of each rank in these steps."""
        return read_rank_records(
            self.run, self.processes, self.node_of, self.ranks, steps, self.notes
        )

    def read_rows(
        self,
        folder: Path,
        columns: Collection[str],
        where: Mapping[str, Collection[Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield rows with those of the columns that the files have, and `time` in Unix ns."""

        def rows(file: ParquetFile) -> list[dict[str, Any]]:
            table = file.read_table([name for name in columns if name in file.names], where)
            if "time" in columns:
                # Python's times have no nanoseconds.
                time = table.column("time").cast("int64")
                table = table.drop_columns("time").append_column("time", time)
            return table.to_pylist()

        files = ParquetFolder(folder, unreadable=make_error_collector(self.notes))
        return itertools.chain.from_iterable(files.read_each(rows))


def _choose_ranks(
    report: Report,
    slow: Sequence[SlowPeriod],
    node_of: Mapping[int, str],
    asked: Collection[int] | None,
    notes: list[str],
) -> list[int]:
    if asked is not None:
        missing = sorted(set(asked) - set(node_of))
        if missing:
            raise RunStoreError(
                f"rank {missing[0]} is not in this run: it has {len(node_of)} ranks"
            )
        return sorted(set(asked))
    if len(node_of) <= MAX_RANKS:
        return sorted(node_of)
    chosen = choose_ranks(report, slow, node_of)
    notes.append(f"only {len(chosen)} of {len(node_of)} ranks; --ranks chooses others")
    return chosen


def _choose_window(
    source: _TraceSource,
    first: int,
    last: int,
    begins: Sequence[int],
    limit_bytes: int,
    notes: list[str],
) -> tuple[int, int]:
    """Return as many consecutive steps as fit: around the last of `begins`, else the newest."""
    sample = range(max(first, last - 3), last + 1)
    spans = sum(len(each.records.records) for each in source.read(sample))
    room = max(1, int(limit_bytes / max(1, spans / len(sample) * _BYTES_PER_SPAN)))
    if room > last - first:
        return first, last
    begins = [step for step in begins if first <= step <= last]
    begin = begins[-1] - int(_BEFORE * room) if begins else last - room + 1
    begin = max(first, min(begin, last - room + 1))
    notes.append(
        f"only steps {begin} to {begin + room - 1} of {first} to {last}; --steps and --limit-mb choose"
        " others"
    )
    return begin, begin + room - 1


def _write_events(
    path: Path,
    source: _TraceSource,
    report: Report,
    heads: Sequence[Headline],
    first: int,
    last: int,
    advanced: Callable[[int, int], object],
) -> None:
    width = max(1, _RANK_STEPS_AT_ONCE // len(source.ranks))
    batches = [range(at, min(at + width, last + 1)) for at in range(first, last + 1, width)]
    records = source.read(batches[0])
    if not records:
        raise RunStoreError(f"{source.run.path} has no records of steps {first} to {last}")
    clock = NodeClocks([records], source.uncomparable).common_clock(records)
    # Ranks whose clocks cannot be aligned keep the wall clock of their node.
    offset_of = {each.rank: clock.offset_ns.get(each.rank, each.unix_offset_ns) for each in records}
    begin_ns = min(
        int(each.records.records["start_ns"].min()) + offset_of[each.rank] for each in records
    )
    host_of = {rank["rank"]: rank["host"] for rank in report["ranks"]}
    writer = TraceWriter(path, begin_ns, host_of)
    about = _describe_trace(source, report, clock.words, first, last, begin_ns)
    writer.write_instant(begin_ns, "about this trace", about)
    _write_findings(writer, heads, report, begin_ns)
    _write_gpu_counters(writer, source, report, begin_ns)
    flows: dict[tuple[str, int], int] = {}
    for number, steps in enumerate(batches):
        records = source.read(steps) if number else records
        tracks = list(_build_rank_tracks(records, offset_of, source, flows))
        arrows = _find_arrows(tracks)
        for track in tracks:
            writer.write_track(track, arrows)
        _write_rank_counters(writer, source, steps, offset_of)
        advanced(number + 1, len(batches))
    # Their times are of the clock of the node whose trainer collects the batches.
    for process, row, found in read_slices(
        source.run, source.notes, begin_ns, next(iter(offset_of.values()))
    ):
        writer.write_track(Track(process, len(LANES), row, [Slice(*found, "roles")]), {})
    writer.close()


def _build_rank_tracks(
    records: Sequence[RankRecords],
    offset_of: Mapping[int, int],
    source: _TraceSource,
    flows: dict[tuple[str, int], int],
) -> Iterator[Track]:
    joined = join_collectives_by_step(records, [each.rank for each in records], source.uncomparable)
    matched = _match_collectives(joined, flows)
    for each in records:
        offset_ns = offset_of.get(each.rank, each.unix_offset_ns)
        yield from build_tracks(each.rank, each.records, offset_ns, matched[each.rank])


def _find_arrows(tracks: Iterable[Track]) -> dict[int, tuple[int, int]]:
    """Return the ranks whose slices of an arrow begin first and last, if it connects several.

    Of slices that begin together, Perfetto takes the longest one first, then by order in the file.
    """
    begins = group_values(
        (each.flow, (each.start_ns, -each.end_ns, track.rank))
        for track in tracks
        for each in track.slices
        if each.flow is not None
    )
    return {
        flow: (min(found)[2], max(found)[2]) for flow, found in begins.items() if len(found) > 1
    }


def _write_rank_counters(
    writer: TraceWriter, source: _TraceSource, steps: range, offset_of: Mapping[int, int]
) -> None:
    rank_of = {source.processes[rank].identity.key: rank for rank in source.ranks}
    columns = ("process", "start_ns", "duration_ns", "memory_bytes", "ready_ns")
    where: dict[str, list[Any]] = {"step": list(steps), "process": list(rank_of)}
    for row in source.read_rows(source.run.steps, columns, where):
        rank, length = rank_of[row["process"]], row["duration_ns"]
        if rank not in offset_of:
            continue
        end_ns = row["start_ns"] + length + offset_of[rank]
        if row["memory_bytes"] is not None:
            writer.write_counter(rank, "memory", "bytes", end_ns, float(row["memory_bytes"]))
        if row["ready_ns"] is not None and length:
            share = 100 * (row["ready_ns"] / length)
            writer.write_counter(rank, "CPU contention", "% of the step", end_ns, share)


def _match_collectives(
    joined: Mapping[int, Sequence[JoinedCollective]], flows: dict[tuple[str, int], int]
) -> dict[int, dict[tuple[str, int], MatchedCollective]]:
    """Return by rank what is known of its collectives."""
    found: dict[int, dict[tuple[str, int], MatchedCollective]] = defaultdict(dict)
    for rows in joined.values():
        for row in rows:
            key = (row["group_name"], row["number"])
            flow = flows.setdefault(key, len(flows) + 1)
            for rank, wait_us in row["wait_us"].items():
                last_rank = None if int(rank) == row["last_rank"] else row["last_rank"]
                found[int(rank)][key] = MatchedCollective(
                    flow, round(1e3 * (wait_us or 0.0)), last_rank
                )
    return found


def _write_findings(
    writer: TraceWriter, heads: Sequence[Headline], report: Report, begin_ns: int
) -> None:
    for head, row in zip(heads, report["verdicts"], strict=True):
        since = row.held.since if row.held is not None else None
        at_ns = begin_ns
        if since is not None:
            unix_s = datetime.datetime.fromisoformat(since).timestamp()
            at_ns = max(begin_ns, round(unix_s * 1e9))
        texts = {"finding": head.sentence, "cause": head.cause, "next": head.action}
        writer.write_instant(
            at_ns, head.status, {name: printable(text) for name, text in texts.items() if text}
        )


def _write_gpu_counters(
    writer: TraceWriter, source: _TraceSource, report: Report, begin_ns: int
) -> None:
    hosts = {rank["host"] for rank in report["ranks"] if rank["rank"] in source.ranks}
    counters = (("sm_clock_hz", "SM clock", "Hz"), ("power_w", "power", "W"),
                ("memory_used_bytes", "GPU memory", "bytes"))  # fmt: skip

    columns = ["host", "uuid", "time", *(column for column, _, _ in counters)]
    for row in source.read_rows(source.run.path / GPUS, columns):
        if row["host"] not in hosts or row["time"] < begin_ns:
            continue
        for column, name, unit in counters:
            if row.get(column) is not None:
                counter = f"{name} {str(row['uuid'])[:12]}"
                writer.write_counter(
                    f"host {row['host']}", counter, unit, row["time"], float(row[column])
                )


def _describe_trace(
    source: _TraceSource, report: Report, clock: str, first: int, last: int, begin_ns: int
) -> dict[str, str | int]:
    run = report["run"]
    begins = datetime.datetime.fromtimestamp(begin_ns // 10**9, datetime.timezone.utc)
    texts: dict[str, str | int] = {
        "run": run["id"],
        "program": run["program"] or "",
        "attempt": run["attempt"],
        "ranks": f"{len(source.ranks)} of {run['world_size']}",
        "steps": f"{first} to {last}",
        "begins": begins.isoformat(),
        "clocks": clock or "All ranks are on one node and share its clock.",
        "limits": "; ".join(source.notes),
    }
    return {
        name: printable(text) if isinstance(text, str) else text for name, text in texts.items()
    }
