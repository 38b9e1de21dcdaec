"""Tests of limits and pressure read from control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchlens_perf.sidecar.host.cgroup import ControlGroup

PID = 7
STALLED = (
    "some avg10=1.00 avg60=0.50 avg300=0.10 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00"
    " total=5\n"
)


class Machine:
    """A folder with control-group files like those of the kernel."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root, self.pressure = (
            folder / "proc",
            folder / "cgroup",
            folder / "pressure",
        )

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, lines: str) -> ControlGroup:
        self.write(self.proc / str(PID) / "cgroup", lines)
        return ControlGroup(PID, proc=self.proc, root=self.root, pressure=self.pressure)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_cgroup_version_2_reports_the_tightest_limit_of_nested_groups(machine: Machine) -> None:
    pod = machine.root / "pod"
    machine.write(pod / "memory.current", "900\n")
    machine.write(pod / "memory.max", "1000\n")
    machine.write(pod / "memory.stat", "inactive_file 50\nactive_file 70\n")
    machine.write(pod / "train/memory.current", "400\n")
    machine.write(pod / "train/memory.max", "max\n")
    machine.write(
        pod / "train/memory.stat", "anon 5\nworkingset_refault_anon 3\nworkingset_refault_file 40\n"
    )
    machine.write(
        pod / "train/cpu.stat", "usage_usec 9\nnr_periods 4\nnr_throttled 2\nthrottled_usec 1500\n"
    )
    machine.write(pod / "train/memory.pressure", STALLED.format(123))
    machine.write(machine.pressure / "io", STALLED.format(456))

    group = machine.group("0::/pod/train\n")

    assert group.path == "/pod/train"
    assert group.memory_limit_share() == 0.85  # Inactive file pages do not count as used memory.
    assert group.refault_count() == 43
    assert group.quota_periods() == (4, 2)
    assert group.stall_time_us("memory") == 123
    # The group has no file for I/O pressure, so the value of the whole node is read.
    assert group.stall_time_us("io") == 456


def test_cgroup_version_1_reads_a_separate_hierarchy_per_controller(machine: Machine) -> None:
    """A very large number means that there is no limit."""
    machine.write(machine.root / "memory/job/memory.usage_in_bytes", "300\n")
    machine.write(machine.root / "memory/job/memory.limit_in_bytes", "400\n")
    machine.write(machine.root / "memory/memory.usage_in_bytes", "900\n")
    machine.write(machine.root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write(
        machine.root / "memory/job/memory.stat",
        "cache 1\nworkingset_refault_file 8\ntotal_inactive_file 100\n",
    )
    machine.write(
        machine.root / "cpu/other/cpu.stat", "nr_periods 4\nnr_throttled 2\nthrottled_time 77\n"
    )

    group = machine.group("5:memory:/job\n3:cpu,cpuacct:/other\n0::/\n")

    assert group.path == "/job"
    assert group.memory_limit_share() == 0.5
    assert group.refault_count() == 8
    assert group.quota_periods() == (4, 2)


def test_missing_limits_and_pressure_files_are_reported_as_none(machine: Machine) -> None:
    machine.root.mkdir()
    machine.write(
        machine.root / "cpu.stat", "usage_usec 9\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n"
    )

    # The group's path belongs to another namespace, so its files are not visible.
    group = machine.group("0::/../../host/path\n")

    assert group.memory_limit_share() is None
    assert group.refault_count() is None
    assert group.quota_periods() is None
    assert group.stall_time_us("memory") is None


def test_control_group_of_a_missing_process_raises_an_error(machine: Machine) -> None:
    with pytest.raises(FileNotFoundError):
        ControlGroup(PID, proc=machine.proc)


def test_counters_of_this_process_do_not_decrease() -> None:
    group = ControlGroup(os.getpid())
    first = group.stall_time_us("io"), group.refault_count()
    second = group.stall_time_us("io"), group.refault_count()

    for before, after in zip(first, second, strict=True):
        assert (before is None) == (after is None)
        assert before is None or after is None or 0 <= before <= after
    share = group.memory_limit_share()
    assert share is None or 0 < share < 1.1
