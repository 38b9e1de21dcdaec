"""The list of cases, and the training loop that most of them use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STEPS = 4

Watch = Callable[..., AbstractContextManager[Any]]
Program = Callable[[Watch], Any]


class Case(NamedTuple):
    """A program, and where its situation was reported.

    `source` is OWNER/REPOSITORY#NUMBER on GitHub, or empty for a situation without a known thread.
    """

    run: Program
    source: str
    sidecar: bool
    slow: bool


CASES: dict[str, Case] = {}


def case(
    source: str = "", *, sidecar: bool = False, slow: bool = False
) -> Callable[[Program], Program]:
    """Register a program under its function's name.

    `sidecar`: the situation needs a sidecar process. `slow`: the program takes more than a second.
    """

    def register(run: Program) -> Program:
        assert run.__name__ not in CASES, run.__name__
        CASES[run.__name__] = Case(run, source, sidecar, slow)
        return run

    return register


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    watch: Watch,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    call: Callable[[Tensor], Tensor] | None = None,
    batches: Iterable[Tensor] | None = None,
    at_step: Callable[[int], Any] = lambda step: None,
) -> list[Any]:
    """Run the simplest loop. Return the losses, what `at_step` returned, and the trained state."""
    optimizer = sgd(model) if optimizer is None else optimizer
    call = model if call is None else call
    found: list[Any] = []
    with watch(model, optimizer):
        for step, batch in enumerate(random_batches() if batches is None else batches):
            loss = call(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss, at_step(step)]
    return [*found, model.state_dict(), optimizer.state_dict()]


def random_batches() -> Iterable[Tensor]:
    """Return inputs of the global generator, which a watch must not advance."""
    for _ in range(STEPS):
        yield torch.randn(4, 8)
