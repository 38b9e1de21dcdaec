"""Tests of a job whose roles are on several nodes, which share the run directory only.

A node is a set of namespaces with a host name, a shared memory, a network and a monotonic clock of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.roles.test_drain import open_file, rows
from tests.support.launched import by_shell, on_node, why_no_nodes
from tests.support.processes import ROOT, SCRIPTS, clean_environ
from tests.support.servers import wait_for
from tests.support.warm_python import WarmPython
from torchlens_perf.report.run_report import load_report
from torchlens_perf.roles import drain, table
from torchlens_perf.roles.drain import EventReader
from torchlens_perf.roles.event_file import CODES, LOCK
from torchlens_perf.roles.lanes import draw_lanes
from torchlens_perf.roles.table import read_iterations
from torchlens_perf.run import directory
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rings import memory
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.store.reader import ParquetFolder
from torchlens_perf.store.writer import EncodedFile, TableWriter

SCRIPT = str(SCRIPTS / "role_on_node.py")
ITERATIONS, HOUR_S = 6, 3600
ALONE = (
    "unshare", "--net", "--time", "--monotonic", str(HOUR_S), "--boottime", str(HOUR_S), "--fork",
)  # fmt: skip


def _why_not() -> str:
    reason = why_no_nodes()
    if not reason:
        done = subprocess.run([*ALONE, "true"], capture_output=True, text=True)
        reason = done.stderr.strip() if done.returncode else ""
    return reason


REASON = _why_not()


@pytest.mark.distributed
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_roles_on_three_nodes_are_one_run(tmp_path: Path) -> None:
    """The report that the trainer prints has the samples of the other nodes, at the right times."""
    environ = clean_environ(
        {
            "PYTHONPATH": str(ROOT), "TORCHLENS_PERF_RUN_ID": f"nodes-{os.getpid()}",
            "TORCHLENS_PERF_DIR": str(tmp_path / "runs"),
        }
    )  # fmt: skip
    servers = [
        subprocess.Popen(
            by_shell(node, *ALONE, sys.executable, SCRIPT, role, str(ITERATIONS)),
            cwd=tmp_path,
            env={**environ, "TORCHLENS_PERF_ROLE": role},
        )
        for node, role in (("node-b", "rollout"), ("node-c", "tool"))
    ]
    trainer = WarmPython(
        on_node("node-a", 0, SCRIPT, "trainer", str(ITERATIONS)),
        cwd=tmp_path,
        env={**environ, "TORCHLENS_PERF_ROLE": "trainer"},
        stderr=subprocess.PIPE,
        text=True,
    )
    _, said = trainer.communicate(timeout=110)
    assert [each.wait(20) for each in (trainer, *servers)] == [0, 0, 0], said
    run = RunDirectory(tmp_path / "runs" / environ["TORCHLENS_PERF_RUN_ID"])
    printed = run.report.read_text()
    wait_for(lambda: not list((run.path / "events").glob("*.until")), 20)
    assert not list((run.path / "events").glob("*.until"))
    report: Any = load_report(run, lost_time=False)
    found = report["iterations"]

    assert [each.name for each in (tmp_path / "runs").iterdir()] == [run.run_id]
    assert found.count == ITERATIONS - 1, report["quality"]["notes"]
    assert f"({found.count} of " in printed
    (engine,) = found.engines
    assert (engine.name, engine.samples, engine.tokens) == (
        "rollout (node-b)", 3 * found.count, 30 * found.count,
    )  # fmt: skip
    assert found.roles == {"trainer": 1, "rollout": 1, "tool": 1}
    assert {each.process for each in found.lanes[0].lanes} == {
        "trainer (node-a)", "rollout (node-b)", "tool (node-c)",
    }  # fmt: skip
    # The other nodes' clocks are an hour ahead. On a busy machine, parts take longer than they sleep.
    assert 0.049 < found.parts["generation"] < 1
    assert 0.019 < found.parts["tool"] < 1
    assert found.parts.get("generation wait", 0) + found.parts["tool wait"] < 1
    assert found.parts["sending"] > 0.1
    assert sum(found.parts.values()) == pytest.approx(found.mean_s)
    notes = report["quality"]["notes"]
    assert not [each for each in notes if "clock" in each or "left out" in each]
    assert "generation on rollout (node-b)" in draw_lanes(found.lanes[0])[1]


def write_events(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    ahead_s: float,
    late_s: float,
    batches: Sequence[int] = range(4),
) -> None:
    """Write the events of a trainer, or of an engine on another node, of four iterations.

    ahead_s, late_s: of the node's monotonic clock and of its wall clock.
    """
    memory_of_node = run.path.parent / node
    memory_of_node.mkdir(exist_ok=True)
    monkeypatch.setattr(directory, "_SHARED_MEMORY", memory_of_node)
    role = "trainer" if node == "a-000000" else "rollout"
    file = open_file(run, f"{role}-7-{7 + batches[0]}", role)
    for batch in batches:
        at_s = 100.0 + 10 * batch + ahead_s
        for name, after_s in {
            "trainer": {"sample_sent": 0, "batch_complete": 5, "steps_begin": 5, "steps_end": 9},
            "rollout": {"generation_begin": 1, "generation_end": 4},
        }[role].items():
            file.write(
                CODES[name], "" if "s_" in name and name != "sample_sent" else batch,
                "" if role == "rollout" else batch, -1, 7, 0, round((at_s + after_s) * 1e9),
            )  # fmt: skip
    unix_s = 1e9 - late_s - ahead_s
    monkeypatch.setattr(drain.HostClock, "anchor", lambda self: Anchor(0, round(unix_s * 1e9), 0))
    reader = EventReader(run, node)
    reader.read()
    reader.write(1 << 30, ended=node != "c-000000")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


@pytest.mark.parametrize("late_s", [0.0, -0.5, 1.0002, 30.0])
def test_times_of_another_node_are_those_of_the_trainers_clock(
    late_s: float, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wall clock that is late by more than a sample may wait is corrected, with a note from 1 ms on."""
    write_events(run, monkeypatch, "a-000000", 0.0, 0.0)
    write_events(run, monkeypatch, "b-000000", 5e4, late_s)
    notes: list[str] = []
    recorded, iterations = read_iterations(run, notes)

    begins = [each.last_sample.segments[0].seconds for each in iterations]
    # At the latest, a sample that is sent is generated at once.
    assert begins == pytest.approx([max(0.0, 1 - late_s)] * 3, abs=1e-5)
    assert [each.last_sample.seconds("generation") for each in iterations] == pytest.approx([3] * 3)
    assert {each.last_sample.engine for each in iterations} == {"rollout (b)"}
    assert recorded.pids["rollout (b)"] == ("b", 7)
    assert len(notes) == (late_s > 2)
    assert all("the clock of b is 29.000 s late or more" in each for each in notes)


