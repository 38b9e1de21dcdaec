"""Models that are found or passed have names from the user's code. A note lists trained models that
are not timed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.recording import recorded
from torchlens_perf.hooks.loop.model_names import name_models
from torchlens_perf.hooks.loop.trained_models import find_objects_of_type
from torchlens_perf.run.ring import Kind

STEPS = 3
GET_OBJECTS = gc.get_objects


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


def test_models_passed_in_a_list_are_named_by_their_variables(tmp_path: Path) -> None:
    """Names are taken from the source of the watch() call.

    An element without a variable is named by its class.
    """
    from torchlens_perf import watch

    class Agent:
        actor = network()

    agent, critic = Agent(), network()
    with watch(
        [agent.actor, critic, nn.Linear(4, 4)], sidecar=False, report="off", dir=str(tmp_path)
    ) as w:
        names = [*w._session.metadata._module_names]  # type: ignore[union-attr]

    assert sorted(names) == [
        "Linear",
        "actor",
        "actor.0",
        "actor.1",
        "critic",
        "critic.0",
        "critic.1",
    ]


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


def test_model_is_found_and_timed_after_its_optimizers_first_step(tmp_path: Path) -> None:
    generator, critic = Generator(nn.Linear(4, 4), nn.ReLU()), Critic(nn.Linear(4, 4), nn.ReLU())
    first, second = optimizers(generator, critic)
    with recorded(tmp_path, modules="all") as recording:
        for _ in range(STEPS):
            train(critic, second)
            train(generator, first)

    names = ["critic", "generator"] if sys.version_info >= (3, 12) else ["Critic", "Generator"]
    assert roots(recording) == names
    assert modules(recording) == [f"{name}.{layer}" for name in names for layer in (0, 1)]
    assert recording.names(Kind.FORWARD) == [f"forward {name}" for name in names] * (STEPS - 1)


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


_TRAINER = "class Trainer: pass\ntrainer = Trainer()\n"
HOLDERS = {
    "variables": ("generator, critic = A(), A()", ["critic", "generator"]),
    "attributes": (_TRAINER + "trainer.policy, trainer.value = A(), A()", ["policy", "value"]),
    "list": ("critics = [A(), A()]", ["critics.0", "critics.1"]),
    "variables before attributes": (
        _TRAINER + "trainer.module = G = A()\ntrainer.other = D = A()",
        ["D", "G"],
    ),
    "variables before lists": (
        "generator, critic = A(), A()\nall = [generator, critic]",
        ["critic", "generator"],
    ),
    "private attributes are a framework's": (
        _TRAINER + "trainer._first, trainer._second = A(), A()",
        ["A", "A_2"],
    ),
    "slots": (
        "class T: __slots__ = ('p',)\none, two = T(), T()\none.p, two.p = A(), A()",
        ["A", "A_2"],
    ),
}


@pytest.mark.parametrize(("holder", "expected"), HOLDERS.values(), ids=HOLDERS)
def test_found_models_are_named_by_variables_and_attributes(
    holder: str, expected: list[str]
) -> None:
    """The variables are in the main module of a script."""

    class A(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)

    exec(holder, main := {"__name__": "__main__", "A": A})
    assert sorted(name_models([each for each in gc.get_objects() if type(each) is A])) == expected
    main.clear()


def test_compiled_or_wrapped_model_without_a_variable_has_its_inner_class_name() -> None:
    names = name_models(
        [torch.compile(nn.Linear(4, 4)), nn.DataParallel(torch.compile(nn.Bilinear(2, 2, 2)))]
    )

    assert names == ["Linear", "Bilinear"]


def test_equal_model_names_get_different_suffixes() -> None:
    """New names also differ from names that are already used."""
    models = [nn.Linear(2, 2) for _ in range(3)]
    assert name_models(models, ["a", "a", "b"], taken=["b"]) == ["a", "a_2", "b_2"]


def test_search_for_names_does_not_change_local_variables() -> None:
    """A dictionary returned earlier by locals() keeps its contents."""

    def training() -> tuple[dict[str, Any], list[str]]:
        options = locals()
        model, other = network(), network()
        names = name_models([model, other])
        assert "model" not in options
        return options, names

    options, names = training()
    assert options == {}
    assert names == (
        ["model", "other"] if sys.version_info >= (3, 12) else ["Sequential", "Sequential_2"]
    )


def test_search_for_names_evaluates_no_property() -> None:
    called: list[str] = []

    class Holder:
        def __init__(self, model: nn.Module) -> None:
            self.held = model

        @property
        def trap(self) -> None:
            called.append("trap")

        def __getattr__(self, name: str) -> Callable[[], None]:
            called.append(name)
            raise AttributeError(name)

    holders = [Holder(network()), Holder(network())]
    assert name_models([holder.held for holder in holders]) == ["held", "held_2"]
    assert called == []


# -- cost of the search


@pytest.mark.parametrize("passed", [True, False])
def test_memory_is_not_searched_for_models_if_a_model_was_passed(
    passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of memory for models takes as long as several steps."""
    looks: list[str] = []
    monkeypatch.setattr(gc, "get_objects", lambda: [*GET_OBJECTS(), looks.append("a look")])
    model = network()
    (optimizer,) = optimizers(model)
    with recorded(tmp_path, *([model] if passed else [])) as recording:
        for _ in range(STEPS):
            train(model, optimizer)

    assert bool(looks) is not passed
    assert len(roots(recording)) == 1


class Hostile(type):
    """A metaclass that runs user code when classes are compared or hashed."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(cls) -> int:
        raise RuntimeError("hashed")

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("asked")


class Proxy(metaclass=Hostile):
    """A lazy proxy that creates its object when its `__class__` is read."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("made")


def test_search_for_models_runs_no_user_code() -> None:
    """Objects are found by their type, also by a subclass of a subclass."""
    proxies = [Proxy() for _ in range(3)]
    model, generator = network(), Generator(nn.Linear(2, 2))
    found = find_objects_of_type(nn.Module)

    assert len(proxies) == 3
    assert {id(model), id(model[0]), id(generator)} <= {id(module) for module in found}
    assert not {id(proxy) for proxy in proxies} & {id(module) for module in found}
    assert [type(each) for each in find_objects_of_type(Generator)] == [Generator]
