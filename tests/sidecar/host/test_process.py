"""Tests of host signals of real processes and of files like those in /proc."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchlens_perf.run.cpu_programs import OTHER, OUTSIDE, RANK
from torchlens_perf.run.processes import TICKS_PER_S
from torchlens_perf.sidecar.host.cgroup import ControlGroup
from torchlens_perf.sidecar.host.neighbours import CpuNeighbours
from torchlens_perf.sidecar.host.process import HostMetrics

SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
LITTLE = SPIN.replace("pass", "__import__('time').sleep(0.05); sum(range(100000))")


@contextlib.contextmanager
def start_busy_process(cpu: int, program: str = SPIN) -> Iterator[int]:
    """Start a process that keeps a CPU busy and does not belong to the job."""
    with subprocess.Popen([sys.executable, "-c", program, str(cpu)]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def sample_signals(signals: HostMetrics, pid: int, samples: int) -> dict[str, float]:
    """Sample several times, half a second apart, and return the newest signals."""
    found: dict[int, dict[str, float]] = {}
    for _ in range(samples):
        found = signals.take_signals({pid: 0}, time.monotonic())
        for _ in range(6):
            signals.sample_disk_waits([pid], time.monotonic())
            time.sleep(0.1)
    return found[pid]


def make_proc_folder(folder: Path, *pids: int) -> Path:
    """Make a /proc folder with the machine's CPUs and only the given real processes."""
    folder.mkdir()
    for name in ("stat", *map(str, pids)):
        (folder / name).symlink_to(Path("/proc") / name)
    return folder


def pid_of_busiest_other(signals: HostMetrics, pid: int) -> int:
    return next(each.pid for each in signals.busiest_programs(pid) if each.owner in OUTSIDE)


def test_other_process_on_the_ranks_cpu_is_reported(tmp_path: Path) -> None:
    """Two processes share a CPU, so each of them waits half of the time."""
    cpu = min(os.sched_getaffinity(0))
    with (
        start_busy_process(cpu) as rank,
        start_busy_process(cpu) as other,
        start_busy_process(cpu, LITTLE) as little,
    ):
        # Only three processes are visible, because other tests may be busier for a moment.
        signals = HostMetrics(make_proc_folder(tmp_path / "proc", rank, other, little))
        newest = sample_signals(signals, rank, 5)

        assert newest["cpu_wait_share"] > 0.2
        assert newest["neighbour_share"] > 0.2
        assert pid_of_busiest_other(signals, rank) == other
        owners = {each.pid: each.owner for each in signals.busiest_programs(rank)}
        assert owners.items() >= {rank: RANK, other: OTHER}.items()
        assert signals.sharing_ranks(rank) == 1
        assert newest["gc_share"] == newest["disk_wait_share"] == 0.0


def test_rank_that_has_ended_is_still_one_of_the_job(tmp_path: Path) -> None:
    """A rank that ends before another one is no program outside of the job."""
    cpu = min(os.sched_getaffinity(0))
    with start_busy_process(cpu) as rank, start_busy_process(cpu) as ended:
        signals = HostMetrics(make_proc_folder(tmp_path / "proc", rank, ended))
        for _ in range(5):
            signals.take_signals({rank: 0, ended: 0}, time.monotonic())
            time.sleep(0.6)
            signals.busiest_programs(rank)
        signals.take_signals({rank: 0}, time.monotonic())
        owners = {each.pid: each.owner for each in signals.busiest_programs(rank)}

    assert owners == {rank: RANK, ended: RANK}


def test_rank_itself_is_not_reported_as_busiest_other_process() -> None:
    cpu = min(os.sched_getaffinity(0))
    with start_busy_process(cpu) as rank, start_busy_process(cpu):
        signals = HostMetrics()
        assert sample_signals(signals, rank, 4)["neighbour_share"] > 0.2
        assert pid_of_busiest_other(signals, rank) != rank


def test_sleeping_process_reports_no_cpu_wait() -> None:
    """Other processes are not sampled, because this one does not wait for a CPU."""
    with subprocess.Popen(["sleep", "20"]) as process:
        newest = sample_signals(HostMetrics(), process.pid, 3)
        process.kill()

    assert newest["cpu_wait_share"] < 0.02
    assert newest["kernel_share"] < 0.1
    assert newest["disk_wait_share"] == 0.0
    assert "neighbour_share" not in newest


def test_ended_process_produces_no_signals() -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        signals = HostMetrics()
        signals.take_signals({process.pid: 0}, 0.0)
        process.kill()
    signals.sample_disk_waits([process.pid], 0.5)

    assert signals.take_signals({process.pid: 0}, 1.0) == {}
    assert signals.busiest_programs(process.pid) == []


