"""The sidecar over real ring files: live and dead ranks, restarts, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support.findings import hang
from tests.support.ranks import HOST, Rank, make_run
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.exporters import FIRST_TRACED_STEPS, traced_steps
from torchlens_perf.exporters.choice.said import EVERYTHING
from torchlens_perf.exporters.in_memory import InMemoryExporter
from torchlens_perf.report.build import build
from torchlens_perf.run.directory import RunDirectory, local_folders, sidecar_lock
from torchlens_perf.run.ring import Kind
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.replay import replay
from torchlens_perf.sidecar.schedule import Schedule
from torchlens_perf.verdicts import node_state

WORK = {"data": 1, "forward": 4, "communication": 2, "backward": 6, "host": 1}


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest):
    made = make_run(tmp_path, f"{request.node.name[:40]}-{os.getpid()}".replace("[", "-").replace("]", ""))
    yield made
    for folder in local_folders(made.run_id):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def sidecar(
    run: RunDirectory, exporter: InMemoryExporter | None = None, host: str = HOST
) -> tuple[Sidecar, list[dict[str, Any]]]:
    """A sidecar, and what it was asked to report."""
    asked: list[dict[str, Any]] = []
    return Sidecar(run, host, exporter, lambda run, settings: asked.append(settings)), asked


def finish(run: RunDirectory, host: str = HOST, exporter: InMemoryExporter | None = None) -> list[dict[str, Any]]:
    """Runs a sidecar to its end."""
    made, asked = sidecar(run, exporter, host)
    lock = SidecarLock(sidecar_lock(run.run_id))
    assert lock.acquire()
    assert not run_sidecar(made, lock, exporter)
    return asked


def report(run: RunDirectory) -> dict[str, Any]:
    return build(run.run_id, node_state.load_all(run))


def dead_process() -> dict[str, int]:
    """Pid and start time of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    from torchlens_perf.run.processes import process_started

    started = process_started(child.pid)
    child.kill()
    child.wait()
    return {"pid": child.pid, "process_started": started or 0}


def test_two_ranks_from_start_to_end(run: RunDirectory) -> None:
    """Both ranks' steps are in state, segments and report; the rings are gone; rank 0's wish is passed on."""
    ranks = [Rank(run, rank) for rank in range(2)]
    ranks[0].steps(50, **WORK)
    ranks[1].steps(50, **{**WORK, "forward": 9})
    ranks[1].close()
    ranks[0].close(columns=77, color=False)
    asked = finish(run)
    value = report(run)

    assert [rank["steps"] for rank in value["ranks"]] == [50, 50]
    assert [rank["state"] for rank in value["ranks"]] == ["closed", "closed"]
    assert (value["quality"]["lost"], value["quality"]["coverage"], value["run"]["live"]) == (0, 1.0, False)
    assert value["quality"]["records"] == 2 * 50 * 5
    assert value["verdicts"][0]["kind"] == "straggler"
    assert (value["verdicts"][0]["rank"], value["verdicts"][0]["phase"]) == (1, "forward")
    steps = pd.read_parquet(run.steps)
    assert steps.groupby("rank").size().to_dict() == {0: 50, 1: 50}
    assert set(steps["duration_ns"]) == {14_000_000, 19_000_000}
    assert asked[0]["columns"] == 77
    assert not any(rank.ring_path.exists() for rank in ranks)
    assert not sidecar_lock(run.run_id).exists()


def test_live_report(run: RunDirectory) -> None:
    """While the ranks run, the state on disk shows what has been so far."""
    rank = Rank(run, 0, 1)
    made, _ = sidecar(run)
    rank.steps(20, **WORK)
    made.poll()
    made.account()
    made.save()
    rank.steps(7, **WORK)
    first = report(run)
    made.poll()
    made.account()
    made.save()
    second = report(run)

    assert (first["ranks"][0]["steps"], second["ranks"][0]["steps"]) == (20, 27)
    assert (first["run"]["live"], first["run"]["ended"], first["ranks"][0]["state"]) == (True, None, "running")
    assert made.sources.has_more_to_come(1000.0)
    rank.close()
    made.close()


