"""Tests of the sidecar with real ring files: live and dead ranks, restarts, and its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.findings import hang
from tests.support.in_memory import InMemoryExporter
from tests.support.ranks import HOST, Rank, make_run
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.exporters import FIRST_TRACED_STEPS, steps_traced_by_number
from torchlens_perf.report.build import build_report
from torchlens_perf.run.directory import RunDirectory, create_local_folders, sidecar_lock_path
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.ring import Kind
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.sidecar.schedule import MAX_WAITING_RECORDS, Schedule
from torchlens_perf.verdicts import node_state

WORK = {"data": 1, "forward": 4, "communication": 2, "backward": 6, "host": 1}


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest):
    made = make_run(
        tmp_path, f"{request.node.name[:40]}-{os.getpid()}".replace("[", "-").replace("]", "")
    )
    yield made
    for folder in create_local_folders(made.run_id):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def sidecar(
    run: RunDirectory,
    exporter: InMemoryExporter | None = None,
    host: str = HOST,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Sidecar, list[dict[str, Any]]]:
    """Return a sidecar and the list of the sidecar's report requests."""
    asked: list[RankFacts] = []
    made = Sidecar(run, host, exporter, lambda run, facts: asked.append(facts), clock=clock)
    return made, asked


def finish(
    run: RunDirectory, host: str = HOST, exporter: InMemoryExporter | None = None
) -> list[dict[str, Any]]:
    """Run a sidecar to its end."""
    made, asked = sidecar(run, exporter, host)
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    assert not run_sidecar(made, lock)
    return asked


def report(run: RunDirectory) -> dict[str, Any]:
    return build_report(run.run_id, node_state.load_all(run))


def dead_process() -> dict[str, int]:
    """Return pid and start time of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    from torchlens_perf.run.processes import process_start_ticks

    started = process_start_ticks(child.pid)
    child.kill()
    child.wait()
    return {"pid": child.pid, "process_started": started or 0}


def test_all_steps_of_two_ranks_are_saved_and_reported(run: RunDirectory) -> None:
    """The rings are removed. Rank 0's settings are passed to the report."""
    ranks = [Rank(run, rank) for rank in range(2)]
    ranks[0].steps(50, **WORK)
    ranks[1].steps(50, **{**WORK, "forward": 9})
    ranks[1].close()
    ranks[0].close(columns=77, color=False)
    asked = finish(run)
    value = report(run)

    assert [rank["steps"] for rank in value["ranks"]] == [50, 50]
    assert [rank["state"] for rank in value["ranks"]] == ["closed", "closed"]
    assert (value["quality"]["lost"], value["quality"]["coverage"], value["run"]["live"]) == (
        0,
        1.0,
        False,
    )
    assert value["quality"]["records"] == 2 * 50 * 5
    assert value["verdicts"][0].kind == "straggler"
    assert (value["verdicts"][0].rank, value["verdicts"][0].phase) == (1, "forward")
    steps = pd.read_parquet(run.steps)
    assert steps.groupby("rank").size().to_dict() == {0: 50, 1: 50}
    assert set(steps["duration_ns"]) == {14_000_000, 19_000_000}
    assert asked[0].report.columns == 77
    assert not any(rank.ring_path.exists() for rank in ranks)
    assert not sidecar_lock_path(run.run_id).exists()


