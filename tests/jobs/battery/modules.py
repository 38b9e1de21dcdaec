"""Models: hooks, copies, saved models, parametrizations, unusual modules and optimizers."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import weakref
from collections import OrderedDict, UserDict
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.jobs.battery.registry import STEPS, Watch, case, mlp, random_batches, sgd, train


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


@case("wandb/wandb#5573")
def saves_and_copies_of_the_model(watch: Watch) -> Any:
    """Save, pickle and copy model and optimizer in each step, and run the copies."""
    model = mlp()
    optimizer = sgd(model)

    def copies(step: int) -> Any:
        parts = {"model": model, "optimizer": optimizer}
        both = loaded(saved(parts)), pickle.loads(pickle.dumps(parts)), copy.deepcopy(parts)
        return [len(saved(parts)), *(each["model"](torch.ones(2, 8)) for each in both)]

    return train(watch, model, optimizer, at_step=copies)


@case("wandb/wandb#11907")
def saves_of_results_and_parameters(watch: Watch) -> Any:
    """Saving a tensor that has a hook warns that the hook is not saved."""
    model = mlp()
    kept: list[Any] = []

    def call(batch: Tensor) -> Tensor:
        result = model(batch)
        kept.append(loaded(saved([result, *model.parameters()])))
        return result

    return [train(watch, model, call=call), kept]


@case("lucidrains/ema-pytorch#6")
def shared_memory_and_averages(watch: Watch) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).share_memory()
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    slow = AveragedModel(copy.deepcopy(model))
    schedule = SWALR(optimizer, swa_lr=0.05)

    def update(step: int) -> Any:
        average.update_parameters(model)
        slow.update_parameters(model)
        schedule.step()
        return average(torch.ones(2, 8))

    found = train(watch, model, optimizer, at_step=update)
    update_bn(random_batches(), slow)
    return [found, average, slow, model[0].weight.is_shared()]


class ReturnsDict(nn.Module):
    """A model whose layers return a dictionary, a named tuple, a dataclass or None."""

    class Pair(NamedTuple):
        first: Tensor
        rest: Any

    @dataclasses.dataclass
    class Output:
        logits: Tensor

    class Layer(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.linear = kind, nn.Linear(8, 8)

        def forward(self, x: Tensor, *, seen: list[str]) -> Any:
            seen.append(self.kind)
            y = self.linear(x)
            return {
                "dict": {"y": y, "none": None},
                "pair": ReturnsDict.Pair(y, [1]),
                "output": ReturnsDict.Output(y),
                "user": UserDict(y=y),
                "none": None,
            }[self.kind]

    def __init__(self) -> None:
        super().__init__()
        kinds = "dict", "pair", "output", "user", "none"
        self.layers = nn.ModuleDict({kind: self.Layer(kind) for kind in kinds})

    def forward(self, x: Tensor) -> Tensor:
        seen: list[str] = []
        x = self.layers["dict"](x, seen=seen)["y"]
        x = self.layers["pair"](x, seen=seen).first
        x = self.layers["output"](x, seen=seen).logits
        x = self.layers["user"](x, seen=seen)["y"]
        assert self.layers["none"](x, seen=seen) is None
        return x * len(seen)


@case("wandb/wandb#1122")
def layers_that_return_no_tensor(watch: Watch) -> Any:
    return train(watch, ReturnsDict())


@case("pytorch/pytorch#61519")
def in_place_activations(watch: Watch) -> Any:
    """A full backward hook makes in-place activations fail."""
    kinds = nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), nn.Dropout(0.5, inplace=True)
    layers = [layer for kind in kinds for layer in (nn.Linear(8, 8), kind)]
    return train(watch, nn.Sequential(*layers))


@case("pytorch/pytorch#186796")
def swapped_parameters(watch: Watch) -> Any:
    """swap_tensors() refuses a tensor with other references, also weak ones."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    model = mlp()
    batches = [torch.randn(4, 8, dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]

    def convert(step: int) -> Any:
        model.to(torch.float32 if step % 2 else torch.float64)
        other = nn.Parameter(torch.zeros_like(model[0].bias))
        torch.utils.swap_tensors(model[0].bias, other)
        return [model[0].bias, other]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(watch, model, optimizer, batches=batches, at_step=convert)


@case("pytorch/pytorch#20124")
def schedulers_after_the_step(watch: Watch) -> Any:
    """A scheduler warns if optimizer.step() was replaced."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ]

    def step(number: int) -> Any:
        for schedule in schedules:
            schedule.step()
        late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [schedules[1].get_last_lr(), late.get_last_lr(), saved(schedules[0].state_dict())]

    return train(watch, model, optimizer, at_step=step)


@case("pytorch/pytorch#94450")
def pickled_one_cycle_schedule(watch: Watch) -> Any:
    """The state of OneCycleLR contains a bound method, and so the optimizer."""
    model = mlp()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)

    def step(number: int) -> Any:
        schedule.step()
        other = pickle.loads(pickle.dumps(schedule))
        return [other.get_last_lr(), len(pickle.dumps(schedule.state_dict()))]

    return train(watch, model, optimizer, at_step=step)


@case("wandb/wandb#626")
def two_models_of_one_class(watch: Watch) -> Any:
    """Train two models with equal names of layers, as a GAN does."""
    models = [mlp(), mlp()]
    optimizers = [sgd(each) for each in models]
    losses = []
    with watch(models, optimizers):
        for batch in random_batches():
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
    return [losses, models]


@case("wandb/wandb#349")
def deeply_nested_model(watch: Watch) -> Any:
    """A walk over the modules by recursion exceeds the limit; so do calls inside of calls."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    model: nn.Module = nn.Linear(8, 8)
    for _ in range(150):
        model = Around(model)
    return train(watch, model)


@case("pytorch/pytorch#37138")
def pruning_keeps_the_order_of_hooks(watch: Watch) -> Any:
    model = mlp()
    model[0].register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))
    prune.random_unstructured(model[0], "weight", 0.2)
    model[0].register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2,))

    def again(step: int) -> Any:
        prune.l1_unstructured(model[0], "weight", 0.1)
        return [type(hook).__name__ for hook in model[0]._forward_pre_hooks.values()]

    return train(watch, model, at_step=again)