def test_killed_rank_loses_nothing_finished(run: RunDirectory) -> None:
    """A rank that died is shown as dead, with every finished step and what it was inside of."""
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
def test_restarted_sidecar_counts_everything_once(run: RunDirectory, saved: str) -> None:
    """However far a killed sidecar had got, the next one counts and keeps every record once."""
    rank = Rank(run, 0, 1)
    first, _ = sidecar(run)
    rank.steps(10, **WORK)
    first.poll()
    first.account()
    state_path = run.node_state(HOST)
    if saved == "state only":
        first.save()
    else:
        first.keep()
    if saved == "segment only":
        state_path.unlink()
    first.close()  # killed here: what it had in memory is gone
    rank.steps(15, **WORK)
    rank.close()
    finish(run)
    value = report(run)
    spans = pd.read_parquet(run.spans)

    assert value["ranks"][0]["steps"] == 25
    assert (value["quality"]["records"], value["quality"]["lost"]) == (25 * 5, 0)
    assert sorted(spans["sequence"]) == list(range(25 * 5))
    assert pd.read_parquet(run.steps)["step"].tolist() == list(range(25))


def test_overrun_is_counted(run: RunDirectory) -> None:
    """Records that were overwritten before the sidecar came are counted as lost, and the report says what to do."""
    rank = Rank(run, 0, 1, ring_records=1024)
    rank.steps(1000, **WORK)
    rank.close()
    finish(run)
    value = report(run)

    assert value["quality"]["lost"] == 5000 - 1024
    assert value["quality"]["records"] == 1024
    assert value["ranks"][0]["steps"] == 1024 // 5 + (1024 % 5 > 0)
    assert any("raise ring_records" in note for note in value["quality"]["notes"])


def test_unreadable_ring_is_left_out(run: RunDirectory, tmp_path: Path) -> None:
    """A registered file that is no ring is named in the notes; the others are read."""
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


def test_export_gets_every_step_once(run: RunDirectory) -> None:
    """The exporter gets all steps of all ranks in order, and whole traces of the sampled ones, with their spans."""
    exporter = InMemoryExporter()
    rank = Rank(run, 0, 1, trace_every=10)
    made, _ = sidecar(run, exporter)
    for _ in range(5):
        rank.steps(5, **WORK)
        made.poll()
        made.account()
        made.export()
    made.close()
    rank.close()

    steps = np.concatenate([batch.steps.step for batch in exporter.batches])
    traces = exporter.traces
    assert steps.tolist() == list(range(25))
    assert [trace.step for trace in traces] == [*range(FIRST_TRACED_STEPS), 10, 20]
    assert [span.name for span in traces[3].spans] == ["data", "forward", "communication", "backward"]
    assert traces[3].duration_ns == 14_000_000


def test_traced_steps() -> None:
    """The first steps and one of so many are exported span by span; with 0, none."""
    assert traced_steps(list(range(25)), 10) == {0, 1, 2, 10, 20}
    assert traced_steps(list(range(25)), 0) == set()


def test_replay_sends_the_same_again(run: RunDirectory) -> None:
    """A finished run, replayed, exports the same steps and traces, and leaves its saved state alone."""
    live, again = InMemoryExporter(), InMemoryExporter()
    rank = Rank(run, 0, 1)
    rank.steps(30, **WORK)
    rank.close()
    finish(run, exporter=live)
    state = run.node_state(HOST).read_text()
    done = replay(run, again)

    def columns(exporter: InMemoryExporter, field: str) -> list[Any]:
        return np.concatenate([getattr(batch.steps, field) for batch in exporter.batches]).tolist()

    assert (done.steps, done.records, done.notes) == (30, 150, [])
    for field in ("step", "duration_ns", "parts_ns", "memory_bytes", "flags"):
        assert columns(again, field) == columns(live, field)
    assert [trace.step for trace in again.traces] == list(range(FIRST_TRACED_STEPS))
    assert again.traces == live.traces
    assert run.node_state(HOST).read_text() == state


def test_replay_rebuilds_a_lost_state(run: RunDirectory) -> None:
    """Without a state file, a replay makes one from the records that are kept."""
    rank = Rank(run, 0, 1)
    rank.steps(30, **WORK)
    rank.close()
    finish(run)
    before = report(run)
    run.node_state(HOST).unlink()
    replay(run, None)
    after = report(run)

    assert after["steps"] == before["steps"]
    assert after["ranks"][0]["phases"] == before["ranks"][0]["phases"]
    assert "rebuilt from the records that are kept" in after["quality"]["notes"]


