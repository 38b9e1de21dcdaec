"""Models are found, and have distinct names. A note lists trained models that are not timed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks.loop.selection import name_models
from torchlens_perf.hooks.loop.trained_models import CalledModules
from torchlens_perf.recorder.training_thread import TrainingThread, Work
from torchlens_perf.run.ring import Kind

STEPS = 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def optimizers(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def roots(recording: Any) -> list[str]:
    return list(
        dict.fromkeys(name.removeprefix("forward ") for name in recording.names(Kind.FORWARD))
    )


def modules(recording: Any) -> list[str]:
    return list(dict.fromkeys(recording.names(Kind.MODULE)))


# -- passed models


def test_models_passed_in_a_list_are_named_by_their_classes(tmp_path: Path) -> None:
    with recorded(tmp_path, [network(), network(), nn.Linear(4, 4)]) as recording:
        names = recording.watch._session.metadata._module_names

    models = ["Sequential", "Sequential_2"]
    assert sorted(names) == ["Linear", *(name + end for name in models for end in ("", ".0", ".1"))]


def test_models_passed_in_a_dictionary_are_named_by_its_keys(tmp_path: Path) -> None:
    """The key also names the model of a dictionary with a single entry."""
    model, other = network(), network()
    with recorded(
        tmp_path / "two", {"generator": model, "critic": other}, modules="all"
    ) as recording:
        for each in (model, other):
            each(torch.randn(2, 4))
    with recorded(tmp_path / "one", {"policy": model}, modules="all") as single:
        model(torch.randn(2, 4))

    assert roots(recording) == ["generator", "critic"]
    assert modules(recording) == ["generator.0", "generator.1", "critic.0", "critic.1"]
    assert (roots(single), modules(single)) == (["policy"], ["policy.0", "policy.1"])


def test_module_names_have_no_prefix_if_one_model_is_passed(tmp_path: Path) -> None:
    """The model is passed alone or in a list."""
    model = network()
    for given in (model, [model], (model,)):
        with recorded(tmp_path / str(type(given).__name__), given, modules="all") as recording:
            model(torch.randn(2, 4))
        assert (roots(recording), modules(recording)) == (["Sequential"], ["0", "1"])


def test_module_patterns_match_with_and_without_the_models_name(tmp_path: Path) -> None:
    models = {"actor": network(), "critic": network()}
    for pattern, expected in (
        ("*.0", ["actor.0", "critic.0"]),
        ("0", ["actor.0", "critic.0"]),
        ("critic.1", ["critic.1"]),
    ):
        with recorded(
            tmp_path / pattern.replace("*", "x"), models, modules=(pattern,)
        ) as recording:
            for each in models.values():
                each(torch.randn(2, 4))
        assert modules(recording) == expected


def test_note_lists_trained_models_that_were_not_passed(tmp_path: Path) -> None:
    """Only the passed model is timed."""
    model, other = network(), network()
    first, second = optimizers(model, other)
    with recorded(tmp_path, model) as recording:
        for _ in range(STEPS):
            train(model, first)
            train(other, second)

    (note,) = [each for each in recording.notes if "is also trained" in each]
    assert note.endswith("its modules are not timed: pass it to watch() as well")
    assert len(roots(recording)) == 1


@pytest.mark.parametrize("way", ["inner model", "part of it"])
def test_passed_model_is_recognized_if_wrapped_later_or_passed_in_part(
    way: str, tmp_path: Path
) -> None:
    inner = network()
    whole = nn.Sequential(inner, nn.Linear(4, 4)) if way == "part of it" else nn.DataParallel(inner)
    (optimizer,) = optimizers(whole)
    with recorded(tmp_path, inner) as recording:
        for _ in range(STEPS):
            train(whole, optimizer)

    assert recording.notes == []


# -- found models


class Generator(nn.Sequential):
    pass


class Critic(nn.Sequential):
    pass


def test_models_are_found_when_an_optimizer_steps_for_the_second_time(tmp_path: Path) -> None:
    generator, critic = Generator(nn.Linear(4, 4), nn.ReLU()), Critic(nn.Linear(4, 4), nn.ReLU())
    first, second = optimizers(generator, critic)
    with recorded(tmp_path, modules="all") as recording:
        for _ in range(STEPS):
            train(critic, second)
            train(generator, first)

    names = ["Critic", "Generator"]
    assert roots(recording)[::-1] == names
    assert sorted(modules(recording)) == [f"{name}.{layer}" for name in names for layer in (0, 1)]
    assert len(recording.of(Kind.FORWARD)) == 2 * (STEPS - 2) + 1, "after the first step's second"


def test_models_trained_before_the_watch_are_not_timed(tmp_path: Path) -> None:
    """In a notebook, models and optimizers of earlier cells still exist."""
    old, model = network(), Generator(nn.Linear(4, 4))
    old_optimizer, optimizer = optimizers(old, model)
    train(old, old_optimizer)
    with recorded(tmp_path) as recording:
        for _ in range(STEPS):
            train(model, optimizer)
            old(torch.randn(2, 4))

    assert len(roots(recording)) == 1


def test_model_created_after_the_first_steps_is_found(tmp_path: Path) -> None:
    """The later model has its own optimizer."""
    model = Generator(nn.Linear(4, 4))
    (optimizer,) = optimizers(model)
    with recorded(tmp_path) as recording:
        train(model, optimizer)
        later = Critic(nn.Linear(4, 4))
        (its,) = optimizers(later)
        for _ in range(STEPS):
            train(model, optimizer)
            train(later, its)

    assert len(roots(recording)) == 2


def test_two_models_of_one_optimizer_are_timed_separately(tmp_path: Path) -> None:
    """Twin critics are usually trained by one optimizer."""
    models = [network(), network()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    with recorded(tmp_path) as recording:
        for _ in range(STEPS):
            sum(model(torch.randn(2, 4)).sum() for model in models).backward()
            optimizer.step()

    assert len(roots(recording)) == 2


def test_called_submodules_of_an_uncalled_model_are_separate_forward_passes(tmp_path: Path) -> None:
    """An agent calls its actor and critic but is never called itself."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = network(), network()

    agent = Agent()
    (optimizer,) = optimizers(agent)
    with recorded(tmp_path, agent, modules="all") as recording:
        for _ in range(STEPS):
            (agent.actor(torch.randn(2, 4)) + agent.critic(torch.randn(2, 4))).sum().backward()
            optimizer.step()

    assert roots(recording) == ["actor", "critic"]
    assert len(recording.steps) == STEPS
    assert {each.value1 & 0xFFFF for each in recording.steps} == {1}


