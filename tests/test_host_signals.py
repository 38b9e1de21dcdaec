"""What the kernel tells of real processes, and of files as it writes them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchlens_perf.host_signals import HostSignals
from torchlens_perf.neighbours import Neighbours

SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextlib.contextmanager
def spinning(cpu: int) -> Iterator[int]:
    """A process that keeps a CPU busy, and is nobody's loader worker."""
    with subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def observed(signals: HostSignals, pid: int, samples: int) -> dict[str, float]:
    """The newest signals after some samples, half a second each."""
    found: dict[int, dict[str, float]] = {}
    for _ in range(samples):
        found = signals.sample({pid: 0}, time.monotonic())
        for _ in range(6):
            signals.look([pid])
            time.sleep(0.1)
    return found[pid]


def test_a_busy_neighbour() -> None:
    """Two processes on one CPU: each is ready without it for half of the time, and the other one is found."""
    cpu = min(os.sched_getaffinity(0))
    with spinning(cpu) as rank, spinning(cpu) as other:
        signals = HostSignals()
        newest = observed(signals, rank, 5)

        assert newest["cpu_wait_share"] > 0.2
        assert newest["neighbour_cpus"] > 0.2
        assert signals.busiest_neighbour(rank, {other: "rank 1"}) == f"rank 1 (pid {other})"
        assert f"(pid {other})" in signals.busiest_neighbour(rank, {})
        assert "pid" in signals.busiest_neighbour(rank, {})
        assert newest["gc_share"] == newest["disk_wait_share"] == 0.0


def test_a_process_that_sleeps() -> None:
    """It waits for nothing; nobody looks for neighbours."""
    with subprocess.Popen(["sleep", "20"]) as process:
        newest = observed(HostSignals(), process.pid, 3)
        process.kill()

    assert newest["cpu_wait_share"] < 0.02
    assert newest["kernel_share"] < 0.1
    assert newest["disk_wait_share"] == 0.0
    assert "neighbour_cpus" not in newest


def test_a_process_that_has_ended() -> None:
    """It has no signals, and nothing is raised."""
    with subprocess.Popen(["sleep", "20"]) as process:
        signals = HostSignals()
        signals.sample({process.pid: 0}, 0.0)
        process.kill()
    signals.look([process.pid])

    assert signals.sample({process.pid: 0}, 1.0) == {}
    assert signals.busiest_neighbour(process.pid, {}) == ""


class Kernel:
    """A /proc folder with this process in it and a loader worker, as proc(5) has them."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder
        self.pid, self.worker = os.getpid(), 99999
        self.write(self.pid)
        self.write(self.worker)

    def write(self, pid: int, state: str = "S", faults: int = 0, kernel_ticks: int = 0, waited_ns: int = 0) -> None:
        fields = [state, *["0"] * 49]
        fields[9], fields[12] = str(faults), str(kernel_ticks)
        stat = f"{pid} (py (x) y) {' '.join(fields)}\n"
        folder = self.proc / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(stat)
        (folder / "cgroup").write_text("0::/\n")
        (folder / "task" / str(pid) / "stat").write_text(stat)
        (folder / "task" / str(pid) / "schedstat").write_text(f"5 {waited_ns} 3\n")
        (folder / "task" / str(pid) / "children").write_text(f"{self.worker} " if pid == self.pid else "")


def test_rates_and_shares(tmp_path: Path) -> None:
    """What grew between two samples, by the time between them; a loader worker's faults count."""
    kernel = Kernel(tmp_path)
    signals = HostSignals(tmp_path)
    assert signals.sample({kernel.pid: 10**9}, 100.0) == {}
    for state in ("D", "S", "R", "D"):
        kernel.write(kernel.pid, state)
        signals.look([kernel.pid])
    kernel.write(kernel.pid, faults=6, kernel_ticks=os.sysconf("SC_CLK_TCK") // 2, waited_ns=500_000_000)
    kernel.write(kernel.worker, faults=4)

    newest = signals.sample({kernel.pid: 2 * 10**9}, 102.0)[kernel.pid]

    assert newest["disk_wait_share"] == 0.5
    assert newest["major_faults_per_s"] == 5.0
    assert newest["kernel_share"] == 0.25
    assert newest["cpu_wait_share"] == 0.25
    assert newest["gc_share"] == 0.5
    assert signals.sample({kernel.pid: 2 * 10**9}, 102.1)[kernel.pid] is newest  # too soon for a new one


@pytest.mark.parametrize(("state", "share"), [("S", 1.0), ("R", 0.0)])
def test_a_loader_worker_waits_for_the_disk(tmp_path: Path, state: str, share: float) -> None:
    """While the main thread sleeps, its worker's wait is its own; while it runs, it waits for nothing."""
    kernel = Kernel(tmp_path)
    signals = HostSignals(tmp_path)
    signals.sample({kernel.pid: 0}, 100.0)
    kernel.write(kernel.pid, state)
    kernel.write(kernel.worker, "D")
    signals.look([kernel.pid])

    assert signals.sample({kernel.pid: 0}, 101.0)[kernel.pid]["disk_wait_share"] == share


def test_neighbours_of_long_ago_are_forgotten() -> None:
    """Who was busy minutes ago is not blamed for what is now."""
    cpu = min(os.sched_getaffinity(0))
    neighbours = Neighbours()
    with spinning(cpu) as pid:
        neighbours.look(0.0)
        time.sleep(0.5)
        assert neighbours.look(0.5)
        neighbours.remember({cpu}, {})
        assert f"(pid {pid})" in neighbours.busiest({cpu}, {os.getpid()}, {})
        assert neighbours.busiest({cpu}, {pid, os.getpid()}, {}) != neighbours.busiest({cpu}, {os.getpid()}, {})
    assert not neighbours.look(100.0)  # too long ago to tell who was busy since
    with spinning(cpu) as later:
        for second in (101.0, 102.0, 103.0):
            time.sleep(0.5)
            neighbours.look(second)
            neighbours.remember({cpu}, {})
        for _ in range(60):
            neighbours.remember({cpu}, {})
        assert f"(pid {later})" in neighbours.busiest({cpu}, {os.getpid()}, {})
