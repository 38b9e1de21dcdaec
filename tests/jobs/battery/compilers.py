"""torch.compile, TorchScript, export and fx, by cheap backends."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.jobs.battery.registry import Watch, case, mlp, random_batches, sgd, train


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="eager", **options)


def translations() -> Any:
    """Return how much Dynamo has translated, and why it translated again."""
    return [dict(counters[each]) for each in ("frames", "graph_break", "recompiles")] + [
        counters["stats"].get("unique_graphs")
    ]


@case("pytorch/pytorch#110803", slow=True)
def recompilations(watch: Watch) -> Any:
    """Dynamic shapes, and changes between training and evaluation, translate no more."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    call = compiled(model)

    def evaluate(step: int) -> Any:
        model.train(step % 2 == 1)
        return call(torch.ones(2 + step, 8))

    return [train(watch, model, call=call, at_step=evaluate), translations()]


@case("pytorch/pytorch#170110", slow=True)
def hooks_of_compiled_submodules(watch: Watch) -> Any:
    """A hook of a submodule with keyword arguments is traced into one graph."""
    model = mlp()
    model[0].register_forward_hook(lambda module, args, kwargs, out: out * 0.5, with_kwargs=True)
    call = compiled(model, fullgraph=True)
    return [train(watch, model, call=call), translations()]


@case("pytorch/pytorch#117758", slow=True)
def compiled_in_place_and_reset(watch: Watch) -> Any:
    """Compile and reset inside the watch, and add a hook after the compilation."""
    model = mlp()
    seen: list[str] = []

    def change(step: int) -> None:
        if step == 0:
            model.compile(backend="eager")
        if step == 1:
            model[0].register_forward_hook(lambda *arguments: seen.append("hook"))
        if step == 2:
            torch.compiler.reset()

    return [train(watch, model, at_step=change), seen, translations()]


@case(slow=True)
def compiled_autograd(watch: Watch) -> Any:
    model = mlp()
    optimizer = sgd(model)
    losses = []
    with watch(model, optimizer), torch._dynamo.compiled_autograd._enable(compiled):
        for batch in random_batches():
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    captured = dict(counters["compiled_autograd"])
    return [losses, model, captured, counters["stats"].get("unique_graphs")]


@case("pytorch/pytorch#117767", slow=True)
def compiled_optimizer(watch: Watch) -> Any:
    """Dynamo translates no more functions than with two empty hooks of the user."""
    empty = torch._dynamo.disable(lambda *arguments: None)
    register_optimizer_step_pre_hook(empty)
    register_optimizer_step_post_hook(empty)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    step = compiled(lambda: optimizer.step())
    with watch(model, optimizer):
        for batch in random_batches():
            model(batch).square().mean().backward()
            step()
            optimizer.zero_grad()
    return [model, dict(counters["frames"]), counters["stats"].get("unique_graphs")]


@case("wandb/wandb#580")
def scripted_models(watch: Watch) -> Any:
    """TorchScript modules accept few kinds of hooks, and are watched as the model itself."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    return [train(watch, scripted), train(watch, nn.Sequential(scripted, nn.Linear(8, 8)))]


@case("pytorch/pytorch#20862", slow=True)
def exports_of_a_watched_model(watch: Watch) -> Any:
    """Tracing, scripting and exporting refuse a module with hooks, or trace the hooks."""
    model = mlp()
    sample = torch.ones(2, 8)

    def export(step: int) -> Any:
        if step:
            return None
        traced = torch.jit.trace(model, sample)
        scripted = torch.jit.script(model)
        symbolic = torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (sample,))
        return [
            traced.code,
            scripted.code,
            symbolic.code,
            exported.graph_module.code,
            traced(sample),
        ]

    return train(watch, model, at_step=export)


@case()
def data_dependent_control_flow(watch: Watch) -> Any:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) if x.sum() > 0 else self.right(self.left(x))

    return train(watch, Gate())
