"""Measure the peak rates of the node's CPUs after a run, for the utilization of jobs on CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from torchlens_perf.verdicts.node_state import CpuPeak

_WINDOW_S = 0.03
_WINDOWS = 2
_SIZE = 512
_COPIED_BYTES = 1 << 24


def measure_cpu_peak() -> CpuPeak:
    """Return the rates that all CPUs of this process reach together. Takes 0.15 s.

    The environment of the sidecar limits BLAS to one thread, so each CPU gets a thread of its own,
    and the threads run outside of the GIL. The best of several windows counts, because other
    programs may be running.
    """
    cpus = len(os.sched_getaffinity(0))

    def multiply() -> Callable[[], object]:
        left, right, result = (np.ones((_SIZE, _SIZE), np.float32) for _ in range(3))
        return lambda: np.matmul(left, right, out=result)

    def copy() -> Callable[[], object]:
        source, target = (np.ones(_COPIED_BYTES, np.uint8) for _ in range(2))
        return lambda: np.copyto(target, source)

    with ThreadPoolExecutor(cpus) as pool:

        def calls_per_s(make: Callable[[], Callable[[], object]]) -> float:
            works = [make() for _ in range(cpus)]
            return max(sum(pool.map(_count_calls_per_s, works)) for _ in range(_WINDOWS))

        return CpuPeak(
            flops_per_s=2 * _SIZE**3 * calls_per_s(multiply),
            bytes_per_s=2 * _COPIED_BYTES * calls_per_s(copy),
            cpus=cpus,
        )


def _count_calls_per_s(work: Callable[[], object]) -> float:
    began_s, calls = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - began_s) < _WINDOW_S:
        work()
        calls += 1
    return calls / elapsed_s
