"""Cost of a watch for a training step on a GPU.

The watch must not wait for the device or use much of its memory.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
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

LAUNCH_BOUND = {"batch": 1, "length": 32, "layers": 8, "width": 64, "heads": 4, "words": 256}


def _watch(model: nn.Module, folder: str, modules: str) -> perf.Watch:
    return perf.watch(model, dir=folder, sidecar=False, report="off", modules=modules)


class Size(NamedTuple):
    """A model whose overhead is measured."""

    name: str
    bars: tuple[float, float]
    """In percent: limits of the median and of the upper end of its 95 % interval."""
    rounds: int
    steps: int
    """Steps in each block of a round.

    A watch's first sampled step is its ninth, and then at most one in 16.
    """
    size: dict[str, int]


SIZES = (
    Size("launch-bound, 8 layers of 64", (1.0, 2.0), 16, 128, LAUNCH_BOUND),
    Size("device-bound, GPT-2 small, bf16, 8 x 1024", (0.25, 0.5), 24, 16, {}),
)
Arms = dict[str, Callable[[str], AbstractContextManager[object]]]


def overhead(checks: Checks) -> None:
    """Measure the cost of the default watch for two model sizes.

    The larger model hides kernel launches behind device work, and the smaller one does not.
    """
    for size in SIZES:
        model, step = trainer(**size.size)
        _measure(
            checks,
            "overhead",
            size,
            step,
            {"default watch": lambda folder, m=model: _watch(m, folder, "auto")},
        )
        del model, step
        gc.collect()
        torch.cuda.empty_cache()


def every_module(checks: Checks) -> None:
    """Measure a watch that times every module, which is not the default.

    No limit is checked.
    """
    model, step = trainer(**LAUNCH_BOUND)
    size = SIZES[0]._replace(rounds=10)
    arms: Arms = {"every module": lambda folder: _watch(model, folder, "all")}
    _measure(checks, "every_module", size, step, arms, bars=False)


def _measure(
    checks: Checks, part: str, size: Size, step: Callable[[], None], arms: Arms, bars: bool = True
) -> None:
    """Run blocks of steps in shuffled rounds, and compare each arm with blocks without hooks.

    Blocks without hooks run twice per round, so the table also shows differences due to noise.
    """
    arms = {
        "nothing": lambda folder: nullcontext(),
        "nothing again": lambda folder: nullcontext(),
        **arms,
    }
    for _ in range(10):
        step()
    draw = random.Random(1)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(size.rounds):
            order = list(arms)
            draw.shuffle(order)
            for arm in order:
                with arms[arm](folder):
                    step()
                    torch.cuda.synchronize()
                    begin = time.perf_counter_ns()
                    for _ in range(size.steps):
                        step()
                    torch.cuda.synchronize()
                    times[arm].append((time.perf_counter_ns() - begin) / size.steps / 1e6)
    checks.value(part, f"a step, {size.name}", f"{statistics.median(times['nothing']):.2f} ms")
    for arm in list(arms)[1:]:
        added = [100 * (a / b - 1) for a, b in zip(times[arm], times["nothing"], strict=True)]
        low, high = bootstrap(added)
        median = statistics.median(added)
        what, value = f"{arm}, {size.name}", f"{median:+.3f} % [{low:+.3f}, {high:+.3f}]"
        if bars and arm != "nothing again":
            met = median <= size.bars[0] and high <= size.bars[1]
            checks.bar(
                part, what, value, f"<= {size.bars[0]} %, upper end <= {size.bars[1]} %", met
            )
        else:
            checks.value(part, what, value)


def synchronizations(checks: Checks) -> None:
    """Count the waits that torch.profiler records in 300 steps without and with a watch.

    Waits are synchronizations, and copies from or to memory that is not page-locked. The steps take
    some seconds, in which the watch reduces windows and compares the clocks. The steps launch few
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
    if not any("ynchronize" in name for name in without):
        checks.missing("synchronizations", "calls that wait", "the profiler does not see them here")
        return
    more = with_watch - without
    value = ", ".join(f"{name} {count}" for name, count in sorted(more.items())) or "none"
    checks.bar(
        "synchronizations",
        "calls that wait, added by every hook in 300 steps",
        value,
        "none",
        not more,
    )


def _waits(step: Callable[[], None], steps: int = 300) -> Counter[str]:
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
    checks.bar(
        "memory", "device memory added", f"{added / 2**20:.1f} MiB", "<= 32 MiB", added <= 32 << 20
    )


def gaps(checks: Checks) -> None:
    """Check that the device is idle between kernels that are shorter than their launches.

    With a large model the device is not idle.
    """
    shares = {}
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