def test_one_sidecar_a_node(run: RunDirectory) -> None:
    """The lock admits one sidecar; a killed one's lock is free at once."""
    path = sidecar_lock(run.run_id)
    first, second = SidecarLock(path), SidecarLock(path)

    assert first.acquire()
    assert not second.acquire()
    first.close()
    assert second.acquire()
    second.remove()
    assert not path.parent.exists()


def test_lock_on_a_removed_file_does_not_count(run: RunDirectory) -> None:
    """A process that opened the file before its last holder removed it locks the new one instead."""
    path = sidecar_lock(run.run_id)
    holder, late, other = SidecarLock(path), SidecarLock(path), SidecarLock(path)
    assert holder.acquire()
    late._descriptor = os.open(path, os.O_RDWR)
    path.unlink()
    holder.close()

    assert late.acquire()
    assert path.exists()
    assert not other.acquire()
    late.remove()


def test_ring_made_while_a_sidecar_ends_is_not_forgotten(run: RunDirectory) -> None:
    """A rank that registers in the instant before the lock is given back is still read."""
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
    lock = Interrupted(sidecar_lock(run.run_id))
    assert lock.acquire()
    assert run_sidecar(made, lock, None)
    SidecarLock.close(lock)
    finish(run)
    value = report(run)

    assert (value["run"]["attempt"], value["ranks"][0]["steps"]) == (1, 20)


def test_elastic_restart_is_waited_for(run: RunDirectory) -> None:
    """After a rank died under torchrun, the sidecar waits as long as torchrun lives; after a clean end it does not."""
    elastic = {"elastic": True, "launcher_pid": os.getpid()}
    died = Rank(run, 0, 1, identity={**elastic, **dead_process()})
    died.steps(5, **WORK)
    made, _ = sidecar(run)
    made.poll()

    assert made.sources.has_more_to_come(1000.0)

    again = Rank(run, 0, 1, identity={**elastic, "attempt": 1})
    again.steps(9, **WORK)
    again.close()
    made.poll()
    made.account()
    made.keep()

    assert not made.sources.has_more_to_come(1000.0)
    value = report(run)
    assert (value["run"]["attempt"], value["ranks"][0]["steps"], value["ranks"][0]["state"]) == (1, 9, "closed")
    assert set(pd.read_parquet(run.steps)["attempt"]) == {0, 1}
    made.close()
    died.session.recorder.abandon()


def looked(made: Sidecar, now_s: float = 0.0) -> None:
    """A round of the sidecar, without its waiting."""
    made.poll()
    made.account()
    made.judge(now_s)
    made.export()


def two_ranks(run: RunDirectory, attempt: int = 0) -> tuple[Rank, Rank]:
    first, second = (Rank(run, rank, identity={"attempt": attempt}) for rank in range(2))
    return first, second


def test_findings_of_another_attempt_are_not_those_of_the_new_one(run: RunDirectory) -> None:
    """As soon as a rank is started again, what was found is over, and nothing is told of its healthy successor."""
    exporter = InMemoryExporter()
    made, _ = sidecar(run, exporter)
    before = two_ranks(run)
    before[0].steps(60, **WORK)
    before[1].steps(60, **{**WORK, "forward": 9})
    looked(made)
    assert [each.rank for each in made.state.findings.episodes] == [1]
    assert [(each.change, each.attempt) for each in exporter.alerts] == [("started", 0)]

    for rank in before:
        rank.close()
    after = two_ranks(run, 1)
    made.poll()
    made.export()  # before anybody has looked
    made.save()
    state = node_state.load(run.node_state(HOST))
    assert (state.findings.episodes, state.findings.groups) == ((), ())
    for count in (0, 2, 8, 50):
        for rank in after:
            rank.steps(count, **WORK)
        looked(made)
        assert exporter.assessment is not None
        assert (exporter.assessment.identity.attempt, exporter.assessment.findings.episodes) == (1, ())
    assert made.state.findings.rows
    assert [(each.change, each.attempt, each.rank) for each in exporter.alerts] == [("started", 0, 1), ("ended", 0, 1)]
    assert exporter.alerts[1].text.endswith("It is over: the job was restarted.")
    for rank in after:
        rank.close()
    made.close()


