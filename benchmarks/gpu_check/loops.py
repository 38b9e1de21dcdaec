"""Six kinds of training loops: our device times against the check's own events on the same spans.

A phase has four events of the check: just outside and just inside of both ends of our measurement.
In the order of the stream our marks are in between, so each of our times must be in between. This
holds on a busy machine, too, on which a process is interrupted between two marks for as long as a
phase takes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import torchlens_perf as perf
from benchmarks.gpu_check.gpt import GPT
from benchmarks.gpu_check.lines import Checks
from benchmarks.gpu_check.parts import CUDA
from benchmarks.gpu_check.runs import last_rings
from benchmarks.planted_on import DEVICES
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Kind, RingReader

_SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16, "words": 64}
_LAUNCH = {"layers": 8, "width": 64, "heads": 4, "context": 32, "words": 256}
# Batch, kernel time of the test device in seconds.
_BATCH, _KERNEL_S, SHORT_KERNEL_S = 8, 1e-4, 1e-5
WARM_UP = 10
# The host may run ahead of the device by all of them, except in the launch-bound loop.
_STEPS, _LAUNCH_STEPS, _LEAST_STEPS = 60, 300, 3
_DATA_S = 0.08
# A driver returns times as float32 ms: two times of 30 s are known to 2 us each.
_RESOLUTION_MS = 0.005
_OWN_ACCOUNT = 0.005
PHASES = {
    "step": Kind.STEP, "forward": Kind.FORWARD, "backward": Kind.BACKWARD, "optimizer": Kind.OPTIMIZER
}  # fmt: skip
# Borders of a phase, in the order in which the check records them.
OUTER_BEGIN, INNER_BEGIN, INNER_END, OUTER_END = range(4)
Mark = Callable[[str, int], None]
Times = Mapping[int, list[float]]
"""The times of a phase in ms, by step."""
Bounds = Mapping[int, list[tuple[float, float]]]
"""The smallest and largest possible times of a phase in ms, by step."""


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The same batch again and again, which takes a slow loader some time."""

    def __init__(self, ids: Tensor, seconds: float) -> None:
        self._ids, self._seconds = ids, seconds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return self._ids, self._ids.roll(-1, 1)


class OwnEvents:
    """Events that the check records itself at the borders of phases."""

    def __init__(self, device: str) -> None:
        self._device, self._name = torch.get_device_module(device), device
        # The events of each phase of each step, by border.
        self._steps: dict[int, dict[str, list[dict[int, Any]]]] = {}
        self._phases: dict[str, list[dict[int, Any]]] | None = None

    def begin_step(self, number: int) -> None:
        """Record the events of this step."""
        self._phases = self._steps[number] = defaultdict(list)

    def mark(self, phase: str, border: int) -> None:
        """Record an event at a border of a phase. Of several, the last one counts."""
        if self._phases is None:
            return
        if self._name == CUDA:
            event: Any = torch.cuda.Event(enable_timing=True)
        else:
            event = torch.Event(self._name, enable_timing=True)
        event.record()
        if border == OUTER_BEGIN:
            self._phases[phase].append({})
        self._phases[phase][-1][border] = event

    def bounds_ms(self) -> dict[str, Bounds]:
        """Wait for the device, and return the bounds of all phases and steps.

        A step ends with its optimizer.
        """
        self._device.synchronize()
        found: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(dict)
        for number, phases in self._steps.items():
            for phase, calls in phases.items():
                found[phase][number] = [_bounds_ms(events, events) for events in calls]
            if number - 1 in self._steps and "optimizer" in phases:
                before = self._steps[number - 1]["optimizer"][-1]
                ended = {INNER_BEGIN: before[OUTER_END], OUTER_BEGIN: before[INNER_END]}
                found["step"][number] = [_bounds_ms(ended, phases["optimizer"][-1])]
        return dict(found)


def _bounds_ms(begins: Mapping[int, Any], ends: Mapping[int, Any]) -> tuple[float, float]:
    """Return the times between the inner and the outer borders. Without inner ones, 0 is the least."""
    least_ms = 0.0
    if INNER_END in ends:
        least_ms = begins[INNER_BEGIN].elapsed_time(ends[INNER_END])
    return least_ms, begins[OUTER_BEGIN].elapsed_time(ends[OUTER_END])


