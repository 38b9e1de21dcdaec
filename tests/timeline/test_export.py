"""The trace has the spans of the run directory, with their times, on one track per rank and lane."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

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
    path = tmp_path_factory.mktemp("trace") / "run.pftrace"
    assert main(["report", str(run), "--perfetto", str(path), "--quiet"]) == 0
    return decoded(path)


class Decoded:
    """The content of a trace, with absolute times and plain names."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.parents: dict[int, int] = {}
        self.slices: list[tuple[int, int, int, str, str, tuple[int, ...]]] = []
        """Track, start, end, name, category, and flows."""
        self.instants: list[tuple[int, str, dict[str, Any]]] = []
        self.counters: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.descriptors: list[Any] = []
        """All track descriptors, in the order of the file."""

    def process_of(self, track: int) -> str:
        return self.names[self.parents[track]]


def decoded(path: Path) -> Decoded:
    """Decode a trace as Perfetto does: by interned names and a clock of differences."""
    trace = pb.Trace()
    trace.ParseFromString(path.read_bytes())
    found = Decoded()
    names, categories = dict[tuple[int, int], str](), dict[tuple[int, int], str]()
    opened: dict[int, list[tuple[int, str, str, tuple[int, ...]]]] = defaultdict(list)
    now: dict[int, int] = {}
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.HasField("clock_snapshot"):
            now[sequence] = max(clock.timestamp for clock in packet.clock_snapshot.clocks)
        for each in packet.interned_data.event_names:
            names[sequence, each.iid] = each.name
        for each in packet.interned_data.event_categories:
            categories[sequence, each.iid] = each.name
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            found.descriptors.append(track)
            found.names[track.uuid] = track.name or track.process.process_name
            found.parents[track.uuid] = track.parent_uuid
        if not packet.HasField("track_event"):
            continue
        now[sequence] += packet.timestamp
        time_ns, event = now[sequence], packet.track_event
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            category = categories[sequence, event.category_iids[0]]
            opened[event.track_uuid].append(
                (time_ns, names[sequence, event.name_iid], category, tuple(event.flow_ids))
            )
        elif event.type == pb.TrackEvent.TYPE_SLICE_END:
            start, name, category, flows = opened[event.track_uuid].pop()
            found.slices.append((event.track_uuid, start, time_ns, name, category, flows))
        elif event.type == pb.TrackEvent.TYPE_INSTANT:
            annotations = {
                each.name: each.string_value or each.int_value for each in event.debug_annotations
            }
            found.instants.append((time_ns, names[sequence, event.name_iid], annotations))
        else:
            found.counters[event.track_uuid].append((time_ns, event.double_counter_value))
    assert not any(opened.values()), "a slice has no end"
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


def test_steps_and_ranks_are_tracks_in_order(trace: Decoded) -> None:
    processes = [name for track, name in trace.names.items() if not trace.parents[track]]
    ranks = [name for name in processes if name.startswith("rank ")]
    assert [name.split()[1] for name in ranks] == [str(rank) for rank in range(RANKS)]
    # Perfetto sorts processes by their ranks only if the root comes first and asks for it.
    root, *others = trace.descriptors
    assert root.uuid == 0
    assert root.process_ordering == pb.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
    orders = [each.sibling_order_rank for each in others if each.process.process_name in ranks]
    assert orders == sorted(set(orders))


def test_spans_of_a_collective_are_connected_and_wait_for_the_slow_rank(trace: Decoded) -> None:
    by_flow = defaultdict(set)
    for track, *_, flows in trace.slices:
        for flow in flows:
            by_flow[flow].add(trace.process_of(track))
    assert by_flow
    assert all(len(processes) == RANKS for processes in by_flow.values())
    waits = [name for *_, name, category, _ in trace.slices if name.startswith("wait for rank")]
    assert max(set(waits), key=waits.count) == "wait for rank 2"


def test_memory_is_a_counter_of_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.pftrace"
    with run_without_traces(tmp_path) as run:
        ranks = [Rank(run, rank) for rank in range(2)]
        for rank in ranks:
            rank.steps(5, forward=2.0)
        read_to_end(run)
        assert main(["report", str(run.path), "--perfetto", str(path), "--quiet"]) == 0
        for rank in ranks:
            rank.close()
    found = decoded(path)
    tracks = [track for track in found.counters if found.names[track] == "memory"]
    assert sorted(found.process_of(track)[:6] for track in tracks) == ["rank 0", "rank 1"]
    for track in tracks:
        assert [value for _, value in found.counters[track]] == [123e6] * 5


def test_memory_that_was_not_measured_has_no_counter(trace: Decoded) -> None:
    assert not [track for track in trace.counters if trace.names[track] == "memory"]


def test_findings_and_the_clocks_are_instants(trace: Decoded) -> None:
    names = [name for _, name, _ in trace.instants]
    assert names[0] == "about this trace"
    assert trace.instants[0][2]["clocks"]
    assert "SLOW RANK" in names
    finding = next(facts for _, name, facts in trace.instants if name == "SLOW RANK")
    assert "ank 2" in finding["finding"]


def test_chosen_ranks_and_steps_are_written(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.pftrace"
    arguments = ["report", str(run), "--perfetto", str(path), "--ranks", "1-2", "--steps", "5-7"]
    assert main([*arguments, "--quiet"]) == 0
    found = decoded(path)
    steps = {name for *_, name, category, _ in found.slices if category == "step"}
    assert steps == {"step 5", "step 6", "step 7"}
    assert {found.process_of(track)[:6] for track, *_ in found.slices} == {"rank 1", "rank 2"}


def test_limit_shortens_the_window_with_a_note(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.pftrace"
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
    path = tmp_path / "none.pftrace"
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
            write_trace(RunDirectory(copy), tmp_path / "x.pftrace")
        return
    written = write_trace(RunDirectory(copy), tmp_path / "x.pftrace")
    assert any(files[0].name in note for note in written.notes)


def test_kinds_of_records_that_are_no_spans_are_not_written(trace: Decoded) -> None:
    from torchlens_perf.run.ring import kind_name
    from torchlens_perf.store.segments import SPANS

    names = {kind_name(kind) for kind in Kind if kind not in SPANS}
    assert not names & {category for *_, category, _ in trace.slices}
