"""Compare predicted numbers of DataLoader workers with the least that is enough when tried.

Each set-up has planted times per sample: reads that sleep, and decoding that uses the CPU. The truth is
the least number of workers whose steps take at most 1.1 times the shortest ones. It is measured here
with a plain DataLoader and a loop, and computed from the planted times. Run it on two CPUs of an idle
machine; on a busy one, with --computed, which measures no truth:

    taskset -c 0,1 python -m benchmarks.loader_workers
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from torchlens_perf.check.loader import predict_workers, try_workers

_SECONDS, _REPEATS, _ENOUGH = 0.5, 2, 1.1


class SetUp(NamedTuple):
    """Planted times in ms."""

    name: str
    batch_size: int
    read: float
    decode: float
    step: float
    burns: bool = False
    """True for a step that uses a CPU."""
    varies: bool = False


SET_UPS = (
    SetUp("slow reads", 8, 5, 0, 20),
    SetUp("slow reads, large batch", 16, 5, 0, 20),
    SetUp("slow reads, short step", 32, 2.5, 0, 12),
    SetUp("fast reads", 4, 10, 0, 60),
    SetUp("reads that vary", 8, 5, 0, 15, varies=True),
    SetUp("little decoding", 8, 0, 2.5, 30),
    SetUp("much decoding", 8, 0, 4, 20),
    SetUp("more decoding than CPUs", 16, 0, 4, 20),
    SetUp("reads and decoding", 8, 8, 1, 20),
    SetUp("reads, step on a CPU", 4, 10, 0, 20, burns=True),
    SetUp("decoding, step on a CPU", 8, 0, 3, 30, burns=True),
    SetUp("many small reads", 64, 1, 0, 15),
)


class Samples(Dataset[Any]):
    def __init__(self, planted: SetUp) -> None:
        self.planted = planted

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        read_s = self.planted.read / 1e3
        time.sleep(random.expovariate(1 / read_s) if self.planted.varies else read_s)
        use_cpu(self.planted.decode / 1e3)
        return torch.zeros(16)


def use_cpu(seconds: float) -> None:
    """Use so much CPU time, however busy the machine is."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def measure_period(planted: SetUp, workers: int) -> float:
    """Return the time of a step in s, without the first batches, which are loaded in advance."""
    loader = DataLoader(Samples(planted), planted.batch_size, num_workers=workers)
    step_s, began_s, times_s = planted.step / 1e3, 0.0, list[float]()
    for count in itertools.count():
        if count == 0:
            batches = iter(loader)
        next(batches)
        use_cpu(step_s) if planted.burns else time.sleep(step_s)
        now_s = time.perf_counter()
        if count == 3 * workers:
            began_s = now_s
        elif count > 3 * workers and count % workers == 0:
            times_s.append((now_s - began_s) / (count - 3 * workers))
            if now_s - began_s > _SECONDS and len(times_s) > 1:
                return times_s[-1]
    raise AssertionError("unreachable")


def compute_enough(planted: SetUp, cpus: int) -> int:
    """Return the least number of workers that is enough by the planted times."""
    batch, on_cpu = (
        planted.batch_size * each for each in (planted.read + planted.decode, planted.decode)
    )
    least = max(planted.step, on_cpu / cpus)
    return next(
        each
        for each in itertools.count(1)
        if max(planted.step, batch / each, on_cpu / cpus) <= _ENOUGH * least
    )


def find_enough(planted: SetUp) -> tuple[int, dict[int, float]]:
    """Return the least number of workers that is enough, and the times of a step by workers."""
    most = int(planted.batch_size * (planted.read + planted.decode) / planted.step) + 3
    periods_s = {
        workers: min(measure_period(planted, workers) for _ in range(_REPEATS))
        for workers in range(1, most + 1)
    }
    limit_s = _ENOUGH * min(periods_s.values())
    return min(each for each in periods_s if periods_s[each] <= limit_s), periods_s


def main() -> int:
    """Print a table. Return 1 if fewer than 9 of 10 predictions are right within one."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    cpus, right = len(os.sched_getaffinity(0)), 0
    is_measured = sys.argv[1:] != ["--computed"]
    print(f"{'set-up':28} predicted  computed  measured   step in ms by workers")
    for planted in SET_UPS:
        left = cpus - planted.burns
        loader = DataLoader(Samples(planted), planted.batch_size)
        one = try_workers(loader, 1, lambda: None, _SECONDS)
        predicted = predict_workers(one, planted.step / 1e3, left)
        computed = compute_enough(planted, left)
        enough, periods_s = find_enough(planted) if is_measured else (computed, {})
        right += abs(predicted - enough) <= 1
        shown = " ".join(f"{1e3 * each:.1f}" for each in periods_s.values())
        measured = enough if is_measured else "-"
        print(f"{planted.name:28} {predicted:9} {computed:9} {measured:>9}   {shown}", flush=True)
    print(f"{right} of {len(SET_UPS)} are right within one, on {cpus} CPUs")
    return int(right < 0.9 * len(SET_UPS))


if __name__ == "__main__":
    sys.exit(main())
