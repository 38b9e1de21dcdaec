"""Tests of CPU time, memory, disk and network of the ranks' processes, read from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchlens_perf.sidecar.telemetry.processes import sample_processes

MB = 1 << 20
WORKER = """
import os, sys
held = bytearray(64 << 20)
held[:: 4096] = b"x" * len(held[:: 4096])
with open(sys.argv[1], "wb") as file:
    file.write(bytes(8 << 20))
    os.fsync(file.fileno())
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[int]:
    """Start a process that has allocated 64 MiB and written 8 MiB."""
    command = [sys.executable, "-c", WORKER, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid


def test_sample_of_a_real_process_has_cpu_time_and_memory(worker: int) -> None:
    (sample,) = sample_processes({3: worker}, 5, 7)
    assert (sample["rank"], sample.monotonic_ns, sample.unix_ns) == (3, 5, 7)
    assert sample["cpu_ns"] is not None
    assert 0 < sample["cpu_ns"] < 60e9
    assert sample["resident_bytes"] is not None
    assert 64 * MB < sample["resident_bytes"] < 512 * MB


def test_cpu_time_and_memory_of_children_are_added_to_their_parent(worker: int) -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if not children.exists() or str(worker) not in children.read_text().split():
        pytest.skip("the kernel does not list child processes (CONFIG_PROC_CHILDREN)")
    alone, both = sample_processes({0: worker, 1: os.getpid()}, 0, 0)
    assert alone["resident_bytes"] is not None
    assert both["resident_bytes"] is not None
    assert both["resident_bytes"] > alone["resident_bytes"] + 16 * MB


def test_written_bytes_are_counted_and_ended_processes_have_no_sample(worker: int) -> None:
    if not os.access(f"/proc/{worker}/io", os.R_OK):
        pytest.skip("the kernel does not count bytes per process (CONFIG_TASK_IO_ACCOUNTING)")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (sample,) = sample_processes({0: ended.pid, 1: worker}, 0, 0)
    assert sample["rank"] == 1
    # The 8 MiB count only on a disk, not in a memory file system.
    assert sample["written_bytes"] is not None
    assert sample["written_bytes"] == 0 or sample["written_bytes"] >= 8 * MB


def proc(root: Path, pid: int, children: str = "", **files: str) -> None:
    """Write files of /proc for a process with 100 ticks of CPU time and 10 pages."""
    folder = root / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "net").mkdir()
    fields = ["S", *["0"] * 10, "10", "20", "30", "40", *["0"] * 6, "10", *["0"] * 20]
    (folder / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
    (folder / "task" / str(pid) / "children").write_text(children)
    for name, text in files.items():
        (folder / name.replace("_", "/")).write_text(text)


NET = """Inter-|   Receive
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets
    lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0
  eth0:1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0
  ib0: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0
"""


def test_values_of_children_and_network_interfaces_are_summed(tmp_path: Path) -> None:
    io = "rchar: 1\nread_bytes: 100\nwrite_bytes: 200\n"
    proc(tmp_path, 1, "2 99 ", io=io, net_dev=NET)
    proc(tmp_path, 2, io=io)
    (sample,) = sample_processes({0: 1}, 0, 0, str(tmp_path))
    ticks = 2 * (10 + 20 + 30 + 40)
    assert sample["cpu_ns"] == ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    assert sample["resident_bytes"] == 20 * os.sysconf("SC_PAGE_SIZE")
    assert (sample["read_bytes"], sample["written_bytes"]) == (200, 400)
    assert (sample["network_received_bytes"], sample["network_transmitted_bytes"]) == (1010, 2020)


def test_values_that_the_kernel_does_not_report_are_none(tmp_path: Path) -> None:
    proc(tmp_path, 1)
    (sample,) = sample_processes({0: 1}, 0, 0, str(tmp_path))
    assert (sample["read_bytes"], sample["written_bytes"]) == (None, None)
    assert (sample["network_received_bytes"], sample["network_transmitted_bytes"]) == (None, None)
