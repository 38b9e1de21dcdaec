"""Tests of a sidecar's wait at its start: its cost, the events that end it, and data losses."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.sidecar.test_node import WORK, dead_process
from tests.support.ranks import HOST, Rank
from torchlens_perf.analysis.statistics.rank import WARM_UP_STEPS
from torchlens_perf.run import ring
from torchlens_perf.run.directory import RunDirectory, create_local_folders
from torchlens_perf.run.mailbox import ALERTS, ANSWER, VIEW, Mailbox
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.rings import waiting
from torchlens_perf.sidecar.start.wait import (
    FILLING,
    POLL_INTERVAL_S,
    SHORT_RUN_S,
    wait_until_due,
)


def registrations(run: RunDirectory) -> str:
    """Return this node's folder of registered rings."""
    return str(next(create_local_folders(run.run_id)))


class Clock:
    """A clock that advances only in sleep()."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sleeps = 0

    def now(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.sleeps += 1


class Waited:
    """The result of wait(). `during` is called at each sleep with the elapsed time."""

    def __init__(
        self, run: RunDirectory, during=lambda waited_s: None, longest_sleep_s=POLL_INTERVAL_S
    ) -> None:
        self.clock = clock = Clock()

        def sleep(duration_s: float) -> None:
            clock.sleep(duration_s)
            during(clock.now_s - 1000.0)

        self.rings = wait_until_due(
            registrations(run), now=clock.now, sleep=sleep, longest_sleep_s=longest_sleep_s
        )
        self.took_s = clock.now_s - 1000.0


def test_ring_header_fields_in_waiting_py_equal_those_in_run_ring_py() -> None:
    """waiting.py repeats the fields, because importing run/ring.py takes long."""
    mine = (waiting.MAGIC, waiting.HEAD, waiting.STEP, waiting.STATE, waiting.CLOSED)

    assert mine == (ring.MAGIC, ring.HEAD, ring.STEP, ring.STATE, ring.State.CLOSED)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("longest_sleep_s", "most_polls"), [(POLL_INTERVAL_S, 210), (0.5, 20)])
def test_wait_without_events_lasts_its_full_time(
    run: RunDirectory, ranks: int, longest_sleep_s: float, most_polls: int
) -> None:
    """The polls are rare if the kernel reports new files."""
    made = [Rank(run, rank) for rank in range(ranks)]
    for rank in made:
        rank.steps(10, **WORK)
    waited = Waited(run, longest_sleep_s=longest_sleep_s)

    assert waited.took_s == pytest.approx(SHORT_RUN_S)
    assert waited.clock.sleeps <= most_polls
    assert len(waited.rings) == ranks
    for rank in made:
        rank.close()


@pytest.mark.parametrize(
    "event",
    [
        "closes",
        "one of two closes",
        "comes later and closes",
        "fills",
        "no ring",
        "unreadable",
        "empty file",
    ],
)
def test_wait_ends_at_once_after_an_event(run: RunDirectory, event: str, tmp_path: Path) -> None:
    """The events are a rank's end, a ring that fills up, and a ring that cannot be read."""
    ranks = [Rank(run, 0), *([] if event == "comes later and closes" else [Rank(run, 1)])]

    def at(waited_s: float) -> None:
        if not 1.0 <= waited_s < 1.0 + POLL_INTERVAL_S:
            return
        if event == "closes":
            for rank in ranks:
                rank.close()
        elif event == "one of two closes":
            ranks[1].close()
        elif event == "comes later and closes":
            ranks.append(Rank(run, 1))
            ranks[1].steps(3, **WORK)
            ranks[1].close()
        elif event == "fills":
            ranks[0].steps(int(FILLING * 4096 / 5) + 1, **WORK)
        else:
            content = {
                "no ring": b"x" * 300_000,
                "unreadable": ring.MAGIC + bytes(300_000),
                "empty file": b"",
            }[event]
            (tmp_path / "node-1-2.ring").write_bytes(content)
            run.register_ring(HOST, tmp_path / "node-1-2.ring")

    waited = Waited(run, at)

    assert 1.0 <= waited.took_s < 1.0 + 0.3
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("ended", ["before", "with records", "under another process's pid"])
def test_wait_ends_if_a_rank_is_killed(run: RunDirectory, ended: str) -> None:
    """The ring of a killed process stays open, so the process itself is checked."""
    process = dead_process()
    if ended == "under another process's pid":
        process = {"pid": os.getpid(), "process_started": 1}
    rank = Rank(run, 0, identity=process)
    if ended == "with records":
        rank.steps(20, **WORK)
    waited = Waited(run)

    assert waited.took_s < 0.3
    rank.session.recorder.abandon()