# -- names


def test_compiled_or_wrapped_model_has_the_name_of_its_inner_class() -> None:
    named = name_models(
        [torch.compile(nn.Linear(4, 4)), nn.DataParallel(torch.compile(nn.Bilinear(2, 2, 2)))]
    )

    assert [each.name for each in named] == ["Linear", "Bilinear"]


def test_equal_model_names_get_different_suffixes() -> None:
    """New names also differ from names that are already used."""
    models = [nn.Linear(2, 2) for _ in range(3)]
    named = name_models(models, ["a", "a", "b"], taken=["b"])

    assert [each.name for each in named] == ["a", "a_2", "b_2"]


# -- which modules are found


def find(tmp_path: Path, *calls: Callable[[Tensor], Tensor], trained: nn.Module) -> Recording:
    """Train one module by calling others. Return what was recorded without a passed model."""
    (optimizer,) = optimizers(trained)
    with recorded(tmp_path) as recording:
        for _ in range(2 * STEPS):
            sum(call(torch.randn(2, 4)).sum() for call in calls).backward()
            optimizer.step()
    return recording


def test_search_for_models_looks_at_no_other_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of all objects takes as long as several steps."""
    for name in ("get_objects", "get_referrers"):
        monkeypatch.setattr(gc, name, lambda *_: pytest.fail("all objects are searched"))
    first, second = network(), network()
    recording = find(tmp_path, first, second, trained=nn.ModuleList([first, second]))

    assert len(roots(recording)) == 2


def test_modules_without_parameters_are_not_models(tmp_path: Path) -> None:
    """A wrapper that hides its model in a list has no parameters, so the model is found in it."""

    class Hiding(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.held = [model]

        def forward(self, x: Tensor) -> Tensor:
            return self.held[0](x)

    model = Generator(nn.Linear(4, 4))
    recording = find(tmp_path, nn.ReLU(), Hiding(model), trained=model)

    assert roots(recording) == ["Generator"]


def test_part_that_is_called_first_is_not_a_model_of_its_own(tmp_path: Path) -> None:
    model = Generator(nn.Linear(4, 4), nn.ReLU())
    recording = find(tmp_path, model[0], model, trained=model)

    assert roots(recording) == ["0", "Generator"], "no separate model named Linear"


def test_teacher_is_not_a_trained_model(tmp_path: Path) -> None:
    model, teacher = Generator(nn.Linear(4, 4)), Critic(nn.Linear(4, 4))
    recording = find(tmp_path, teacher, model, trained=model)

    assert roots(recording) == ["Generator"]


def test_layers_are_found_if_forward_is_called_directly(tmp_path: Path) -> None:
    model = Generator(nn.Linear(4, 4), nn.Bilinear(4, 4, 4))
    recording = find(
        tmp_path, lambda x: model[1](model[0](x), x), lambda x: model[0].forward(x), trained=model
    )

    assert roots(recording) == ["Linear", "Bilinear"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_is_found(backend: str, tmp_path: Path) -> None:
    model = Generator(nn.Linear(4, 4))
    recording = find(tmp_path, torch.compile(model, backend=backend), trained=model)

    assert roots(recording) == ["Generator"]


def test_checkpointed_parts_are_not_models(tmp_path: Path) -> None:
    """The recomputation calls them inside the backward pass, in which the model has no call."""

    class Checkpointed(Generator):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed(nn.Linear(4, 4), nn.Linear(4, 4))
    recording = find(tmp_path, model, trained=model)

    assert roots(recording) == ["Checkpointed"]


def test_model_of_a_functional_call_is_found(tmp_path: Path) -> None:
    model = Generator(nn.Linear(4, 4))
    parameters = dict(model.named_parameters())
    recording = find(tmp_path, lambda x: functional_call(model, parameters, (x,)), trained=model)

    assert roots(recording) == ["Generator"]


def test_names_of_deleted_models_are_used_again(tmp_path: Path) -> None:
    """A search for hyperparameters makes models one after the other, which are freed."""
    with recorded(tmp_path) as recording:
        for _ in range(12):
            model = Generator(nn.Linear(4, 4))
            (optimizer,) = optimizers(model)
            for _ in range(4):
                train(model, optimizer)
            reference = weakref.ref(model)
            del model, optimizer
            assert reference() is None

    assert roots(recording) == ["Generator"]
    assert recording.metadata["root_modules"] == ["Generator"]
    assert len(recording.of(Kind.FORWARD)) == 12 * 2


def test_loss_created_in_each_step_does_not_end_native_steps(tmp_path: Path) -> None:
    model = Generator(nn.Linear(4, 4))
    (optimizer,) = optimizers(model)
    with recorded(tmp_path) as recording:
        for _ in range(20):
            nn.MSELoss()(model(torch.randn(2, 4)), torch.randn(2, 4)).backward()
            optimizer.step()
        settled = recording.watch._session.recorder.settled

    assert settled


def test_time_before_a_step_of_an_optimizer_is_in_the_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two optimizers that step in turn, each call is handled in Python."""
    slow_s, begun, note_work = 0.02, [], TrainingThread.note_work

    def note_slowly(self: TrainingThread, work: Work) -> bool:
        if work is Work.OPTIMIZER:
            begun.append(time.sleep(slow_s))
        return note_work(self, work)

    monkeypatch.setattr(TrainingThread, "note_work", note_slowly)
    models = network(), network()
    with recorded(tmp_path) as recording:
        both = [optimizers(model)[0] for model in models]
        for _ in range(4):
            for model, optimizer in zip(models, both, strict=True):
                train(model, optimizer)
        tool_s = recording.watch._session.recorder.tool_ns / 1e9

    assert len(begun) >= 7
    assert tool_s >= (len(begun) - 1) * slow_s


