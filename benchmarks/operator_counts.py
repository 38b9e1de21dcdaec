"""Cost and harm of counting operators in one step: the native tap's callback, torch's counter, and
torch's profiler with shapes.

All ways alternate in one process, one step at a time. Harm is a changed bit of a gradient, or a
compiled model that is not compiled any more.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpt import GPT
from benchmarks.measure import Table
from torchlens_perf.recorder import native_tap, recorder

ROUNDS, WARM_UP = 40, 5


class _Tap:
    """Counts the operators inside the context."""

    def __init__(self, tap: Any) -> None:
        self._tap = tap
        self.calls = 0

    def __enter__(self) -> None:
        self._tap.start_counting()

    def __exit__(self, *_: object) -> None:
        self.calls = self._tap.stop_counting()[0]


def main() -> int:
    """Print the table. Return the number of missed bars."""
    tap = native_tap.load_tap()
    if tap is None:
        print("the native tap is not built: torchlens-perf build-tap builds it")
        return 1
    torch.set_num_threads(1)
    tap.attach(recorder.collective_marks(), [], [], lambda *_: None)
    counts = _Tap(tap)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "counted by the tap": lambda: counts,
        "torch's counter": lambda: FlopCounterMode(display=False),
        "profiler with shapes": lambda: profile(record_shapes=True),
    }
    table = Table(
        "a step of a GPT of 84 modules", "ms", "ns more an operator", "gradients",
        "a compiled model afterwards", "bar",
    )  # fmt: skip
    taken = durations(ways)
    calls = counts.calls
    for way, context in ways.items():
        more_s = statistics.median(taken[way]) - statistics.median(taken["plain"])
        per_operator = more_s * 1e9 / calls
        equal, compiled = harm(context)
        met = per_operator <= 1000 and equal and compiled
        table.row(
            way, f"{statistics.median(taken[way]) * 1e3:.2f}", f"{per_operator:.0f}",
            "equal" if equal else "changed", "compiled" if compiled else "not compiled any more",
            table.bar(met) if way == "counted by the tap" else "",
        )  # fmt: skip
    return table.missed


def durations(ways: dict[str, Callable[[], AbstractContextManager[Any]]]) -> dict[str, list[float]]:
    """Return the durations in s of steps whose time is the dispatch of operators."""
    model, tokens = _make_model()
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + WARM_UP):
        for way, context in ways.items():
            began_s = time.perf_counter()
            with context():
                model(tokens).sum().backward()
            if number >= WARM_UP:
                taken[way].append(time.perf_counter() - began_s)
    return taken


def harm(context: Callable[[], AbstractContextManager[Any]]) -> tuple[bool, bool]:
    """Return True if gradients are equal, and True if a compiled model stays compiled."""
    model, tokens = _make_model()
    found = []
    for each in (contextlib.nullcontext, context):
        model.zero_grad()
        with each():
            model(tokens).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    torch._dynamo.reset()
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    compiled, x = torch.compile(layer), torch.randn(4, 8)
    compiled(x).sum().backward()
    with context():
        compiled(x).sum().backward()
    return all(map(torch.equal, *found)), "Compiled" in compiled(x).grad_fn.name()


def _make_model() -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    return GPT(), torch.randint(0, 256, (4, 8))


if __name__ == "__main__":
    raise SystemExit(main())
