"""Compare the GPU's busy time by Kineto with the first sentence of the report."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import torchlens_perf as perf
from benchmarks.gpu_check.cost import LAUNCH_BOUND
from benchmarks.gpu_check.gpt import trainer
from benchmarks.gpu_check.lines import Checks
from benchmarks.planted_training import wait_for_sidecar
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory

# A GPU that is busy for a larger share is not called waiting, and one below the other share is.
BUSY, IDLE = 0.95, 0.3
# Kineto's own cost makes a launch-bound GPU more idle than it is without Kineto.
_TOLERANCE = 0.15
_WAITING = ("host_bound", "data_bound")


def busy(checks: Checks) -> None:
    """Compare the first verdict of a GPT-2 small and of a launch-bound model with Kineto's share."""
    for name, size, steps in (("GPT-2 small", {}, 80), ("8 layers of 64", LAUNCH_BOUND, 120)):
        model, step = trainer(**size)
        verdict = _first_verdict(model, step, steps)
        judge(checks, name, _busy_share(step, 8), verdict)
        del model, step
        torch.cuda.empty_cache()


def judge(checks: Checks, name: str, share: float, verdict: dict[str, Any]) -> None:
    """Report whether a verdict about a GPU that waits agrees with the time that the GPU is busy."""
    text, waits = str(verdict.get("text", "no verdict")), verdict.get("kind") in _WAITING
    said = re.search(r"(\d+)%", text)
    claimed = int(said[1]) / 100 if said and waits else 0.0
    if share >= BUSY:
        bar, met = "is not said to wait", not waits
    elif share < IDLE:
        bar, met = "is said to wait", waits
    else:
        bar = f"waits in at most {1 - share + _TOLERANCE:.0%}"
        met = claimed <= 1 - share + _TOLERANCE
    value = f"busy {share:.0%} by Kineto; {text.partition('. ')[0][:120]}"
    checks.bar("busy", f"{name}: the first sentence", value, bar, met)


def _first_verdict(model: Any, step: Callable[[], None], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with perf.watch(model, dir=folder, report="quiet") as watch:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
        assert watch.run_dir is not None
        wait_for_sidecar(watch.run_dir)
        report = load_report(RunDirectory(Path(watch.run_dir)))
    return next(({"text": each.text, "kind": each.kind} for each in report["verdicts"]), {})


def _busy_share(step: Callable[[], None], steps: int) -> float:
    """Return the share of the time in which a kernel or a copy runs, by CUPTI's records."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        begin_ns = time.perf_counter_ns()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall_ns = time.perf_counter_ns() - begin_ns
    events = profiler.profiler.kineto_results.events()
    work = (each for each in events if str(each.device_type()).endswith("CUDA"))
    return union_ns((each.start_ns(), each.end_ns()) for each in work) / wall_ns


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals, which may overlap."""
    covered = last = 0
    for begin, end in sorted(intervals):
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered
