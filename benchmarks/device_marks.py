"""Cost of device times for the training thread, beyond the driver's own calls.

A driver whose events cost nothing stands in for the GPU's: every mark is reached at once. Blocks of
steps of a small GPT with 62 modules run in shuffled order, with the device's clock, without it, and
again without it (the control), all under one watch. A usual step has 6 marks: the begin and end of
the forward pass, the backward pass and the optimizer, whose end is also the step's. In a sampled
step, modules have marks too.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import torchlens_perf as perf
from benchmarks.gpt import GPT
from benchmarks.measure import Table, interleaved
from torchlens_perf.cuda.clock import create_driver_clock

ROUNDS, STEPS, WARM_STEPS = 400, 10, 2
USUAL_LIMIT_US, SAMPLED_LIMIT_US = 12.0, 200.0
_DRIVER = """
#include <time.h>
static int exchanged(int *mode) { return *mode = 0; }
static char events[1 << 16];
static int made;
int cuEventCreate(void **event, unsigned flags) { *event = &events[made++ & 0xffff]; return 0; }
int cuEventDestroy_v2(void *event) { return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventQuery(void *event) { return 0; }
int cuEventElapsedTime(float *ms, void *begin, void *end) { *ms = 1; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { return *status = 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return exchanged(mode); }
"""


class Loop:
    """A training loop under a watch, with a device's clock that can be taken away."""

    def __init__(self, session: Any, clock: Any) -> None:
        self.session = session
        self.model = GPT(layers=4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.ids = torch.randint(0, 256, (1, 8))
        self._clock = clock

    def step(self) -> None:
        self.model(self.ids).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block_us(self, *, marked: bool, sampled: bool) -> float:
        """Return the median of the steps' durations."""
        recorder = self.session.recorder
        recorder.set_device_clock(self._clock if marked else None)
        durations_us = []
        for number in range(STEPS + WARM_STEPS):
            recorder.sampled = int(sampled)
            began_ns = time.perf_counter_ns()
            self.step()
            if number >= WARM_STEPS:
                durations_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        recorder.set_device_clock(None)
        return statistics.median(durations_us)


def compile_driver(folder: Path) -> str:
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(_DRIVER)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def main() -> int:
    if shutil.which("cc") is None:
        print("device_marks: there is no C compiler")
        return 0
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    table = Table("step", "marks", "more than without", "control", "limit", "")
    clock = create_driver_clock(compile_driver(folder), lambda index: 0, 0, 1)
    config = perf.Config(report="off", modules="all", dir=str(folder / "runs"))
    with perf.watch(config=config) as watch:
        loop = Loop(watch._session, clock)
        for _ in range(100):
            loop.step()
        for name, sampled, limit_us in (
            ("usual", False, USUAL_LIMIT_US),
            ("sampled", True, SAMPLED_LIMIT_US),
        ):
            marked = clock.marked
            loop.block_us(marked=True, sampled=sampled)
            marks = (clock.marked - marked) / (STEPS + WARM_STEPS)
            times_us = interleaved(
                {
                    each: lambda each=each, sampled=sampled: loop.block_us(
                        marked=each == "marked", sampled=sampled
                    )
                    for each in ("marked", "plain", "control")
                },
                ROUNDS,
            )
            more_us, control_us = (
                statistics.median(
                    a - b for a, b in zip(times_us[which], times_us["plain"], strict=True)
                )
                for which in ("marked", "control")
            )
            met = table.bar(more_us <= limit_us)
            table.row(
                name, f"{marks:.1f}", f"{more_us:.1f} us", f"{control_us:.1f} us", f"{limit_us:.0f} us", met
            )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    return int(table.missed > 0)
