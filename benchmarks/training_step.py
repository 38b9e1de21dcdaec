"""Cost of a watch for a training step in the worst case: a GPT whose step time is dispatch with
almost no arithmetic.

Six layers, width 32, batch 1 x 8: 78 module calls in about 3.3 ms. Each round runs blocks of 16
steps in shuffled order: unwatched, again unwatched (the control), under the default watch, and with
every module timed. Watches and their sidecars run during the whole benchmark. Each block only
attaches hooks at its start and removes them at its end. Its first steps, in which the hooks get to
know the loop, are not timed. Sampled steps (backward times of modules)
are so rare that they do not affect the median of blocks. The cost of sampled steps is measured
separately and added.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import torchlens_perf as perf
from benchmarks.gpt import GPT
from benchmarks.measure import Table, ratio_interval
from torchlens_perf.hooks import attach
from torchlens_perf.hooks.loop.selection import NamedModel
from torchlens_perf.watch import Watch

ROUNDS, WARM_STEPS, STEPS, SAMPLES = 800, 6, 16, 100


class Arm:
    """One way to run a block of steps."""

    def __init__(self, model: nn.Module, watch: Watch | None) -> None:
        self._model = model
        self._watch = watch

    def __enter__(self) -> None:
        if self._watch is not None:
            session = self._watch._session
            assert session is not None
            attach.attach_hooks(session, [], [NamedModel(self._model)])

    def sampling_cost(self, step: Callable[[], None]) -> float:
        """Return the relative cost of sampling: the extra time of a sampled step divided by the
        sampling period.
        """
        session = None if self._watch is None else self._watch._session
        if session is None:
            return 0.0
        period = session.step._sampling.period
        with self:
            durations_ns: tuple[list[int], list[int]] = ([], [])
            for number in range(2 * SAMPLES):
                session.recorder.sampled = number % 2
                begin = time.perf_counter_ns()
                step()
                durations_ns[number % 2].append(time.perf_counter_ns() - begin)
        plain, sampled = (statistics.median(each) for each in durations_ns)
        return (sampled - plain) / plain / period

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            session = self._watch._session
            assert session is not None
            session.hooks._contexts.close()
            session.recorder.deactivate()


def started(folder: str, modules: str) -> Watch:
    """Start a watch with its ring and sidecar, without hooks."""
    watch = perf.watch(modules=modules, dir=folder, report="quiet")
    watch.start()
    Arm(nn.Identity(), watch).__exit__()
    return watch


def main() -> int:
    """Print the table. Return the number of missed bars."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = torch.randint(0, 256, (1, 8)), torch.randint(0, 256, (8,))
    calls = sum(1 for module in model.modules() if not isinstance(module, nn.ModuleList))

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(arm: Arm) -> float:
        with arm:
            for _ in range(WARM_STEPS):
                step()
            begin = time.perf_counter_ns()
            for _ in range(STEPS):
                step()
            return (time.perf_counter_ns() - begin) / STEPS

    with tempfile.TemporaryDirectory() as folder:
        watches = {"default watch": started(folder, "auto"), "every module": started(folder, "all")}
        arms = {
            "unwatched": Arm(model, None),
            "unwatched again (control)": Arm(model, None),
            **{name: Arm(model, watch) for name, watch in watches.items()},
        }
        for arm in arms.values():
            block(arm)
        order, draw = list(arms), random.Random(1)
        values: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS):
            draw.shuffle(order)
            for name in order:
                values[name].append(block(arms[name]))
        sampling = {name: arm.sampling_cost(step) for name, arm in arms.items()}
        for watch in watches.values():
            watch.stop()
    table = Table(
        f"a step of {calls} modules",
        "ms",
        "cost in %",
        "of it sampling",
        "us",
        "bar (upper end)",
        "",
    )
    unwatched, control = values["unwatched"], values["unwatched again (control)"]
    both = [statistics.mean(pair) for pair in zip(unwatched, control, strict=True)]
    bars = {"default watch": 1.0, "every module": 1.5}
    for name, nanoseconds in values.items():
        share = 100 * sampling[name]
        base = both if name in watches else unwatched
        middle, low, high = (
            100 * (ratio - 1) + share for ratio in ratio_interval(nanoseconds, base)
        )
        microseconds = middle / 100 * statistics.median(base) / 1000
        bar = bars.get(name)
        compared = name != "unwatched"
        table.row(
            name,
            f"{statistics.median(nanoseconds) / 1e6:.3f}",
            f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]" if compared else "",
            "" if bar is None else f"{share:.2f}",
            f"{microseconds:+.1f}" if compared else "",
            "" if bar is None else f"at most {bar} %",
            "" if bar is None else table.bar(high <= bar),
        )
    return table.missed
