"""Tests that recomputation by each form of activation checkpointing is measured, or reported as not
measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.support.recording import Record, Recording, recorded
from torchlens_perf.recorder import torch_private
from torchlens_perf.run.ring import Kind

LAYERS, WIDTH = 3, 8


class Layer(nn.Module):
    """A layer without submodules.

    If the layer's forward() is checkpointed, no watched module runs again, because the layer has no
    submodules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight))


class CheckpointsForward(Layer):
    """A layer like GradientCheckpointingLayer of transformers 5: one call runs forward() twice."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        recomputed = functools.partial(Layer.forward, self)
        result: Tensor = checkpoint(recomputed, x, use_reentrant=self.use_reentrant)
        return result


class ReentrantForward(CheckpointsForward):
    use_reentrant = True


class Stack(nn.Module):
    """A model that calls its layers by the function `call`."""

    def __init__(
        self, layer: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(LAYERS)])
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


class Sequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint_sequential(list(self), LAYERS, x, use_reentrant=False)
        return result


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def checkpointed(**settings: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda layer, x: checkpoint(layer, x, **settings)


def selective() -> Any:
    return create_selective_checkpoint_contexts(
        [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )


def of_function(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: layer(y) * 2, x, use_reentrant=False)


def function_in_function(layer: nn.Module, x: Tensor) -> Tensor:
    inner = functools.partial(checkpoint, layer, use_reentrant=False)
    return checkpoint(lambda y: inner(y) + 1, x, use_reentrant=False)


# Models with checkpoints, each with the number of regions that run again in a backward pass.
FORMS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "module": (lambda: Stack(Layer, checkpointed(use_reentrant=False)), LAYERS),
    "module, reentrant": (lambda: Stack(Layer, checkpointed(use_reentrant=True)), LAYERS),
    "forward": (lambda: Stack(CheckpointsForward, plain), LAYERS),
    "forward, reentrant": (lambda: Stack(ReentrantForward, plain), LAYERS),
    "function": (lambda: Stack(Layer, of_function), LAYERS),
    "selective": (lambda: Stack(Layer, checkpointed(use_reentrant=False, context_fn=selective)), LAYERS),
    "without early stop": (lambda: Stack(Layer, checkpointed(use_reentrant=False, early_stop=False)), LAYERS),
    "wrapper": (lambda: Stack(lambda: checkpoint_wrapper(Layer()), plain), LAYERS),
    "wrapper, reentrant": (
        lambda: Stack(lambda: checkpoint_wrapper(Layer(), checkpoint_impl=CheckpointImpl.REENTRANT), plain), LAYERS,
    ),
    "sequential": (lambda: Sequential(*[Layer() for _ in range(LAYERS)]), LAYERS - 1),
    "one in another": (lambda: Stack(Layer, function_in_function), 2 * LAYERS),
}  # fmt: skip


def train(model: nn.Module, folder: Path, **settings: Any) -> Recording:
    with recorded(folder, model, **settings) as recording:
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    return recording


def outermost(records: list[Record]) -> list[Record]:
    return [each for each in records if each.depth == min(record.depth for record in records)]


@pytest.mark.parametrize("modules", ["none", "all"])
@pytest.mark.parametrize(("make", "regions"), FORMS.values(), ids=FORMS)
def test_each_recomputed_region_is_a_span_in_the_backward_pass(
    make: Callable[[], nn.Module], regions: int, modules: str, tmp_path: Path
) -> None:
    """The regions may or may not contain watched modules."""
    recording = train(make(), tmp_path, modules=modules)
    (backward,) = outermost(recording.of(Kind.BACKWARD))
    recomputed = recording.of(Kind.RECOMPUTE)

    assert recording.names(Kind.RECOMPUTE) == ["checkpoint"] * regions
    assert all(
        backward.start_ns <= each.start_ns and each.end_ns <= backward.end_ns for each in recomputed
    )
    assert backward.phase_ns >= sum(each.duration_ns - each.phase_ns for each in recomputed)
    assert recording.metadata["not_measured"] == []
    assert recording.unbalanced == 0


def test_backward_pass_inside_a_checkpoint_is_not_recomputation(tmp_path: Path) -> None:
    """Reentrant checkpointing runs an inner backward pass."""
    recording = train(FORMS["module, reentrant"][0](), tmp_path)

    passes = recording.of(Kind.BACKWARD)
    for recomputed in recording.of(Kind.RECOMPUTE):
        inside = [
            each
            for each in passes
            if recomputed.start_ns <= each.start_ns and each.end_ns <= recomputed.end_ns
        ]
        assert len(outermost(inside)) == 1
        assert recomputed.phase_ns >= outermost(inside)[0].duration_ns


def test_no_recomputation_is_recorded_without_checkpoints(tmp_path: Path) -> None:
    """Without checkpoints there are no recomputation spans and no notes."""
    recording = train(Stack(Layer, plain), tmp_path)

    assert recording.of(Kind.RECOMPUTE) == []
    assert recording.metadata["not_measured"] == []


class Foreign(torch.autograd.Function):
    """Checkpointing as implemented by other libraries."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.function(x)
        torch.autograd.backward(result, gradient)
        return None, x.grad


def test_recomputation_by_another_library_is_noted_as_not_measured(tmp_path: Path) -> None:
    """The time of recomputation counts as backward pass, because no watched module runs again."""
    recording = train(Stack(Layer, lambda layer, x: Foreign.apply(layer.forward, x)), tmp_path)

    assert recording.of(Kind.RECOMPUTE) == []
    assert recording.metadata["not_measured"] == ["recompute"]


def test_recomputation_by_another_library_is_measured_with_watched_modules(tmp_path: Path) -> None:
    recording = train(
        Stack(Layer, lambda layer, x: Foreign.apply(layer, x)), tmp_path, modules="all"
    )

    assert recording.names(Kind.RECOMPUTE) == ["layers.2", "layers.1", "layers.0"]


def test_missing_checkpoint_functions_of_torch_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched modules show recomputation, and the report says that it may be incomplete."""
    is_usable = torch_private.is_usable
    monkeypatch.setattr(
        torch_private,
        "is_usable",
        lambda name: name != torch_private.RECOMPUTATION and is_usable(name),
    )
    recording = train(FORMS["module"][0](), tmp_path, modules="all")

    assert recording.names(Kind.RECOMPUTE) == ["layers.2", "layers.1", "layers.0"]
    assert recording.metadata["not_measured"] == ["recompute"]
    assert [note for note in recording.notes if note.startswith("recompute: torch lacks")]


def test_patched_checkpoint_functions_are_restored_after_the_watch(tmp_path: Path) -> None:
    """Static and inherited methods are included."""

    def state() -> list[dict[str, Any]]:
        return [
            dict(vars(each))
            for each in (torch_checkpoint._recomputation_hook, torch_checkpoint.CheckpointFunction)
        ]

    before = state()
    with recorded(tmp_path):
        assert state() != before
    assert state() == before


def test_exception_during_recomputation_is_passed_on_and_spans_end(tmp_path: Path) -> None:
    model = Stack(Layer, checkpointed(use_reentrant=False))
    calls = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("not again")
        return Layer.forward(model.layers[0], x)  # type: ignore[arg-type]

    model.layers[0].forward = forward
    with recorded(tmp_path, model) as recording:
        with pytest.raises(ValueError, match="not again"):
            model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()

    assert len(recording.of(Kind.RECOMPUTE)) == 2 * LAYERS
    assert recording.unbalanced == 0
