"""Cost of a watch for a training step in the worst case: a GPT whose step time is dispatch with
almost no arithmetic.

Six layers, width 32, batch 1 x 8: 84 modules, in 5 to 7 ms. Each round runs blocks of 16 steps in
shuffled order: unwatched, again unwatched (the control), under the default watch, and with every
module timed. One watch with its sidecar runs during the whole benchmark. A block attaches the hooks
at its start and removes them at its end. The first steps of a block, in which the hooks get to know
the loop, are not timed. A block's time is the lower quartile of its steps: the control's interval is
a third narrower than with their mean, because other programs and the machine's host interrupt few of
these steps. Two things happen in so few steps that they do not affect it: sampling (backward times of
modules), and the callbacks that run twice per second. Their costs are measured separately and added.
After TIMEOUT_S no further round begins.

The second table is the cost of the marks that each step has once: data, backward pass and
optimizer, whose end is the step's boundary. Clocks are read outside each of the watch's hooks and
inside, where the hook calls torch. The rest of the step runs in between, so that caches are cold.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchlens_perf as perf
from benchmarks.gpt import GPT
from benchmarks.measure import Table, ratio_interval
from torchlens_perf.hooks import attach
from torchlens_perf.hooks.loop.selection import NamedModel
from torchlens_perf.recorder.step_callbacks import _LONGEST, _THROTTLE_NS
from torchlens_perf.watching import Watch

ROUNDS, WARM_STEPS, STEPS, SAMPLES = 480, 6, 16, 100
TIMEOUT_S = 300
MARKS_ROUNDS, MARKS_LIMIT_US = 60, 3.0


class Arm:
    """One way to run a block of steps."""

    def __init__(self, model: nn.Module, watch: Watch | None, modules: str = "auto") -> None:
        self._model = model
        self._session = None if watch is None else watch._session
        self._modules = modules
        # A block is too short for the recorder to get to know its cost again.
        self._module_mask: int | None = None

    @property
    def module_period(self) -> int:
        """Modules are timed in one step of this many."""
        return (self._module_mask or 0) + 1

    @property
    def native_steps(self) -> int:
        """Number of steps that C has ended since Python last ended one."""
        return 0 if self._session is None else self._session.recorder.quiet_steps

    def __enter__(self) -> None:
        session = self._session
        if session is not None:
            session.config = dataclasses.replace(session.config, modules=self._modules)
            attach.attach_hooks(session, [], [NamedModel(self._model)])
            if self._module_mask is not None:
                session.recorder.module_mask = self._module_mask

    def sampling_cost(self, step: Callable[[], None]) -> float:
        """Return the relative cost of sampling: the extra time of a sampled step divided by the
        sampling period.
        """
        session = self._session
        if session is None:
            return 0.0

        def choose(sampled: bool) -> None:
            session.recorder.sampled = int(sampled)

        plain_ns, more_ns = self._compare(step, choose)
        return more_ns / plain_ns / session.step._sampling.period

    def callback_cost(self, step: Callable[[], None]) -> float:
        """Return the relative cost of throttled callbacks, after their pause has grown."""
        session = self._session
        if session is None:
            return 0.0

        def choose(due: bool) -> None:
            session.recorder.due_ns = 0 if due else 1 << 62

        _, more_ns = self._compare(step, choose)
        session.recorder.due_ns = 0
        return more_ns / (_LONGEST * _THROTTLE_NS)

    def _compare(
        self, step: Callable[[], None], choose: Callable[[bool], None]
    ) -> tuple[float, float]:
        """Return the median duration of a step, and how much longer a chosen step takes, in ns."""
        with self:
            durations_ns: tuple[list[int], list[int]] = ([], [])
            for number in range(2 * SAMPLES):
                chosen = number % 2
                choose(bool(chosen))
                begin = time.perf_counter_ns()
                step()
                durations_ns[chosen].append(time.perf_counter_ns() - begin)
        plain, more = (statistics.median(each) for each in durations_ns)
        return plain, more - plain

    def __exit__(self, *error: object) -> None:
        session = self._session
        if session is not None:
            self._module_mask = session.recorder.module_mask
            session.hooks.detach()
            session.hooks.detached = False  # __enter__() attaches them again.
            session.recorder.deactivate()


class TimedMarks:
    """Adds up the time between the begin of each hook and torch's function inside of the hook, and
    between the function's end and the hook's.
    """

    def __init__(self) -> None:
        self.sum_ns = 0

    def outside(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                self.sum_ns += time.perf_counter_ns() - begin_ns

        return call

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin_ns = time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.sum_ns -= time.perf_counter_ns() - begin_ns

        return call

    @contextmanager
    def around_torch(self) -> Iterator[None]:
        """Time torch's functions. The hooks of a watch that is attached later surround them."""
        with (
            replaced(torch.autograd, "_engine_run_backward", self.inside),
            replaced(_BaseDataLoaderIter, "__next__", self.inside),
        ):
            yield

    @contextmanager
    def around_hooks(self) -> Iterator[None]:
        """Time the hooks that are attached. Without a watch, functions that do nothing take the
        place of the optimizer's hooks.
        """
        hooks = (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        before = [dict(each) for each in hooks]
        for each in hooks:
            for key, hook in (dict(each) or {-1: lambda *_: None}).items():
                each[key] = self.outside(hook)
        try:
            with (
                replaced(torch.autograd, "_engine_run_backward", self.outside),
                replaced(_BaseDataLoaderIter, "__next__", self.outside),
            ):
                yield
        finally:
            for each, kept in zip(hooks, before, strict=True):
                each.clear()
                each.update(kept)


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def measure_marks(model: nn.Module, optimizer: torch.optim.Optimizer, watched: Arm) -> Table:
    """Print the table of the marks that each step has once, relative to the same clock reads
    without a watch.
    """
    batches = [(torch.randint(0, 256, (8,)), torch.randint(0, 256, (8,))) for _ in range(64)]
    marks = TimedMarks()

    def block(arm: Arm) -> list[tuple[int, bool]]:
        """Return the time of each step's marks, and whether C ended the step."""
        found = []
        loader = iter(DataLoader(batches, batch_size=1))  # type: ignore[arg-type]
        with marks.around_torch(), arm, marks.around_hooks():
            for _ in range(WARM_STEPS + STEPS):
                marks.sum_ns, before = 0, arm.native_steps
                ids, targets = next(loader)
                F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append((marks.sum_ns, arm.native_steps == before + 1))
        return found[WARM_STEPS:]

    plain, native = Arm(model, None), []
    added: dict[str, list[float]] = {"steps that C ends": [], "all steps": []}
    for _ in range(MARKS_ROUNDS):
        without = [ns for ns, _ in block(plain)]
        found = block(watched)
        native += [in_c for _, in_c in found]
        ended_in_c = [ns for ns, in_c in found if in_c]
        added["all steps"].append(
            statistics.fmean(ns for ns, _ in found) - statistics.fmean(without)
        )
        if ended_in_c:
            added["steps that C ends"].append(
                statistics.median(ended_in_c) - statistics.median(without)
            )
    table = Table("data + backward + optimizer + boundary", "us a step", "share", "bar", "")
    for name, values in added.items():
        middle, low, high = ratio_interval(values, [1e3] * len(values))
        bar = (f"at most {MARKS_LIMIT_US} us", table.bar(high <= MARKS_LIMIT_US))
        in_c = name == "steps that C ends"
        table.row(
            f"{'median' if in_c else 'mean'} of {name}",
            f"{middle:.1f} [{low:.1f}, {high:.1f}]",
            f"{statistics.fmean(native):.0%}" if in_c else "",
            *(bar if in_c else ("", "")),
        )
    return table


def main() -> int:
    """Print the tables. Return the number of missed bars."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = torch.randint(0, 256, (1, 8)), torch.randint(0, 256, (8,))
    modules = sum(1 for module in model.modules() if not isinstance(module, nn.ModuleList))

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(arm: Arm) -> float:
        with arm:
            for _ in range(WARM_STEPS):
                step()
            times = [time.perf_counter_ns()]
            for _ in range(STEPS):
                step()
                times.append(time.perf_counter_ns())
            return statistics.quantiles(
                (end - begin for begin, end in pairwise(times)), method="inclusive"
            )[0]

    with tempfile.TemporaryDirectory() as folder:
        watch = perf.watch(dir=folder, report="quiet").start()
        watched = {
            "default watch": Arm(model, watch),
            "every module": Arm(model, watch, modules="all"),
        }
        arms = {
            "unwatched": Arm(model, None),
            "unwatched again (control)": Arm(model, None),
            **watched,
        }
        # The watch itself has attached hooks.
        watched["default watch"].__exit__()
        for arm in arms.values():
            block(arm)
        order, draw = list(arms), random.Random(1)
        values: dict[str, list[float]] = {name: [] for name in arms}
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(values["unwatched"]) < ROUNDS and time.monotonic() < deadline_s:
            draw.shuffle(order)
            for name in order:
                values[name].append(block(arms[name]))
        rare = {
            name: (arm.sampling_cost(step), arm.callback_cost(step)) for name, arm in arms.items()
        }
        steps = print_step_table(modules, values, rare, set(watched))
        print()
        marks = measure_marks(model, optimizer, watched["default watch"])
        watch.stop()
    return steps.missed + marks.missed


def print_step_table(
    modules: int,
    values: dict[str, list[float]],
    rare: dict[str, tuple[float, float]],
    watched: set[str],
) -> Table:
    table = Table(
        f"a step of {modules} modules, {len(values['unwatched'])} rounds",
        "ms",
        "cost in %",
        "of it sampling, callbacks",
        "us",
        "bar (upper end)",
        "",
    )
    unwatched, control = values["unwatched"], values["unwatched again (control)"]
    both = [statistics.mean(pair) for pair in zip(unwatched, control, strict=True)]
    bars = {"default watch": 0.5, "every module": 1.0}
    for name, nanoseconds in values.items():
        share = 100 * sum(rare[name])
        base = both if name in watched else unwatched
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
            "" if bar is None else ", ".join(f"{100 * each:.2f}" for each in rare[name]),
            f"{microseconds:+.1f}" if compared else "",
            "" if bar is None else f"at most {bar} %",
            "" if bar is None else table.bar(high <= bar),
        )
    return table
