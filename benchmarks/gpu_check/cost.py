"""Cost of a watch for a training step on a GPU.

The watch must not wait for the device or use much of its memory.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

import torchlens_perf as perf
from benchmarks.gpu_check.checks import bootstrap
from benchmarks.gpu_check.gpt import trainer
from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.runs import device_statistics, last_rings
from torchlens_perf.analysis.statistics.device import CAUGHT_UP_NS

# Seconds for the lines of a part after its last round.
_RESERVE_S = 2.0
LAUNCH_BOUND = {"batch": 1, "length": 32, "layers": 8, "width": 64, "heads": 4, "words": 256}


def _watch(model: nn.Module, folder: str, modules: str) -> perf.Watch:
    return perf.watch(model, dir=folder, sidecar=False, report="off", modules=modules)


class Size(NamedTuple):
    """A model whose overhead is measured."""

    name: str
    highest: float
    """In percent: limit of the upper end of the 95 % interval of what a watch adds, beyond the
    same steps without a watch in the same round.
    """
    steps: int
    """Steps in each block of a round.

    A watch's first sampled step is its ninth, and then at most one in 16.
    """
    size: dict[str, int]


SIZES = {
    "launch": Size("launch-bound, 2 layers of 64", 1.5, 64, {**LAUNCH_BOUND, "layers": 2}),
    "device": Size("device-bound, GPT-2 small, bf16, 32 x 1024", 0.2, 10, {"batch": 32}),
}
Arms = dict[str, Callable[[str], AbstractContextManager[object]]]
# The first round may meet the device's clock while it rises.
_LEAST_ROUNDS = 3


def overhead(checks: Checks, name: str) -> None:
    """Measure the cost of the default watch.

    The device-bound model hides kernel launches behind device work, the launch-bound one does not.
    """
    size = SIZES[name]
    model, step = trainer(**size.size)
    part = "overhead" if name == "launch" else "overhead-device"
    arms: Arms = {"default watch": lambda folder: _watch(model, folder, "auto")}
    added = measure(checks, part, size, step, arms)
    judge_overhead(checks, part, size, added["default watch"])


def every_module(checks: Checks) -> None:
    """Measure a watch that times every module, which is not the default.

    No limit is checked.
    """
    size = SIZES["launch"]
    model, step = trainer(**size.size)
    arms: Arms = {"every module": lambda folder: _watch(model, folder, "all")}
    measure(checks, "every_module", size, step, arms)


def judge_overhead(checks: Checks, part: str, size: Size, added: Sequence[float]) -> None:
    """Compare the upper end of a watch's cost with its limit. added: percent in each round."""
    high = bootstrap(added)[1] if len(added) >= _LEAST_ROUNDS else math.inf
    what, value = f"upper end of the default watch, {size.name}", f"{high:+.2f} %"
    checks.bar(part, what, value, f"<= {size.highest} %", high <= size.highest)


def measure(
    checks: Checks, part: str, size: Size, step: Callable[[], None], arms: Arms
) -> dict[str, list[float]]:
    """Run blocks of steps in shuffled rounds for the part's time. Return what each arm adds.

    The results are percentages, one for each round, of the mean of two blocks without hooks.
    The line "nothing again" shows differences due to noise.
    """
    nothing = ("nothing", "nothing again")
    arms = {**dict.fromkeys(nothing, lambda folder: nullcontext()), **arms}
    for _ in range(10):
        step()
    draw, times = random.Random(1), {arm: [] for arm in arms}
    took_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        while len(times["nothing"]) < _LEAST_ROUNDS or checks.left_s > took_s + _RESERVE_S:
            begin_s = time.monotonic()
            for arm in draw.sample(list(arms), len(arms)):
                times[arm].append(_block_ms(arms[arm], folder, step, size.steps))
            took_s = time.monotonic() - begin_s
    checks.value(part, f"a step, {size.name}", f"{statistics.median(times['nothing']):.2f} ms")
    added = {arm: _added(times, arm, nothing) for arm in arms if arm != "nothing"}
    for arm, percent in added.items():
        low, high = bootstrap(percent)
        value = f"{statistics.median(percent):+.2f} % [{low:+.2f}, {high:+.2f}]"
        checks.value(part, f"{arm}, {size.name}, {len(percent)} rounds", value)
    return added