def test_iterations_that_another_node_may_not_have_written_are_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_events(run, monkeypatch, "a-000000", 0.0, 0.0)
    # The last two iterations end at 129 and at 139.
    monkeypatch.setattr(drain.time, "monotonic_ns", lambda: round((130 + 5e4) * 1e9))
    write_events(run, monkeypatch, "c-000000", 5e4, 0.0)
    notes: list[str] = []
    _, iterations = read_iterations(run, notes)

    assert [each.batch for each in iterations] == ["1", "2"]
    assert notes == [
        "left out: the last 1 of 3 iterations, because another node has not written their events"
    ]


def test_iterations_of_a_long_run_begin_where_the_events_of_all_nodes_were_read(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the newest file of the other node is read."""
    write_events(run, monkeypatch, "b-000000", 5e4, 0.0, (0, 1, 2))
    for path in (run.path / "events").iterdir():
        os.utime(path, (1, 1))
    write_events(run, monkeypatch, "a-000000", 0.0, 0.0, range(8))
    write_events(run, monkeypatch, "b-000000", 5e4, 0.0, (3, 4, 5, 6, 7))
    monkeypatch.setattr(table, "_MOST_EVENTS", 40)
    assert [each.batch for each in read_iterations(run, [])[1]] == ["5", "6", "7"]


@pytest.mark.distributed
def test_sidecar_takes_over_from_the_reader_of_a_node(tmp_path: Path) -> None:
    """No event is read twice, and none is lost."""
    run = RunDirectory(tmp_path / f"taken-{os.getpid()}")
    run.create()
    program = (
        "import time, torchlens_perf as perf\n"
        "for number in range(int(input())): perf.event('tool_begin', id=number)\n"
        "print('written', flush=True)\n"
        "for number in range(int(input())): perf.event('tool_end', id=number)\n"
        "print('written', flush=True)\n"
        "input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=clean_environ(
            {
                "PYTHONPATH": str(ROOT), "TORCHLENS_PERF_RUN_ID": run.run_id, "TORCHLENS_PERF_ROLE": "tool",
                "TORCHLENS_PERF_DIR": str(tmp_path),
            }
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("5\n")
        process.stdin.flush()
        process.stdout.readline()
        wait_for(lambda: any((run.path / "events").glob("*.parquet")), 30)
        lock = SidecarLock(directory.sidecar_lock_path(run.run_id))
        assert lock.acquire()
        directory.sidecar_log_path(lock.path).touch()
        process.stdin.write("3\n")
        process.stdin.flush()
        process.stdout.readline()
        node = next((run.path / "events").glob("*.until")).stem
        reader = None
        while reader is None:
            reader = drain.read_events(run, node, None, disk_bytes=1 << 30, ended=True)
        assert not memory.is_held(lock.path.with_name(LOCK))
        assert directory.sidecar_log_path(lock.path).exists()
    finally:
        process.communicate("\n", 20)
        run.remove_local_leftovers()
        lock.remove()
    found = [(each["event"], each["id"]) for each in rows(run)]
    assert sorted(found) == sorted(
        [("tool_begin", str(each)) for each in range(5)]
        + [("tool_end", str(each)) for each in range(3)]
    )


def test_server_that_two_nodes_ask_is_one_process_unless_it_is_their_own(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes record requests to an address of the network, and to one of the node itself."""
    write_events(run, monkeypatch, "a-000000", 0.0, 0.0)
    for node in ("b-000000", "c-000000"):
        memory_of_node = run.path.parent / node
        memory_of_node.mkdir()
        monkeypatch.setattr(directory, "_SHARED_MEMORY", memory_of_node)
        file = open_file(run, "trainer-7-7", "trainer")
        for address in (
            "10.0.0.5:80", "engine.internal", "127.0.0.1:80", "0.0.0.0:80", "[::]:80", "[::1]:80",
        ):  # fmt: skip
            server = file.number_of_other("rollout", address)
            file.write(CODES["generation_end"], "x", "", -1, -1, server)
        function = file.number_of_other("tool", "between turns")
        file.write(CODES["tool_end"], "x", "", -1, -1, function)
        reader = EventReader(run, node)
        reader.read()
        reader.write(1 << 30, ended=True)

    roles = table.read_events(run, []).roles
    own = ("0.0.0.0:80", "127.0.0.1:80", "[::1]:80", "[::]:80", "between turns")
    assert sorted(name for name, role in roles.items() if role in ("rollout", "tool")) == sorted(
        ["10.0.0.5:80", "engine.internal", *(f"{each} ({node})" for each in own for node in "bc")]
    )


def write_steps(run: RunDirectory, node: str, *starts_s: float) -> None:
    """Write a file of a rank's steps, each of one second."""
    columns = {
        "rank": [0] * len(starts_s), "step": [round(each) for each in starts_s],
        "start_ns": [round(each * 1e9) for each in starts_s],
        "duration_ns": [10**9] * len(starts_s), "own_ns": [10**9] * len(starts_s),
    }  # fmt: skip
    encoded = EncodedFile()
    encoded.add_rows(pa.table(columns))
    TableWriter([run.steps], node).write_files({run.steps: encoded}, 1 << 30)


@pytest.mark.parametrize("has_events", [False, True])
def test_steps_of_a_node_are_read_whatever_those_of_another_are(
    has_events: bool, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node has no events, or its steps ended before the first iteration began."""
    write_events(run, monkeypatch, "a-000000", 0.0, 0.0)
    for node in ["engine-000000", "b-000000"][: 1 + has_events]:
        write_events(run, monkeypatch, node, 0.0, 0.0)
    for begin_s in (115.0, 125.0, 135.0):
        write_steps(run, "a-000000", *(begin_s + each for each in range(1, 4)))
    write_steps(run, "b-000000", 50.0)
    write_steps(run, "b-000000", 60.0)
    recorded, iterations = read_iterations(run, [])
    steps, per_iteration = table.read_trainer_steps(run, iterations, recorded.shifts, [])

    assert sorted(each.step for each in steps) == [116, 117, 118, 126, 127, 128, 136, 137, 138]
    assert per_iteration == 4


def test_newest_events_of_a_copied_run_are_read(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has other times of files. Here, the file that was written first has the last time."""
    for batches in ((0, 1, 2, 3), (4, 5, 6, 7)):
        write_events(run, monkeypatch, "a-000000", 0.0, 0.0, batches)
        write_events(run, monkeypatch, "b-000000", 5e4, 0.0, batches)
    for number, path in enumerate(sorted((run.path / "events").iterdir())):
        os.utime(path, (9 - number, 9 - number))
    monkeypatch.setattr(table, "_MOST_EVENTS", 20)
    assert [each.batch for each in read_iterations(run, [])[1]] == ["6", "7"]


def test_node_that_joins_late_takes_no_iterations_from_a_long_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of the late node are read, so it has no earlier events."""
    for batches in ((0, 1, 2, 3), (4, 5, 6, 7)):
        write_events(run, monkeypatch, "a-000000", 0.0, 0.0, batches)
        write_events(run, monkeypatch, "b-000000", 5e4, 0.0, batches)
    write_events(run, monkeypatch, "late-000000", 7e4, 0.0, (7,))
    monkeypatch.setattr(table, "_MOST_EVENTS", 20)
    recorded, iterations = read_iterations(run, [])

    assert "rollout (late)" in recorded.roles
    assert [each.batch for each in iterations] == ["6", "7"]


def test_iterations_written_while_the_report_reads_are_left_out(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node writes the events of the last two iterations after the files were listed."""
    write_events(run, monkeypatch, "a-000000", 0.0, 0.0)
    write_events(run, monkeypatch, "b-000000", 0.0, 0.0)
    monkeypatch.setattr(drain.time, "monotonic_ns", lambda: round((119.5 + 5e4) * 1e9))
    write_events(run, monkeypatch, "c-000000", 5e4, 0.0, (0, 1))

    class ListedBefore(ParquetFolder):
        def read_each(self, use: Any) -> Any:
            if len(list((run.path / "events").glob("c-*.parquet"))) == 1:
                monkeypatch.setattr(drain.time, "monotonic_ns", lambda: round((150 + 5e4) * 1e9))
                write_events(run, monkeypatch, "c-000000", 5e4, 0.0, (2, 3))
            return super().read_each(use)

    monkeypatch.setattr(table, "ParquetFolder", ListedBefore)
    assert [each.batch for each in read_iterations(run, [])[1]] == ["1"]
    monkeypatch.undo()
    assert [each.batch for each in read_iterations(run, [])[1]] == ["1", "2", "3"]