def test_time_of_finding_models_is_in_the_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_s, searched = 0.05, []

    def search(self: CalledModules, is_trained: Any) -> list[nn.Module]:
        searched.append(time.sleep(slow_s))
        return []

    monkeypatch.setattr(CalledModules, "find_models", search)
    model = network()
    (optimizer,) = optimizers(model)
    with recorded(tmp_path) as recording:
        for _ in range(STEPS):
            train(model, optimizer)
        tool_s = recording.watch._session.recorder.tool_ns / 1e9

    assert len(searched) == 1
    assert tool_s >= slow_s


@pytest.mark.parametrize("name", ["note_work", "is_current"])
def test_time_of_hooks_before_and_after_their_spans_is_in_the_overhead(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_s, calls, method = 0.01, [], getattr(TrainingThread, name)

    def slow(self: TrainingThread, *arguments: Any) -> Any:
        calls.append(time.sleep(slow_s))
        return method(self, *arguments)

    monkeypatch.setattr(TrainingThread, name, slow)
    with recorded(tmp_path) as recording:
        for _ in range(2):
            model = network()
            (optimizer,) = optimizers(model)
            for _ in range(3):
                train(model, optimizer)
        tool_s = recording.watch._session.recorder.tool_ns / 1e9
        made = len(calls)

    assert made >= 4
    assert tool_s >= made * slow_s