@case("pytorch/pytorch#13350")
def spectral_norm_of_two_forwards(watch: Watch) -> Any:
    """The vectors of the power iteration change in each forward pass."""
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.weight_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
    )
    return train(watch, model, call=lambda batch: model(batch) - model(batch + 1))


@case("huggingface/transformers#22248")
def signatures_of_wrapped_functions(watch: Watch) -> Any:
    """Trainers choose columns by the signature of forward(), which a wrapper changes."""
    model = mlp()
    optimizer = sgd(model)
    functions = [
        model.forward, model[0].forward, type(model).__call__, optimizer.step, torch.save,
        Tensor.backward, torch.autograd.backward, torch.utils.data.DataLoader.__iter__, optimizer.zero_grad,
    ]  # fmt: skip

    def look(step: int) -> Any:
        names = [each.__name__ for each in functions]
        own = [torch.save, Tensor.backward, model.forward, optimizer.step]
        return [names, *(str(inspect.signature(each)) for each in (*functions, *own))]

    return train(watch, model, optimizer, at_step=look)


@case("facebookresearch/fairscale#424")
def models_are_freed_without_a_collection(watch: Watch) -> Any:
    """A cycle through a hook keeps a model alive until the next garbage collection."""
    gc.disable()
    alive = []
    for _ in range(3):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = train(watch, model, optimizer)
        alive += [weakref.ref(model), weakref.ref(model[0].weight)]
        del model, losses
        optimizer.param_groups.clear()
        del optimizer
    return [reference() is None for reference in alive[:4]]


