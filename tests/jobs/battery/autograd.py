"""Autograd, transforms, modes and tensor subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.jobs.battery.registry import Watch, case, mlp, random_batches, train


class Blocks(nn.Module):
    """A model that recomputes its blocks in the backward pass."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)]
        self.blocks, self.options = nn.ModuleList(blocks), options

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


@case()
def checkpoint_with_dropout(watch: Watch) -> Any:
    """Both kinds of recomputation restore the random state."""
    kinds = [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "early_stop": False},
    ]
    return [train(watch, Blocks(**kind)) for kind in kinds]


@case("pytorch/pytorch#130734")
def saved_tensor_hooks_that_end_inside(watch: Watch) -> Any:
    model = mlp()
    order: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        order.append(f"pack {tuple(tensor.shape)}")
        return tensor.clone()

    def call(batch: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = model(batch)
        with torch.autograd.graph.save_on_cpu():
            return result.sigmoid()

    return [train(watch, model, call=call), order]


@case("pytorch/functorch#488")
def transforms_of_a_watched_model(watch: Watch) -> Any:
    """Values inside vmap() and grad() are wrapped tensors, which must not be kept."""
    model = mlp()
    parameters = dict(model.named_parameters())
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda module, x: seen.append(type(x[0]).__name__))

    def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, values, (sample,)).square().sum()

    found: list[Any] = []
    with watch(model):
        for batch in random_batches():
            found += [vmap(grad(loss), (None, 0))(parameters, batch), vmap(model)(batch)]
            found += [jacrev(model)(batch[0]), hessian(loss, argnums=1)(parameters, batch[0])]
    return [found, seen]


@case("pytorch/pytorch#182842")
def ensembles_and_forward_derivatives(watch: Watch) -> Any:
    models = [mlp() for _ in range(3)]
    parameters, buffers = stack_module_state(models)

    def call(values: Any, others: Any, batch: Tensor) -> Tensor:
        return functional_call(models[0], (values, others), (batch,))

    found: list[Any] = []
    with watch(models):
        for batch in random_batches():
            many = vmap(call, (0, 0, None), randomness="different")
            found.append(many(parameters, buffers, batch))
            found.append(jvp(models[0], (batch,), (torch.ones_like(batch),)))
            with contextlib.suppress(RuntimeError):
                found.append(
                    jvp(lambda x, run=many: run(parameters, buffers, x), (batch,), (batch,))
                )
    return found


class AddsOne(torch.Tensor):
    """A subclass of Tensor that counts the functions that are called with it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@case("pytorch/pytorch#167223")
def tensor_subclasses_see_all_functions(watch: Watch) -> Any:
    """A subclass sees only the program's functions, in forward and backward passes."""
    model = mlp()
    found: list[Any] = []

    def call(batch: Tensor) -> Tensor:
        result = model(batch.as_subclass(AddsOne))
        result.register_hook(lambda grad: found.append(type(grad).__name__))
        return result

    return [train(watch, model, call=call), found, AddsOne.calls]


