"""Spans of optimizer steps, and which optimizer step ends a step of the training loop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from tests.support.recording import recorded, records_of
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import Flag, Kind


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, scale: float = 1.0) -> Tensor:
    loss = model(torch.randn(2, 4)).sum() * scale
    loss.backward()
    return loss


def test_each_optimizer_step_is_a_span_and_ends_the_step_of_the_loop(tmp_path: Path) -> None:
    """The span has the name of the optimizer's class and no parent."""
    model, optimizer = model_and_optimizer()
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            backward(model)
            optimizer.step()

    spans = recording.of(Kind.OPTIMIZER)
    assert [(each.name, each.step, each.depth) for each in spans] == [
        ("optimizer SGD", step, 1) for step in range(3)
    ]
    for span, step in zip(spans, recording.steps, strict=True):
        assert step.start_ns <= span.start_ns
        assert span.end_ns <= step.end_ns
    for step, later in zip(recording.steps, recording.steps[1:], strict=False):
        assert step.end_ns == later.start_ns


def test_passes_in_an_lbfgs_closure_do_not_count_as_optimizer_time(tmp_path: Path) -> None:
    """LBFGS runs forward and backward passes inside its step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        return backward(model)

    with recorded(tmp_path, model) as recording:
        optimizer.step(evaluate)

    (span,) = recording.of(Kind.OPTIMIZER)
    closures = recording.of(Kind.CLOSURE)
    passes = recording.of(Kind.FORWARD) + recording.of(Kind.BACKWARD)
    assert len(recording.steps) == 1
    assert len(closures) >= 3
    assert ({each.depth for each in closures}, {each.depth for each in passes}) == ({2}, {3})
    assert sum(each.duration_ns for each in closures) <= span.phase_ns <= span.duration_ns
    assert sum(each.duration_ns for each in passes) <= sum(each.phase_ns for each in closures)


def test_host_code_in_a_closure_counts_as_host_time(tmp_path: Path) -> None:
    """Lightning runs a whole training step in a closure, including code outside the passes."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> Tensor:
        time.sleep(0.02)
        optimizer.zero_grad()
        return backward(model)

    with recorded(tmp_path, model) as recording:
        for _ in range(5):
            optimizer.step(evaluate)
    table = assemble_steps(records_of(recording))
    host, tool = (table.parts_ns[:, PARTS.index(part)] for part in ("host", "tool"))

    assert (host >= 20_000_000).all()
    assert (tool < host / 2).all()
    assert (table.parts_ns.sum(axis=1) == table.duration_ns).all()


class Wrapper(torch.optim.Optimizer):
    """An optimizer that wraps another one, as in schedulers and sharded optimizers."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_wrapped_optimizer_and_its_wrapper_end_one_step(tmp_path: Path) -> None:
    """The optimizer and its wrapper each have a span. The outermost one ends the step."""
    model, optimizer = model_and_optimizer()
    wrapper = Wrapper(optimizer)
    with recorded(tmp_path, model) as recording:
        for _ in range(2):
            backward(model)
            wrapper.step()

    assert recording.names(Kind.OPTIMIZER) == ["optimizer SGD", "optimizer Wrapper"] * 2
    assert len(recording.steps) == 2


def test_alternating_optimizers_end_one_step_per_iteration(tmp_path: Path) -> None:
    """The last optimizer passed to watch() ends the step."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(other.parameters())]
    with recorded(tmp_path, [model, other], optimizers) as recording:
        for _ in range(3):
            for one, optimizer in zip((model, other), optimizers, strict=True):
                backward(one)
                optimizer.step()

    assert [each.step for each in recording.of(Kind.OPTIMIZER)] == [0, 0, 1, 1, 2, 2]
    assert recording.names(Kind.OPTIMIZER)[:2] == ["optimizer SGD", "optimizer Adam"]
    assert len(recording.steps) == 3


