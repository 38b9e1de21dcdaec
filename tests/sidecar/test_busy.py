"""Tests of how the sidecar gives way to a job that keeps all CPUs busy, after it began to read."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecar.test_node import WORK
from tests.support.ranks import HOST, Rank
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.mailbox import ALERTS, Mailbox
from torchlens_perf.sidecar.busy import ASSUME_IDLE, BusyCpus
from torchlens_perf.sidecar.loop import _STALLED_S, _RoundRunner
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.schedule import Schedule
from torchlens_perf.sidecar.wake import Wake

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CPUS = sorted(os.sched_getaffinity(0))


class Stat:
    """A file like /proc/stat, in which each CPU of this process has some idle time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(0.0)

    def write(self, idle_s: float, others_s: float = 0.0) -> None:
        """idle_s: time of each CPU of this process. others_s: time of another CPU."""
        ticks = [round(idle_s * TICKS_PER_S / len(CPUS))] * len(CPUS)
        rows = [
            ("cpu", 10**9),
            *((f"cpu{cpu}", idle) for cpu, idle in zip(CPUS, ticks, strict=True)),
        ]
        rows.append((f"cpu{CPUS[-1] + 1}", round(others_s * TICKS_PER_S)))
        lines = [f"{name} 5 5 5 {idle} 7 0 0 0 0 0" for name, idle in rows]
        self.path.write_text("\n".join([*lines, "intr 1 2 3"]) + "\n")


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stat:
    monkeypatch.delenv(ASSUME_IDLE)
    return Stat(tmp_path / "stat")


def test_cpus_are_busy_if_less_than_half_a_cpu_is_idle(stat: Stat) -> None:
    """Idle time of CPUs that this process may not use does not count."""
    cpus = BusyCpus(str(stat.path))
    found = [cpus.poll(100.0)]
    for now_s, idle_s, others_s in (
        (100.2, 0.2, 0.0),
        (101.0, 0.4, 9.0),
        (102.0, 1.1, 9.0),
        (103.0, 1.2, 9.0),
    ):
        stat.write(idle_s, others_s)
        found.append(cpus.poll(now_s))

    assert found == [None, None, True, False, True]


@pytest.mark.parametrize("text", ["", "cpu 1 2\n", "cpu0 a b c d e\n", "intr 5\n"])
def test_cpus_are_not_busy_if_the_kernel_reports_no_idle_time(stat: Stat, text: str) -> None:
    stat.path.write_text(text)
    cpus = BusyCpus(str(stat.path))

    assert cpus.poll(100.0) is False
    stat.path.unlink()
    assert cpus.poll(200.0) is False


@pytest.fixture
def wake() -> Iterator[Wake]:
    made = Wake()
    made.install()
    yield made
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGURG, signal.SIG_DFL)