@case("pytorch/pytorch#110970")
def nested_tensors(watch: Watch) -> Any:
    """A nested tensor has no size(), and its gradient in a hook is nested too."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found: list[Any] = []

    def call(batch: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor([batch[:1], batch[1:]], layout=torch.jagged)
        result = model(jagged)
        result.register_hook(lambda grad: found.append(grad.is_nested))
        return result.values()

    return [train(watch, model, call=call), found]


@case("pytorch/pytorch#73604")
def views_in_custom_functions(watch: Watch) -> Any:
    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x[:]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Alias.apply(super().forward(x))

    def changed_in_place(batch: Tensor) -> Tensor:
        result = model(batch)
        with contextlib.suppress(RuntimeError):
            result.mul_(-1)
        return model(batch)

    model = nn.Sequential(Layer(8, 8), Layer(8, 8))
    return train(watch, model, call=changed_in_place)


@case("pytorch/pytorch#139742")
def parameters_with_other_storage(watch: Watch) -> Any:
    """Parameters get their data by set_(), as sharding libraries do, and have gradient hooks."""
    model = mlp()
    order: list[int] = []
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, n=number: order.append(n))

    def gather(step: int) -> None:
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.set_(parameter.detach().clone())

    return [train(watch, model, at_step=gather), order]


@case("pytorch/pytorch#41692")
def deterministic_algorithms(watch: Watch) -> Any:
    """An operation that is not deterministic raises, and no other code calls one."""
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    refused: list[str] = []

    def refuse(step: int) -> None:
        try:
            torch.kthvalue(
                torch.randn(3), 1, out=(torch.empty(()), torch.empty((), dtype=torch.long))
            )
            torch.bincount(torch.ones(3, dtype=torch.long), weights=torch.ones(3))
        except RuntimeError as error:
            refused.append(str(error)[:60])

    found = train(watch, model, at_step=refuse)
    return [found, refused, torch.are_deterministic_algorithms_enabled()]


@case("pytorch/pytorch#135990")
def default_device_and_dtype(watch: Watch) -> Any:
    """A default device is a mode that sees all factory functions, also of samplers."""
    created: list[str] = []

    class Factories(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__name__", "") in (
                "empty",
                "zeros",
                "tensor",
                "randperm",
                "ones",
            ):
                created.append(function.__name__)
            return function(*args, **(kwargs or {}))

    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float64)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    with Factories():
        found = train(watch, mlp(), batches=(batch for (batch,) in loader))
    return [found, created]


@case()
def users_modes_see_the_same_operators(watch: Watch) -> Any:
    seen: list[str] = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    model = mlp()

    def call(batch: Tensor) -> Tensor:
        with Operators(), Functions():
            return model(batch)

    def both(step: int) -> None:
        with Operators():
            model(torch.ones(2, 8)).sum().backward()

    return [train(watch, model, call=call, at_step=both), seen]


@case()
def anomaly_and_inference_mode(watch: Watch) -> Any:
    model = mlp()

    def infer(step: int) -> Any:
        with torch.inference_mode():
            return model(torch.ones(2, 8))

    with torch.autograd.detect_anomaly(check_nan=True):
        return train(watch, model, at_step=infer)


@case()
def double_backward(watch: Watch) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    found: list[Any] = []

    def call(batch: Tensor) -> Tensor:
        x = batch.requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        found.append(torch.autograd.functional.hessian(lambda y: model(y).sum(), batch[0].detach()))
        return first

    return [train(watch, model, call=call), found]


class Planned(Exception):
    """An exception of the user's program."""


def _raise(*arguments: Any) -> None:
    raise Planned


@case()
def exceptions_out_of_every_place(watch: Watch) -> Any:
    """Exceptions of forward, backward and hooks reach the program, and training goes on."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Planned("forward")

    class FailsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise Planned("backward")

    model = mlp()
    register: list[Callable[[Any], Any]] = [
        model.register_forward_hook,
        model[0].register_forward_pre_hook,
        model[2].register_full_backward_hook,
        model[2].weight.register_hook,
        model[0].bias.register_post_accumulate_grad_hook,
    ]
    caught: list[Any] = []

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
        except Planned as error:
            caught.append([error, type(error.__cause__).__name__, type(error.__context__).__name__])

    def fail(step: int) -> None:
        attempt(lambda: nn.Sequential(model, Fails())(torch.ones(2, 8)))
        attempt(lambda: FailsInBackward.apply(model(torch.ones(2, 8))).sum().backward())
        for each in register:
            handle = each(_raise)
            attempt(lambda: model(torch.ones(2, 8)).sum().backward())
            handle.remove()

    return [train(watch, model, at_step=fail), caught]


@case()
def scaler_that_skips_steps(watch: Watch) -> Any:
    """GradScaler does not call the optimizer if a gradient is infinite; autocast to bfloat16."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    found: list[Any] = []
    with watch(model, optimizer):
        for step, batch in enumerate(random_batches()):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss, scaler.get_scale()]
    return [found, model]