def test_only_the_passed_optimizer_ends_steps_and_others_have_spans(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    _, other = model_and_optimizer()
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(2):
            backward(model)
            other.step()
            optimizer.step()
            other.step()

    assert len(recording.steps) == 2
    assert len(recording.of(Kind.OPTIMIZER)) == 6


class Sometimes(torch.optim.SGD):
    """An optimizer that calls its base class's step, which fires the hooks again, or raises."""

    error: Exception | None = None

    def step(self, closure: Any = None) -> None:
        if self.error is not None:
            raise self.error
        super().step()


def test_optimizer_that_calls_its_base_class_makes_one_step(tmp_path: Path) -> None:
    """torch calls the hooks of both the class and its base class."""
    model_and_optimizer()[1].step()  # The first step of an SGD installs the hooks in its class.
    model = nn.Linear(4, 4)
    optimizer = Sometimes(model.parameters(), lr=0.1)
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            backward(model)
            optimizer.step()

    assert recording.names(Kind.OPTIMIZER) == ["optimizer Sometimes"] * 3
    assert len(recording.steps) == 3
    assert recording.unbalanced == 0


@pytest.mark.parametrize("again", ["same", "other"])
def test_optimizer_step_that_raised_has_no_span_and_is_counted(again: str, tmp_path: Path) -> None:
    """torch calls no hook after an exception. The span is dropped when the next step begins."""
    error = ValueError("no step today")
    model = nn.Linear(4, 4)
    optimizer, other = (
        Sometimes(model.parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    optimizer.error = error
    with recorded(tmp_path, model) as recording:
        backward(model)
        with pytest.raises(ValueError, match="today") as caught:
            optimizer.step()
        optimizer.error = None
        for _ in range(2):
            backward(model)
            (optimizer if again == "same" else other).step()

    assert caught.value is error
    name = "optimizer Sometimes" if again == "same" else "optimizer SGD"
    assert [(each.name, each.depth) for each in recording.of(Kind.OPTIMIZER)] == [(name, 1)] * 2
    assert len(recording.steps) == 2
    # No hook ends the failed span, so later spans up to the next step seem to be inside it.
    assert recording.unbalanced == 1


def scaled_steps(
    folder: Path, optimizers: int, infinite: dict[int, int], scaler: Any = None
) -> list[Flag]:
    """Return the flags of three steps with GradScaler.

    `infinite` has for each step the position of the optimizer that gets an infinite gradient.
    """
    scaler = scaler if scaler is not None else torch.amp.GradScaler("cpu", init_scale=2.0)
    models = [nn.Linear(4, 4) for _ in range(optimizers)]
    steppers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with recorded(folder, models, steppers) as recording:
        for step in range(3):
            for number, (model, optimizer) in enumerate(zip(models, steppers, strict=True)):
                loss = model(torch.randn(2, 4)).sum() * (
                    float("inf") if infinite.get(step) == number else 1.0
                )
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()
            for optimizer in steppers:
                optimizer.zero_grad()
    assert recording.unbalanced == 0
    return [each.flags & Flag.SKIPPED for each in recording.steps]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_optimizer_step_skipped_by_gradscaler_ends_a_flagged_step(at: int, tmp_path: Path) -> None:
    """GradScaler skips an optimizer whose gradient is not finite, also in the first step."""
    assert scaled_steps(tmp_path, 1, {at: 0}) == [
        Flag.SKIPPED if step == at else Flag(0) for step in range(3)
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_step_is_flagged_once_if_gradscaler_skips_one_of_two_optimizers(
    which: int, tmp_path: Path
) -> None:
    assert scaled_steps(tmp_path, 2, {1: which}) == [Flag(0), Flag.SKIPPED, Flag(0)]


def test_skipped_step_is_flagged_if_a_gradscaler_subclass_overrides_update(tmp_path: Path) -> None:
    """FSDP's ShardedGradScaler overrides update()."""

    class Sharded(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None:
            torch.amp.GradScaler.update(self, new_scale)

    scaler = Sharded("cpu", init_scale=2.0)
    assert scaled_steps(tmp_path, 1, {1: 0}, scaler) == [Flag(0), Flag.SKIPPED, Flag(0)]


def test_disabled_gradscaler_counts_each_step_once(tmp_path: Path) -> None:
    assert (
        scaled_steps(tmp_path, 1, {}, torch.amp.GradScaler("cpu", enabled=False)) == [Flag(0)] * 3
    )


def test_optimizer_without_torchs_base_class_is_found_through_its_gradscaler(
    tmp_path: Path,
) -> None:
    """Each call of GradScaler.step() ends a step."""

    class Descent:
        def __init__(self, model: nn.Module) -> None:
            self.param_groups = [{"params": list(model.parameters())}]

        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad

    model = nn.Linear(4, 4)
    optimizer, scaler = Descent(model), torch.amp.GradScaler("cpu", init_scale=2.0)
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            scaler.scale(model(torch.randn(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert [each.flags & Flag.SKIPPED for each in recording.steps] == [Flag(0)] * 3


def test_only_manual_step_calls_end_steps_after_the_first_one(tmp_path: Path) -> None:
    """After the first Watch.step(), optimizers end no steps, but their steps still have spans."""
    model, optimizer = model_and_optimizer()
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            recording.watch.step()
            backward(model)
            optimizer.step()
            optimizer.step()

    assert [each.flags for each in recording.steps] == [Flag.MANUAL] * 3
    assert [each.step for each in recording.of(Kind.OPTIMIZER)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("micro_steps", [1, 3])
@pytest.mark.parametrize(
    "before", [False, True], ids=["after the optimizer", "before the optimizer"]
)
@pytest.mark.parametrize("is_passed", [False, True])
def test_iteration_with_optimizer_and_manual_step_counts_once(
    micro_steps: int, before: bool, is_passed: bool, tmp_path: Path
) -> None:
    """The first iteration must not count both for its optimizer and for its Watch.step()."""
    model, optimizer = model_and_optimizer()
    with recorded(tmp_path, model, optimizer if is_passed else None) as recording:
        for _ in range(20):
            for _ in range(micro_steps):
                backward(model)
            if before:
                recording.watch.step(tokens=512)
            optimizer.step()
            if not before:
                recording.watch.step(tokens=512)

    assert len(recording.steps) == 20


def test_iteration_with_two_optimizers_and_manual_step_counts_once(tmp_path: Path) -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    with recorded(tmp_path, models) as recording:
        for _ in range(20):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model)
                optimizer.step()
            recording.watch.step()

    assert len(recording.steps) == 20


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def swap_head(model: TwoParts, old: Any) -> torch.optim.Optimizer:
    model.head = nn.Linear(4, 4)
    return torch.optim.Adam(model.head.parameters())


def with_scheduler(model: TwoParts, old: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


SECOND_PHASES = {
    "the same parameters": lambda model, old: torch.optim.Adam(model.parameters()),
    "a subset": lambda model, old: torch.optim.Adam(model.body.parameters()),
    "a new head": swap_head,
    "of the same class": lambda model, old: torch.optim.SGD(model.parameters(), lr=0.01),
    "with a scheduler": with_scheduler,
    "LBFGS": lambda model, old: torch.optim.LBFGS(model.parameters(), max_iter=2),
}


def phase(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step(*[lambda: backward(model)] * isinstance(optimizer, torch.optim.LBFGS))


@pytest.mark.parametrize("is_kept", [True, False], ids=["old kept", "old deleted"])
@pytest.mark.parametrize("is_passed", [True, False], ids=["passed", "not passed"])
@pytest.mark.parametrize("first", ["all", "head"])
@pytest.mark.parametrize("name", SECOND_PHASES)
def test_steps_are_counted_after_another_optimizer_replaces_the_first(
    name: str, first: str, is_passed: bool, is_kept: bool, tmp_path: Path
) -> None:
    """Cases are a replaced head, unfrozen layers, and Adam after SGD."""
    model = TwoParts()
    parameters = (model if first == "all" else model.head).parameters()
    optimizers = [torch.optim.SGD(parameters, lr=0.1)]
    with recorded(tmp_path, model, optimizers[0] if is_passed else None) as recording:
        phase(model, optimizers[0], 20)
        optimizers.append(SECOND_PHASES[name](model, optimizers[0]))
        if not is_kept:
            optimizers.pop(0)
        phase(model, optimizers[-1], 20)

    assert len(recording.steps) == 40
    if is_passed:
        new = type(optimizers[-1]).__name__
        assert f"{new} has replaced SGD: steps end with {new} from then on" in recording.notes


def test_first_two_steps_of_the_next_model_count_as_one_with_a_note(tmp_path: Path) -> None:
    """Models are trained one after the other, but their optimizers exist from the start.

    When a new optimizer begins, the optimizers might still alternate within a step.
    """
    models = [nn.Linear(4, 4) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with recorded(tmp_path, None) as recording:
        for model, optimizer in zip(models, optimizers, strict=True):
            phase(model, optimizer, 20)

    assert len(recording.steps) == 58
    assert (
        "SGD has replaced SGD: its first steps, before this was clear, count as one"
        in recording.notes
    )


def test_second_optimizer_ends_steps_once_the_loop_uses_it(tmp_path: Path) -> None:
    """Two optimizers exist from the start. The loop uses first, second, first."""
    model = TwoParts()
    first, second = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(model.body.parameters()),
    )
    with recorded(tmp_path, model, first) as recording:
        phase(model, first, 10)
        phase(model, second, 10)
        phase(model, first, 10)

    # The first step after the return to the first optimizer may be merged with the step before it.
    assert len(recording.steps) in (29, 30)


@pytest.mark.parametrize("is_passed", [True, False])
def test_optimizer_without_parameters_of_the_watched_model_ends_no_step(
    is_passed: bool, tmp_path: Path
) -> None:
    """A small probe model is trained from time to time, each time with a new optimizer."""
    model, optimizer = model_and_optimizer()
    with recorded(tmp_path, model, optimizer if is_passed else None) as recording:
        for turn in range(10):
            backward(model)
            optimizer.step()
            if turn % 3 == 2:
                probe = nn.Linear(4, 4)
                phase(probe, torch.optim.Adam(probe.parameters()), 7)

    assert len(recording.steps) == 10
    assert (
        "Adam has no parameters of a watched model: its steps do not end steps of the loop"
        in recording.notes
    )


@pytest.mark.parametrize("is_passed", [True, False])
def test_alternating_optimizers_are_counted_correctly_after_both_are_replaced(
    is_passed: bool, tmp_path: Path
) -> None:
    """A growing GAN replaces both optimizers."""
    models = [TwoParts(), TwoParts()]

    def made() -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(each.parameters()) for each in models]

    optimizers = made()
    with recorded(tmp_path, models, optimizers if is_passed else None) as recording:
        for turn in range(20):
            if turn == 10:
                optimizers = made()
            for model, optimizer in zip(models, optimizers, strict=True):
                phase(model, optimizer, 1)

    assert len(recording.steps) in (20, 21)


def test_each_model_call_ends_a_step_if_there_is_no_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with recorded(tmp_path, model) as recording:
        for context in (torch.no_grad(), torch.inference_mode(), torch.no_grad()):
            with context:
                model(torch.randn(2, 4))

    assert [each.flags for each in recording.steps] == [Flag.INFERENCE] * 3
    assert [each.step for each in recording.of(Kind.FORWARD)] == [0, 1, 2]


def test_optimizer_hooks_are_removed_when_the_watch_ends(tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        return (
            dict(torch_optimizer._global_optimizer_pre_hooks),
            dict(torch_optimizer._global_optimizer_post_hooks),
            dict(vars(torch.amp.GradScaler)),
        )

    before = state()
    with recorded(tmp_path):
        assert state() != before
    assert before == state()
