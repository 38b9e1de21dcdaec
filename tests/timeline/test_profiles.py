"""Profiles of torch.profiler are in the trace of the run: same clock, same steps, below their rank.

The job is real: two gloo ranks with torch.profiler inside perf.watch(), and a capture of the run.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.profiled_run import ACTIVE, CAPTURED, ProfiledRun, record_profiled_run
from tests.support.simulated_runs import simulate_run
from tests.timeline.test_export import Decoded, decoded
from torchlens_perf.commands.cli import main
from torchlens_perf.run.captures import TRACE
from torchlens_perf.timeline.profiler_trace import read_profiler_trace

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ProfiledRun:
    return record_profiled_run(tmp_path_factory.mktemp("profiled"), 2)


@pytest.fixture(scope="module")
def trace(job: ProfiledRun, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    path = tmp_path_factory.mktemp("trace") / "run.pftrace"
    arguments = ["report", str(job.run.path), "--perfetto", str(path), "--quiet", "--profile"]
    assert main([*arguments, *map(str, job.profiles)]) == 0
    return decoded(path)


def events_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete events of a profile, and what is added to their times, in ns."""
    content = path.read_bytes()
    found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    events = [each for each in found["traceEvents"] if each.get("cat") != "Trace"]
    return events, found["baseTimeNanoseconds"]


def slices_of(trace: Decoded, rank: int, *, profiled: bool) -> list[tuple[str, int, int]]:
    """Return name, start and end of a rank's slices on the tracks of profiles, or on the others."""
    return [
        (name, start, end)
        for track, start, end, name, *_ in trace.slices
        if trace.process_of(track).startswith(f"rank {rank} ")
        and trace.names[track].startswith("torch.profiler: ") == profiled
    ]


def test_each_event_of_a_profile_is_a_slice_below_its_rank(
    job: ProfiledRun, trace: Decoded
) -> None:
    captured = job.run.captures / "one" / "rank00001" / TRACE
    for rank, paths in enumerate(([job.profiles[0]], [job.profiles[1], captured])):
        expected: Counter[tuple[str, int, int]] = Counter()
        for path in paths:
            events, base_ns = events_of(path)
            for each in events:
                if each["ph"] == "X":
                    start = round(1e3 * each["ts"]) + base_ns
                    end = round(1e3 * (each["ts"] + each["dur"])) + base_ns
                    expected[each["name"], start, end] += 1
        got = Counter(slices_of(trace, rank, profiled=True))
        assert sum(expected.values()) > 1000
        # The first and the last events may be outside the recorded steps.
        assert not got - expected
        missing = expected - got
        assert sum(missing.values()) < 0.01 * sum(expected.values()), missing.most_common(3)


def test_calls_agree_within_the_error_that_the_trace_states(trace: Decoded) -> None:
    about = trace.instants[0][2]["profiles"]
    stated = re.findall(r"rank (\d): (\d+) calls begin (\d+) us .*?, at most (\d+) us", about)
    assert [int(rank) for rank, *_ in stated] == [0, 1, 1]
    for rank, count, median_us, most_us in stated[:2]:
        # An optimizer, a DataLoader and a DDP call in each step.
        assert int(count) == 3 * ACTIVE
        assert int(median_us) < 1000
        own = [
            start
            for name, start, _ in slices_of(trace, int(rank), profiled=False)
            if name.startswith("optimizer")
        ]
        calls = [
            start
            for name, start, _ in slices_of(trace, int(rank), profiled=True)
            if name.startswith("Optimizer.step#")
        ]
        assert len(calls) >= ACTIVE
        apart_us = [min(abs(start - each) for each in own) / 1e3 for start in calls]
        assert max(apart_us[:ACTIVE]) <= int(most_us) + 1


def test_memory_is_a_counter_of_each_rank(trace: Decoded) -> None:
    tracks = [track for track in trace.counters if trace.names[track] == "memory"]
    assert len(tracks) == 2
    assert all(min(value for _, value in trace.counters[track]) > 1e8 for track in tracks)