def test_a_hang_of_another_attempt_is_over(run: RunDirectory) -> None:
    """It is not found anew under the attempt that has just begun."""
    exporter = InMemoryExporter()
    made, _ = sidecar(run, exporter)
    before = two_ranks(run)
    for rank in before:
        rank.steps(10, **WORK)
    looked(made)
    made.monitor.epoch._hangs.hang = hang()
    made.judge(0.1)
    made.export()
    after = two_ranks(run, 1)
    for now_s in (0.2, 0.3, 1.5):
        looked(made, now_s)

    assert [(each.kind, each.change, each.attempt) for each in exporter.alerts] == [
        ("hang", "started", 0),
        ("hang", "ended", 0),
    ]
    for rank in (*before, *after):
        rank.close()
    made.close()


def test_a_straggler_outlives_the_sidecar(run: RunDirectory) -> None:
    """Killed and started again while a rank is slow: one alert, and one end when it has ended."""
    ranks, alerts = two_ranks(run), []
    for steps, forward in ((60, 9), (4, 9), (12, 9), (60, 9), (200, 4)):
        exporter = InMemoryExporter()
        made, _ = sidecar(run, exporter)
        for _ in range(steps // 4):
            ranks[0].steps(4, **WORK)
            ranks[1].steps(4, **{**WORK, "forward": forward})
            looked(made)
        made.keep()
        made.close()
        alerts += exporter.alerts
    (only,) = node_state.load(run.node_state(HOST)).findings.episodes

    assert [alert.change for alert in alerts] == ["started", "ended"]
    assert alerts[0].about == alerts[1].about
    assert (only.rank, only.since_step) == (1, alerts[0].since_step)
    assert abs((only.until_step or 0) - 136) <= 16
    for rank in ranks:
        rank.close()


def test_a_hang_outlives_the_sidecar(run: RunDirectory) -> None:
    """The next sidecar, which has not found it again yet, does not hold it to be over; a step ends it."""
    ranks, changes = two_ranks(run), []
    for rank in ranks:
        rank.steps(10, **WORK)
    for found in (hang(step=10), None):
        exporter = InMemoryExporter()
        made, _ = sidecar(run, exporter)
        looked(made)
        made.monitor.epoch._hangs.hang = found
        made.judge(0.1)
        made.export()
        made.keep()
        changes.append([(each.kind, each.change) for each in exporter.alerts])
        if found is not None:
            made.close()
    ranks[0].steps(1, **WORK)
    looked(made, 0.2)

    assert changes == [[("hang", "started")], []]
    assert [(each.kind, each.change) for each in exporter.alerts] == [("hang", "ended")]
    made.close()
    for rank in ranks:
        rank.close()


def test_a_hang_is_saved_at_once(run: RunDirectory) -> None:
    """One that has begun, blames others or has ended is news to a report; one that merely lasts is not."""
    ranks = two_ranks(run)
    made, _ = sidecar(run)
    for rank in ranks:
        rank.steps(10, **WORK)
    looked(made)
    news = []
    began, lasts = hang(step=10), hang(step=10, since_s=20.0)
    for found in (None, began, lasts, hang(step=10, ranks=(1, 2)), hang(step=10, kind="silent"), None):
        made.monitor.epoch._hangs.hang = found
        made.judge(0.1)
        news.append(made.has_unsaved_hang())
        made.save()
        assert not made.has_unsaved_hang()
    made.close()
    for rank in ranks:
        rank.close()

    assert news == [False, True, False, True, True, True]


def test_the_last_choice_of_traces_outlasts_a_restart(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes receive it once a second: nothing replaces it before the new processes have made steps.

    Of the steps themselves nothing is left: the new processes begin with step 0.
    """
    made, published, left = sidecar(run, InMemoryExporter())[0], list[bytes](), list[int]()
    monkeypatch.setattr(made.monitor.cluster, "publish", published.append)
    for process, steps in ((dead_process(), 60), ({}, 0)):
        rank = Rank(run, 0, 1, trace_every=10, identity={"elastic": True, "launcher_pid": 1, **process})
        rank.steps(steps, **WORK)
        looked(made)
        left.append(len(made.monitor.epoch.traces._buffer.of(37)))
    made.close()
    rank.close()

    assert json.loads(published[-1])[2] == EVERYTHING
    assert left == [1, 0]


def test_new_processes_of_an_attempt_have_alerts_of_their_own(run: RunDirectory) -> None:
    """Nodes came or went: ranks begin anew in the same attempt, and one is slow like its predecessor."""
    exporter, attempts = InMemoryExporter(), []
    made, _ = sidecar(run, exporter)
    for process in (dead_process(), {}):
        ranks = [Rank(run, rank, identity={"elastic": True, "launcher_pid": 1, **process}) for rank in range(2)]
        ranks[0].steps(60, **WORK)
        ranks[1].steps(60, **{**WORK, "forward": 9})
        for rank in ranks:
            rank.close()
        looked(made)
        attempts.append([(each.change, each.rank) for each in exporter.alerts])
    made.keep()
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
    ["epoch.add_steps", "cluster.update", "epoch.end", "alerts.assess", "metrics.sample"],
)
def test_an_error_of_the_judgement_ends_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is concluded from them, records are read, counted and kept; the report and the log say what failed."""
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
    lock = SidecarLock(sidecar_lock(run.run_id))
    assert lock.acquire()
    assert not run_sidecar(made, lock, exporter)
    value = report(run)

    assert [rank["steps"] for rank in value["ranks"]] == [50, 50]
    assert len(pd.read_parquet(run.steps)) == sum(len(batch.steps) for batch in exporter.batches) == 100
    places = {"alerts": "raising alerts", "metrics": "looking for causes"}
    place = places.get(owner, "judging the ranks")
    assert [note for note in value["quality"]["notes"] if note.startswith(f"{place} failed")] == [
        f"{place} failed in the sidecar, and its results are missing: see nodes/{HOST}.log"
    ]
    assert "ValueError: not enough values to unpack" in caplog.text
    assert swallowed.by_place.pop(place) > 0


def test_missing_rank_is_told(run: RunDirectory) -> None:
    """A rank that never recorded is shown as missing, not as fast."""
    rank = Rank(run, 0, 4, identity={"local_world_size": 1})
    rank.steps(10, **WORK)
    rank.close()
    finish(run)

    assert "3 of 4 ranks are missing: 1, 2, 3" in report(run)["quality"]["notes"]


def test_full_disk_loses_no_records(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run directory cannot be written, records wait; when it can, they are all there."""
    from torchlens_perf.store import writer

    rank = Rank(run, 0, 1)
    rank.steps(10, **WORK)
    made, _ = sidecar(run)
    write = writer.pq.write_table

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    made.poll()
    made.account()
    monkeypatch.setattr(writer.pq, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        made.keep()
    monkeypatch.setattr(writer.pq, "write_table", write)
    rank.steps(5, **WORK)
    rank.close()
    made.poll()
    made.account()
    made.keep()
    made.close()

    assert sorted(pd.read_parquet(run.spans)["sequence"]) == list(range(15 * 5))


class TestPacing:
    def test_polls_sooner_as_rings_fill(self) -> None:
        """A ring that fills fast is read up to every 5 ms, an idle one every 0.5 s."""
        schedule = Schedule(0.0)
        for _ in range(20):
            schedule.polled(0.5)
        assert schedule.poll_s == 0.005
        for _ in range(50):
            schedule.polled(0.0)
        assert schedule.poll_s == 0.5

    def test_segments_get_rarer(self) -> None:
        """Segments come after 5 s at first and every minute in a long run; many records bring one at once."""
        early, late = Schedule(0.0), Schedule(0.0)
        assert not early.keep_due(4.9, 100, 0.1)
        assert early.keep_due(5.0, 100, 0.1)
        assert late.keep_due(10_000.0, 100, 0.1)
        assert not late.keep_due(10_059.0, 100, 0.1)
        assert late.keep_due(10_059.0, 1 << 18, 0.1)
        assert late.keep_due(10_120.0, 100, 0.1)

    def test_what_is_in_no_segment_is_still_in_the_ring(self) -> None:
        """Half of a ring brings a segment, but no more often than every 5 s."""
        schedule = Schedule(0.0)
        assert schedule.keep_due(1_000.0, 100, 0.1)
        assert not schedule.keep_due(1_004.9, 40_000, 0.6)
        assert not schedule.keep_due(1_020.0, 30_000, 0.4)
        assert schedule.keep_due(1_020.0, 40_000, 0.6)

    def test_full_disk_is_not_asked_all_the_time(self) -> None:
        """What could not be written is tried again after the usual time, however much it is."""
        schedule = Schedule(0.0)
        assert schedule.keep_due(0.1, 1 << 18, 4.0)
        assert not schedule.keep_due(0.2, 1 << 18, 4.0, failing=True)
        assert schedule.keep_due(5.2, 1 << 18, 4.0, failing=True)
        assert schedule.keep_due(5.3, 1 << 18, 4.0)

    def test_saving_takes_a_bounded_share(self) -> None:
        """A state that takes long to write is written more rarely."""
        schedule = Schedule(0.0)
        assert schedule.save_due(0.2, 0.0)  # for the first time soon
        assert not schedule.save_due(5.0, 0.01)
        assert schedule.save_due(5.3, 0.01)
        assert not schedule.save_due(25.0, 0.05)
        assert schedule.save_due(25.4, 0.05)

    def test_news_is_saved_at_once(self) -> None:
        """What somebody waits for does not wait for the state's turn, and does not bring that forward."""
        schedule = Schedule(0.0)
        assert schedule.save_due(0.2, 0.0)
        assert schedule.save_due(0.3, 0.05, news=True)
        assert not schedule.save_due(20.2, 0.05)
        assert schedule.save_due(20.4, 0.05)

    def test_counting_takes_a_bounded_share(self) -> None:
        """Counting that takes long comes more rarely, but every 5 s; one that is quick, once a second."""
        for took_s, period_s in ((0.001, 1.0), (0.005, 2.0), (0.5, 5.0)):
            schedule = Schedule(0.0)
            assert schedule.account_due(100.0, took_s)
            assert not schedule.account_due(100.0 + 0.99 * period_s, took_s)
            assert schedule.account_due(100.0 + 1.01 * period_s, took_s)

    def test_counting_comes_sooner_while_somebody_looks(self) -> None:
        """A twentieth of the time may go to it then, and never more than what it takes in 1 s."""
        for took_s, period_s in ((0.001, 1.0), (0.05, 1.0), (0.1, 2.0), (0.5, 5.0)):
            schedule = Schedule(0.0)
            assert schedule.account_due(100.0, took_s, watched=True)
            assert not schedule.account_due(100.0 + 0.99 * period_s, took_s, watched=True)
            assert schedule.account_due(100.0 + 1.01 * period_s, took_s, watched=True)

    def test_looks_as_often_as_asked(self) -> None:
        """However long counting takes; sooner in a young run."""
        schedule = Schedule(0.0)
        assert schedule.judge_due(0.2, 1.0)
        assert schedule.judge_due(50.0, 1.0)
        assert not schedule.judge_due(50.9, 1.0)
        assert not schedule.judge_due(51.1, 2.0)
        assert schedule.judge_due(51.1, 1.0)


@pytest.mark.distributed
def test_killed_sidecar_process_is_replaced(run: RunDirectory) -> None:
    """The real process: killed with SIGKILL in the middle and started again by hand, it finishes the run."""
    rank = Rank(run, 0, 1)
    command = [sys.executable, "-m", "torchlens_perf", "sidecar", str(run.path), "--host", HOST]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    rank.steps(40, **WORK)
    deadline = time.monotonic() + 20
    while not run.node_state(HOST).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    second = subprocess.run(command, capture_output=True, text=True)
    first.kill()
    first.wait()
    rank.steps(40, **WORK)
    rank.close()
    third = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (second.returncode, "runs on this node already" in second.stderr) == (2, True)
    assert third.returncode == 0
    assert json.loads(run.node_state(HOST).read_text())["processes"][rank.identity.key]["ended"] == "closed"
    assert report(run)["ranks"][0]["steps"] == 80
    assert run.report.read_text().count("80 steps") == 1