class Loop:
    """A model with its data, trained as the kind of loop says."""

    def __init__(self, kind: str, device: str) -> None:
        self.kind, self.device, on_cuda = kind, device, device == CUDA
        big = on_cuda and kind != "launch"
        sizes = {} if big else _LAUNCH if on_cuda else _SMALL
        torch.manual_seed(0)
        self.model = GPT(**sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=on_cuda)
        self._micro_steps = 2 if kind == "accumulation" else 1
        if kind == "checkpoint":
            for block in self.model.blocks:
                _recompute(block)
        words, context = self.model.tokens.num_embeddings, len(self.model.positions)
        ids = torch.randint(0, words, (1 if kind == "launch" else _BATCH, context))
        slow_s = _DATA_S if kind == "data" else 0.0
        self._batches: Iterator[Any] = iter(DataLoader(Batches(ids, slow_s), batch_size=None))
        self._precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        if on_cuda:
            self._precision = lambda: torch.autocast("cuda", torch.bfloat16)

    def step(self, mark: Mark) -> None:
        """Make one step. mark: is called at the outer borders of phases."""
        for _ in range(self._micro_steps):
            ids, wanted = (each.to(self.device, non_blocking=True) for each in next(self._batches))
            mark("forward", OUTER_BEGIN)
            with self._precision():
                loss = self.model(ids, wanted)
            mark("forward", OUTER_END)
            mark("backward", OUTER_BEGIN)
            loss.backward()
            mark("backward", OUTER_END)
        mark("optimizer", OUTER_BEGIN)
        self.optimizer.step()
        mark("optimizer", OUTER_END)
        self.optimizer.zero_grad()
        if self.kind == "item":
            loss.item()

    def mark_inside(self, mark: Mark) -> None:
        """Call `mark` at the inner borders of phases in all later steps."""
        forward = self.model.forward

        def marked(ids: Tensor, wanted: Tensor) -> Tensor:
            mark("forward", INNER_BEGIN)
            loss = forward(ids, wanted)
            mark("forward", INNER_END)
            loss.register_hook(lambda _: mark("backward", INNER_BEGIN))
            return loss

        self.model.forward = marked  # type: ignore[method-assign]
        # The embeddings are used first, so their gradients are computed last.
        for last in (self.model.tokens.weight, self.model.positions):
            last.register_post_accumulate_grad_hook(lambda _: mark("backward", INNER_END))
        self.optimizer.register_step_pre_hook(lambda *_: mark("optimizer", INNER_BEGIN))
        self.optimizer.register_step_post_hook(lambda *_: mark("optimizer", INNER_END))


def _recompute(block: torch.nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def loop(checks: Checks, kind: str) -> None:
    """Train with a watch until half of the part's time is over, and compare the times."""
    name = os.environ["GPU_CHECK_DEVICE"]
    on = DEVICES[name]()
    on.load(SHORT_KERNEL_S if kind == "launch" else _KERNEL_S, 0)
    training, own = Loop(kind, on.name), OwnEvents(on.name)
    training.mark_inside(own.mark)
    with tempfile.TemporaryDirectory() as folder:
        with perf.watch(
            training.model, training.optimizer, dir=folder, sidecar=False, report="off"
        ):
            until_s = checks.left_s / 2
            for number in range(_LAUNCH_STEPS if kind == "launch" else _STEPS):
                if number >= WARM_UP:
                    own.begin_step(number)
                training.step(own.mark)
                if checks.left_s < until_s and number >= WARM_UP + _LEAST_STEPS:
                    break
            bounds = own.bounds_ms()
        ours, account = recorded(last_rings(folder))
    compare(checks, f"loop-{kind}", ours, bounds)
    judge_account(checks, f"loop-{kind}", account, limited=name == CUDA)


def compare(
    checks: Checks, part: str, ours: Mapping[str, Times], bounds: Mapping[str, Bounds]
) -> None:
    """Compare each of our times with the check's own events around it."""
    for phase in PHASES:
        times, limits = ours.get(phase, {}), bounds[phase]
        pairs = pair_with_bounds(times, limits)
        if not pairs:
            checks.bar(part, f"{phase}, by the device's clock", "not recorded", "recorded", False)
            continue
        ours_ms, least_ms, most_ms = (
            statistics.median(column) for column in zip(*pairs, strict=True)
        )
        inside = sum(
            least - _RESOLUTION_MS <= time_ms <= most + _RESOLUTION_MS
            for time_ms, least, most in pairs
        )
        # A step may lack all times of a phase, as the budget thins them, but not some.
        expected = sum(len(limits[step]) for step in times.keys() & limits.keys())
        value = f"{ours_ms:.2f} ms; {inside} of {expected} inside"
        bar = f"each inside of own events, {least_ms:.2f} to {most_ms:.2f} ms"
        checks.bar(part, f"{phase}, by the device's clock", value, bar, inside == expected)


def pair_with_bounds(ours: Times, bounds: Bounds) -> list[tuple[float, float, float]]:
    """Return our time, the least and the most of each span that has both."""
    return [
        (time_ms, *limits)
        for step in sorted(ours.keys() & bounds.keys())
        for time_ms, limits in zip(ours[step], bounds[step], strict=False)
    ]


def judge_account(checks: Checks, part: str, share: float, *, limited: bool) -> None:
    """Report the share of a step that recording takes by our own account."""
    what, value = "recording, by its own account", f"{share:.2%} of a step"
    if limited:
        checks.bar(part, what, value, f"<= {_OWN_ACCOUNT:.1%}", share <= _OWN_ACCOUNT)
    else:
        checks.value(part, what, value)


def recorded(ring: Any) -> tuple[dict[str, Times], float]:
    """Return our times of steps and phases, and the share of the time in our hooks."""
    reader = RingReader(ring)
    records = reader.read_records(final=True).records
    reader.close()
    records = records[records["step"] >= WARM_UP]
    steps = assemble_steps(records)
    share = steps.parts_ns[:, PARTS.index("tool")].sum() / max(1, steps.duration_ns.sum())
    device = records[records["kind"] == Kind.DEVICE]
    found: dict[str, dict[int, list[float]]] = {phase: defaultdict(list) for phase in PHASES}
    for phase, kind in PHASES.items():
        for each in device[device["value0"] == kind]:
            found[phase][int(each["step"])].append(int(each["duration_ns"]) / 1e6)
    return dict(found), float(share)
