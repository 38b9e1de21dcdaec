"""Optimizers passed to watch(), also wrapped or not from torch, and loops without an optimizer."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks.loop.passed_optimizers import PassedOptimizers
from torchlens_perf.run.ring import Flag, Kind

STEPS = 3


class Around:
    """A typical wrapper in user code, which contains an optimizer and has the optimizer's methods."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Unregistered(torch.optim.Optimizer):
    """A wrapper like Accelerate's: a subclass of torch's class that does not call its constructor.

    torch calls no optimizer hooks for such a wrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()


def dynamic(optimizer: torch.optim.Optimizer) -> Any:
    """Return a wrapper like those of Fabric and Lightning, whose class is created at run time.

    The class derives from the wrapper and from the optimizer's class.
    """

    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self._optimizer = inner

        def step(self, closure: Any = None) -> None:
            self._optimizer.step()

    kind = type(f"Wrapped{type(optimizer).__name__}", (Wrapper, type(optimizer)), {})
    return kind(optimizer)


class Slotted:
    """A wrapper without `__dict__` that allows no weak references."""

    __slots__ = ("empty", "inner")

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


class Flat:
    """A wrapper like DeepSpeed's, whose inner optimizer has other tensors than the model."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = [dict(group) for group in optimizer.param_groups]
        self._model = [p for group in optimizer.param_groups for p in group["params"]]
        self._masters = [p.detach().clone().requires_grad_() for p in self._model]
        self.fp32_optimizer = torch.optim.SGD(self._masters, lr=0.1)

    def step(self) -> None:
        for master, parameter in zip(self._masters, self._model, strict=True):
            master.grad = parameter.grad
        self.fp32_optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._model, strict=True):
                parameter.copy_(master)


class Several:
    """A wrapper of two optimizers, which are stored in a dictionary of lists."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        weight, bias = optimizer.param_groups[0]["params"]
        self.optimizers = {"all": [torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([bias])]}

    def step(self) -> None:
        for optimizer in self.optimizers["all"]:
            optimizer.step()


class Late:
    """A wrapper that creates its optimizer at its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups, self._real = optimizer.param_groups, None

    def step(self) -> None:
        if self._real is None:
            self._real = torch.optim.SGD(self._groups, lr=0.1)
        self._real.step()


class Hidden:
    """A wrapper that has the optimizer's parameters, and refers to the optimizer only in a closure."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups
        self.step: Callable[[], None] = lambda: optimizer.step()


class Cyclic(Around):
    """A wrapper that contains itself."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([self, Slotted(optimizer)])

    def step(self) -> None:
        self.optimizer[1].step()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "user's own": Around,
    "not registered with torch": Unregistered,
    "class made at run time": dynamic,
    "slots": Slotted,
    "wrapper in a wrapper": lambda optimizer: Around(Unregistered(Around(optimizer))),
    "other tensors inside": Flat,
    "two inside": Several,
    "made at the first step": Late,
    "in a function": Hidden,
    "in a list, in a cycle": Cyclic,
}