@pytest.mark.parametrize("event", ["file", "link", "renamed file", "signal"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_new_files_and_signals_end_the_sleep(
    wake: Wake, tmp_path: Path, event: str, in_thread: bool
) -> None:
    """The sidecar sleeps on a thread of low priority, and handles signals on its main thread."""
    (tmp_path / "before").touch()
    wake.watch_folder(str(tmp_path))
    if not wake.reports_files:
        pytest.skip("this kernel does not report new files")
    events = {
        "file": lambda: (tmp_path / "new").touch(),
        "link": lambda: (tmp_path / "new").symlink_to("gone"),
        "renamed file": lambda: (tmp_path / "before").rename(tmp_path / "new"),
        "signal": lambda: os.kill(os.getpid(), signal.SIGURG),
    }
    found: list[object] = []

    def sleep() -> None:
        began_s = time.monotonic()
        found.append((wake.sleep(20.0), time.monotonic() - began_s < 15.0))
        # One event wakes once. Signals of other tests' leftovers may arrive as well.
        found.append(all(wake.sleep(0.05) for _ in range(5)))

    threading.Timer(0.2, events[event]).start()
    if in_thread:
        sleeper = threading.Thread(target=sleep)
        sleeper.start()
        # The main thread must be free to run signal handlers.
        while sleeper.is_alive():
            sleeper.join(0.05)
    else:
        sleep()

    assert found == [(True, True), False]


def test_sleep_lasts_its_full_time_where_no_event_is_reported(tmp_path: Path, wake: Wake) -> None:
    wake.watch_folder(str(tmp_path / "missing"))
    plain = Wake()
    plain.watch_folder(str(tmp_path))
    began_s = time.monotonic()

    assert not plain.sleep(0.05)
    assert time.monotonic() - began_s >= 0.05
    assert (wake.reports_files, plain.reports_files) == (False, False)


def test_work_is_done_rarely_but_still_done_on_busy_cpus() -> None:
    """Ranks are judged and the state is saved while the run lasts."""
    due = {}
    for gives_way in (False, True):
        schedule = Schedule(0.0)
        schedule.gives_way = gives_way
        seconds = [100 + second / 10 for second in range(6000)]
        due[gives_way] = (
            sum(schedule.is_count_due(now_s, 0.002) for now_s in seconds),
            sum(schedule.is_judging_due(now_s, 2.0) for now_s in seconds),
            sum(schedule.is_save_due(now_s, 0.002) for now_s in seconds),
        )
        for _ in range(50):
            schedule.adapt_poll_interval(0.01)
        slow_s = schedule.poll_s
        for _ in range(20):
            schedule.adapt_poll_interval(0.5)

        assert (slow_s, schedule.poll_s) == (2.0 if gives_way else 0.5, 0.005)

    assert due[True] == (30, 30, 30)
    assert min(due[False]) > 100


def test_sidecar_gives_way_only_to_a_job_that_makes_progress_and_needs_no_results(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(5, **WORK)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    rounds = _RoundRunner(sidecar, _Lock(), None, None, Wake())
    monkeypatch.setattr(rounds._busy_cpus, "poll", lambda now_s: True)
    now_s = 1000.0
    found = [rounds._gives_way(now_s), rounds._gives_way(now_s + _STALLED_S + 1)]
    rank.steps(1, **WORK)
    found.append(rounds._gives_way(now_s + _STALLED_S + 2))
    box = Mailbox(rank.ring_path, ALERTS)
    rounds._live.poll_requests()
    found.append(rounds._gives_way(now_s + _STALLED_S + 3))
    monkeypatch.setattr(rounds._busy_cpus, "poll", lambda now_s: False)
    box.close()
    rounds._live.poll_requests()
    found.append(rounds._gives_way(now_s + _STALLED_S + 4))
    sidecar.close()
    rank.close()

    assert found == [True, False, True, False, False]


class _Stepping(Wake):
    """Sleep during which a rank makes a step, up to three times."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank, self.sleeps = rank, 0

    def sleep(self, duration_s: float) -> bool:
        self.sleeps += 1
        if self.sleeps <= 3:
            self._rank.steps(1, **WORK)
        else:
            time.sleep(duration_s)
        return False


@pytest.mark.parametrize(("poll_s", "sleeps"), [(4.0, 1), (0.5, 4)], ids=["idle", "usual"])
def test_sidecar_of_idle_ranks_wakes_at_the_first_record(
    poll_s: float, sleeps: int, run: RunDirectory
) -> None:
    rank = Rank(run, 0, 1)
    rank.steps(5, **WORK)
    sidecar = Sidecar(run, HOST, None, lambda run, asked: None)
    sidecar.read_rings()
    stepping = _Stepping(rank)
    rounds = _RoundRunner(sidecar, _Lock(), None, None, stepping)
    rounds._schedule.poll_s = poll_s
    assert rounds._sleep_until_event(0.2) is False
    sidecar.close()
    rank.close()

    assert stepping.sleeps >= sleeps
    assert (stepping.sleeps == 1) == (sleeps == 1)


class _Lock:
    """The part of a lock that a round uses."""

    def write_status(self, doing: str) -> None:
        pass
