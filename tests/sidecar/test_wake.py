"""Tests of the sidecar's sleep between rounds, and the events that end it."""

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
from torchlens_perf.sidecar.loop import _RoundRunner
from torchlens_perf.sidecar.node import Sidecar
from torchlens_perf.sidecar.wake import Wake


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