def backward(model: nn.Module) -> None:
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_only_steps_of_the_passed_wrapper_are_counted(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    """The loop is the first example of the README. Steps of another optimizer do not count."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    bystander = torch.optim.SGD(other.parameters(), lr=0.1)
    wrapper = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    with recorded(tmp_path, model, wrapper) as recording:
        for _ in range(STEPS):
            backward(model)
            wrapper.step()
            bystander.step()

    assert len(recording.steps) == STEPS
    assert not any("has made no step" in note for note in recording.notes)
    assert {each.value1 & 0xFFFF for each in recording.steps} == {1}, "nothing accumulates"


def test_each_step_of_a_sharded_optimizer_is_counted_once(tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer calls another optimizer with the parameters of this rank."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = nn.Linear(4, 4)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        with recorded(tmp_path / "runs", model, optimizer) as recording:
            for _ in range(STEPS):
                backward(model)
                optimizer.step()
    finally:
        dist.destroy_process_group()

    assert len(recording.steps) == STEPS


def test_accelerate_wrapper_ends_a_step_in_the_last_micro_step_only(tmp_path: Path) -> None:
    """Accelerate's wrapper calls the inner optimizer in the last micro-step only."""

    class Accumulates(Unregistered):
        calls = 0

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            if self.calls % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

    model = nn.Linear(4, 4)
    optimizer = Accumulates(torch.optim.SGD(model.parameters(), lr=0.1))
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(2 * STEPS):
            backward(model)
            optimizer.step()

    assert [each.value1 & 0xFFFF for each in recording.steps] == [2] * STEPS


def test_steps_are_counted_if_the_engine_steps_in_its_backward_method(tmp_path: Path) -> None:
    """With DeepSpeed under Accelerate, the passed object does not call its inner optimizer, but the
    engine does.
    """

    class Engine:
        def __init__(self, model: nn.Module) -> None:
            self.optimizer = Flat(torch.optim.SGD(model.parameters(), lr=0.1))
            self.passes = 0

        def backward(self, loss: Tensor) -> None:
            loss.backward()
            self.passes += 1
            if self.passes % 2 == 0:
                self.optimizer.step()

    class Wrapper(Unregistered):
        def step(self, closure: Any = None) -> None:
            pass

    model = nn.Linear(4, 4)
    engine = Engine(model)
    passed = Wrapper(engine.optimizer)  # type: ignore[arg-type]
    with recorded(tmp_path, model, passed) as recording:
        for _ in range(2 * STEPS):
            engine.backward(model(torch.randn(2, 4)).sum())
            passed.step()

    assert len(recording.steps) == STEPS
    assert len(recording.of(Kind.BACKWARD)) == 2 * STEPS
    assert {each.depth for each in recording.of(Kind.OPTIMIZER)} == {1}


def test_passed_optimizer_that_never_steps_is_replaced_with_a_note(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    unused, used = (
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1),
    )
    with recorded(tmp_path, model, unused) as recording:
        for _ in range(10):
            backward(model)
            used.step()

    assert len(recording.steps) == 8
    assert [
        note
        for note in recording.notes
        if note.startswith("Adam, passed to watch(), has made no step")
    ]


def test_last_of_several_passed_wrappers_ends_the_step(tmp_path: Path) -> None:
    """Each wrapper contains one optimizer."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [Around(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    with recorded(tmp_path, models, optimizers) as recording:
        for _ in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model)
                optimizer.step()

    assert [each.step for each in recording.of(Kind.OPTIMIZER)] == [0, 0, 1, 1, 2, 2]
    assert len(recording.steps) == STEPS


# -- optimizers that do not derive from torch's class


class Descent:
    """An optimizer that neither derives from torch's class nor contains such an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self.error: Exception | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if self.error is not None:
            raise self.error
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._parameters:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
        return loss


def test_only_steps_of_the_passed_optimizer_count_without_torchs_base_class(tmp_path: Path) -> None:
    """Steps of another object of the class do not count. The class is restored after the watch."""
    before = dict(vars(Descent))
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, bystander = Descent(model), Descent(other)
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(STEPS):
            for each, its in ((model, optimizer), (other, bystander)):
                backward(each)
                its.step()

    assert len(recording.steps) == STEPS
    assert recording.names(Kind.OPTIMIZER) == ["optimizer Descent"] * STEPS
    assert dict(vars(Descent)) == before


def test_time_in_the_closure_of_a_non_torch_optimizer_is_not_optimizer_time(tmp_path: Path) -> None:
    """The closure runs inside the step, and its value is returned."""
    model = nn.Linear(4, 4)
    optimizer = Descent(model)

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    expected = model(torch.ones(2, 4)).sum().detach()
    with recorded(tmp_path, model, optimizer) as recording:
        loss = optimizer.step(closure=closure)

    assert torch.equal(loss.detach(), expected)
    assert [each.depth for each in recording.of(Kind.CLOSURE)] == [2]
    assert len(recording.steps) == 1


def test_failed_step_of_a_non_torch_optimizer_is_not_counted(tmp_path: Path) -> None:
    """The next step is counted as usual."""
    model = nn.Linear(4, 4)
    optimizer = Descent(model)
    with recorded(tmp_path, model, optimizer) as recording:
        optimizer.error = error = ValueError("no step today")
        with pytest.raises(ValueError, match="today") as caught:
            optimizer.step()
        optimizer.error = None
        for _ in range(STEPS):
            backward(model)
            optimizer.step()

    assert caught.value is error
    assert len(recording.steps) == STEPS


# -- optimizer steps inside the backward pass


@pytest.mark.parametrize("passed", [False, True])
def test_optimizer_steps_in_the_backward_pass_are_optimizer_time(
    passed: bool, tmp_path: Path
) -> None:
    """Each parameter has its own optimizer, as in torchtitan.

    The step of the loop ends with the backward pass.
    """
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()
    }

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with recorded(
        tmp_path, None, list(optimizers.values()) if passed else None, modules="all"
    ) as recording:
        for _ in range(STEPS):
            backward(model)

    assert len(recording.steps) == STEPS
    assert [each.step for each in recording.of(Kind.BACKWARD)] == list(range(STEPS))
    assert len(recording.of(Kind.OPTIMIZER)) == 10 * STEPS
    assert {each.depth for each in recording.of(Kind.OPTIMIZER)} == {2}
    assert [each.value1 & 0xFFFF for each in recording.steps] == [1] * STEPS
    assert recording.names(Kind.FORWARD) == ["forward Sequential"] * (STEPS - 2), (
        "found after the second step"
    )


