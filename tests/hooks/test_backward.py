"""Spans of the backward pass, and backward times of modules in sampled steps."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.support.recording import EVERYTHING, Record, Recording, recorded
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.hooks.backward import BackwardHook, iterate_tensors
from torchlens_perf.recorder.sampling import SamplingSchedule
from torchlens_perf.run.ring import Flag, Kind


class Model(nn.Module):
    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.use_reentrant is None:
            x = self.second(x)
        else:
            x = checkpoint(self.second, x, use_reentrant=self.use_reentrant)
        return self.third(x.relu())


def train(
    model: nn.Module, folder: Path, steps: int = 3, micro_steps: int = 1, **settings: Any
) -> Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(folder, model, **{**EVERYTHING, **settings}) as recording:
        for _ in range(steps):
            for _ in range(micro_steps):
                model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


def inside(inner: Record, outer: Record) -> bool:
    return outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns


# -- the pass as a whole


def test_each_way_to_run_a_backward_pass_makes_one_outermost_span(tmp_path: Path) -> None:
    """The ways are Tensor.backward, autograd.backward, and autograd.grad for a weight."""
    model = Model()
    with recorded(tmp_path, model) as recording:
        model(torch.randn(2, 4)).sum().backward()
        torch.autograd.backward(model(torch.randn(2, 4)).sum())
        torch.autograd.grad(model(torch.randn(2, 4)).sum(), model.first.weight)

    assert recording.names(Kind.BACKWARD) == ["backward"] * 3
    assert {(each.depth, each.flags) for each in recording.of(Kind.BACKWARD)} == {(1, Flag(0))}


def test_exception_in_the_backward_pass_is_passed_on_and_its_span_is_flagged(
    tmp_path: Path,
) -> None:
    """The user gets the same exception object, and the next pass is recorded as usual."""
    error = ValueError("no gradient today")

    def refuse(gradient: Tensor) -> None:
        raise error

    model = Model()
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        result = model(torch.randn(2, 4))
        result.register_hook(refuse)
        with pytest.raises(ValueError, match="today") as caught:
            result.sum().backward()
        model(torch.randn(2, 4)).sum().backward()

    assert caught.value is error
    assert [each.flags for each in recording.of(Kind.BACKWARD)] == [Flag.EXCEPTION, Flag(0)]
    assert recording.unbalanced == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_reentrant_checkpointing_is_one_backward_pass_and_one_micro_step(
    use_reentrant: bool, tmp_path: Path
) -> None:
    """Reentrant checkpointing calls autograd's engine inside a backward pass."""
    recording = train(Model(use_reentrant), tmp_path, steps=2)
    outer = [each for each in recording.of(Kind.BACKWARD) if each.depth == 1]

    assert len(outer) == 2
    assert len(recording.of(Kind.BACKWARD)) == (4 if use_reentrant else 2)
    assert [each.value1 for each in recording.steps] == [1, 1]
    assert recording.names(Kind.RECOMPUTE) == ["checkpoint"] * 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_recomputation_of_the_whole_model_counts_as_no_forward_pass(
    early_stop: bool, tmp_path: Path
) -> None:
    """The second forward pass runs inside the backward pass and ends no step."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        recorded(tmp_path, model, **EVERYTHING) as recording,
        set_checkpoint_early_stop(early_stop),
    ):
        for _ in range(2):
            checkpoint(model, torch.randn(2, 4), use_reentrant=False).sum().backward()
            optimizer.step()

    assert [(each.flags & ~Flag.SAMPLED, each.value1) for each in recording.steps] == [
        (Flag(0), 1)
    ] * 2
    assert recording.names(Kind.FORWARD) == ["forward Model"] * 2
    assert recording.names(Kind.RECOMPUTE) == ["checkpoint"] * 2


def test_backward_pass_that_the_compiler_traces_is_not_recorded(tmp_path: Path) -> None:
    """AOTAutograd runs the engine while it traces a model."""
    torch._dynamo.reset()
    model = torch.compile(Model(), backend="aot_eager")
    with recorded(tmp_path, model) as recording:
        model(torch.randn(2, 4)).sum().backward()

    assert len(recording.of(Kind.BACKWARD)) == 1


def test_function_that_another_tool_wraps_during_the_watch_stays_wrapped(tmp_path: Path) -> None:
    """The wrapper of the other tool still works after the watch."""
    original = torch.autograd._engine_run_backward
    calls = []
    try:
        with recorded(tmp_path) as recording:
            recorded_backward = torch.autograd._engine_run_backward

            def tool_wrapper(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return recorded_backward(*args, **kwargs)

            torch.autograd._engine_run_backward = tool_wrapper
            torch.ones(1, requires_grad=True).sum().backward()
        assert torch.autograd._engine_run_backward is tool_wrapper
        torch.ones(1, requires_grad=True).sum().backward()
    finally:
        torch.autograd._engine_run_backward = original

    assert len(calls) == 2
    assert len(recording.of(Kind.BACKWARD)) == 1


# -- steps


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_accumulated_backward_passes_are_counted_as_micro_steps(
    micro_steps: int, tmp_path: Path
) -> None:
    recording = train(Model(), tmp_path, steps=2, micro_steps=micro_steps)

    assert [each.value1 for each in recording.steps] == [micro_steps] * 2
    assert len(recording.of(Kind.FORWARD)) == len(recording.of(Kind.BACKWARD)) == 2 * micro_steps


def test_model_called_twice_or_differentiated_twice_is_one_micro_step(tmp_path: Path) -> None:
    """Examples are a loss of two model calls, and a gradient penalty, which runs the engine
    twice.
    """
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        (model(torch.randn(2, 4)) - model(torch.randn(2, 4))).square().sum().backward()
        optimizer.step()
        batch = torch.randn(2, 4, requires_grad=True)
        torch.autograd.grad(model(batch).sum(), batch, create_graph=True)[0].norm().backward()
        optimizer.step()

    assert [each.value1 for each in recording.steps] == [1, 1]


def test_step_with_an_evaluation_is_flagged(tmp_path: Path) -> None:
    """An evaluation (forward passes without gradients) makes a step longer than others."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for evaluate in (False, True, False):
            if evaluate:
                with torch.no_grad():
                    model(torch.randn(2, 4))
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    assert [bool(each.flags & Flag.EVALUATION) for each in recording.steps] == [False, True, False]
    assert [each.value1 for each in recording.steps] == [1, 1, 1]