def test_removed_ring_does_not_end_the_wait_for_others(run: RunDirectory) -> None:
    """An earlier sidecar has read the ring to its end and removed it."""
    run.register_ring(HOST, Path("/dev/shm/gone/rank00000-attempt0-1-2.ring"))
    rank = Rank(run, 0)
    rank.steps(10, **WORK)

    assert Waited(run).took_s >= SHORT_RUN_S
    rank.close()


@pytest.mark.parametrize("removed", ["ring", "ring and registration", "folder"])
def test_wait_ends_at_once_without_a_ring(run: RunDirectory, removed: str) -> None:
    """A rank registers its ring before it starts the sidecar, so another program removed it."""
    rank = Rank(run, 0)
    rank.steps(10, **WORK)
    folder = rank.session.ring_path.parent
    gone = {"ring": "*.ring", "ring and registration": "*.r*", "folder": "*"}[removed]
    for path in folder.glob(gone):
        path.unlink()
    waited = Waited(run)

    assert waited.took_s == 0.0
    assert waited.rings == {}
    rank.session.recorder.abandon()


def test_hang_during_the_wait_is_timed_from_the_last_step(run: RunDirectory) -> None:
    ranks = [Rank(run, rank) for rank in range(2)]
    for rank in ranks:
        rank.steps(12, **WORK)
    began_s = time.monotonic()
    found = {}
    for waits in (True, False):
        clock = Clock()
        clock.now_s = began_s - SHORT_RUN_S
        rings = wait_until_due(registrations(run), now=clock.now, sleep=clock.sleep)
        made = Sidecar(run, HOST, None, lambda run, asked: None, rings if waits else {})
        made.read_rings()
        made.count_records()
        made.judge_ranks(began_s)
        found[waits] = min(source.progress.step_s for source in made.sources)
        made.close()
    for rank in ranks:
        rank.close()

    assert found[True] == pytest.approx(began_s - SHORT_RUN_S, abs=POLL_INTERVAL_S)
    assert found[False] >= began_s


@pytest.mark.parametrize(("kind", "at_once"), [(ANSWER, True), (VIEW, True), (ALERTS, False)])
def test_request_for_results_ends_the_wait(run: RunDirectory, kind: str, at_once: bool) -> None:
    """A notebook or w.summary() may request results in the first seconds.

    A listener for alerts does not end the wait, because alerts need steps.
    """
    rank = Rank(run, 0, 1)
    boxes: list[Mailbox] = []

    def at(waited_s: float) -> None:
        if waited_s >= 1.0 and not boxes:
            boxes.append(Mailbox(rank.ring_path, kind))

    waited = Waited(run, at)

    assert (waited.took_s < 1.3) == at_once
    boxes[0].close()
    rank.close()


@pytest.mark.parametrize("longest_sleep_s", [POLL_INTERVAL_S, 0.5])
@pytest.mark.parametrize("steps_per_s", [10, 1000, 10_000])
def test_ring_is_read_before_it_is_full(
    run: RunDirectory, steps_per_s: int, longest_sleep_s: float
) -> None:
    """The wait ends early enough for the imports, which may take a few seconds on busy CPUs."""
    rank = Rank(run, 0, 1, ring_records=1 << 16)
    made = 0

    def fill(waited_s: float) -> None:
        nonlocal made
        made, new = round(steps_per_s * waited_s), round(steps_per_s * waited_s) - made
        rank.steps(new, **WORK)

    waited = Waited(run, fill, longest_sleep_s=longest_sleep_s)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None, waited.rings)
    sidecar.read_rings()
    sidecar.count_records()
    (process,) = sidecar.state.processes.values()

    assert (process.statistics.lost, process.statistics.step.count) == (0, made - WARM_UP_STEPS)
    assert max(ring.fill_level for ring in waited.rings.values()) < 1 / 2
    sidecar.close()
    rank.close()
