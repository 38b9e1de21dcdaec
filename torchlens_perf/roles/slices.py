"""The lanes of all processes of a job with roles as slices, for a timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchlens_perf.roles.facts import PARTS
from torchlens_perf.roles.iterations import pair_events
from torchlens_perf.roles.table import read_iterations
from torchlens_perf.run.directory import RunDirectory

PATH, _MOST_ROWS = "critical path of iterations", 100


def read_slices(
    run: RunDirectory, notes: list[str], begin_ns: int, offset_ns: int
) -> Iterator[tuple[str, int, tuple[int, int, str]]]:
    """Yield process, row, and begin, end and name of all intervals and critical paths after begin_ns.

    offset_ns: from the events' clock to that of begin_ns. Overlapping slices are in several rows, of which
    there are at most 100.
    """
    recorded, iterations = read_iterations(run, notes)
    found = [(PATH, f"iteration {each.batch}", each.begin_s, each.end_s) for each in iterations]
    found += [
        (PATH, f"{PARTS[part]}: {process}", begin_s, end_s)
        for each in iterations
        for part, process, begin_s, end_s in each.path()
    ]
    found += [
        (each.process, each.stage, each.begin_s, each.end_s)
        for each in pair_events(recorded.events)
    ]
    ends: dict[str, list[float]] = defaultdict(list)
    for process, name, begin_s, end_s in sorted(found, key=lambda each: (each[2], -each[3])):
        row = next(
            (at for at, end in enumerate(ends[process]) if end <= begin_s), len(ends[process])
        )
        ends[process][row : row + 1] = [end_s]
        start_ns = round(begin_s * 1e9) + offset_ns
        if start_ns >= begin_ns and row < _MOST_ROWS:
            yield process, row, (start_ns, round(end_s * 1e9) + offset_ns, name)
