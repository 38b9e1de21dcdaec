"""A capture on a GPU: the contents of its files, the pause of training, and the cost of steps after
it.
"""

from __future__ import annotations

import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import torchlens_perf as perf
from benchmarks.capture_cost import STEPS, Asking
from benchmarks.gpu_check.driver_calls import Calls
from benchmarks.gpu_check.gpt import trainer
from benchmarks.gpu_check.lines import Checks
from torchlens_perf.run.captures import SNAPSHOT

AROUND, TIMES = 30, 2


def capture(checks: Checks) -> None:
    """Make two captures. Each attaches CUPTI, which must be detached afterwards."""
    model, step = trainer(batch=2)
    for _ in range(10):
        step()
    with tempfile.TemporaryDirectory() as folder:
        with perf.watch(model, dir=folder, sidecar=False, report="off") as watch:
            before_ms = [_timed_ms(step) for _ in range(AROUND)]
            usual_ms = statistics.median(before_ms)
            for number in range(1, TIMES + 1):
                asking = Asking(watch, Path(folder), python=False)
                asking.ask()
                during_ms = [_timed_ms(step) for _ in range(STEPS + 1)]
                after_ms = [_timed_ms(step) for _ in range(AROUND)]
                outcome = asking.outcome()
                pauses = f"{during_ms[0] - usual_ms:.0f} ms, {during_ms[-1] - during_ms[-2]:.0f} ms"
                checks.value(
                    "capture", f"pause at the begin and at the end, capture {number}", pauses
                )
                captured = 100 * (statistics.median(during_ms[1:-1]) / usual_ms - 1)
                checks.value("capture", f"a captured step, capture {number}", f"{captured:+.1f} %")
                judge_capture(checks, number, before_ms, after_ms, outcome.steps)
        check_detached(checks)
        trace = json.loads(asking.trace)
        kernels = sum(each.get("cat") == "kernel" for each in trace["traceEvents"])
        checks.bar("capture", "kernels in the trace", str(kernels), "at least 300", kernels >= 300)
        with open(Path(folder) / "files" / SNAPSHOT, "rb") as file:
            segments = len(pickle.load(file)["segments"])
        checks.bar(
            "capture", "segments in the memory snapshot", str(segments), "at least 1", segments >= 1
        )


def judge_capture(
    checks: Checks, number: int, before_ms: Sequence[float], after_ms: Sequence[float], steps: int
) -> None:
    """Expect steps as before the first capture, and as many captured steps as requested."""
    later = 100 * (statistics.median(after_ms) / statistics.median(before_ms) - 1)
    what = f"a step after capture {number}"
    checks.bar("capture", what, f"{later:+.2f} %", "at most 1 %", later <= 1)
    what, met = f"steps in capture {number}", steps == STEPS
    checks.bar("capture", what, str(steps), str(STEPS), met)


def check_detached(checks: Checks, cupti: str | None = None) -> None:
    """Subscribe to CUPTI, which has room for one subscriber. cupti: path, by default torch's own."""
    try:
        with Calls(cupti):
            found = "detached"
    except (RuntimeError, OSError) as error:
        found = str(error)
    checks.bar("capture", "CUPTI after the captures", found, "detached", found == "detached")


def _timed_ms(step: Callable[[], None]) -> float:
    begin = time.perf_counter_ns()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e6
