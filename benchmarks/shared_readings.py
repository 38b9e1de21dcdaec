"""Error of the CPU times of phases that share a reading of the kernel's statistics.

    python -m benchmarks.shared_readings

A thread alternates between work and waits, next to programs that keep its CPU busy. Phases of less than
10 ms share a reading (torchlens_perf/native/thread_time.c). The truth is read from the kernel at the end
of each phase. The error is that of a step's time without a CPU in its work, which ranks are compared
without.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Table
from tests.support.busy_machine import busy_machine, one_cpu
from torchlens_perf._native import Recorder
from torchlens_perf.run.ring import Kind, RingFile, RingReader

STEPS, STEP_S = 120, 0.02
PHASES_S, OTHERS = (0.0005, 0.002, 0.004), (0, 1, 2)


def work(duration_s: float) -> None:
    """Use this much CPU time."""
    end_s = time.thread_time() + duration_s
    while time.thread_time() < end_s:
        pass


def poll(duration_s: float) -> None:
    """Wait by asking again and again, as a rank in shared memory does."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        pass


def measure(phase_s: float, wait: Callable[[float], None]) -> list[tuple[float, float, float]]:
    """Return, for each step, its duration and the time without a CPU in its work in s: true and
    recorded.
    """
    statistics_file = os.open(f"/proc/self/task/{os.getpid()}/schedstat", os.O_RDONLY)
    steps = []

    def read_ready_s() -> float:
        return int(os.pread(statistics_file, 96, 0).split()[1]) / 1e9

    with tempfile.TemporaryDirectory() as folder:
        ring = RingFile(Path(folder, "0.ring"), 1 << 16)
        recorder, reader = Recorder(ring.buffer, ring.intern), RingReader(ring.path)
        names = ring.intern("forward"), ring.intern("wait")
        recorder.start_thread_time()
        for _ in range(STEPS):
            true_s, began_s = 0.0, time.monotonic()
            while time.monotonic() - began_s < STEP_S:
                before_s = read_ready_s()
                recorder.begin(Kind.FORWARD, names[0])
                work(phase_s)
                recorder.end(Kind.FORWARD, names[0])
                true_s += read_ready_s() - before_s
                recorder.begin(Kind.WAIT, names[1])
                wait(phase_s / 2)
                recorder.end(Kind.WAIT, names[1])
            recorder.next_step()
            found = reader.read_records().records
            times = found[found["kind"] == Kind.THREAD_TIME]
            if len(times):
                of_work = times[times["flags"] == Kind.FORWARD]
                recorded_s = float(of_work["value1"].sum()) / 1e9
                steps.append((time.monotonic() - began_s, true_s, recorded_s))
        recorder.close()
        reader.close()
        ring.close()
    os.close(statistics_file)
    return steps


def main() -> int:
    """Print the table."""
    table = Table(
        "work", "waits", "busy programs", "without a CPU, true", "recorded", "error, mean", "of a step, median",
    )  # fmt: skip
    ways = {"blocked": time.sleep, "polling": poll}
    for phase_s, (name, wait), others in itertools.product(PHASES_S, ways.items(), OTHERS):
        with one_cpu(), busy_machine(others):
            steps = measure(phase_s, wait)
        whole_s, true_s, recorded_s = map(statistics.fmean, zip(*steps, strict=True))
        errors = [abs(recorded - true) / whole for whole, true, recorded in steps]
        table.row(
            f"{1e3 * phase_s:g} ms", name, others, f"{true_s / whole_s:.1%}", f"{recorded_s / whole_s:.1%}",
            f"{(recorded_s - true_s) / whole_s:+.2%}", f"{statistics.median(errors):.2%}",
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
