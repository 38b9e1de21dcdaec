"""Tests of a sidecar's wait at its start: its cost, the events that end it, and data losses."""

from __future__ import annotations

import functools
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
from torchlens_perf.sidecar import priority
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.rings import waiting
from torchlens_perf.sidecar.start.wait import (
    BUSY_WAIT_S,
    FILLING,
    FULL,
    MAX_SPOOLED_RECORDS,
    POLL_INTERVAL_S,
    PRELOAD_AFTER_S,
    SHORT_RUN_S,
    STALLED_S,
    STARVED_S,
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


class Preparation:
    """A fake ImportThread that records its calls and their times."""

    def __init__(self, clock: Clock, done_after_s: float) -> None:
        self._clock = clock
        self._done_s = clock.now_s + done_after_s
        self.begun_s = clock.now_s - 1000.0
        self.hurries_s: list[float] = []
        self.groups: list[int] = []

    def hurry(self, group: int) -> None:
        self.hurries_s.append(self._clock.now_s - 1000.0)
        self.groups.append(group)

    @property
    def is_done(self) -> bool:
        return self._clock.now_s >= self._done_s


class Waited:
    """The result of wait(). `during` is called at each sleep with the elapsed time."""

    def __init__(
        self,
        run: RunDirectory,
        during=lambda waited_s: None,
        imports_s=0.5,
        impatient=False,
        busy=lambda waited_s: False,
        longest_sleep_s=POLL_INTERVAL_S,
    ) -> None:
        self.clock = clock = Clock()
        self.preloads: list[Preparation] = []

        def prepare() -> Preparation:
            self.preloads.append(Preparation(clock, imports_s))
            return self.preloads[-1]

        def sleep(duration_s: float) -> None:
            clock.sleep(duration_s)
            during(clock.now_s - 1000.0)

        self.rings, _ = wait_until_due(
            registrations(run),
            prepare,
            impatient=impatient,
            now=clock.now,
            sleep=sleep,
            busy_cpus=lambda now_s: busy(now_s - 1000.0),
            longest_sleep_s=longest_sleep_s,
        )
        self.took_s = clock.now_s - 1000.0


def test_ring_header_fields_in_waiting_py_equal_those_in_run_ring_py() -> None:
    """waiting.py repeats the fields, because importing run/ring.py takes long."""
    mine = (waiting.MAGIC, waiting.HEAD, waiting.STEP, waiting.STATE, waiting.CLOSED)

    assert mine == (ring.MAGIC, ring.HEAD, ring.STEP, ring.STATE, ring.State.CLOSED)


@pytest.mark.parametrize("ranks", [1, 2])
def test_wait_without_events_lasts_its_full_time(run: RunDirectory, ranks: int) -> None:
    """Modules are imported once during the wait."""
    made = [Rank(run, rank) for rank in range(ranks)]
    for rank in made:
        rank.steps(10, **WORK)
    waited = Waited(run)

    assert SHORT_RUN_S <= waited.took_s < SHORT_RUN_S + 2 * POLL_INTERVAL_S
    assert [preload.begun_s for preload in waited.preloads] == [
        pytest.approx(PRELOAD_AFTER_S, abs=2 * POLL_INTERVAL_S)
    ]
    assert waited.preloads[0].hurries_s == []
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
            ranks[0].steps(int(FULL * 4096 / 5) + 1, **WORK)
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


@pytest.mark.parametrize("impatient", [False, True])
def test_imports_get_little_cpu_time_at_first_if_no_cpu_is_idle(
    run: RunDirectory, impatient: bool
) -> None:
    """If no CPU becomes idle for a while, the imports get a small share of CPU time.

    After twice the time until then, the share is unlimited. A job with other nodes does not wait
    for an idle CPU.
    """
    rank = Rank(run, 0)
    rank.steps(10, **WORK)
    waited = Waited(run, imports_s=1000.0, impatient=impatient)
    rank.close()
    (preload,) = waited.preloads

    assert waited.took_s == pytest.approx(
        SHORT_RUN_S if impatient else 2 * STARVED_S, abs=2 * POLL_INTERVAL_S
    )
    assert preload.hurries_s == (
        [] if impatient else [pytest.approx(STARVED_S, abs=2 * POLL_INTERVAL_S)]
    )
    assert preload.groups == ([] if impatient else [priority.SLOW_GROUP])


def test_wait_ends_when_all_modules_are_imported(run: RunDirectory) -> None:
    """A CPU becomes idle only late in this test."""
    rank = Rank(run, 0)
    waited = Waited(run, imports_s=8.0)
    rank.close()

    assert waited.took_s == pytest.approx(PRELOAD_AFTER_S + 8.0, abs=2 * POLL_INTERVAL_S)
    assert waited.preloads[0].hurries_s == []


@pytest.mark.parametrize("steps", [1, 3, 5, 20])
def test_filling_ring_starts_the_imports_early(run: RunDirectory, steps: int) -> None:
    """Modules are imported before the ring is read, and the ring is read before it is full."""
    rank = Rank(run, 0)

    def fill(waited_s: float) -> None:
        rank.steps(steps, **WORK)

    waited = Waited(run, fill, imports_s=1000.0)
    ring_s = 4096 / (steps * 5) * POLL_INTERVAL_S  # Time until the ring is full.

    (preload,) = waited.preloads

    assert preload.begun_s == pytest.approx(
        min(PRELOAD_AFTER_S, FILLING * ring_s), abs=2 * POLL_INTERVAL_S
    )
    assert preload.hurries_s == [pytest.approx(FILLING * ring_s, abs=2 * POLL_INTERVAL_S)]
    assert preload.groups == [priority.SLOW_GROUP if steps == 1 else priority.USUAL_GROUP]
    assert waited.took_s == pytest.approx(FULL * ring_s, abs=2 * POLL_INTERVAL_S)
    rank.close()


@pytest.mark.parametrize("imports_s", [0.2, 1.5, 60.0])
def test_sidecar_of_a_several_node_job_waits_only_for_its_imports(
    run: RunDirectory, imports_s: float
) -> None:
    """The sidecar must connect to the other nodes while the job runs."""
    rank = Rank(run, 0)
    waited = Waited(run, imports_s=imports_s, impatient=True)
    rank.close()

    assert waited.took_s == pytest.approx(
        min(SHORT_RUN_S, PRELOAD_AFTER_S + imports_s), abs=2 * POLL_INTERVAL_S
    )


def test_hang_during_the_wait_is_timed_from_the_last_step(run: RunDirectory) -> None:
    ranks = [Rank(run, rank) for rank in range(2)]
    for rank in ranks:
        rank.steps(12, **WORK)
    began_s = time.monotonic()
    found = {}
    for waits in (True, False):
        clock = Clock()
        clock.now_s = began_s - SHORT_RUN_S
        rings, _ = wait_until_due(
            registrations(run),
            functools.partial(Preparation, clock, 0.5),
            now=clock.now,
            sleep=clock.sleep,
            busy_cpus=lambda now_s: False,
        )
        made = Sidecar(run, HOST, None, lambda run, asked: None, rings if waits else {})
        made.read_rings()
        made.count_records()
        made.judge_ranks(began_s)
        found[waits] = min(source.step_s for source in made.sources)
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


def always(waited_s: float) -> bool:
    return True


@pytest.mark.parametrize(("longest_sleep_s", "most_polls"), [(POLL_INTERVAL_S, 3700), (0.5, 200)])
def test_sidecar_on_busy_cpus_imports_nothing_and_polls_rarely(
    run: RunDirectory, longest_sleep_s: float, most_polls: int
) -> None:
    """The polls are rare if the kernel reports new files."""
    rank = Rank(run, 0, 1)
    waited = Waited(
        run, lambda waited_s: rank.steps(1, **WORK), busy=always, longest_sleep_s=longest_sleep_s
    )
    rank.close()

    assert waited.took_s == pytest.approx(BUSY_WAIT_S, abs=1.0)
    assert waited.preloads == []
    assert waited.clock.sleeps <= most_polls


@pytest.mark.parametrize("longest_sleep_s", [POLL_INTERVAL_S, 0.5])
@pytest.mark.parametrize(
    ("steps_per_s", "ring_records"), [(100, 4096), (400, 4096), (2000, 4096), (20_000, 1 << 16)]
)
def test_no_record_is_lost_during_the_wait_on_busy_cpus(
    run: RunDirectory, steps_per_s: int, ring_records: int, longest_sleep_s: float
) -> None:
    """The ring is overwritten up to 70 times. Its records are moved to the spool before."""
    rank = Rank(run, 0, 1, ring_records=ring_records)
    made = 0

    def fill(waited_s: float) -> None:
        nonlocal made
        made, new = round(steps_per_s * waited_s), round(steps_per_s * waited_s) - made
        rank.steps(new, **WORK)

    waited = Waited(run, fill, imports_s=0.5, busy=always, longest_sleep_s=longest_sleep_s)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None, waited.rings)
    sidecar.read_rings()
    sidecar.count_records()
    (process,) = sidecar.state.processes.values()

    assert rank.session.recorder.written > 4096
    assert (process.statistics.lost, process.statistics.step.count) == (0, made - WARM_UP_STEPS)
    assert waited.took_s <= min(BUSY_WAIT_S, MAX_SPOOLED_RECORDS / (5 * steps_per_s)) + 1.0
    sidecar.save_records()
    sidecar.close()
    assert not list(rank.ring_path.parent.glob("*.spool"))
    rank.close()


