"""Find profiles of torch.profiler for a run, and turn their events into slices on the run's clock.

Both clocks are Unix time. Their difference is measured at the calls that both recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from torchlens_perf.errors import RunStoreError
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.run.captures import TRACE
from torchlens_perf.run.ring import Kind
from torchlens_perf.store.segments import iterate_records
from torchlens_perf.timeline.profiler_trace import (
    ProfiledThread,
    ProfilerTrace,
    read_profiler_trace,
)
from torchlens_perf.timeline.slices import Slice, nest_slices

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.timeline.trace_file import Event
    from torchlens_perf.verdicts.node_state import ProcessState

# Annotations of PyTorch that begin within microseconds of a phase.
_SHARED_CALLS = {
    r"Optimizer\.step#": Kind.OPTIMIZER,
    r"enumerate\(DataLoader\)": Kind.DATA,
    r"DistributedDataParallel\.forward$": Kind.FORWARD,
}


class Profile(NamedTuple):
    """A profile of one rank, and the run's steps in which it was made."""

    rank: int
    trace: ProfilerTrace
    first_step: int
    last_step: int
    clock: str
    """The difference of the clocks, in words."""


def load_profiles(
    run: RunDirectory,
    processes: dict[int, tuple[ProcessState, str]],
    named: Sequence[tuple[int | None, Path]],
    notes: list[str],
) -> list[Profile]:
    """Return the named profiles, each with its rank if it is given, and the run's own captures.

    processes: process and node of each rank that is written. Raise RunStoreError if a named profile
    cannot be read or is not of this run.
    """
    found = [_load_profile(run, processes, *each) for each in named]
    for row in capture_rows(run):
        if row["rank"] not in processes or TRACE not in row["files"]:
            continue
        if row["attempt"] == processes[row["rank"]][0].identity.attempt:
            path = run.path / row["files"][TRACE]["path"]
            try:
                found.append(_load_profile(run, processes, row["rank"], path))
            except RunStoreError as error:
                notes.append(str(error))
    return found


def _load_profile(
    run: RunDirectory,
    processes: dict[int, tuple[ProcessState, str]],
    given_rank: int | None,
    path: Path,
) -> Profile:
    trace = read_profiler_trace(path)
    rank = trace.rank if given_rank is None else given_rank
    if rank is None and len(processes) == 1:
        (rank,) = processes
    if rank is None:
        raise RunStoreError(f"{path} does not name its rank: write --profile RANK={path}")
    if rank not in processes:
        raise RunStoreError(f"{path} is of rank {rank}, which is not written: choose it by --ranks")
    process, node = processes[rank]
    begin_ns = min((thread.slices[0].start_ns for thread in trace.threads), default=0)
    end_ns = max((each.end_ns for thread in trace.threads for each in thread.slices), default=0)
    starts: dict[Kind, list[int]] = {kind: [] for kind in _SHARED_CALLS.values()}
    steps: list[int] = []
    for _, (records, _) in iterate_records(
        run, {process.identity.key: node}, lambda error: None, [Kind.STEP, *starts]
    ):
        start_ns = records["start_ns"] + process.anchor.offset_ns
        for kind, times in starts.items():
            times += start_ns[records["kind"] == kind].tolist()
        during = (start_ns < end_ns) & (start_ns + records["duration_ns"] > begin_ns)
        steps += records["step"][during & (records["kind"] == Kind.STEP)].tolist()
    if not steps:
        raise RunStoreError(
            f"{path} has no events in the recorded steps of rank {rank}: name a profile of this run"
        )
    apart_us: list[float] = []
    for pattern, kind in _SHARED_CALLS.items():
        times_ns = np.array(starts[kind])
        for each in trace.select(pattern) if len(times_ns) else ():
            apart_us.append(float(np.abs(times_ns - each.start_ns).min()) / 1e3)
    clock = f"rank {rank}: not compared, as no call is in both recordings"
    if apart_us:
        clock = (
            f"rank {rank}: {len(apart_us)} calls begin {np.median(apart_us):.0f} us apart in the"
            f" profile and in the recording (median), at most {max(apart_us):.0f} us"
        )
    return Profile(rank, trace, min(steps), max(steps), clock)


def build_profile_events(
    thread: ProfiledThread,
    shift_ns: int,
    within_ns: tuple[int, int],
    track_of: Callable[[int], int],
    first_flow: int,
) -> Iterator[Event]:
    """Yield the events of a thread or stream, in rows if its slices overlap without nesting.

    shift_ns: from Unix time to the clock of the events. within_ns: slices outside are left out.
    track_of: track of a row. first_flow: number of the first arrow.
    """
    rows: list[list[Slice]] = []
    row_ends: list[list[int]] = []
    for each in thread.slices:
        start_ns, end_ns = each.start_ns + shift_ns, each.end_ns + shift_ns
        if start_ns < within_ns[0] or end_ns > within_ns[1]:
            continue
        row = _find_row(row_ends, start_ns, end_ns)
        if row == len(rows):
            rows.append([])
        flows = tuple(first_flow + flow for flow in each.flows)
        rows[row].append(Slice(start_ns, end_ns, each.name, each.category, flows))
    for row, slices in enumerate(rows):
        yield from nest_slices(slices, track_of(row))


def _find_row(row_ends: list[list[int]], start: int, end: int) -> int:
    """Return the first row in which the slice nests, and add its end to the open slices there."""
    for row, open_until in enumerate(row_ends):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if not open_until or end <= open_until[-1]:
            open_until.append(end)
            return row
    row_ends.append([end])
    return len(row_ends) - 1
