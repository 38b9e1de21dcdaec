"""Six kinds of training loops: our device times against the check's own events on the same steps."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
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
from torchlens_perf.analysis.statistics.device import phase_durations_ns
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Kind, RingReader

_SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16, "words": 64}
_LAUNCH = {"layers": 8, "width": 64, "heads": 4, "context": 32, "words": 256}
# Batch, kernel time of the test device in seconds.
_BATCH, _KERNEL_S, SHORT_KERNEL_S = 8, 1e-4, 1e-5
WARM_UP = 10
# The host may run ahead of the device by all of them, except in the launch-bound loop.
_STEPS, _LAUNCH_STEPS = 60, 300
_DATA_S = 0.08
# Allowed difference of medians: a share, and ms. The machines of the tests are busy.
_ALLOWED = {CUDA: (0.02, 0.1)}
_ALLOWED_ELSEWHERE = (0.05, 3.0)
_OWN_ACCOUNT = 0.005
MEAN_STEP = "mean step"
Times = Mapping[str, float]


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
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Record an event at the end of a phase, or at the begin of a step ("begin")."""
        if self._name == CUDA:
            event: Any = torch.cuda.Event(enable_timing=True)
        else:
            event = torch.Event(self._name, enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def medians_ms(self) -> dict[str, float]:
        """Wait for the device. Return the times of typical_ms()."""
        self._device.synchronize()
        found: dict[str, list[float]] = {}
        for (_, begin), (phase, end) in itertools.pairwise(self._marks):
            found.setdefault(phase, []).append(begin.elapsed_time(end))
        begins = [event for phase, event in self._marks if phase == "begin"]
        steps = itertools.pairwise(begins)
        found["step"] = [begin.elapsed_time(end) for begin, end in steps]
        return typical_ms(found)


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

    def step(self, mark: Callable[[str], None]) -> None:
        """Make one step. mark: is called at the borders of phases."""
        mark("begin")
        for _ in range(self._micro_steps):
            ids, wanted = (each.to(self.device, non_blocking=True) for each in next(self._batches))
            mark("data")
            with self._precision():
                loss = self.model(ids, wanted)
            mark("forward")
            loss.backward()
            mark("backward")
        self.optimizer.step()
        mark("optimizer")
        self.optimizer.zero_grad()
        if self.kind == "item":
            loss.item()


def _recompute(block: torch.nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def loop(checks: Checks, kind: str) -> None:
    """Train with a watch until half of the part's time is over, and compare the times."""
    name = os.environ["GPU_CHECK_DEVICE"]
    on = DEVICES[name]()
    on.load(SHORT_KERNEL_S if kind == "launch" else _KERNEL_S, 0)
    training, own = Loop(kind, on.name), OwnEvents(on.name)
    with tempfile.TemporaryDirectory() as folder:
        with perf.watch(
            training.model, training.optimizer, dir=folder, sidecar=False, report="off"
        ):
            until_s = checks.left_s / 2
            for number in range(_LAUNCH_STEPS if kind == "launch" else _STEPS):
                training.step(own.mark if number >= WARM_UP else lambda phase: None)
                if checks.left_s < until_s and number > 2 * WARM_UP:
                    break
            theirs = own.medians_ms()
        ours, account = recorded(last_rings(folder))
    compare(checks, f"loop-{kind}", ours, theirs, allowed_difference())
    judge_account(checks, f"loop-{kind}", account, limited=name == CUDA)


def allowed_difference() -> tuple[float, float]:
    """Return the share and the ms by which times may differ from the check's own ones."""
    return _ALLOWED.get(os.environ.get("GPU_CHECK_DEVICE", CUDA), _ALLOWED_ELSEWHERE)


def compare(
    checks: Checks, part: str, ours: Times, own: Times, allowed: tuple[float, float]
) -> None:
    """Compare our times of the step and of each phase with the check's own ones, in ms.

    Steps agree if their medians or their means do. Our steps begin elsewhere: on a busy machine
    medians then differ, and so do means if a step was interrupted at the begin or the end.
    """
    share, least_ms = allowed

    def agrees(phase: str) -> bool:
        difference_ms = abs(ours.get(phase, math.inf) - own[phase])
        return difference_ms <= share * own[phase] + least_ms

    for phase in ("step", "forward", "backward", "optimizer"):
        true_ms, found_ms = own[phase], ours.get(phase)
        bar = f"{true_ms:.2f} ms +- {share:.0%} + {least_ms:g} ms"
        met = agrees(phase) or (phase == "step" and agrees(MEAN_STEP))
        value = "not recorded" if found_ms is None else f"{found_ms:.2f} ms"
        checks.bar(part, f"{phase}, by the device's clock", value, bar, met)


def judge_account(checks: Checks, part: str, share: float, *, limited: bool) -> None:
    """Report the share of a step that recording takes by our own account."""
    what, value = "recording, by its own account", f"{share:.2%} of a step"
    if limited:
        checks.bar(part, what, value, f"<= {_OWN_ACCOUNT:.1%}", share <= _OWN_ACCOUNT)
    else:
        checks.value(part, what, value)


def recorded(ring: Any) -> tuple[dict[str, float], float]:
    """Return our median times after the first steps, and the share of the time in our hooks."""
    reader = RingReader(ring)
    records = reader.read_records(final=True).records
    reader.close()
    # The check's own last step has no end, as its next step never begins.
    last = records["step"][records["kind"] == Kind.STEP].max(initial=0)
    records = records[(records["step"] >= WARM_UP) & (records["step"] < last)]
    found = phase_durations_ns(records)
    steps = assemble_steps(records)
    share = steps.parts_ns[:, PARTS.index("tool")].sum() / max(1, steps.duration_ns.sum())
    ours_ms = {phase: (times / 1e6).tolist() for phase, times in found.items()}
    return typical_ms(ours_ms), float(share)


def typical_ms(times_ms: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of the step and of each phase, and the mean of the step."""
    typical = {phase: statistics.median(times) for phase, times in times_ms.items() if times}
    if times_ms.get("step"):
        typical[MEAN_STEP] = statistics.fmean(times_ms["step"])
    return typical