# -- loops without an optimizer


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def test_each_backward_pass_ends_a_step_if_no_optimizer_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has a note on this. Optimizers of other tests may still exist and must not count."""
    monkeypatch.setattr("torchlens_perf.hooks.loop.training_loop.has_optimizer_class", bool)
    model = nn.Linear(4, 4)
    with recorded(tmp_path, model) as recording:
        for _ in range(5):
            backward(model)
            update(model)

    assert len(recording.steps) == 4, "the first one ends with the second pass"
    assert [note for note in recording.notes if note.startswith("no optimizer's step was seen")]


def test_backward_passes_end_no_step_if_an_optimizer_exists(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model) as recording:
        for _ in range(2):
            for _ in range(8):
                backward(model)
            optimizer.step()
            optimizer.zero_grad()

    assert [each.value1 & 0xFFFF for each in recording.steps] == [8, 8]


# -- micro-steps


def micro_steps(recording: Recording) -> list[int]:
    # The number of micro-steps of the first step is unknown.
    return [each.value1 & 0xFFFF for each in recording.steps][1:]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "loop",
    ["one loss", "critic and actor", "gradient penalty", "two forward passes", "accumulation"],
)
def test_each_accumulated_loss_is_one_micro_step(loop: str, to_none: bool, tmp_path: Path) -> None:
    """The numbers of model calls and of backward passes for each loss make no difference."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    batch = torch.randn(2, 4)

    def zero(*optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    with recorded(
        tmp_path, [model, other], [first, second] if loop == "critic and actor" else first
    ) as recording:
        for _ in range(4):
            zero(first)
            if loop == "one loss":
                model(batch).sum().backward()
            elif loop == "critic and actor":
                model(other(batch).detach()).sum().backward()
                first.step()
                zero(second)
                model(other(batch)).sum().backward()
                second.step()
                continue
            elif loop == "gradient penalty":
                (gradient,) = torch.autograd.grad(
                    model(batch).sum(), model.weight, create_graph=True
                )
                (model(batch).sum() + gradient.square().sum()).backward()
            elif loop == "two forward passes":
                (model(batch).sum() + model(-batch).sum()).backward()
            else:
                for _ in range(3):
                    model(batch).sum().backward()
            first.step()

    assert micro_steps(recording) == [3 if loop == "accumulation" else 1] * 3


# -- matching


def test_optimizer_is_recognized_as_a_passed_one_by_object_wrapper_or_parameters() -> None:
    """The list of passed optimizers does not keep a deleted wrapper alive."""
    models = [nn.Linear(2, 2) for _ in range(4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    wrapped = Around(optimizers[1])
    passed = PassedOptimizers([optimizers[0], wrapped])
    same_parameters = torch.optim.Adam(models[1].parameters())

    assert [passed.find_position(each) for each in (*optimizers, same_parameters)] == [
        0,
        1,
        None,
        None,
        1,
    ]
    references = sys.getrefcount(wrapped)
    passed.find_position(wrapped)
    assert sys.getrefcount(wrapped) == references
    assert len(passed.list_alive()) == 2
    del wrapped
    assert len(passed.list_alive()) == 1


def test_forward_without_gradients_is_an_evaluation_unless_it_runs_in_each_step(
    tmp_path: Path,
) -> None:
    """A target network that runs in each step is part of training, unlike a validation from time to
    time.
    """
    flags = {}
    for name, every in (("target network", 1), ("validation", 4)):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recorded(tmp_path / name, model, optimizer) as recording:
            for step in range(12):
                if step % every == every - 1:
                    with torch.no_grad():
                        model(torch.randn(2, 4))
                backward(model)
                optimizer.step()
        flags[name] = [bool(each.flags & Flag.EVALUATION) for each in recording.steps]

    assert flags["target network"][1:] == [False] * 11
    assert [step for step, flag in enumerate(flags["validation"]) if flag] == [3, 7, 11]


@pytest.mark.parametrize("every", [1, 4])
def test_forward_of_an_untrained_copy_is_an_evaluation_unless_it_runs_in_each_step(
    every: int, tmp_path: Path
) -> None:
    """A copy with averaged weights generates samples from time to time, or teaches in each step."""
    model = nn.Linear(4, 4)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for step in range(12):
            backward(model)
            if step % every == every - 1:
                with torch.inference_mode():
                    copied(torch.randn(2, 4))
            optimizer.step()

    flagged = [each.step for each in recording.steps if each.flags & Flag.EVALUATION]
    assert flagged[-2:] == [7, 11] if every == 4 else flagged in ([], [0])


def test_target_network_that_runs_in_each_step_is_no_evaluation(tmp_path: Path) -> None:
    """An agent calls its target network without gradients in each iteration."""
    critic, actor = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, actor)]
    with recorded(tmp_path, [critic, actor], optimizers) as recording:
        for turn in range(12):
            with torch.no_grad():
                critic(torch.randn(2, 4))
            backward(critic)
            optimizers[0].step()
            for _ in range(2 if turn % 3 == 0 else 0):
                backward(actor)
                optimizers[1].step()

    assert [each.step for each in recording.steps if each.flags & Flag.EVALUATION] in ([], [0])
    assert len(recording.steps) > 10