class Kernel:
    """A /proc folder, as in proc(5), with this process and a data loader worker."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder
        (folder / "stat").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
        self.pid, self.worker = os.getpid(), 99999
        self.write(self.pid)
        self.write(self.worker)

    def write(
        self, pid: int, state: str = "S", faults: int = 0, kernel_ticks: int = 0, waited_ns: int = 0
    ) -> None:
        fields = [state, *["0"] * 49]
        fields[9], fields[12] = str(faults), str(kernel_ticks)
        stat = f"{pid} (py (x) y) {' '.join(fields)}\n"
        folder = self.proc / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(stat)
        (folder / "cgroup").write_text("0::/\n")
        (folder / "task" / str(pid) / "stat").write_text(stat)
        (folder / "task" / str(pid) / "schedstat").write_text(f"5 {waited_ns} 3\n")
        (folder / "task" / str(pid) / "children").write_text(
            f"{self.worker} " if pid == self.pid else ""
        )


def test_rates_and_shares_are_computed_between_two_samples(tmp_path: Path) -> None:
    """Page faults of a data loader worker are added."""
    kernel = Kernel(tmp_path)
    signals = HostMetrics(tmp_path)
    assert signals.take_signals({kernel.pid: 10**9}, 100.0) == {}
    for second, state in enumerate(("D", "S", "R", "D")):
        kernel.write(kernel.pid, state)
        signals.sample_disk_waits([kernel.pid], 100 + second / 4)
        # The last sample is too recent to compute a rate.
        signals.sample_disk_waits([kernel.pid], 100 + second / 4 + 0.01)
    kernel.write(kernel.pid, faults=6, kernel_ticks=TICKS_PER_S // 2, waited_ns=500_000_000)
    kernel.write(kernel.worker, faults=4)

    newest = signals.take_signals({kernel.pid: 2 * 10**9}, 102.0)[kernel.pid]

    assert newest["disk_wait_share"] == 0.5
    assert newest["major_faults_per_s"] == 5.0
    assert newest["kernel_share"] == 0.25
    assert newest["cpu_wait_share"] == 0.25
    assert newest["gc_share"] == 0.5
    # The last sample is too recent for a new one.
    assert signals.take_signals({kernel.pid: 2 * 10**9}, 102.1)[kernel.pid] is newest


@pytest.mark.parametrize(("state", "share"), [("S", 1.0), ("R", 0.0)])
def test_disk_wait_of_a_worker_counts_only_while_the_main_thread_sleeps(
    tmp_path: Path, state: str, share: float
) -> None:
    """A running main thread does not wait for its worker."""
    kernel = Kernel(tmp_path)
    signals = HostMetrics(tmp_path)
    signals.take_signals({kernel.pid: 0}, 100.0)
    kernel.write(kernel.pid, state)
    kernel.write(kernel.worker, "D")
    signals.sample_disk_waits([kernel.pid], 100.5)

    assert signals.take_signals({kernel.pid: 0}, 101.0)[kernel.pid]["disk_wait_share"] == share


class Machine:
    """A /proc folder of a machine with one CPU, as in proc(5)."""

    def __init__(self, folder: Path) -> None:
        self.proc, self._ticks = folder, dict[int, int]()
        self.second = 0.0

    def passes(self, busy: float, **programs: float) -> float:
        """Advance time by one second, in which the CPU was busy for the given share.

        programs: CPU shares of processes, such as pid1=0.5.
        """
        self.second += 1.0
        busy_ticks = self._ticks[-1] = self._ticks.get(-1, 0) + round(busy * TICKS_PER_S)
        self.proc.mkdir(exist_ok=True)
        (self.proc / "stat").write_text(
            f"cpu 0\ncpu0 {busy_ticks} 0 0 {7000} 0 0 0 0 0 0\nintr 5\n"
        )
        for name, share in programs.items():
            pid = int(name.removeprefix("pid"))
            ticks = self._ticks[pid] = self._ticks.get(pid, 0) + round(share * TICKS_PER_S)
            fields = ["S", *["0"] * 49]
            fields[11] = str(ticks)
            (self.proc / str(pid)).mkdir(exist_ok=True)
            (self.proc / str(pid) / "stat").write_text(f"{pid} (prog{pid}) {' '.join(fields)}\n")
        return self.second


def test_cpu_use_of_invisible_processes_is_counted(tmp_path: Path) -> None:
    """A container hides other processes but not the CPU's total time.

    Processes of the job itself do not count.
    """
    machine = Machine(tmp_path)
    neighbours = CpuNeighbours(tmp_path)
    for _ in range(3):
        neighbours.take_sample(machine.passes(1.0, pid7=0.4, pid8=0.2))

    assert neighbours.busy_share({0}, {7: {0}, 8: {0}}) == pytest.approx(0.4)
    # Process 8 may spend half of its time on the other CPU.
    assert neighbours.busy_share({0}, {7: {0}, 8: {0, 1}}) == pytest.approx(0.5)
    assert neighbours.busy_share({0, 1}, {7: {0, 1}, 8: {0, 1}}) == pytest.approx(0.2)
    found = neighbours.busiest_programs({0}, {7: RANK})
    assert [(each.name, each.pid, each.owner) for each in found] == [
        ("prog7", 7, RANK), ("prog8", 8, OTHER)
    ]  # fmt: skip
    assert [each.cpus for each in found] == pytest.approx([0.4, 0.2])
    assert neighbours.busiest_programs({1}, {}) == []


def test_recently_busy_process_replaces_an_earlier_one(tmp_path: Path) -> None:
    """A new process is reported after some seconds, although another one was busy for minutes."""
    machine = Machine(tmp_path)
    neighbours = CpuNeighbours(tmp_path)
    for _ in range(60):
        neighbours.take_sample(machine.passes(1.0, pid7=0.9, pid8=0.0))
    assert [each.pid for each in neighbours.busiest_programs({0}, {})] == [7]
    for _ in range(6):
        neighbours.take_sample(machine.passes(1.0, pid7=0.0, pid8=0.9))

    assert [each.pid for each in neighbours.busiest_programs({0}, {})] == [8, 7]
    assert not neighbours.take_sample(machine.second + 100.0)  # The newest sample is too old.


def test_ranks_of_one_control_group_share_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's files are read once for each sample, not once for each rank."""
    reads: list[ControlGroup] = []
    read = ControlGroup.refault_count
    monkeypatch.setattr(
        ControlGroup, "refault_count", lambda group: (reads.append(group), read(group))[1]
    )
    with contextlib.ExitStack() as stack:
        pids = [os.getpid(), stack.enter_context(start_busy_process(0, "input()"))]
        signals = HostMetrics()
        for now_s in (0.0, 1.0, 2.0):
            signals.take_signals(dict.fromkeys(pids, 0), now_s)

    assert len(reads) == 3
