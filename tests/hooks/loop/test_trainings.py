"""Trainings that a process makes one after the other are told apart."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks.loop import training_loop
from torchlens_perf.run.ring import Flag

STEPS = 12


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def train(model: nn.Module, *optimizers: Any, steps: int = STEPS) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def first_steps(recording: Recording) -> list[int]:
    return [each.step for each in recording.steps if each.flags & Flag.NEW_TRAINING]


def run_trial(kept: list[Any]) -> None:
    model = make_model()
    optimizer = sgd(model)
    train(model, optimizer)
    kept.append((model, optimizer))


def folds() -> None:
    for _ in range(3):
        run_trial([])


def folds_of_kept_models() -> None:
    kept: list[Any] = []
    for _ in range(3):
        run_trial(kept)


def pair_after_pair() -> None:
    """Two optimizers take turns, in each of three trainings."""
    for _ in range(3):
        model = make_model()
        train(model, sgd(model[0]), sgd(model[1]))
        del model
        gc.collect()


@pytest.mark.parametrize("program", [folds, folds_of_kept_models, pair_after_pair])
def test_each_training_has_its_first_step_and_its_model(
    program: Callable[[], None], tmp_path: Path
) -> None:
    with recorded(tmp_path) as recording:
        program()

    firsts = first_steps(recording)
    assert len(firsts) == 2
    assert [step for step, _ in recording.metadata["trainings"]] == [0, *firsts]
    assert [name for _, name in recording.metadata["trainings"]] == ["Sequential"] * 3
    lengths = [
        end - begin for begin, end in zip(firsts, [*firsts[1:], len(recording.steps)], strict=True)
    ]
    # Steps count as one until it is clear that an optimizer that still exists has been replaced.
    assert all(STEPS - 4 <= each <= STEPS for each in lengths)


def one_model_with_many_optimizers() -> None:
    model = make_model()
    for _ in range(3):
        train(model, sgd(model))


def head_after_whole_model() -> None:
    model = make_model()
    train(model, sgd(model))
    train(model, sgd(model[1]))


def two_that_take_turns() -> None:
    model, critic = make_model(), make_model()
    first, second = sgd(model), sgd(critic)
    for _ in range(3 * STEPS):
        train(critic, second, steps=5)
        train(model, first, steps=1)


def critic_alone_and_then_both() -> None:
    model, critic = make_model(), make_model()
    second = sgd(critic)
    train(critic, second)
    first = sgd(model)
    for _ in range(STEPS):
        train(model, first, steps=1)
        train(critic, second, steps=1)


def inner_loops() -> None:
    """A new model for each step of the outer optimizer, as in meta-learning."""
    model = make_model()
    outer = sgd(model)
    for _ in range(STEPS):
        inner = make_model()
        train(inner, sgd(inner), steps=5)
        train(model, outer, steps=1)


def short_trials() -> None:
    for _ in range(5):
        model = make_model()
        train(model, sgd(model), steps=3)


@pytest.mark.parametrize(
    "program",
    [
        one_model_with_many_optimizers,
        head_after_whole_model,
        two_that_take_turns,
        critic_alone_and_then_both,
        inner_loops,
    ],
)
def test_loops_that_train_the_same_models_are_one_training(
    program: Callable[[], None], tmp_path: Path
) -> None:
    with recorded(tmp_path) as recording:
        program()

    assert recording.metadata.get("trainings", []) == []
    assert len(first_steps(recording)) <= 1


def test_short_trainings_are_joined(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        short_trials()

    firsts = [0, *first_steps(recording)]
    assert all(end - begin >= 8 for begin, end in itertools.pairwise(firsts))


def test_number_of_trainings_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "_MAX_TRAININGS", 3)
    with recorded(tmp_path) as recording:
        for _ in range(5):
            run_trial([])

    assert len(first_steps(recording)) == 2
    assert len(recording.metadata["trainings"]) == 3
