"""The trace has the spans of the run directory, with their times, on one track per rank and lane."""

from __future__ import annotations

import decimal
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Rank, read_to_end, run_without_traces
from tests.support.simulated_runs import simulate_run
from torchlens_perf.commands.cli import main
from torchlens_perf.errors import RunStoreError
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.ring import Kind
from torchlens_perf.store.reader import ParquetFolder

RANKS, STEPS = 4, 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("timeline") / "run"
    fault = "constant:rank=2,share=0.4,phase=forward,since=0"
    return simulate_run(path, "--fault", fault, ranks=RANKS, steps=STEPS)


@pytest.fixture(scope="module")
def trace(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("trace") / "run.json.gz"
    assert main(["report", str(run), "--perfetto", str(path), "--quiet"]) == 0
    return decoded(path)


class Decoded:
    """The content of a trace, with absolute times and plain names."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """Names of threads by id, and of processes by negative id."""
        self.parents: dict[int, int] = {}
        """The process of each thread."""
        self.orders: dict[int, int] = {}
        self.slices: list[tuple[int, int, int, str, str, tuple[int, ...]]] = []
        """Track, start, end, name, category, and flows."""
        self.arrow_ends: dict[int, list[tuple[int, int, bool, bool]]] = defaultdict(list)
        """Start, negative duration, and whether the arrow leads in and out, of each slice."""
        self.instants: list[tuple[int, str, dict[str, Any]]] = []
        self.counters: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
        """Times and values by process, and by name with unit."""

    def process_of(self, track: int) -> str:
        return self.names[self.parents[track]]


def nanoseconds(event: dict[str, Any], field: str) -> int:
    """Return a time as Perfetto does, which reads the decimals as digits."""
    return int(event[field].scaleb(3).to_integral_exact())


def decoded(path: Path) -> Decoded:
    """Decode a trace. Its times must be exact."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file, parse_float=decimal.Decimal)
    found, begin_ns = Decoded(), trace["baseTimeNanoseconds"]
    for event in trace["traceEvents"]:
        kind, process = event["ph"], event["pid"]
        if kind == "M":
            is_thread = event["name"].startswith("thread_")
            # Ids of processes are negative here, because a thread may have the id of a process.
            key = event["tid"] if is_thread else -process
            if event["name"].endswith("_name"):
                assert key not in found.names, "two tracks have one id"
                found.names[key] = event["args"]["name"]
                if is_thread:
                    found.parents[key] = -process
            else:
                found.orders[key] = event["args"]["sort_index"]
            continue
        start_ns = begin_ns + nanoseconds(event, "ts")
        if kind == "X":
            flows = (event["bind_id"],) if "bind_id" in event else ()
            for flow in flows:
                end = (start_ns, -event["dur"], event["flow_in"], event["flow_out"])
                found.arrow_ends[flow].append(end)
            found.slices.append(
                (event["tid"], start_ns, start_ns + nanoseconds(event, "dur"), event["name"],
                 event["cat"], flows)
            )  # fmt: skip
        elif kind == "i":
            found.instants.append((start_ns, event["name"], event["args"]))
        else:
            ((unit, value),) = event["args"].items()
            name = f"{event['name']} {unit}"
            found.counters[process, name].append((start_ns, float(value)))
    return found


def test_each_span_has_its_times_of_the_run_directory(run: Path, trace: Decoded) -> None:
    expected = []
    columns = ("rank", "kind", "name", "step", "duration_ns", "time")
    for table in ParquetFolder(RunDirectory(run).spans).read_each(
        lambda file: file.read_table(columns)
    ):
        starts = table.column("time").cast("int64").to_pylist()
        for row, start_ns in zip(table.drop(["time"]).to_pylist(), starts, strict=True):
            if row["kind"] not in ("memory", "thread_time"):
                name = f"step {row['step']}" if row["kind"] == "step" else row["name"]
                expected.append((row["rank"], name, start_ns, start_ns + row["duration_ns"]))
    ranks = {f"rank {rank} ": rank for rank in range(RANKS)}
    got = []
    for track, start, end, name, category, _ in trace.slices:
        process = trace.process_of(track)
        rank = next(rank for text, rank in ranks.items() if process.startswith(text))
        if not (category == "wait" and name.startswith("wait for rank")):
            got.append((rank, name, start, end))
    assert sorted(got) == sorted(expected)


def test_ranks_and_lanes_are_tracks_in_order(trace: Decoded) -> None:
    processes = {name: id for id, name in trace.names.items() if id not in trace.parents}
    ordered = sorted(processes, key=lambda name: trace.orders[processes[name]])
    assert [name.split(" on ")[0] for name in ordered] == ["findings"] + [
        f"rank {rank}" for rank in range(RANKS)
    ]
    for name, process in processes.items():
        if name != "findings":
            tracks = [track for track, parent in trace.parents.items() if parent == process]
            first = min(tracks, key=lambda track: trace.orders[track])
            assert trace.names[first] == "phases and modules"
            # Perfetto moves a thread with the id of its process to the top.
            assert -process not in tracks


def test_slices_of_a_track_nest(trace: Decoded) -> None:
    by_track = defaultdict(list)
    for track, start, end, *_ in trace.slices:
        by_track[track].append((start, end))
    for spans in by_track.values():
        assert spans == sorted(spans, key=lambda span: (span[0], -span[1]))
        open_until: list[int] = []
        for start, end in spans:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_spans_of_a_collective_are_connected_and_wait_for_the_slow_rank(trace: Decoded) -> None:
    by_flow = defaultdict(set)
    for track, *_, flows in trace.slices:
        for flow in flows:
            by_flow[flow].add(trace.process_of(track))
    assert by_flow
    assert all(len(processes) == RANKS for processes in by_flow.values())
    for ends in trace.arrow_ends.values():
        # The order of Perfetto, which is by the file for equal times.
        in_order = sorted(ends, key=lambda each: each[:2])
        leads = [(leads_in, leads_out) for *_, leads_in, leads_out in in_order]
        assert leads == [(False, True), *[(True, True)] * (RANKS - 2), (True, False)]
    waits = [name for *_, name, category, _ in trace.slices if name.startswith("wait for rank")]
    assert max(set(waits), key=waits.count) == "wait for rank 2"


def test_memory_is_a_counter_of_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    with run_without_traces(tmp_path) as run:
        ranks = [Rank(run, rank) for rank in range(2)]
        for rank in ranks:
            rank.steps(5, forward=2.0)
        read_to_end(run)
        assert main(["report", str(run.path), "--perfetto", str(path), "--quiet"]) == 0
        for rank in ranks:
            rank.close()
    found = decoded(path)
    for rank in range(2):
        values = [value for _, value in found.counters[rank + 1, "memory bytes"]]
        assert values == [123e6] * 5


def test_memory_that_was_not_measured_has_no_counter(trace: Decoded) -> None:
    assert not [name for _, name in trace.counters if name.startswith("memory")]


def test_findings_and_the_clocks_are_instants(trace: Decoded) -> None:
    names = [name for _, name, _ in trace.instants]
    assert names[0] == "about this trace"
    assert trace.instants[0][2]["clocks"]
    assert "SLOW RANK" in names
    finding = next(facts for _, name, facts in trace.instants if name == "SLOW RANK")
    assert "ank 2" in finding["finding"]


def test_chosen_ranks_and_steps_are_written(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.json.gz"
    arguments = ["report", str(run), "--perfetto", str(path), "--ranks", "1-2", "--steps", "5-7"]
    assert main([*arguments, "--quiet"]) == 0
    found = decoded(path)
    steps = {name for *_, name, category, _ in found.slices if category == "step"}
    assert steps == {"step 5", "step 6", "step 7"}
    assert {found.process_of(track)[:6] for track, *_ in found.slices} == {"rank 1", "rank 2"}


def test_limit_shortens_the_window_with_a_note(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.json.gz"
    assert main(["report", str(run), "--perfetto", str(path), "--limit-mb", "0.02"]) == 0
    error = capsys.readouterr().err
    assert "only steps" in error
    assert path.stat().st_size < 60_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "9"], "rank 9 is not in this run"),
        (["--steps", "900-901"], "no such steps"),
        (["--steps", "9-5"], "invalid numbers"),
    ],
)
def test_invalid_choice_ends_with_exit_code_2(
    arguments: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "none.json.gz"
    assert main(["report", str(run), "--perfetto", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_damaged_span_file_costs_only_its_rows(run: Path, tmp_path: Path) -> None:
    import shutil

    from torchlens_perf.timeline.export import write_trace

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    files = sorted((copy / "spans").glob("*.parquet"))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    if len(files) == 1:
        with pytest.raises(RunStoreError, match="no recorded steps"):
            write_trace(RunDirectory(copy), tmp_path / "x.json.gz")
        return
    written = write_trace(RunDirectory(copy), tmp_path / "x.json.gz")
    assert any(files[0].name in note for note in written.notes)


def test_kinds_of_records_that_are_no_spans_are_not_written(trace: Decoded) -> None:
    from torchlens_perf.run.ring import kind_name
    from torchlens_perf.store.segments import SPANS

    names = {kind_name(kind) for kind in Kind if kind not in SPANS}
    assert not names & {category for *_, category, _ in trace.slices}
