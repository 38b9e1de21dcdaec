"""Measure this rank and its node with real work of torch, Python, disk and kernel."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import socket
import struct
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch

from torchlens_perf.check.loader import drop_pages
from torchlens_perf.config import CHILD
from torchlens_perf.run.children import find_interpreter
from torchlens_perf.run.processes import read_kernel_text
from torchlens_perf.sidecar.host.cgroup import ControlGroup

Measure: TypeAlias = Callable[[float], float]
"""Measure one quantity for about the given seconds, and return its value."""

CPU = torch.device("cpu")
ROUNDS = 5
"""Number of times that each quantity is measured."""
_LOOPS, _SIZE = 20_000, 512
_BLOCK = bytes(1 << 20)
_MOST_FILE_BYTES = 1 << 28
# ioctl(2) of <linux/sockios.h> and flags of <net/if.h>.
_SIOCGIFFLAGS, _SIOCGIFMTU = 0x8913, 0x8921
_UP_AND_RUNNING, _LOOPBACK = 0x41, 0x08
_TIMED_IMPORT = "import time; t = time.perf_counter(); import numpy; print(time.perf_counter() - t)"


def time_call(call: Callable[[], object], budget_s: float, device: torch.device) -> float:
    """Return the seconds that a call takes, repeated for about `budget_s`."""
    call()
    begin_s, seconds = time.perf_counter(), list[float]()
    while not seconds or time.perf_counter() - begin_s < budget_s:
        seconds.append(time_calls(call, 1 if device.type == "cpu" else 10, device))
    return sum(seconds) / len(seconds)


def time_calls(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the mean seconds of calls, by the clock of the GPU if the device is one."""
    if device.type == "cpu":
        return timeit.timeit(call, number=count) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    timeit.timeit(call, number=count)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def list_rank_measures(device: torch.device) -> dict[str, Measure]:
    """Return the measures of one rank: its device and one thread of its CPU."""
    on_device = device.type == "cuda"
    size, copied = (8192, 1 << 29) if on_device else (384, 1 << 26)

    def rate(work: float, call: Callable[[], object]) -> Measure:
        return lambda budget_s: work / time_call(call, budget_s, device)

    found: dict[str, Measure] = {}
    for dtype in ("float32", "bfloat16", *(("float16",) if on_device else ())):
        a = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
        found[f"matmul {dtype}"] = rate(
            2.0 * size**3, functools.partial(torch.mm, a, a, out=a.clone())
        )
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["memory bandwidth"] = rate(2.0 * copied, lambda: target.copy_(source))
    if on_device:
        pinned = torch.ones(copied, dtype=torch.uint8, pin_memory=True)
        one = torch.ones(1, device=device)
        found |= {
            "copy to the device": rate(copied, lambda: source.copy_(pinned, non_blocking=True)),
            "copy from the device": rate(copied, lambda: pinned.copy_(source, non_blocking=True)),
            "kernel launch": lambda budget_s: time_call(lambda: one.add_(1), budget_s, CPU),
        }
    group = ControlGroup(os.getpid())
    before = group.quota_periods() or (0, 0)

    def measure_quota(_: float) -> float:
        periods, throttled = group.quota_periods() or before
        return 1 - min(0.999, (throttled - before[1]) / max(1, periods - before[0]))

    return found | {
        "one CPU thread": lambda budget_s: time_call(lambda: sum(range(_LOOPS)), budget_s, CPU),
        "CPU quota": measure_quota,
    }


def list_node_measures() -> dict[str, Measure]:
    """Return the measures of a node, which its first rank makes."""
    file: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # The process ends soon.
    a = torch.ones(_SIZE, _SIZE)
    multiply = functools.partial(torch.mm, a, a, out=a.clone())

    def measure_all_threads(budget_s: float) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        seconds = time_call(multiply, budget_s, CPU)
        torch.set_num_threads(before)
        return 2.0 * _SIZE**3 / seconds

    def stream(step: Callable[[], int], budget_s: float) -> float:
        # Read from the disk instead of the page cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin_s, total = time.perf_counter(), 0
        while count := step():
            total += count
            if time.perf_counter() - begin_s >= budget_s or total >= _MOST_FILE_BYTES:
                break
        return total / (time.perf_counter() - begin_s)

    return {
        "all CPU threads": measure_all_threads,
        "Python import": _measure_import,
        # Each write waits for the disk. Offset -1 is that of the file.
        "disk write": functools.partial(
            stream, lambda: os.pwritev(file.fileno(), [_BLOCK], -1, os.RWF_DSYNC)
        ),
        "disk read": functools.partial(stream, lambda: len(file.read(len(_BLOCK)))),
    }


def read_sizes() -> dict[str, float]:
    """Return sizes of the node that need one reading, in bytes."""
    shared = os.statvfs("/dev/shm")
    return {
        "shared memory": float(shared.f_frsize * shared.f_blocks),
        "free memory": _read_free_memory(),
        **{f"MTU of {name}": float(mtu) for name, mtu in _read_mtus()},
    }


def describe_machine() -> str:
    """Return the model and the number of the CPUs."""
    model = re.search(r"^model name\s*: (.*)", read_kernel_text("/proc/cpuinfo"), re.MULTILINE)
    return f"{os.cpu_count()} x {model[1].strip() if model else os.uname().machine}"


def _measure_import(_: float) -> float:
    """Return the seconds of an import in a new process, whose files are read from where they lie."""
    for path in Path(numpy.__file__).parent.rglob("*.*"):
        if path.suffix in (".py", ".pyc", ".so"):
            drop_pages(path)
    done = subprocess.run(
        [find_interpreter(), "-c", _TIMED_IMPORT],
        env={**os.environ, CHILD: "1"}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return float(done.stdout)


def _read_free_memory() -> float:
    """Return the memory that new processes can use: of the machine, or less by a control group."""
    lines = dict(line.split(":") for line in read_kernel_text("/proc/meminfo").splitlines())
    free = 1024.0 * int(lines["MemAvailable"].split()[0])
    group = ControlGroup(os.getpid())
    share, limit = group.memory_limit_share(), group.memory_limit_bytes()
    return free if share is None or limit is None else min(free, (1 - share) * limit)


def _read_mtus() -> Iterator[tuple[str, int]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        for _, name in socket.if_nameindex():
            flags, mtu = (
                struct.unpack_from("i", fcntl.ioctl(opened, number, struct.pack("16si12x", name.encode(), 0)), 16)[0]
                for number in (_SIOCGIFFLAGS, _SIOCGIFMTU)
            )  # fmt: skip
            if flags & _UP_AND_RUNNING == _UP_AND_RUNNING and not flags & _LOOPBACK:
                yield name, mtu