def test_report_of_a_live_run_has_the_steps_so_far(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    made, _ = sidecar(run)
    rank.steps(20, **WORK)
    made.read_rings()
    made.count_records()
    made.save_state()
    rank.steps(7, **WORK)
    first = report(run)
    made.read_rings()
    made.count_records()
    made.save_state()
    second = report(run)

    assert (first["ranks"][0]["steps"], second["ranks"][0]["steps"]) == (20, 27)
    assert (first["run"]["live"], first["run"]["ended"], first["ranks"][0]["state"]) == (
        True,
        None,
        "running",
    )
    assert made.sources.may_get_more_records()
    rank.close()
    made.close()


def test_killed_rank_keeps_all_finished_steps(run: RunDirectory) -> None:
    """The report shows that the rank is dead, and which spans were open."""
    rank = Rank(run, 0, 1, identity=dead_process())
    rank.steps(33, **WORK)
    rank.begin(Kind.BACKWARD, "backward")
    finish(run)
    value = report(run)

    assert (value["ranks"][0]["steps"], value["ranks"][0]["state"]) == (33, "died")
    assert value["ranks"][0]["inside"] == ["backward"]
    assert value["quality"]["lost"] == 0
    assert not rank.ring_path.exists()
    rank.session.recorder.abandon()


@pytest.mark.parametrize("saved", ["state only", "segment and state", "segment only"])
def test_restarted_sidecar_counts_every_record_once(run: RunDirectory, saved: str) -> None:
    """A sidecar may be killed at any point. The next sidecar counts and saves each record once."""
    rank = Rank(run, 0, 1)
    first, _ = sidecar(run)
    rank.steps(10, **WORK)
    first.read_rings()
    first.count_records()
    state_path = run.node_state_path(HOST)
    if saved == "state only":
        first.save_state()
    else:
        first.save_records()
    if saved == "segment only":
        state_path.unlink()
    first.close()  # The sidecar is killed here, so the contents of its memory are lost.
    rank.steps(15, **WORK)
    rank.close()
    finish(run)
    value = report(run)
    spans = pd.read_parquet(run.spans)

    assert value["ranks"][0]["steps"] == 25
    assert (value["quality"]["records"], value["quality"]["lost"]) == (25 * 5, 0)
    assert sorted(spans["sequence"]) == list(range(25 * 5))
    assert pd.read_parquet(run.steps)["step"].tolist() == list(range(25))


def test_overwritten_records_are_counted_as_lost(run: RunDirectory) -> None:
    """The report says how to avoid the loss."""
    rank = Rank(run, 0, 1, ring_records=1024)
    rank.steps(1000, **WORK)
    rank.close()
    finish(run)
    value = report(run)

    assert value["quality"]["lost"] == 5000 - 1024
    assert value["quality"]["records"] == 1024
    assert value["ranks"][0]["steps"] == 1024 // 5 + (1024 % 5 > 0)
    assert any("Increase ring_records" in note for note in value["quality"]["notes"])


def test_invalid_ring_file_is_noted_and_other_rings_are_read(
    run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "no-ring").write_bytes(b"x" * 300_000)
    run.register_ring(HOST, tmp_path / "no-ring")
    run.register_ring(HOST, tmp_path / "missing")
    rank = Rank(run, 0, 1)
    rank.steps(12, **WORK)
    rank.close()
    finish(run)
    value = report(run)

    assert value["ranks"][0]["steps"] == 12
    assert any("no-ring could not be read" in note for note in value["quality"]["notes"])


def test_every_step_is_exported_once_and_in_order(run: RunDirectory) -> None:
    """Sampled steps are exported as complete traces."""
    exporter = InMemoryExporter()
    rank = Rank(run, 0, 1, trace_every=10)
    made, _ = sidecar(run, exporter)
    for _ in range(5):
        rank.steps(5, **WORK)
        made.read_rings()
        made.count_records()
        made.export_results()
    made.close()
    rank.close()

    steps = np.concatenate([batch.steps.step for batch in exporter.batches])
    traces = exporter.traces
    assert steps.tolist() == list(range(25))
    assert [trace.step for trace in traces] == [*range(FIRST_TRACED_STEPS), 10, 20]
    assert [span.name for span in traces[3].spans] == [
        "data",
        "forward",
        "communication",
        "backward",
    ]
    assert traces[3].duration_ns == 14_000_000


def test_first_steps_and_every_nth_step_are_traced() -> None:
    """If the sampling interval is 0, no step is traced."""
    assert steps_traced_by_number(list(range(25)), 10) == {0, 1, 2, 10, 20}
    assert steps_traced_by_number(list(range(25)), 0) == set()


def test_replay_exports_the_same_steps_and_traces(run: RunDirectory) -> None:
    """The replay does not change the saved state."""
    live, again = InMemoryExporter(), InMemoryExporter()
    rank = Rank(run, 0, 1)
    rank.steps(30, **WORK)
    rank.close()
    finish(run, exporter=live)
    state = run.node_state_path(HOST).read_text()
    done = replay(run, again)

    def columns(exporter: InMemoryExporter, field: str) -> list[Any]:
        return np.concatenate([getattr(batch.steps, field) for batch in exporter.batches]).tolist()

    assert (done.steps, done.records, done.notes) == (30, 150, [])
    for field in ("step", "duration_ns", "parts_ns", "memory_bytes", "flags"):
        assert columns(again, field) == columns(live, field)
    assert [trace.step for trace in again.traces] == list(range(FIRST_TRACED_STEPS))
    assert again.traces == live.traces
    assert run.node_state_path(HOST).read_text() == state


def test_replay_rebuilds_a_lost_state_from_the_segments(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(30, **WORK)
    rank.close()
    finish(run)
    before = report(run)
    run.node_state_path(HOST).unlink()
    replay(run, None)
    after = report(run)

    assert after["steps"] == before["steps"]
    assert after["ranks"][0]["phases"] == before["ranks"][0]["phases"]
    assert "rebuilt from the records that are kept" in after["quality"]["notes"]


def test_lock_admits_one_sidecar_per_node(run: RunDirectory) -> None:
    """The lock of a killed sidecar is free at once."""
    path = sidecar_lock_path(run.run_id)
    first, second = SidecarLock(path), SidecarLock(path)

    assert first.acquire()
    assert not second.acquire()
    first.close()
    assert second.acquire()
    second.remove()
    assert not path.parent.exists()


def test_lock_on_a_removed_file_is_ignored(run: RunDirectory) -> None:
    """A process that opened the removed file locks the new file instead."""
    path = sidecar_lock_path(run.run_id)
    holder, late, other = SidecarLock(path), SidecarLock(path), SidecarLock(path)
    assert holder.acquire()
    late._descriptor = os.open(path, os.O_RDWR)
    path.unlink()
    holder.close()

    assert late.acquire()
    assert path.exists()
    assert not other.acquire()
    late.remove()


def test_ring_registered_during_the_release_of_the_lock_is_read(run: RunDirectory) -> None:
    early = Rank(run, 0, 1)
    early.steps(10, **WORK)
    early.close()

    class Interrupted(SidecarLock):
        def close(self) -> None:
            super().close()
            late = Rank(run, 0, 1, identity={"attempt": 1})
            late.steps(20, **WORK)
            late.close()

    made, _ = sidecar(run)
    lock = Interrupted(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    assert run_sidecar(made, lock)
    SidecarLock.close(lock)
    finish(run)
    value = report(run)

    assert (value["run"]["attempt"], value["ranks"][0]["steps"]) == (1, 20)


def test_sidecar_waits_for_an_elastic_restart_while_torchrun_lives(run: RunDirectory) -> None:
    """After a normal end of the ranks, the sidecar does not wait."""
    elastic = {"elastic": True, "launcher_pid": os.getpid()}
    died = Rank(run, 0, 1, identity={**elastic, **dead_process()})
    died.steps(5, **WORK)
    made, _ = sidecar(run)
    made.read_rings()

    assert made.sources.may_get_more_records()

    again = Rank(run, 0, 1, identity={**elastic, "attempt": 1})
    again.steps(9, **WORK)
    again.close()
    made.read_rings()
    made.count_records()
    made.save_records()

    assert not made.sources.may_get_more_records()
    value = report(run)
    assert (value["run"]["attempt"], value["ranks"][0]["steps"], value["ranks"][0]["state"]) == (
        1,
        9,
        "closed",
    )
    assert set(pd.read_parquet(run.steps)["attempt"]) == {0, 1}
    made.close()
    died.session.recorder.abandon()


def run_round(made: Sidecar, now_s: float = 0.0) -> None:
    """Run one round of the sidecar without its waiting."""
    made.read_rings()
    made.count_records()
    made.judge_ranks(now_s)
    made.export_results()


def two_ranks(run: RunDirectory, attempt: int = 0) -> tuple[Rank, Rank]:
    first, second = (Rank(run, rank, identity={"attempt": attempt}) for rank in range(2))
    return first, second


def test_findings_about_a_rank_end_when_it_is_restarted(run: RunDirectory) -> None:
    exporter = InMemoryExporter()
    made, _ = sidecar(run, exporter)
    before = two_ranks(run)
    before[0].steps(60, **WORK)
    before[1].steps(60, **{**WORK, "forward": 9})
    run_round(made)
    assert [each.rank for each in made.state.findings.episodes] == [1]
    assert [(each.change, each.attempt) for each in exporter.alerts] == [("started", 0)]

    for rank in before:
        rank.close()
    after = two_ranks(run, 1)
    made.read_rings()
    made.export_results()  # The new processes have not been judged yet.
    made.save_state()
    state = node_state.load(run.node_state_path(HOST))
    assert (state.findings.episodes, state.findings.groups) == ((), ())
    for count in (0, 2, 8, 50):
        for rank in after:
            rank.steps(count, **WORK)
        run_round(made)
        assert exporter.assessment is not None
        assert (exporter.assessment.identity.attempt, exporter.assessment.findings.episodes) == (
            1,
            (),
        )
    assert made.state.findings.rows
    assert [(each.change, each.attempt, each.rank) for each in exporter.alerts] == [
        ("started", 0, 1),
        ("ended", 0, 1),
    ]
    assert exporter.alerts[1].text.endswith("It is over: the job was restarted.")
    for rank in after:
        rank.close()
    made.close()


def test_hang_finding_ends_with_its_attempt(run: RunDirectory) -> None:
    exporter = InMemoryExporter()
    made, _ = sidecar(run, exporter)
    before = two_ranks(run)
    for rank in before:
        rank.steps(10, **WORK)
    run_round(made)
    made.monitor.job._hangs.hang = hang()
    made.judge_ranks(0.1)
    made.export_results()
    after = two_ranks(run, 1)
    for now_s in (0.2, 0.3, 1.5):
        run_round(made, now_s)

    assert [(each.kind, each.change, each.attempt) for each in exporter.alerts] == [
        ("hang", "started", 0),
        ("hang", "ended", 0),
    ]
    for rank in (*before, *after):
        rank.close()
    made.close()


def test_straggler_has_one_alert_across_a_restart_of_the_sidecar(run: RunDirectory) -> None:
    """One alert reports the start, and one reports the end."""
    ranks, alerts = two_ranks(run), []
    for steps, forward in ((60, 9), (4, 9), (12, 9), (60, 9), (200, 4)):
        exporter = InMemoryExporter()
        made, _ = sidecar(run, exporter)
        for _ in range(steps // 4):
            ranks[0].steps(4, **WORK)
            ranks[1].steps(4, **{**WORK, "forward": forward})
            run_round(made)
        made.save_records()
        made.close()
        alerts += exporter.alerts
    (only,) = node_state.load(run.node_state_path(HOST)).findings.episodes

    assert [alert.change for alert in alerts] == ["started", "ended"]
    assert alerts[0].about == alerts[1].about
    assert (only.rank, only.since_step) == (1, alerts[0].since_step)
    assert abs((only.until_step or 0) - 136) <= 16
    for rank in ranks:
        rank.close()


def test_hang_finding_lasts_across_a_restart_of_the_sidecar(run: RunDirectory) -> None:
    """The new sidecar keeps the finding before it has found the hang itself.

    A step ends the finding.
    """
    ranks, changes = two_ranks(run), []
    for rank in ranks:
        rank.steps(10, **WORK)
    for found in (hang(step=10), None):
        exporter = InMemoryExporter()
        made, _ = sidecar(run, exporter)
        run_round(made)
        made.monitor.job._hangs.hang = found
        made.judge_ranks(0.1)
        made.export_results()
        made.save_records()
        changes.append([(each.kind, each.change) for each in exporter.alerts])
        if found is not None:
            made.close()
    ranks[0].steps(1, **WORK)
    run_round(made, 0.2)

    assert changes == [[("hang", "started")], []]
    assert [(each.kind, each.change) for each in exporter.alerts] == [("hang", "ended")]
    made.close()
    for rank in ranks:
        rank.close()


def test_changes_of_a_hang_are_saved_at_once(run: RunDirectory) -> None:
    """Changes are the hang's start, other blocking ranks, and the hang's end.

    A longer duration of the hang does not count as a change.
    """
    ranks = two_ranks(run)
    made, _ = sidecar(run)
    for rank in ranks:
        rank.steps(10, **WORK)
    run_round(made)
    news = []
    began, lasts = hang(step=10), hang(step=10, since_s=20.0)
    for found in (
        None,
        began,
        lasts,
        hang(step=10, ranks=(1, 2)),
        hang(step=10, kind="silent"),
        None,
    ):
        made.monitor.job._hangs.hang = found
        made.judge_ranks(0.1)
        news.append(made.has_unsaved_hang())
        made.save_state()
        assert not made.has_unsaved_hang()
    made.close()
    for rank in ranks:
        rank.close()

    assert news == [False, True, False, True, True, True]


def test_buffered_steps_of_old_processes_are_dropped_after_a_restart(run: RunDirectory) -> None:
    """New processes begin with step 0."""
    made, left = sidecar(run, InMemoryExporter())[0], list[int]()
    for process, steps in ((dead_process(), 60), ({}, 0)):
        rank = Rank(
            run, 0, 1, trace_every=10, identity={"elastic": True, "launcher_pid": 1, **process}
        )
        rank.steps(steps, **WORK)
        run_round(made)
        left.append(len(made.monitor.job.traces._buffer.entries_with_step(37)))
    made.close()
    rank.close()

    assert left == [1, 0]


def test_new_processes_of_the_same_attempt_have_their_own_alerts(run: RunDirectory) -> None:
    """The set of nodes has changed, and a rank is as slow as the previous process of that rank."""
    exporter, attempts = InMemoryExporter(), []
    made, _ = sidecar(run, exporter)
    for process in (dead_process(), {}):
        ranks = [
            Rank(run, rank, identity={"elastic": True, "launcher_pid": 1, **process})
            for rank in range(2)
        ]
        ranks[0].steps(60, **WORK)
        ranks[1].steps(60, **{**WORK, "forward": 9})
        for rank in ranks:
            rank.close()
        run_round(made)
        attempts.append([(each.change, each.rank) for each in exporter.alerts])
    made.save_records()
    made.close()
    again = InMemoryExporter()
    replay(run, again)

    assert attempts == [[("started", 1)], [("started", 1), ("ended", 1), ("started", 1)]]
    first, ended, second = exporter.alerts
    assert (first.since_step, ended.about) == (second.since_step, first.about)
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.id != second.id
    assert [each.id for each in again.alerts] == [second.id]


@pytest.mark.parametrize(
    "broken",
    [
        "job.add_steps",
        "cluster.exchange_data",
        "job.end_rank",
        "alerts.update_alerts",
        "metrics.take_signals",
    ],
)
def test_records_are_saved_although_judging_fails(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The report and the log contain the error."""
    monkeypatch.setenv(RAISE, "0")
    for rank in two_ranks(run):
        rank.steps(50, **WORK)
        rank.close()
    exporter = InMemoryExporter()
    made, _ = sidecar(run, exporter)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("not enough values to unpack")

    owner, _, name = broken.rpartition(".")
    monkeypatch.setattr(type(attrgetter(owner)(made.monitor)), name, fails)
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    assert not run_sidecar(made, lock)
    value = report(run)

    assert [rank["steps"] for rank in value["ranks"]] == [50, 50]
    assert (
        len(pd.read_parquet(run.steps))
        == sum(len(batch.steps) for batch in exporter.batches)
        == 100
    )
    places = {"alerts": "raising alerts", "metrics": "looking for causes"}
    place = places.get(owner, "judging the ranks")
    assert [note for note in value["quality"]["notes"] if note.startswith(f"{place} failed")] == [
        f"{place} failed in the sidecar, and its results are missing: see nodes/{HOST}.log"
    ]
    assert "ValueError: not enough values to unpack" in caplog.text
    assert swallowed.by_place.pop(place) > 0


def test_rank_without_records_is_reported_as_missing(run: RunDirectory) -> None:
    rank = Rank(run, 0, 4, identity={"local_world_size": 1})
    rank.steps(10, **WORK)
    rank.close()
    finish(run)

    assert "3 of 4 ranks are missing: 1, 2, 3" in report(run)["quality"]["notes"]


def test_records_wait_until_a_full_disk_has_space_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records wait until the run directory can be written again."""
    from torchlens_perf.store import writer

    rank = Rank(run, 0, 1)
    rank.steps(10, **WORK)
    made, _ = sidecar(run)
    make = writer.pq.ParquetWriter

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    made.read_rings()
    made.count_records()
    monkeypatch.setattr(writer.pq, "ParquetWriter", full)
    with pytest.raises(OSError, match="No space left"):
        made.save_records()
    monkeypatch.setattr(writer.pq, "ParquetWriter", make)
    rank.steps(5, **WORK)
    rank.close()
    made.read_rings()
    made.count_records()
    made.save_records()
    made.close()

    assert sorted(pd.read_parquet(run.spans)["sequence"]) == list(range(15 * 5))


class TestSchedule:
    def test_poll_interval_depends_on_the_fill_level_of_the_ring(self) -> None:
        """The interval is 5 ms for a ring that fills fast, 0.5 s for a slow and 4 s for an idle one."""
        schedule = Schedule(0.0)
        for _ in range(20):
            schedule.adapt_poll_interval(0.5)
        assert schedule.poll_s == 0.005
        for _ in range(50):
            schedule.adapt_poll_interval(0.01)
        assert schedule.poll_s == 0.5
        for _ in range(50):
            schedule.adapt_poll_interval(0.0)
        assert schedule.poll_s == 4.0
        schedule.has_other_nodes = True  # They wait for this one.
        schedule.adapt_poll_interval(0.0)
        assert schedule.poll_s == 2.0

    def test_segments_are_written_less_often_in_a_long_run(self) -> None:
        """The interval grows from 5 s to a minute. Many records cause a segment at once."""
        early, late = Schedule(0.0), Schedule(0.0)
        assert not early.is_segment_due(4.9, 100, 0.1)
        assert early.is_segment_due(5.0, 100, 0.1)
        assert late.is_segment_due(10_000.0, 100, 0.1)
        assert not late.is_segment_due(10_059.0, 100, 0.1)
        assert late.is_segment_due(10_059.0, 1 << 18, 0.1)
        assert late.is_segment_due(10_120.0, 100, 0.1)

    def test_segment_is_written_before_half_of_a_ring_is_unsaved(self) -> None:
        """The interval between such segments is at least 5 s."""
        schedule = Schedule(0.0)
        assert schedule.is_segment_due(1_000.0, 100, 0.1)
        assert not schedule.is_segment_due(1_004.9, 40_000, 0.6)
        assert not schedule.is_segment_due(1_020.0, 30_000, 0.4)
        assert schedule.is_segment_due(1_020.0, 40_000, 0.6)

    def test_failed_segment_is_retried_after_the_usual_interval(self) -> None:
        """After a failure, the number of records does not change the interval."""
        schedule = Schedule(0.0)
        assert schedule.is_segment_due(0.1, 1 << 18, 4.0)
        assert not schedule.is_segment_due(0.2, 1 << 18, 4.0, failing=True)
        assert schedule.is_segment_due(5.2, 1 << 18, 4.0, failing=True)
        assert schedule.is_segment_due(5.3, 1 << 18, 4.0)

    def test_state_is_saved_less_often_if_saving_is_slow(self) -> None:
        schedule = Schedule(0.0)
        assert schedule.is_save_due(0.2, 0.0)  # The first save is soon after the start.
        assert not schedule.is_save_due(5.0, 0.01)
        assert schedule.is_save_due(5.3, 0.01)
        assert not schedule.is_save_due(25.0, 0.05)
        assert schedule.is_save_due(25.4, 0.05)

    def test_new_findings_are_saved_at_once(self) -> None:
        """Saving a finding does not change the time of the regular saves."""
        schedule = Schedule(0.0)
        assert schedule.is_save_due(0.2, 0.0)
        assert schedule.is_save_due(0.3, 0.05, news=True)
        assert not schedule.is_save_due(20.2, 0.05)
        assert schedule.is_save_due(20.4, 0.05)

    def test_records_are_counted_less_often_if_counting_is_slow(self) -> None:
        """The interval grows from 1 s to 5 s."""
        for took_s, period_s in ((0.001, 1.0), (0.005, 2.0), (0.5, 5.0)):
            schedule = Schedule(0.0)
            assert schedule.is_count_due(100.0, took_s)
            assert not schedule.is_count_due(100.0 + 0.99 * period_s, took_s)
            assert schedule.is_count_due(100.0 + 1.01 * period_s, took_s)

    def test_many_records_are_counted_at_once(self) -> None:
        """Records that wait take memory."""
        schedule = Schedule(0.0)
        assert schedule.is_count_due(100.0, 1.0)
        assert not schedule.is_count_due(100.1, 1.0, MAX_WAITING_RECORDS - 1)
        assert schedule.is_count_due(100.1, 1.0, MAX_WAITING_RECORDS)

    def test_records_are_counted_more_often_for_a_live_view(self) -> None:
        """While a process shows the live view, counting may use a twentieth of the time."""
        for took_s, period_s in ((0.001, 1.0), (0.05, 1.0), (0.1, 2.0), (0.5, 5.0)):
            schedule = Schedule(0.0)
            assert schedule.is_count_due(100.0, took_s, watched=True)
            assert not schedule.is_count_due(100.0 + 0.99 * period_s, took_s, watched=True)
            assert schedule.is_count_due(100.0 + 1.01 * period_s, took_s, watched=True)

    def test_ranks_are_judged_at_the_requested_interval(self) -> None:
        """The cost of counting does not change the interval. A young run is judged sooner."""
        schedule = Schedule(0.0)
        assert schedule.is_judging_due(0.2, 1.0)
        assert schedule.is_judging_due(50.0, 1.0)
        assert not schedule.is_judging_due(50.9, 1.0)
        assert not schedule.is_judging_due(51.1, 2.0)
        assert schedule.is_judging_due(51.1, 1.0)

    def test_idle_ranks_are_counted_and_judged_rarely_until_they_record(self) -> None:
        schedule = Schedule(0.0)
        assert schedule.is_count_due(100.0, 0.001)
        assert schedule.is_judging_due(100.0, 1.0)
        for _ in range(50):
            schedule.adapt_poll_interval(0.0)
        assert not schedule.is_count_due(104.9, 0.001)
        assert not schedule.is_judging_due(104.9, 1.0)
        assert schedule.is_count_due(104.9, 0.001, watched=True)
        assert schedule.is_judging_due(105.1, 1.0)
        schedule.adapt_poll_interval(0.01)
        assert schedule.is_count_due(106.0, 0.001)
        assert schedule.is_judging_due(106.2, 1.0)


@pytest.mark.distributed
def test_sidecar_can_be_started_by_hand_after_a_kill(run: RunDirectory) -> None:
    """SIGKILL ends the first process in the middle of a run. The second one finishes the run."""
    rank = Rank(run, 0, 1)
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run.path), "--host", HOST]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    rank.steps(40, **WORK)
    deadline = time.monotonic() + 20
    while not run.node_state_path(HOST).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    second = subprocess.run(command, capture_output=True, text=True)
    first.kill()
    first.wait()
    rank.steps(40, **WORK)
    rank.close()
    third = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (second.returncode, "runs on this node already" in second.stderr) == (2, True)
    assert third.returncode == 0
    assert (
        json.loads(run.node_state_path(HOST).read_text())["processes"][rank.identity.key]["ended"]
        == "closed"
    )
    assert report(run)["ranks"][0]["steps"] == 80
    assert run.report.read_text().count("80 steps") == 1