# -- modules


def test_backward_times_of_chained_modules_are_in_reverse_order(tmp_path: Path) -> None:
    """The intervals do not overlap and lie inside the backward pass."""
    recording = train(Model(), tmp_path, steps=1)
    (whole,) = recording.of(Kind.BACKWARD)
    spans = {each.name: each for each in recording.of(Kind.MODULE_BACKWARD)}

    assert sorted(spans) == ["first", "second", "third"]
    assert all(inside(each, whole) for each in spans.values())
    assert spans["third"].end_ns <= spans["second"].start_ns
    assert spans["second"].end_ns <= spans["first"].start_ns
    assert all(each.step == 0 for each in spans.values())


def test_backward_time_of_the_first_module_ends_with_the_computation(tmp_path: Path) -> None:
    """The first module's input needs no gradient, so no hook marks the end of its backward pass."""
    recording = train(Model(), tmp_path, steps=1)
    (whole,) = recording.of(Kind.BACKWARD)
    (first,) = [each for each in recording.of(Kind.MODULE_BACKWARD) if each.name == "first"]

    assert first.duration_ns > 0
    assert first.end_ns <= whole.end_ns


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("detached", [False, True])
def test_modules_of_a_gans_generator_have_backward_times(
    detached: bool, every: int, tmp_path: Path
) -> None:
    """The generator's loss is computed after the discriminator's optimizer has ended the step."""
    first, second = (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 1)),
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    settings = {**EVERYTHING, "backward_every": every}
    with recorded(tmp_path, {"generator": first, "discriminator": second}, **settings) as recording:
        for _ in range(6):
            made = first(torch.randn(2, 4))
            second(made.detach() if detached else made).sum().backward(retain_graph=True)
            optimizers[1].step()
            if not detached:
                made = first(torch.randn(2, 4))
            second(made).sum().backward()
            optimizers[0].step()
            for each in optimizers:
                each.zero_grad()
    spans = recording.of(Kind.MODULE_BACKWARD)

    assert {"generator.0", "generator.1", "generator.2", "discriminator.0"} <= {
        each.name for each in spans
    }
    passes = recording.of(Kind.BACKWARD)
    assert all(any(inside(each, whole) for whole in passes) for each in spans)


@pytest.mark.parametrize(
    ("every", "sampled"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (3, [1, 4]), (4, [2])]
)
def test_one_step_per_period_of_backward_every_is_sampled_and_flagged(
    every: int, sampled: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplingSchedule, "set_period", lambda self, cost_ns, step_ns: None)
    recording = train(Model(), tmp_path, steps=6, backward_every=every)

    assert sorted({each.step for each in recording.of(Kind.MODULE_BACKWARD)}) == sampled
    assert [each.step for each in recording.steps if each.flags & Flag.SAMPLED] == sampled


def test_sampling_becomes_rare_if_it_takes_over_a_thousandth_of_the_time(tmp_path: Path) -> None:
    """Steps of this test are so short that sampling every fourth step would cost more than 0.1
    %.
    """
    sampled = []
    # If other programs delay a step, sampling the step seems relatively cheap. Therefore the test
    # makes four attempts.
    for number in range(4):
        recording = train(Model(), tmp_path / str(number), steps=64, backward_every=4, budget=0.005)
        sampled.append([each.step for each in recording.steps if each.flags & Flag.SAMPLED])

    assert {steps[0] for steps in sampled} == {2}
    assert min(map(len, sampled)) <= 4  # The interval grows by a factor of eight at most.