@case("pytorch/pytorch#119300")
def order_of_optimizer_hooks(watch: Watch) -> Any:
    """Own hooks of optimizers are called in their order, also global ones."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    order: list[str] = []

    def remember(name: str) -> Any:
        return lambda *arguments: order.append(name)

    handles = [
        register_optimizer_step_post_hook(remember("global post")),
        register_optimizer_step_pre_hook(remember("global pre")),
        optimizer.register_step_post_hook(remember("post")),
        optimizer.register_step_pre_hook(remember("pre")),
        optimizer.register_state_dict_post_hook(remember("state")),
    ]
    found = train(watch, model, optimizer, at_step=lambda step: len(optimizer.state_dict()))
    for handle in handles:
        handle.remove()
    return [found, order]


@case()
def hooks_registered_later(watch: Watch) -> Any:
    model = mlp()
    order: list[str] = []

    def register(step: int) -> Any:
        name = f"step {step}"
        model[0].register_forward_hook(lambda *arguments: order.append(name))
        model.register_full_backward_hook(lambda *arguments: order.append(f"{name} backward"))
        model[2].weight.register_hook(lambda grad: grad * 0.5)
        return [len(model[0]._forward_hooks), list(order)]

    return train(watch, model, at_step=register)


@case()
def recursive_and_repeated_modules(watch: Watch) -> Any:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.relu = nn.Linear(8, 8), nn.ReLU()
            self.same, self.names = self.linear, nn.ModuleDict()
            self.names["a/b\n\x1b[31m"] = self.linear
            self.names["0"] = nn.Linear(8, 8)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            for module in (self.linear, self.same, *self.names.values(), self.relu):
                x = module(x)
            return self(x, depth - 1) if depth else x

    return train(watch, Tree())


@case()
def adapters_and_deleted_layers(watch: Watch) -> Any:
    """Layers are replaced, added and deleted between steps, as adapters are."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(8, 2), nn.Linear(2, base.out_features)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(
        OrderedDict(a=nn.Linear(8, 8), b=nn.ReLU(), c=nn.Linear(8, 8), d=nn.Tanh())
    )
    optimizer = sgd(model)

    def change(step: int) -> Any:
        if step == 0:
            model.a = Adapter(model.a)
            optimizer.add_param_group({"params": [*model.a.down.parameters()]})
        if step == 1:
            del model.d
        if step == 2:
            model.append(nn.Linear(8, 8))
        return [name for name, _ in model.named_modules()]

    return train(watch, model, optimizer, at_step=change)


@case()
def modules_with_own_protocols(watch: Watch) -> Any:
    """Modules that are false, have slots, or an own __call__, length, truth or attributes."""

    class Falsy(nn.Linear):
        def __bool__(self) -> bool:
            raise TypeError("the truth of a layer is not defined")

        def __len__(self) -> int:
            return 0

    class Calls(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    class Slots(nn.Linear):
        __slots__: ClassVar[tuple[str, ...]] = ("place",)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name == "linear":
                return super().__getattr__(name)
            return getattr(super().__getattr__("linear"), name)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    slots = Slots(8, 8)
    slots.place = 1
    return train(watch, nn.Sequential(Falsy(8, 8), Calls(8, 8), slots, Own()))


@case()
def unhashable_modules(watch: Watch) -> Any:
    """A module with __eq__ and without __hash__, as a dataclass is."""

    @dataclasses.dataclass
    class Layer(nn.Module):
        width: int

        def __post_init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(self.width, self.width)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    # Module.named_modules() itself puts modules into a set.
    with watch(), torch.no_grad():
        return [Layer(8)(batch) for batch in random_batches()]


@case()
def lazy_and_meta_modules(watch: Watch) -> Any:
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 4, device="meta"))
    with watch(model):
        model[2].to_empty(device="cpu")
        nn.init.ones_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        model[:2](torch.randn(4, 8))
        return train(lambda *arguments: watch(), model)


@case()
def quantization_aware_training(watch: Watch) -> Any:
    quantization = torch.ao.quantization
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(8, 8), nn.ReLU(), quantization.DeQuantStub()
    )
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model.train(), inplace=True)
    found = train(watch, model)
    return [found, quantization.convert(model.eval())(torch.ones(2, 8))]


@case()
def optimizers_of_all_kinds(watch: Watch) -> Any:
    """Closures, sparse gradients, fused and foreach steps, tied weights and clipped gradients."""
    found: list[Any] = []
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight)
    search = torch.optim.LBFGS(model.parameters(), max_iter=3)
    embedding = nn.Embedding(5, 4, sparse=True)
    sparse = torch.optim.SparseAdam(list(embedding.parameters()))
    fused = torch.optim.Adam(model.parameters(), fused=True)
    with watch([model, embedding], [search, sparse, fused]):
        for batch in random_batches():

            def closure(batch: Tensor = batch) -> Tensor:
                search.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            found.append(search.step(closure))
            embedding(torch.randint(5, (3,))).sum().backward()
            sparse.step()
            sparse.zero_grad()
            closure()
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            fused.step()
    return [found, model, embedding, search.state_dict(), sparse.state_dict()]


@case()
def optimizer_step_in_backward(watch: Watch) -> Any:
    model = mlp()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with watch(model):
        for batch in random_batches():
            model(batch).square().mean().backward()
    return model