def _block_ms(
    arm: Callable[[str], AbstractContextManager[object]],
    folder: str,
    step: Callable[[], None],
    steps: int,
) -> float:
    with arm(folder):
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - begin) / steps / 1e6


def _added(times: dict[str, list[float]], arm: str, nothing: Sequence[str]) -> list[float]:
    base = nothing[:1] if arm in nothing else nothing
    bases = [statistics.fmean(each) for each in zip(*(times[name] for name in base), strict=True)]
    return [100 * (ms / base_ms - 1) for ms, base_ms in zip(times[arm], bases, strict=True)]


def synchronizations(checks: Checks) -> None:
    """Count the waits that torch.profiler records in 60 steps without and with a watch.

    Waits are synchronizations, and copies from or to memory that is not page-locked. The steps launch few
    kernels, because the profiler's event of each kernel must be read. One synchronization that this
    check makes itself must appear. The watch calls a waiting function of the driver only when a
    device ring is created.
    """
    model, step = trainer(batch=16, layers=2, width=1024, heads=16)
    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as folder:
        without = _waits(step)
        # An earlier section makes the watch allocate device memory at its start.
        perf.device_section("step")
        with _watch(model, folder, "all") as watch:
            with perf.device_section("step"):
                step()
            step()

            def watched_step() -> None:
                with perf.device_section("step"):
                    step()

            with_watch = _waits(watched_step)
            del watch
    judge_waits(checks, without, with_watch)


def judge_waits(checks: Checks, without: Counter[str], with_watch: Counter[str]) -> None:
    """Expect that a watch adds no wait, if the profiler sees the check's own one."""
    if not any("ynchronize" in name for name in without):
        checks.missing("synchronizations", "calls that wait", "the profiler does not see them here")
        return
    more = with_watch - without
    value = ", ".join(f"{name} {count}" for name, count in sorted(more.items())) or "none"
    checks.bar(
        "synchronizations",
        "calls that wait, added by every hook in 60 steps",
        value,
        "none",
        not more,
    )


def _waits(step: Callable[[], None], steps: int = 60) -> Counter[str]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    names = [event.name() for event in profiler.profiler.kineto_results.events()]
    return Counter(name for name in names if "ynchronize" in name or "ageable" in name)


def memory(checks: Checks) -> None:
    """Measure how much device memory a watch with device sections uses, by the driver's numbers."""
    model, step = trainer(batch=2)
    for _ in range(3):
        step()
    gc.collect()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        before = torch.cuda.mem_get_info()[0]
        with _watch(model, folder, "all"):
            for _ in range(20):
                with perf.device_section("step"):
                    step()
            torch.cuda.synchronize()
            added = before - torch.cuda.mem_get_info()[0]
    judge_memory(checks, added)


def judge_memory(checks: Checks, added: int) -> None:
    """Compare the device memory that a watch takes, in bytes, with its limit."""
    checks.bar(
        "memory", "device memory added", f"{added / 2**20:.1f} MiB", "<= 32 MiB", added <= 32 << 20
    )


def gaps(checks: Checks) -> None:
    """Check that the device is idle between kernels that are shorter than their launches.

    With a large model the device is not idle.
    """
    shares: dict[str, float | None] = {}
    for name, size in (("launch-bound", LAUNCH_BOUND), ("GPT-2 small", {})):
        model, step = trainer(**size)
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            with _watch(model, folder, "none"):
                for _ in range(40):
                    step()
                torch.cuda.synchronize()
            shares[name] = device_statistics(last_rings(folder)).caught_up_share
    judge_gaps(checks, shares)


def judge_gaps(checks: Checks, shares: dict[str, float | None]) -> None:
    """Expect that a launch-bound device has no work left after a pass, and a busy one has."""
    within = f"within {CAUGHT_UP_NS // 1000} us"
    for name, wanted, met in (
        ("launch-bound", ">= 80 %", (shares["launch-bound"] or 0.0) >= 0.8),
        (
            "GPT-2 small",
            "<= 20 %",
            (shares["GPT-2 small"] if shares["GPT-2 small"] is not None else 1.0) <= 0.2,
        ),
    ):
        share = shares[name]
        value = "not measured" if share is None else f"{share:.0%} of passes"
        checks.bar("gaps", f"{name}: device done {within} of the host", value, wanted, met)
