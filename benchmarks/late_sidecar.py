"""Compare a sidecar that starts at the end of a short run with one that starts at its beginning.

One process makes watched runs of one second and runs without a watch, in random order. The
sidecar's processor time is the time that the kernel reports to the sidecar's parent process.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

import torchlens_perf as perf
from benchmarks.measure import Table
from torchlens_perf.recorder import sidecar

RUNS, RUN_S = 16, 1.0
AT_START, AT_END, UNWATCHED = "at the start", "at the end", "no watch"


class _Job:
    """A run of about RUN_S seconds, whose sidecar starts at the time that `arm` names."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._x = torch.randn(64, 256)
        self._steps(50)
        began_s = time.perf_counter()
        self._steps(100)
        self._count = int(RUN_S / ((time.perf_counter() - began_s) / 100))

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.model(self._x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, arm: str, folder: str) -> tuple[float, float, float, float]:
        """Return the seconds of start, steps and end, and the sidecar's processor seconds."""
        began_s = time.perf_counter()
        if arm == UNWATCHED:
            self._steps(self._count)
            return 0.0, time.perf_counter() - began_s, 0.0, 0.0
        children: list[subprocess.Popen[Any]] = []
        with _sidecars(children, skipped=1 if arm == AT_END else 0):
            config = perf.Config(dir=folder, _exit_timeout_s=30.0)
            watch = perf.watch(self.model, self.optimizer, config=config).start()
            entered_s = time.perf_counter()
            self._steps(self._count)
            left_s = time.perf_counter()
            with contextlib.redirect_stderr(io.StringIO()):
                watch.stop()
            ended_s = time.perf_counter()
        cpu_s = 0.0
        for child in children:
            with contextlib.suppress(ChildProcessError):
                _, _, used = os.wait4(child.pid, 0)
                cpu_s += used.ru_utime + used.ru_stime
        return entered_s - began_s, left_s - entered_s, ended_s - left_s, cpu_s


@contextlib.contextmanager
def _sidecars(children: list[subprocess.Popen[Any]], *, skipped: int) -> Any:
    """Collect the started processes, and skip the first `skipped` starts of the sidecar."""
    ensure, popen, calls = sidecar.ensure_running, subprocess.Popen, iter(range(1 << 30))

    def start(*arguments: Any, **settings: Any) -> subprocess.Popen[Any]:
        children.append(popen(*arguments, **settings))
        return children[-1]

    sidecar.ensure_running = lambda run, who: next(calls) >= skipped and ensure(run, who)
    subprocess.Popen = start  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        sidecar.ensure_running, subprocess.Popen = ensure, popen  # type: ignore[misc]


def main() -> int:
    """Print the table, in which no limit is checked."""
    table = Table(
        "threads", "the sidecar starts", "start ms", "steps s", "end ms", "its processor time s"
    )
    for threads in (1, 2):
        torch.set_num_threads(threads)
        job, values = _Job(), {arm: [] for arm in (AT_START, AT_END, UNWATCHED)}
        order = [arm for arm in values for _ in range(RUNS)]
        random.Random(1).shuffle(order)
        with tempfile.TemporaryDirectory() as folder:
            for arm in order:
                values[arm].append(job.run(arm, folder))
        for arm, runs in values.items():
            start_s, steps_s, end_s, cpu_s = (
                statistics.median(column) for column in zip(*runs, strict=True)
            )
            table.row(
                threads,
                arm,
                f"{1e3 * start_s:.0f}",
                f"{steps_s:.2f}",
                f"{1e3 * end_s:.0f}",
                f"{cpu_s:.2f}",
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
