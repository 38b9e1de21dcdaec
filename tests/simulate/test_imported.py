"""`torchlens-perf import`: profiles of the same steps as a recorded run, compared with that run.

The profiles of torch.profiler are real: of one and of two gloo ranks. Exports of Nsight Systems are
built here with the columns of its documented schema, because nsys does not run here.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.profiled_run import ACTIVE, ProfiledRun, record_profiled_run
from torchlens_perf.commands.cli import main
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.store.reader import ParquetFolder

pytestmark = [pytest.mark.distributed, pytest.mark.long]

TOLERANCE = {"data": 0.05, "forward": 0.05, "backward": 0.15, "optimizer": 0.2, "collective": 0.05}
"""Largest difference of the least disturbed call between a profile and the recording of the same
steps. Each tool counts some of the other's work. If the machine is busy, a thread may lose its CPU
between the two starts, so other calls differ by up to half.
"""


@pytest.fixture(scope="module", params=[1, 2])
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ProfiledRun, Path]:
    """Return a recorded run, and the run that was imported from its profiles."""
    folder = tmp_path_factory.mktemp("imported")
    recorded = record_profiled_run(folder, request.param)
    imported = out_of(folder)
    assert main(["import", *map(str, recorded.profiles), "--out", str(imported), "--quiet"]) == 0
    return recorded, imported


def out_of(folder: Path) -> Path:
    """Return a run directory whose name no other test on this machine uses."""
    return folder / f"imported-{os.getpid()}-{folder.name}"


def rows_of(folder: Path, *columns: str) -> list[dict[str, Any]]:
    """Return rows of steps or spans, with `time` as Unix ns."""
    rows: list[dict[str, Any]] = []
    for table in ParquetFolder(folder).read_each(lambda file: file.read_table((*columns, "time"))):
        times = table.column("time").cast("int64").to_pylist()
        found = table.drop(["time"]).to_pylist()
        rows += [{**row, "time": time} for row, time in zip(found, times, strict=True)]
    return rows


def test_steps_have_the_numbers_and_durations_of_the_profile(
    jobs: tuple[ProfiledRun, Path],
) -> None:
    recorded, imported = jobs
    rows = rows_of(
        RunDirectory(imported).steps, "rank", "step", "duration_ns", "ready_ns", "cpu_ns"
    )
    expected = set()
    for rank, path in enumerate(recorded.profiles):
        profile = json.loads(path.read_text())
        for each in profile["traceEvents"]:
            if each["ph"] == "X" and each["name"].startswith("ProfilerStep#"):
                start = round(1e3 * each["ts"]) + profile["baseTimeNanoseconds"]
                end = round(1e3 * (each["ts"] + each["dur"])) + profile["baseTimeNanoseconds"]
                expected.add((rank, int(each["name"].partition("#")[2]), start, end - start))
    assert len(expected) == ACTIVE * len(recorded.profiles)
    assert {(row["rank"], row["step"], row["time"], row["duration_ns"]) for row in rows} == expected
    # A profile has neither, so both are missing and not zero.
    assert all(row["ready_ns"] is row["cpu_ns"] is None for row in rows)


def test_phases_and_collectives_agree_with_the_recording(jobs: tuple[ProfiledRun, Path]) -> None:
    recorded, imported = jobs
    columns = ("rank", "kind", "name", "duration_ns", "phase_ns", "value0")
    ours = rows_of(RunDirectory(imported).spans, *columns)
    theirs = rows_of(recorded.run.spans, *columns)
    for rank in range(len(recorded.profiles)):
        steps = [row for row in ours if row["rank"] == rank and row["kind"] == "step"]
        begin = min(row["time"] for row in steps)
        end = max(row["time"] + row["duration_ns"] for row in steps)
        calls: list[dict[str, list[int]]] = []
        sizes, counts = [], []
        for rows in (ours, theirs):
            durations: dict[str, list[int]] = defaultdict(list)
            found = [row for row in rows if row["rank"] == rank and begin <= row["time"] < end]
            found.sort(key=lambda row: row["time"])
            for row in found:
                durations[row["kind"]].append(row["duration_ns"])
            collectives = [row for row in found if row["kind"] == "collective"]
            calls.append(durations)
            sizes.append(sum(row["value0"] for row in collectives))
            counts.append(sorted(row["name"] for row in collectives))
        assert sizes[0] == sizes[1]
        assert counts[0] == counts[1]
        for kind, tolerance in TOLERANCE.items():
            if kind != "collective" or len(recorded.profiles) > 1:
                pairs = list(zip(calls[0][kind], calls[1][kind], strict=True))
                assert len(pairs) >= ACTIVE
                assert min(abs(one - other) / other for one, other in pairs) <= tolerance, kind


def test_modules_of_the_profile_are_spans_in_the_forward_pass(
    jobs: tuple[ProfiledRun, Path],
) -> None:
    rows = rows_of(RunDirectory(jobs[1]).spans, "kind", "name", "rank")
    linear = [row for row in rows if row["kind"] == "module" and row["name"].startswith("Linear_")]
    assert len(linear) == 4 * ACTIVE * len(jobs[0].profiles)


def test_imported_run_is_read_by_the_other_commands(
    jobs: tuple[ProfiledRun, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, imported = jobs
    assert main(["report", str(imported), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run"]["program"].startswith("imported: rank-")
    assert all(each["memory"]["last_bytes"] is None for each in report["ranks"])
    assert main(["compare", str(imported), str(recorded.run.path), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["query", str(imported), "SELECT count(*) FROM steps", "--quiet"]) == 0
    assert str(ACTIVE * len(recorded.profiles)) in capsys.readouterr().out
    assert (
        main(["report", str(imported), "--perfetto", str(tmp_path / "x.pftrace"), "--quiet"]) == 0
    )


def export_of_nsys(path: Path, *, ranges: bool = True) -> Path:
    """Write an export with four steps of 10 ms, one 2 ms apart from the next, in one process."""
    process = 4711 << 24
    with sqlite3.connect(path) as file:
        file.execute(
            "CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT)"
        )
        file.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000, '')")
        file.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        file.execute(
            "INSERT INTO StringIds VALUES (1, 'forward'), (2, 'cudaLaunchKernel'), (3, 'k')"
        )
        if not ranges:
            return path
        file.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,"
            " globalTid INTEGER, textId INTEGER)"
        )
        for step in range(4):
            at = 12_000_000 * step
            rows = [(at, at + 10_000_000, 59, f"step {step}", process + 5, None),
                    (at + 1_000_000, at + 4_000_000, 59, None, process + 5, 1),
                    (at + 4_000_000, at + 8_000_000, 59, "backward", process + 5, None)]  # fmt: skip
            file.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", rows)
        # A mark has no end.
        file.execute(
            "INSERT INTO NVTX_EVENTS VALUES (5, NULL, 34, 'step 9', ?, NULL)", (process + 5,)
        )
    return path


def test_nvtx_ranges_of_an_export_are_steps_and_phases(tmp_path: Path) -> None:
    path = export_of_nsys(tmp_path / "report.sqlite")
    assert main(["import", str(path), "--out", str(out_of(tmp_path)), "--quiet"]) == 0
    rows = rows_of(out_of(tmp_path) / "steps", "step", "duration_ns", "forward_ns", "backward_ns")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["time"] for row in rows] == [
        1700000000000000000 + 12_000_000 * step for step in range(4)
    ]
    assert {(row["duration_ns"], row["forward_ns"], row["backward_ns"]) for row in rows} == {
        (10_000_000, 3_000_000, 4_000_000)
    }


def test_pattern_chooses_other_ranges_as_steps(tmp_path: Path) -> None:
    path = export_of_nsys(tmp_path / "report.sqlite")
    arguments = [
        "import",
        str(path),
        "--out",
        str(out_of(tmp_path)),
        "--steps",
        "backward",
        "--quiet",
    ]
    assert main(arguments) == 0
    rows = rows_of(out_of(tmp_path) / "steps", "step", "duration_ns")
    assert [(row["step"], row["duration_ns"]) for row in rows] == [(n, 4_000_000) for n in range(4)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.json", "no trace", "it has no traceEvents"),
        ("empty.json", '{"traceEvents": []}', "has no steps: call profiler.step()"),
        ("ranges.sqlite", None, "has no NVTX ranges"),
        ("missing.json", "", "cannot be read"),
    ],
)
def test_file_that_is_no_profile_ends_with_exit_code_2_and_one_line(
    name: str,
    content: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if content is None:
        export_of_nsys(path, ranges=False)
    elif content:
        path.write_text(content)
    assert main(["import", str(path), "--out", str(out_of(tmp_path)), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (out_of(tmp_path)).exists()


def test_files_must_name_different_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = export_of_nsys(tmp_path / "a.sqlite"), export_of_nsys(tmp_path / "b.sqlite")
    out = ["--out", str(out_of(tmp_path)), "--quiet"]
    assert main(["import", str(one), str(other), *out]) == 2
    assert "does not name its rank: write RANK=" in capsys.readouterr().err
    assert main(["import", f"1={one}", f"1={other}", *out]) == 2
    assert "are both of rank 1" in capsys.readouterr().err
    assert main(["import", f"0={one}", f"1={other}", *out]) == 0
    assert main(["import", f"0={one}", *out]) == 2
    assert "already is a run directory" in capsys.readouterr().err