def test_steps_of_a_capture_are_the_steps_of_the_run(trace: Decoded) -> None:
    own = {name: (start, end) for name, start, end in slices_of(trace, 1, profiled=False)}
    profiled = {name: (start, end) for name, start, end in slices_of(trace, 1, profiled=True)}
    for step in CAPTURED:
        start, end = profiled[f"ProfilerStep#{step}"]
        own_start, own_end = own[f"step {step}"]
        shared = min(end, own_end) - max(start, own_start)
        assert shared > 0.8 * (end - start)


def test_arrows_lead_from_forward_to_backward(job: ProfiledRun, trace: Decoded) -> None:
    ends = defaultdict(list)
    for track, start, _, name, _, flows in trace.slices:
        if trace.names[track].startswith("torch.profiler: "):
            for flow in flows:
                ends[flow].append((start, name))
    pairs = [sorted(each) for each in ends.values() if len(each) == 2]
    arrows = sum(
        each["ph"] == "s" and each["cat"] == "fwdbwd"
        for path in job.profiles
        for each in events_of(path)[0]
    )
    assert len(pairs) >= 0.9 * arrows > 0
    addmm = [(one[1], other[1]) for one, other in pairs if one[1] == "aten::addmm"]
    assert addmm
    assert all("AddmmBackward0" in other for _, other in addmm)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("7={0}", "is of rank 7, which is not written"),
        ("{other}", "has no events in the recorded steps of rank 0"),
        ("{nothing}", "cannot be read as a trace of torch.profiler"),
    ],
)
def test_profile_of_something_else_ends_with_exit_code_2(
    argument: str,
    message: str,
    job: ProfiledRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other, nothing = tmp_path / "rank-0.json", tmp_path / "nothing.json"
    content = json.loads(job.profiles[0].read_text())
    content["baseTimeNanoseconds"] -= 10**12
    other.write_text(json.dumps(content))
    nothing.write_text(job.profiles[0].read_text()[:-2000])
    path = tmp_path / "none.pftrace"
    named = argument.format(*job.profiles, other=other, nothing=nothing)
    arguments = ["report", str(job.run.path), "--perfetto", str(path), "--profile", named]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_profile_of_a_long_run_chooses_its_steps(
    job: ProfiledRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "few.pftrace"
    run = tmp_path / "run"
    shutil.copytree(job.run.path, run, ignore=shutil.ignore_patterns("captures"))
    arguments = ["report", str(run), "--perfetto", str(path), "--limit-mb", "0.02"]
    assert main([*arguments, "--profile", str(job.profiles[0])]) == 0
    assert "only steps" in capsys.readouterr().err
    names = [name for name, *_ in slices_of(decoded(path), 0, profiled=True)]
    assert any(name.startswith("ProfilerStep#") for name in names)


def test_damaged_capture_costs_only_itself(
    job: ProfiledRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = tmp_path / "run", tmp_path / "run.pftrace"
    shutil.copytree(job.run.path, run)
    captured = run / "captures" / "one" / "rank00001" / TRACE
    captured.write_bytes(captured.read_bytes()[:1000])
    assert main(["report", str(run), "--perfetto", str(path)]) == 0
    assert "cannot be read as a trace" in capsys.readouterr().err
    assert slices_of(decoded(path), 1, profiled=False)


def test_time_to_read_a_profile_grows_with_the_number_of_its_events(tmp_path: Path) -> None:
    def read_s(count: int) -> float:
        path = tmp_path / f"{count}.json"
        events = [
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": i, "dur": 1}
            for i in range(count)
        ]
        path.write_text(json.dumps({"traceEvents": events}))

        def measure() -> float:
            began_s = time.process_time()
            assert len(read_profiler_trace(path).threads[0].slices) == count
            return time.process_time() - began_s

        return min(measure() for _ in range(3))

    assert read_s(20_000) < 8 * read_s(5_000)


def test_profile_of_another_job_is_refused_without_events(job: ProfiledRun, tmp_path: Path) -> None:
    run = simulate_run(tmp_path / "run", ranks=2, steps=8)
    path = tmp_path / "run.pftrace"
    named = ["--profile", f"1={job.profiles[0]}"]
    assert main(["report", str(run), "--perfetto", str(path), *named]) == 2
