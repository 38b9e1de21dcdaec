"""Sample the CPU, memory, disk and network use of the ranks' processes from /proc (proc(5)).

No library and no special permission is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from torchlens_perf.run.hardware_samples import PROCESSES, Sample, build_sample
from torchlens_perf.run.processes import TICKS_PER_S, child_pids, read_kernel_text, read_stat_fields

_TICK_NS = 1_000_000_000 // TICKS_PER_S
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def sample_processes(
    pids: Mapping[int, int], monotonic_ns: int, unix_ns: int, proc: str = "/proc"
) -> Iterator[Sample]:
    """Yield a sample of each rank's process and its children, such as data loader workers.

    pids: process ids by rank. Processes that have ended are left out.
    """
    # The counters of a network namespace, which all ranks of a node usually share.
    sent_by: dict[str, dict[str, int]] = {}
    for rank, pid in pids.items():
        parent = read_stat_fields(f"{proc}/{pid}/stat")
        if not parent:
            continue
        children = child_pids(pid, proc)
        stats = [
            parent,
            *(fields for child in children if (fields := read_stat_fields(f"{proc}/{child}/stat"))),
        ]
        # Fields 14 to 17 are CPU times of the process and of its ended children. Field 24 is the
        # number of resident pages.
        ticks = sum(int(value) for fields in stats for value in fields[11:15])
        io = [_read_numbers(f"{proc}/{process}/io") for process in (pid, *children)]
        # These counters cover the process's whole network namespace.
        namespace = _read_namespace(f"{proc}/{pid}/ns/net") or str(pid)
        if namespace not in sent_by:
            sent_by[namespace] = _read_network_bytes(f"{proc}/{pid}/net/dev")
        values = {
            "rank": rank,
            "cpu_ns": ticks * _TICK_NS,
            "resident_bytes": sum(int(fields[21]) for fields in stats) * _PAGE_BYTES,
            "read_bytes": _sum_over_processes(io, "read_bytes"),
            "written_bytes": _sum_over_processes(io, "write_bytes"),
            **sent_by[namespace],
        }
        yield build_sample(PROCESSES, str(rank), monotonic_ns, unix_ns, values, before=None)


def _read_namespace(path: str) -> str:
    """Return the name of a namespace, such as net:[4026531840]; "" if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read_numbers(path: str) -> dict[str, int]:
    """Return the fields of a file with lines such as `read_bytes: 4096`, or {} on an error."""
    pairs = (line.partition(":") for line in read_kernel_text(path).splitlines())
    return {name: int(value) for name, _, value in pairs}


def _sum_over_processes(processes: list[dict[str, int]], name: str) -> int | None:
    """Return a value's sum over processes, or None if the value of the first process is missing."""
    return None if name not in processes[0] else sum(each.get(name, 0) for each in processes)


def _read_network_bytes(path: str) -> dict[str, int]:
    """Return bytes received and transmitted by all interfaces except loopback, {} without one."""
    lines = [line.split() for line in read_kernel_text(path).replace(":", " ").splitlines()[2:]]
    columns = {"network_received_bytes": 1, "network_transmitted_bytes": 9}
    others = [fields for fields in lines if fields[0] != "lo"]
    return {
        name: sum(int(fields[at]) for fields in others) for name, at in columns.items() if others
    }
