"""Tests that a sidecar loses no records when it, its ranks, the disk or other nodes fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.sidecar.test_node import WORK, dead_process, finish, report, sidecar
from tests.support.ranks import HOST, Rank, identity_of, make_run
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run import ownership
from torchlens_perf.run.directory import (
    RunDirectory,
    create_local_folders,
    create_ring,
    sidecar_lock_path,
)
from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.ring import Kind
from torchlens_perf.run.sidecar_lock import SidecarLock
from torchlens_perf.sidecar import record_account
from torchlens_perf.sidecar import schedule as schedule_module
from torchlens_perf.sidecar.loop import run_sidecar
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.nodes.messages import CollectedPosts
from torchlens_perf.sidecar.rings.source import RingSource
from torchlens_perf.sidecar.schedule import Schedule
from torchlens_perf.sidecar.wake import Wake
from torchlens_perf.store import writer
from torchlens_perf.verdicts import node_state


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    made = make_run(tmp_path)
    yield made
    for folder in create_local_folders(made.run_id):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def round_of(made: Sidecar, now_s: float = 0.0) -> None:
    made.read_rings()
    made.count_records()
    made.judge_ranks(now_s)


# -- a sidecar that was killed


def test_records_are_kept_if_the_sidecar_is_killed_after_saving_the_end(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(50, **WORK)
    rank.close()
    first, _ = sidecar(run)
    first.read_rings()
    first.count_records()
    first.save_state()
    first.close()  # SIGKILL
    again, _ = sidecar(run)
    again.read_rings()
    again.count_records()
    again.save_records()
    again.close()

    assert sorted(pd.read_parquet(run.spans)["sequence"]) == list(range(50 * 5))
    assert (report(run)["ranks"][0]["steps"], report(run)["quality"]["lost"]) == (50, 0)
    assert not rank.ring_path.exists()


def test_records_are_counted_if_the_sidecar_is_killed_after_reading_them(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    first, _ = sidecar(run)
    rank.steps(49, **WORK)
    first.read_rings()
    first.count_records()
    rank.steps(50, **WORK)
    rank.close()
    first.read_rings()
    first.save_state()
    first.close()
    finish(run)

    assert (report(run)["ranks"][0]["steps"], report(run)["quality"]["lost"]) == (99, 0)
    assert sorted(pd.read_parquet(run.spans)["sequence"]) == list(range(99 * 5))


def test_report_contains_last_steps_of_rank_0_while_others_run(run: RunDirectory) -> None:
    ranks = [Rank(run, 0), Rank(run, 1)]
    now_s = [time.monotonic()]
    made, asked = sidecar(run, clock=lambda: now_s[0])
    ranks[0].steps(20, **WORK)
    ranks[0].close()
    made.read_rings()
    made.write_report_if_due(print)
    assert asked == []
    now_s[0] += 1.0
    made.write_report_if_due(print)

    assert len(asked) == 1
    assert [each["steps"] for each in report(run)["ranks"]] == [20, 0]
    ranks[1].close()
    made.close()


class SimulatedTime(Wake):
    """A clock that only sleeps advance."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s = self.now_s = time.monotonic()

    def read(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> bool:
        self.now_s += duration_s
        return False


def test_sidecar_waits_half_a_minute_for_a_missing_rank_of_its_node(run: RunDirectory) -> None:
    simulated = SimulatedTime()
    rank = Rank(run, 0, 2)
    rank.steps(20, **WORK)
    rank.close()
    made, asked = sidecar(run, clock=simulated.read)
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    assert not run_sidecar(made, lock, wake=simulated)

    assert 30.0 <= simulated.now_s - simulated.began_s < 40.0
    assert len(asked) == 2  # when rank 0 has ended, and at the end
    assert report(run)["ranks"][0]["steps"] == 20


def test_overwritten_records_are_counted_as_lost_once_across_restarts(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1, ring_records=1024)
    rank.steps(1000, **WORK)
    for _ in range(3):
        made, _ = sidecar(run)
        made.read_rings()
        made.count_records()
        made.save_state()
        made.close()
    rank.close()
    finish(run)

    assert report(run)["quality"]["lost"] == 5000 - 1024
    assert report(run)["quality"]["records"] == 1024


# -- rings without metadata


def test_ring_without_metadata_of_a_dead_process_is_removed_with_a_note(run: RunDirectory) -> None:
    """The sidecar ends instead of waiting for the dead process."""
    rank = Rank(run, 0, 1)
    rank.steps(12, **WORK)
    rank.close()
    dead = create_ring(run, identity_of(run, 1, **dead_process()), 1024)
    run.register_ring(HOST, dead.path)
    finish(run)

    assert any(
        "died before it wrote its metadata; 0 records" in note
        for note in report(run)["quality"]["notes"]
    )
    assert not dead.path.exists()  # If such a ring remained, a finished run could not be replayed.
    dead.close()


def test_sidecar_waits_for_a_live_process_without_metadata(run: RunDirectory) -> None:
    early = Rank(run, 0, 1)
    early.steps(5, **WORK)
    early.close()
    late = create_ring(run, identity_of(run, 1), 1024)
    run.register_ring(HOST, late.path)
    made, _ = sidecar(run)
    made.read_rings()

    assert made.sources.may_get_more_records()
    late.set_metadata({})  # The content of the metadata does not matter.
    late.close()
    made.close()


def test_watch_registers_its_ring_together_with_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports after the registration take seconds, in which the process may be killed."""
    import torchlens_perf as perf
    from torchlens_perf.run.ring import RingReader

    seen = []

    def register(self: RunDirectory, host: str, ring: Path) -> None:
        reader = RingReader(ring)
        seen.append(reader.read_metadata()["identity"]["pid"])
        reader.close()

    monkeypatch.setattr(RunDirectory, "register_ring", register)
    with perf.watch(dir=str(tmp_path), sidecar=False, report="off"):
        pass

    assert seen == [os.getpid()]


# -- a report that cannot be built


def test_report_is_retried_if_another_nodes_state_is_unreadable(run: RunDirectory) -> None:
    """The sidecar continues with the live ranks and keeps all records."""
    ended, living = Rank(run, 0), Rank(run, 1)
    ended.steps(10, **WORK)
    ended.close()
    run.node_state_path("node-b").write_text("{")
    tried = []

    def build_report(run: RunDirectory, settings: dict[str, Any]) -> None:
        tried.append(settings)
        if len(tried) == 1:
            living.steps(30, **WORK)
            living.close()
        report(run)  # raises RunStoreError

    made = Sidecar(run, HOST, None, build_report)
    lock = SidecarLock(sidecar_lock_path(run.run_id))
    assert lock.acquire()
    assert not run_sidecar(made, lock)
    run.node_state_path("node-b").unlink()

    assert len(tried) == 2
    assert [rank["steps"] for rank in report(run)["ranks"]] == [10, 30]
    assert pd.read_parquet(run.steps).groupby("rank").size().to_dict() == {0: 10, 1: 30}


# -- notes of the exchange


class TroubledExchange:
    """An exchange with one note while it is open, and another one after it is closed."""

    time_without_contact_s = 0.0

    def __init__(self, *_: Any) -> None:
        self.closed = False

    def post(self, payloads: Any) -> None:
        pass

    def collect_posts(self) -> CollectedPosts:
        return CollectedPosts((), {})

    def instructions(self) -> bytes:
        return b""

    def set_links(self, links: bytes) -> None:
        pass

    def notes(self) -> list[str]:
        return (
            ["closed already"]
            if self.closed
            else ["3 windows could not be sent to node 0's sidecar"]
        )

    def close(self) -> None:
        self.closed = True


def test_notes_of_the_exchange_are_in_the_report(run: RunDirectory) -> None:
    """The report has the current notes during the run, and the last notes at its end."""
    rank = Rank(run, 1, 4, identity={"local_rank": 0, "local_world_size": 1})
    made, _ = sidecar(run)
    made.monitor.cluster._open_exchange = TroubledExchange  # type: ignore[assignment]
    rank.steps(20, **WORK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "torchlens_perf.recorder.rank_metadata.job_store_address",
            lambda environ: ("127.0.0.1", 1),
        )
        rank.session.publish()
    round_of(made)
    made.save_state()
    assert (
        report(run)["quality"]["notes"].count("3 windows could not be sent to node 0's sidecar")
        == 1
    )

    again, _ = sidecar(run)
    again.save_state()
    assert "3 windows could not be sent to node 0's sidecar" not in report(run)["quality"]["notes"]
    again.close()

    rank.close()
    round_of(made)
    made.wait_for_last_exchange()
    made.save_state()
    assert (
        report(run)["quality"]["notes"].count("3 windows could not be sent to node 0's sidecar")
        == 1
    )
    assert "closed already" not in report(run)["quality"]["notes"]
    made.close()


# -- another process of a rank


def collective(rank: Rank, name: str, sequence: int, duration_ns: int) -> None:
    """Record a collective that the rank issues in the step in progress."""
    recorder = rank.session.recorder
    # Only one recorder of a process can record collectives at a time.
    recorder.start_collectives(rank.session.intern("wait"))
    ticket = recorder.issue(rank.session.intern(name), 0, sequence, 0, 1 << 20)
    rank.clock.advance(duration_ns)
    recorder.returned(ticket, int(EndDetection.BY_RETURN))


def trained(
    run: RunDirectory, names: list[str], used: str, world_size: int = 2, **identity: Any
) -> list[Rank]:
    """Return ranks of a new generation that have made steps with one collective each."""
    ranks = []
    for number in range(world_size):
        own = {"local_world_size": world_size, "elastic": True, **dead_process(), **identity}
        rank = Rank(run, number, world_size, identity=own)
        rank.session.metadata.add_group("0", list(range(world_size)), "default_pg")
        for name in names:
            rank.session.intern(
                f"{name} group=0 dtype=float32" + (" root=0" if name == "broadcast" else "")
            )
        for step in range(20):
            full = next(each for each in rank.ring.names() if each.startswith(used))
            collective(rank, full, step, 1000 * (1 + number))
            rank.steps(1, **WORK)
        rank.session.publish()
        ranks.append(rank)
    return ranks


def test_collectives_of_different_generations_are_not_joined(run: RunDirectory) -> None:
    """After a change of nodes, new processes have other name ids and count from the start."""
    made, _ = sidecar(run)
    before = trained(run, ["allreduce", "broadcast"], "allreduce")
    round_of(made)
    assert {row.key.operation: row.joined for row in made.state.join.operations()} == {
        "allreduce": 17
    }

    living = {"pid": os.getpid(), "process_started": process_start_ticks(os.getpid())}
    after = trained(run, ["broadcast", "allreduce"], "broadcast", **living)
    round_of(made)
    made.save_records()
    made.close()
    again, _ = sidecar(run)  # The rings of the earlier processes are gone.
    for rank in after:
        collective(rank, "broadcast group=0 dtype=float32 root=0", 20, 1000)
        rank.steps(1, **WORK)
        rank.close()
    round_of(again)
    assert {
        row.key.operation: (row.records, row.joined) for row in again.state.join.operations()
    } == {"broadcast": (36, 18)}
    again.close()
    for rank in before:
        rank.session.recorder.abandon()


def test_new_processes_are_judged_independently_of_the_old_ones(run: RunDirectory) -> None:
    """Steps begin at 0 again.

    A slow new rank is reported at once, but not because of the steps of its earlier process.
    """
    made, _ = sidecar(run)
    before = [
        Rank(run, number, identity={"elastic": True, **dead_process()}) for number in range(2)
    ]
    for rank, forward in zip(before, (4, 9), strict=True):
        rank.steps(400, **{**WORK, "forward": forward})
    round_of(made)
    assert [each.rank for each in made.state.findings.episodes] == [1]
    after = [Rank(run, number, identity={"elastic": True}) for number in range(2)]
    round_of(made, 0.1)
    assert made.state.findings.episodes == ()
    for _ in range(10):
        for rank, forward in zip(after, (9, 4), strict=True):
            rank.steps(8, **{**WORK, "forward": forward})
        round_of(made, 0.2)

    (named,) = made.state.findings.episodes
    assert (named.rank, named.since_step < 16) == (0, True)
    for rank in after:
        rank.close()
    for rank in before:
        rank.session.recorder.abandon()
    made.close()


def test_ranks_that_left_a_smaller_world_are_ignored(run: RunDirectory) -> None:
    """Ranks that left are not part of a hang, and no windows are sent for them."""
    made, _ = sidecar(run)
    before = [
        Rank(run, number, identity={"elastic": True, **dead_process()}) for number in range(2)
    ]
    for rank in before:
        rank.steps(20, **WORK)
    round_of(made)
    left = Rank(run, 0, 1, identity={"elastic": True})
    for now_s in (1.0, 5.0):
        left.steps(20, **WORK)
        round_of(made, now_s)
    round_of(made, 400.0)

    assert set(made.monitor.job.ranks) == {0}
    assert made.state.hang is None or made.state.hang.ranks == (0,)
    left.close()
    for rank in before:
        rank.session.recorder.abandon()
    made.close()


# -- bounded memory


def test_memory_for_records_of_an_endless_step_is_bounded(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped records are counted as lost once."""
    monkeypatch.setattr(record_account, "MAX_UNKEPT_RECORDS", 2000)
    rank = Rank(run, 0, 1)
    made, _ = sidecar(run)
    name_id = rank.session.intern("forward")
    for _ in range(10):
        for _ in range(1000):
            rank.session.recorder.begin(Kind.FORWARD, name_id)
            rank.session.recorder.end(Kind.FORWARD, name_id)
        made.read_rings()
        made.count_records()
        (source,) = made.sources
        assert sum(len(records) for records, _ in source.waiting) <= 2000
    assert source.state.statistics.lost == 8000
    made.save_state()
    made.close()
    again, _ = sidecar(run)
    rank.steps(3, **WORK)
    rank.close()
    again.read_rings()
    again.count_records()
    again.save_records()
    again.close()

    kept = pd.read_parquet(run.spans)["sequence"].tolist()
    assert kept == list(range(kept[0], 10_015))
    assert report(run)["quality"]["lost"] + report(run)["quality"]["records"] == 10_015
    assert report(run)["quality"]["lost"] == 8000


def test_unwritten_records_are_limited_on_a_full_disk(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest records wait for space, and dropped ones are counted.

    Writing is retried rarely.
    """
    for each in (record_account, schedule_module):
        monkeypatch.setattr(each, "MAX_UNKEPT_RECORDS", 500)
    write, tries = writer.pq.ParquetWriter.write_table, []

    def full(*args: Any, **kwargs: Any) -> None:
        tries.append(time.monotonic())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.pq.ParquetWriter, "write_table", full)
    rank = Rank(run, 0, 1)
    made, _ = sidecar(run)
    schedule = Schedule(0.0)
    for number in range(100):
        rank.steps(20, **WORK)
        made.read_rings()
        made.count_records()
        unsaved_share = max(each.unsaved_share for each in made.sources)
        unkept = made.records.unsaved_records, unsaved_share
        if schedule.is_segment_due(0.05 * number, *unkept, failing=made.records.disk_failed):
            with pytest.raises(OSError, match="No space"):
                made.save_records()
    assert len(tries) <= 4  # All attempts are within 5 s.
    assert made.records.unsaved_records <= 600
    monkeypatch.setattr(writer.pq.ParquetWriter, "write_table", write)
    rank.close()
    made.read_rings()
    made.count_records()
    waiting = made.records.unsaved_records
    made.save_records()
    made.close()
    value = report(run)

    assert pd.read_parquet(run.spans)["sequence"].tolist() == list(
        range(100 * 100 - waiting, 100 * 100)
    )
    assert (value["ranks"][0]["steps"], value["quality"]["lost"]) == (2000, 10_000 - waiting)
    assert f"{10_000 - waiting} records could not be written to the run directory" in "\n".join(
        value["quality"]["notes"]
    )


# -- files of a killed process


def test_stack_file_of_a_killed_process_is_removed(run: RunDirectory) -> None:
    """After a kill, only the sidecar can remove the stack file. A remaining stack file would keep
    the run's local folder from being removed.
    """
    rank = Rank(run, 0, 1, identity=dead_process())
    rank.steps(3, **WORK)
    stack = rank.ring_path.with_suffix(".stack")
    stack.touch()
    finish(run)

    assert not stack.exists()
    assert not rank.ring_path.parent.exists()
    rank.session.recorder.abandon()


# -- a job that is restarted again and again


def test_state_size_does_not_grow_with_restarts(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segments still contain the steps of all processes."""
    monkeypatch.setattr("torchlens_perf.sidecar.rings.sources._MAX_GENERATIONS", 2)
    for attempt in range(5):
        rank = Rank(run, 0, 1, identity={"attempt": attempt})
        rank.steps(10, **WORK)
        rank.close()
        made, _ = sidecar(run)
        made.read_rings()
        made.count_records()
        made.save_records()
        made.close()
    known = node_state.load(run.node_state_path(HOST)).processes.values()

    assert [process.identity.attempt for process in known] == [3, 4]
    assert len(pd.read_parquet(run.steps)) == 50


def test_sidecar_does_not_wait_for_a_reused_pid_of_the_launcher(run: RunDirectory) -> None:
    """A process that began after the rank cannot be the launcher that started the rank."""
    dead = {**dead_process(), "process_started": (process_start_ticks(os.getpid()) or 0) - 1}
    rank = Rank(run, 0, 1, identity={"elastic": True, "launcher_pid": 1, **dead})
    rank.steps(10, **WORK)
    made, _ = sidecar(run)
    made.sources.poll_rings()
    (source,) = made.sources
    assert source.state.ended == "died"
    waits = made.sources.may_get_more_records()
    object.__setattr__(source.state.identity, "launcher_pid", os.getpid())

    assert (waits, made.sources.may_get_more_records()) == (True, False)
    made.close()
    rank.close()


# -- where records wait


def test_records_stay_in_the_ring_until_they_are_counted_or_fill_it(run: RunDirectory) -> None:
    """Waiting records take no memory of the sidecar, and none is lost."""
    rank = Rank(run, 0, 1, ring_records=1024)
    made, _ = sidecar(run)
    rank.steps(10, **WORK)
    made.read_rings()
    (source,) = made.sources
    assert (source.reader.cursor, source.waiting) == (0, [])
    made.count_records()
    counted = source.state.counted
    assert counted == source.reader.cursor - 1 == source.head - 1 > 0

    while source.head - source.reader.cursor <= 1024 // 4:
        assert source.waiting == []
        rank.steps(2, **WORK)
        source.head = source.reader.read_progress()[0]
    made.read_rings()
    assert source.reader.cursor == source.head
    assert sum(len(records) for records, _ in source.waiting) == source.head - 1 - counted
    made.save_records()
    made.close()
    rank.close()
    assert source.state.statistics.lost == 0


def test_encoded_records_survive_a_full_disk(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next segments have the records from before and after the disk was full."""
    monkeypatch.setattr(record_account, "_ENCODED_AT_ONCE", 100)
    write_all = ownership.write_all

    def fill_disk(file: Any, content: Any) -> None:
        raise OSError(28, "No space left on device")

    rank = Rank(run, 0, 1)
    made, _ = sidecar(run)
    rank.steps(50, **WORK)
    made.count_records()
    made.read_rings()
    made.count_records()
    assert made.records.unsaved_records == source_of(made).reader.cursor
    assert not made.records._unkept
    monkeypatch.setattr(ownership, "write_all", fill_disk)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            made.records.write_segment()
        rank.steps(50, **WORK)
        made.count_records()
    monkeypatch.setattr(ownership, "write_all", write_all)
    made.save_records()
    made.close()
    rank.close()

    kept = pd.read_parquet(run.spans)["sequence"].tolist()
    assert kept == list(range(len(kept)))
    assert source_of(made).kept == len(kept) - 1 == source_of(made).reader.cursor - 1
    assert made.state.unwritten_records == 0


def source_of(made: Sidecar) -> RingSource:
    (source,) = made.sources
    return source


def test_saved_statistics_are_those_of_all_counted_records(run: RunDirectory) -> None:
    """The text of statistics that did not change is used again, but not after new records."""
    rank = Rank(run, 0, 1)
    made, _ = sidecar(run)
    for _ in range(3):
        rank.steps(5, **WORK)
        made.read_rings()
        made.count_records()
        expected = node_state.encode_json(source_of(made).state.statistics)
        for _ in range(4):
            made.save_state()
            (saved,) = node_state.load(run.node_state_path(HOST)).processes.values()
            assert node_state.encode_json(saved.statistics) == expected
    assert isinstance(source_of(made).state.statistics, RankStatistics)
    made.close()
    rank.close()