def test_wait_on_busy_cpus_ends_if_no_rank_makes_a_step(run: RunDirectory) -> None:
    """A hang is found as fast as on idle CPUs."""
    ranks = [Rank(run, rank) for rank in range(2)]

    def train(waited_s: float) -> None:
        for rank in ranks:
            rank.steps(waited_s < 30.0, **WORK)

    waited = Waited(run, train, busy=always)

    assert waited.took_s == pytest.approx(30.0 + STALLED_S, abs=0.1)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("follower", ["alerts", "OTLP", "/metrics"])
def test_wait_on_busy_cpus_is_shorter_if_results_are_used_during_the_run(
    run: RunDirectory, follower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(run, 0, 1, prometheus="127.0.0.1:9464" if follower == "/metrics" else "")
    box = Mailbox(rank.ring_path, ALERTS) if follower == "alerts" else None
    if follower == "OTLP":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    waited = Waited(run, lambda waited_s: rank.steps(1, **WORK), imports_s=1000.0, busy=always)
    if box is not None:
        box.close()
    rank.close()

    assert waited.took_s == pytest.approx(2 * STARVED_S, abs=2 * POLL_INTERVAL_S)
    assert waited.preloads[0].groups == [priority.SLOW_GROUP]


def test_idle_moment_of_a_busy_node_is_used_for_the_imports(run: RunDirectory) -> None:
    rank = Rank(run, 0, 1)
    waited = Waited(
        run, lambda waited_s: rank.steps(1, **WORK), busy=lambda waited_s: not 40 < waited_s < 42
    )
    rank.close()

    assert waited.preloads[0].begun_s == pytest.approx(40.0, abs=0.1)
    assert waited.took_s == pytest.approx(40.5, abs=0.1)
    assert waited.preloads[0].hurries_s == []