def test_measured_cost_of_sampling_is_small_if_only_the_root_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled steps do no extra work if no submodule is timed."""
    costs_ns: dict[str, list[float]] = {"none": [], "all": []}
    for modules, seen in costs_ns.items():
        monkeypatch.setattr(
            SamplingSchedule,
            "set_period",
            lambda self, cost_ns, step_ns, seen=seen: seen.append(cost_ns),
        )
        train(Model(), tmp_path, steps=80, backward_every=4, modules=modules)

    assert len(costs_ns["all"]) == 20
    # On an idle machine the ratio of the two costs is about 1:5.
    assert statistics.median(costs_ns["none"]) < statistics.median(costs_ns["all"]) / 2


def test_module_backward_hooks_are_removed_after_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RAISE, "0")
    monkeypatch.setattr(swallowed, "by_place", Counter())
    with recorded(tmp_path, model := Model(), **EVERYTHING) as recording:
        session = recording.watch._session
        monkeypatch.setattr(session.clocks.current, "span", lambda begin, end: 1 / 0)
        for _ in range(5):
            model(torch.randn(2, 4)).sum().backward()
            recording.watch.step()
        (hook,) = [each for each in gc.get_objects() if type(each) is BackwardHook][-1:]
        assert hook._passes == []
    swallowed.by_place.clear()

    assert recording.names(Kind.MODULE_BACKWARD) == []
    assert any("backward failed" in note for note in recording.notes)
    assert recording.internal_errors == 1


def test_module_called_twice_has_two_backward_intervals(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    recording = train(Twice(), tmp_path, steps=1)
    early, late = sorted(recording.of(Kind.MODULE_BACKWARD), key=lambda each: each.start_ns)

    # The last gradient of one call is the first of the other and has the hooks of both.
    assert (
        early.start_ns < late.start_ns < early.end_ns < late.end_ns or early.end_ns <= late.start_ns
    )


def test_module_without_a_backward_pass_has_no_backward_interval(tmp_path: Path) -> None:
    """The result of one module is unused; the other module is called under no_grad."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            with torch.no_grad():
                x = self.frozen(x)
            return self.used(x)

    recording = train(Partly(), tmp_path, steps=2)

    assert recording.names(Kind.MODULE_BACKWARD) == ["used"] * 2


def test_module_call_that_raised_does_not_affect_the_next_call(tmp_path: Path) -> None:
    """The unfinished interval of the failed call must not be used for a later call."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("NaN")
            return self.layer(x)

    model = nn.Sequential(nn.Linear(4, 4), Picky())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        for step in range(3):
            if step != 1:
                with pytest.raises(ValueError, match="NaN"):
                    model(torch.full((2, 4), torch.nan))
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    *_, last = recording.of(Kind.BACKWARD)

    assert recording.names(Kind.MODULE_BACKWARD).count("1") == 3
    assert (
        len([each for each in recording.of(Kind.MODULE_BACKWARD, "1") if inside(each, last)]) == 1
    )


# -- hooks and graphs are removed


def test_parameters_and_inputs_get_no_backward_hooks(tmp_path: Path) -> None:
    """The loop uses the same input repeatedly, so hooks on it would accumulate."""
    model = Model()
    batch = torch.randn(2, 4, requires_grad=True)
    with recorded(tmp_path, model, **EVERYTHING):
        for _ in range(3):
            model(batch).sum().backward()
        for leaf in (batch, *model.parameters()):
            assert not leaf._backward_hooks
            assert not leaf._post_accumulate_grad_hooks


def test_backward_hooks_keep_no_graph_or_activation_alive(tmp_path: Path) -> None:
    model = Model()
    gc.collect()
    gc.disable()
    try:
        with recorded(tmp_path, model, **EVERYTHING):
            result = model(torch.randn(2, 4))
            loss = result.sum()
            loss.backward()
            kept = [weakref.ref(result), weakref.ref(loss)]
            del result, loss
            assert [reference() for reference in kept] == [None, None]
            unused = weakref.ref(model(torch.randn(2, 4)))  # A model call without a backward pass.
            assert unused() is None
    finally:
        gc.enable()


def test_number_of_python_objects_does_not_grow_with_steps(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(count: int) -> int:
        for _ in range(count):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        gc.collect()
        return len(gc.get_objects())

    with recorded(tmp_path, model, **EVERYTHING):
        few = steps(10)
        many = steps(300)

    assert many - few < 20


# -- search for tensors


def test_tensors_are_found_in_nested_results_of_modules() -> None:
    """Tuples, lists, dicts and dataclasses are searched four levels deep; other objects are not
    searched.
    """

    @dataclasses.dataclass
    class Output:
        logits: Any
        hidden: Any = None

    a, b, c, d = (torch.full((1,), float(number)) for number in range(4))
    nested = Output((a, [b, {"key": c}]), {"more": Output(d)})

    assert [int(each) for each in iterate_tensors(nested)] == [0, 1, 2, 3]
    assert list(iterate_tensors([[[[[a]]]]])) == []
    assert list(iterate_tensors((object(), "text", 3, Output))) == []
