"""Small models and training loops of many kinds, which a watch must not change.

Each case is a function that trains in the given context and returns all values that a watch could
change.

tests/jobs/test_bit_equality.py runs each case with and without a watch.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


class Watching(Protocol):
    """Makes the context of a training loop: a watch of the given models, or an empty context."""

    def __call__(
        self, *models: nn.Module, optimizers: Iterable[Any] = ()
    ) -> AbstractContextManager[Any]: ...


class Outcome(NamedTuple):
    """Values that a case returns after training."""

    models: list[nn.Module]
    optimizers: list[Any]
    losses: list[Tensor]
    extra: Any = None


class Case(NamedTuple):
    """A model and its training loop.

    `steps` is the number of steps that a watch counts if it receives all optimizers and models.
    """

    run: Callable[[Watching], Outcome]
    steps: int


CASES: dict[str, Case] = {}


def case(run: Callable[[Watching], Outcome]) -> Callable[[Watching], Outcome]:
    """Register a case of STEPS steps under its function's name."""
    CASES[run.__name__] = Case(run, STEPS)
    return run


def case_of(steps: int) -> Callable[[Callable[[Watching], Outcome]], Callable[[Watching], Outcome]]:
    """Register a case with another number of steps."""

    def put(run: Callable[[Watching], Outcome]) -> Callable[[Watching], Outcome]:
        CASES[run.__name__] = Case(run, steps)
        return run

    return put


def batches(shape: tuple[int, ...] = (4, 8), count: int = STEPS) -> Iterator[Tensor]:
    """Return random inputs.

    The global random generator makes the inputs, so a watch that uses this generator changes them.
    """
    for _ in range(count):
        yield torch.randn(shape)


def train(
    watching: Watching,
    model: nn.Module,
    call: Callable[[Tensor], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    shape: tuple[int, ...] = (4, 8),
) -> Outcome:
    """Run the simplest loop.

    `call` is a function that returns the loss of a batch. By default it is the mean squared output.
    """
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for batch in batches(shape):
            loss = call(batch) if call is not None else model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    return Outcome([model], [optimizer], losses)


def mlp() -> nn.Sequential:
    """Train a model of two layers."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


# -- in-place operations


@case
def inplace_activation(watching: Watching) -> Outcome:
    return train(
        watching,
        nn.Sequential(
            nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True)
        ),
    )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        return self.norm(y).relu_()


@case
def inplace_residual(watching: Watching) -> Outcome:
    return train(watching, nn.Sequential(Residual(), Residual()))


class Views(nn.Module):
    """A module that returns views of one tensor. The caller writes into one of the views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.split = Halves()
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.split(self.inner(x))
        first.mul_(2)
        return self.outer(first + second)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :4], x.view(-1, 2, 4)[:, 1]


@case
def inplace_on_views(watching: Watching) -> Outcome:
    return train(watching, Views())


# -- calls and results in other forms


class Parts(nn.Module):
    """A trunk and two heads. The subclass chooses the container of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})

    def parts(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x).tanh()
        return {name: head(hidden) for name, head in self.heads.items()}


class ReturnsDict(Parts):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {**self.parts(x), "about": "no tensor", "nested": [{"count": 1}]}


@case
def dict_result(watching: Watching) -> Outcome:
    model = ReturnsDict()
    return train(
        watching, model, lambda batch: sum(model(batch)[name].square().mean() for name in "ab")
    )


@dataclasses.dataclass(frozen=True)
class Heads:
    a: Tensor
    b: Tensor
    about: str = ""


class ReturnsDataclass(Parts):
    def forward(self, x: Tensor) -> Heads:
        return Heads(**self.parts(x))


@case
def dataclass_result(watching: Watching) -> Outcome:
    model = ReturnsDataclass()
    return train(
        watching, model, lambda batch: model(batch).a.mean() + model(batch).b.square().mean()
    )


class ModelOutput(OrderedDict):
    """An ordered dict with indexes, positions and attributes, as in Hugging Face transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class ReturnsModelOutput(Parts):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> ModelOutput:
        parts = self.parts(x)
        return ModelOutput(loss=parts["a"].square().mean(), logits=parts["b"])


@case
def model_output_result(watching: Watching) -> Outcome:
    model = ReturnsModelOutput()
    return train(watching, model, lambda batch: model(batch).loss + model(batch)[1].mean())


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(8, 8, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, *, left: Tensor, right: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.outer(input=self.inner(input1=left, input2=right))


@case
def keyword_arguments(watching: Watching) -> Outcome:
    model = KeywordsOnly()
    return train(
        watching,
        model,
        lambda batch: model(left=batch, right=batch.flip(0), mask=None).square().mean(),
    )


class Recursive(nn.Module):
    """A module that calls itself, and calls one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.again = self.layer

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        x = self.again(self.layer(x).tanh())
        return self(x, depth + 1) if depth < 2 else x


@case_of(STEPS)
def recursion(watching: Watching) -> Outcome:
    return train(watching, Recursive())


# -- layers of many kinds


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)).tanh())


def tokens_of(batch: Tensor) -> Tensor:
    return (batch.abs() * 7).long().clamp_(max=15)


@case
def tied_weights(watching: Watching) -> Outcome:
    model = Tied()

    def loss(batch: Tensor) -> Tensor:
        tokens = tokens_of(batch)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return train(watching, model, loss)


@case
def sparse_embedding(watching: Watching) -> Outcome:
    model = nn.EmbeddingBag(16, 8, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam(model.parameters())
    return train(watching, model, lambda batch: model(tokens_of(batch)).square().mean(), optimizer)


@case
def batch_norm(watching: Watching) -> Outcome:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(5)
    )
    # The lazy layer learns its shape from this batch.
    model(torch.randn(2, 3, 6, 6))
    return train(watching, model, shape=(4, 3, 6, 6))


@case
def lazy_layers(watching: Watching) -> Outcome:
    """Train layers that change their class in the first call, inside the watch."""
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD([*model[2].parameters()], lr=0.1)
    return train(watching, model, optimizer=optimizer)


@case
def dropout(watching: Watching) -> Outcome:
    return train(
        watching,
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Linear(16, 2)),
    )


@case
def attention(watching: Watching) -> Outcome:
    """Train MultiheadAttention, which uses its child's weight without calling the child."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return train(watching, nn.TransformerEncoder(layer, 2), shape=(2, 5, 8))


@case_of(6)
def encoder_fast_path(watching: Watching) -> Outcome:
    """Evaluate TransformerEncoderLayer as one fused operator.

    torch uses the fused operator only in eval mode, without gradients and without hooks.
    """
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    results, fused = [], []
    with watching(model), torch.inference_mode():
        for batch in batches((2, 5, 8), 6):
            with torch.autograd.profiler.profile() as profile:
                results.append(model(batch))
            fused.append(
                sorted(
                    {
                        event.name
                        for event in profile.function_events
                        if "encoder_layer_fwd" in event.name
                    }
                )
            )
    assert fused == [["aten::_transformer_encoder_layer_fwd"]] * 6
    return Outcome([model], [], results)


@case
def recurrent(watching: Watching) -> Outcome:
    model = nn.LSTM(8, 4, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
    return train(watching, model, lambda batch: model(batch)[0].square().mean(), shape=(2, 5, 8))


@case
def reparametrized(watching: Watching) -> Outcome:
    """Train weights that hooks of torch compute."""
    linear, normed = nn.Linear(8, 8), nn.Linear(8, 8)
    nn.utils.parametrizations.spectral_norm(normed)
    nn.utils.parametrizations.weight_norm(linear)
    return train(watching, nn.Sequential(linear, normed))


# -- loops in other forms


@case
def checkpoint_reentrant(watching: Watching) -> Outcome:
    model = nn.Sequential(
        nn.Linear(8, 8), Checkpointed(use_reentrant=True), Checkpointed(use_reentrant=True)
    )
    return train(watching, model)


@case
def checkpoint_not_reentrant(watching: Watching) -> Outcome:
    return train(
        watching,
        nn.Sequential(Checkpointed(use_reentrant=False), Checkpointed(use_reentrant=False)),
    )


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.1), Residual()
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@case
def gradient_accumulation(watching: Watching) -> Outcome:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for _ in range(STEPS):
            for batch in batches(count=3):
                loss = model(batch).square().mean() / 3
                loss.backward()
                losses.append(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return Outcome([model], [optimizer], losses, schedule.state_dict())


@case
def evaluation_between(watching: Watching) -> Outcome:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                losses += [loss, *(model(batch).mean() for _ in range(2))]
            model.train()
    return Outcome([model], [optimizer], losses)


@case
def autocast(watching: Watching) -> Outcome:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))

    def loss(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).square().mean()

    return train(watching, model, loss)


@case_of(5)
def gradient_scaler(watching: Watching) -> Outcome:
    """Train with a gradient scaler that skips the third of five steps, whose gradient
    is infinite.
    """
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for number, batch in enumerate(batches(count=5)):
            loss = model(batch).square().mean() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss)
    return Outcome([model], [optimizer], losses, scaler.state_dict())


@case
def not_a_number(watching: Watching) -> Outcome:
    """Train with an infinite first loss. All later losses and the parameters become NaN."""
    model = mlp()
    scales = iter([float("inf"), *[float("nan")] * STEPS])
    return train(watching, model, lambda batch: model(batch).square().mean() * next(scales))


@case
def closure(watching: Watching) -> Outcome:
    """Train with LBFGS, which runs forward and backward several times inside its step."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():

            def evaluate(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(evaluate))
    return Outcome([model], [optimizer], losses)


@case
def two_optimizers(watching: Watching) -> Outcome:
    """Train a GAN with two models, two optimizers and two backward passes per step."""
    generator, critic = (
        mlp(),
        nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(inplace=True), nn.Linear(8, 1)),
    )
    of_critic = torch.optim.RMSprop(critic.parameters())
    of_generator = torch.optim.NAdam(generator.parameters())
    losses = []
    with watching(generator, critic, optimizers=[of_critic, of_generator]):
        for batch in batches():
            made = generator(torch.randn(4, 8))
            loss = critic(made.detach()).mean() - critic(batch).mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            other = -critic(made).mean()
            of_generator.zero_grad()
            other.backward()
            of_generator.step()
            losses += [loss, other]
    return Outcome([generator, critic], [of_critic, of_generator], losses)


@case
def double_backward(watching: Watching) -> Outcome:
    """Train with a gradient penalty, which differentiates a gradient through the
    watched modules.
    """
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(batch: Tensor) -> Tensor:
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return train(watching, model, loss)


@case
def functional(watching: Watching) -> Outcome:
    """Compute per-sample gradients of a functional call with torch.func."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    losses = []

    def loss_of(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, parameters, (sample[None],)).square().sum()

    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
            each = vmap(grad(loss_of), in_dims=(None, 0))(parameters, batch)
            for name in names:
                model.get_parameter(name).grad = each[name].clamp(-1, 1).mean(0)
            optimizer.step()
            losses.append(each[names[0]])
    return Outcome([model], [optimizer], losses)


@case_of(6)
def generation(watching: Watching) -> Outcome:
    """Sample token by token, as `generate` does."""
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).eval()
    tokens = torch.zeros(1, 1, dtype=torch.long)
    with watching(model), torch.inference_mode():
        for _ in range(6):
            likely = model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(likely, 1)], 1)
    return Outcome([model], [], [tokens])


@case
def caught_exception(watching: Watching) -> Outcome:
    """Train in a loop that continues with the next batch after a module has raised an exception."""
    model = nn.Sequential(nn.Linear(8, 8), Refuses(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    losses, refused = [], []
    with watching(model, optimizers=[optimizer]):
        for batch in [
            batch for good in batches() for batch in (torch.full((4, 8), torch.nan), good)
        ]:
            try:
                loss = model(batch).square().mean()
            except Refused as error:
                refused.append(str(error))
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    return Outcome([model], [optimizer], losses, refused)


class Refused(Exception):
    pass


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise Refused("a batch of NaN")
        return x


@case
def moving_average(watching: Watching) -> Outcome:
    """Evaluate a moving average of the weights, in a deep copy made inside the watch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watching(model, optimizers=[optimizer]):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                losses += [loss, average(batch).mean()]
    return Outcome([model, average], [optimizer], losses)


@case
def saving(watching: Watching) -> Outcome:
    """Save checkpoints of everything inside the watch, including a result that carries our gradient
    hook.
    """
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    losses, saved = [], []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            result = model(batch)
            saved += [as_bytes(model), as_bytes({"result": result}), as_bytes(copy.copy(model))]
            loss = result.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.append(
                as_bytes({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            )
            losses.append(loss)
    return Outcome([model], [optimizer], losses, saved)


def as_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class First(nn.Module):
    """A module that returns the first of several results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class OwnState(nn.Module):
    """A module with its own __getstate__, as nn.GRU and DistributedDataParallel have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@case
def own_state(watching: Watching) -> Outcome:
    model = nn.Sequential(OwnState(), nn.Linear(8, 8), First(nn.GRU(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, saved = [], []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            copied = copy.deepcopy(model)
            nn.init.zeros_(copied[0].inner.weight)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            saved.append(as_bytes(model))
            loaded = torch.load(io.BytesIO(saved[-1]), weights_only=False)
            losses += [loss, copied(batch), loaded(batch)]
    assert not any(b"torchlens" in each for each in saved)
    return Outcome([model], [optimizer], losses)


@case
def graph_module(watching: Watching) -> Outcome:
    """Trace a model with torch.fx, which copies a module's dictionary without calling
    __getstate__.
    """
    model = torch.fx.symbolic_trace(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            copied = copy.deepcopy(model)
            traced = torch.fx.symbolic_trace(model)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loaded = torch.load(io.BytesIO(as_bytes(model)), weights_only=False)
            losses += [loss, copied(batch), traced(batch), loaded(batch)]
    assert b"torchlens" not in as_bytes(model) + as_bytes(copied)
    return Outcome([model], [optimizer], losses, [model.code, traced.code])


@case
def torchscript(watching: Watching) -> Outcome:
    """Trace and script a model inside the watch."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            traced, scripted = torch.jit.trace(model, batch), torch.jit.script(model)
            # Without this reset, the result depends on earlier calls in the process.
            with torch.jit.optimized_execution(False):
                loss = model(batch).square().mean() + traced(batch).mean() + scripted(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss]
    graphs = [re.sub(r"___torch_mangle_\d+\.", "", str(each.graph)) for each in (traced, scripted)]
    return Outcome([model], [optimizer], losses, graphs)


@case
def replicas(watching: Watching) -> Outcome:
    """Emulate nn.DataParallel on several GPUs: replicas with separate parameters, on threads."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            replica = replicate(model, lambda parameter: parameter * 2)
            loss = (model(batch) + on_thread(replica, batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss]
    return Outcome([model], [optimizer], losses)


def on_thread(model: nn.Module, batch: Tensor) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(model(batch)))
    thread.start()
    thread.join()
    return results[0]


def replicate(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Emulate torch.nn.parallel.replicate on the CPU."""
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        replica._modules[name] = replicate(child, change)
    for name, parameter in model._parameters.items():
        setattr(replica, name, change(parameter))
    return replica


@case
def users_hooks(watching: Watching) -> Outcome:
    """Train with user hooks of every kind that change values."""
    model = mlp()
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    model[2].register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: seen.append(parameter.grad.norm())
        )
    return train(watching, model)._replace(extra=seen)


@case
def optimizer_in_backward(watching: Watching) -> Outcome:
    """Train with one optimizer per parameter that steps as soon as the gradient is available."""
    model = mlp()
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()
    }
    losses = []

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with watching(model, optimizers=optimizers.values()):
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss)
    return Outcome([model], list(optimizers.values()), losses)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clamp(max=1).exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


class OwnFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Exponential.apply(x)


@case
def own_autograd_function(watching: Watching) -> Outcome:
    return train(watching, nn.Sequential(nn.Linear(8, 8), OwnFunction(), nn.Linear(8, 8)))


@case
def saved_tensor_hooks(watching: Watching) -> Outcome:
    """Train with activations that are packed until the backward pass, and with anomaly
    detection.
    """
    model = mlp()

    def loss(batch: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
            return model(batch).square().mean()

    with torch.autograd.detect_anomaly(check_nan=True):
        return train(watching, model, loss)


@case
def frozen_layers(watching: Watching) -> Outcome:
    """Fine-tune a model in which only the last layers need a gradient."""
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 4))
    return train(watching, model, optimizer=torch.optim.Adagrad(model[2].parameters()))


@case
def data_loader(watching: Watching) -> Outcome:
    """Train with a shuffling data loader whose workers use all three random generators."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(8 * STEPS, 8))
    losses = []
    with watching(model, optimizers=[optimizer]):
        for (batch,) in DataLoader(data, 8, shuffle=True, num_workers=2, collate_fn=noisy):
            loss = model(batch).square().mean() * random.random() * np.random.rand()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    return Outcome([model], [optimizer], losses)


def noisy(samples: list[tuple[Tensor]]) -> list[Tensor]:
    return [torch.stack([sample for (sample,) in samples]) + torch.rand(8) + random.random()]


class Logged(Tensor):
    """A tensor that logs all operations on the tensor."""

    log: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.log.append(getattr(function, "__qualname__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@case
def tensor_subclass(watching: Watching) -> Outcome:
    """Train with a tensor subclass that logs every function called with it, including getters."""
    Logged.log.clear()
    model = nn.Sequential(nn.Linear(8, 8), Residual())
    outcome = train(
        watching,
        model,
        lambda batch: model(batch.as_subclass(Logged)).square().mean().as_subclass(Tensor),
    )
    return outcome._replace(extra=list(Logged.log))


class FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(getattr(function, "__qualname__", str(function)))
        return function(*args, **(kwargs or {}))


class OperatorLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


@case
def users_modes(watching: Watching) -> Outcome:
    """Train with user modes that log every function and every operator.

    The modes' log must not contain calls of the watch.
    """
    with FunctionLog() as functions, OperatorLog() as operators:
        outcome = train(watching, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Residual()))
    return outcome._replace(extra=[functions.seen, operators.seen])


@case
def scripted_model(watching: Watching) -> Outcome:
    """Train a TorchScript model, alone and as a part of another model."""
    with torch.jit.optimized_execution(False):
        return train(watching, nn.Sequential(nn.Linear(8, 8), torch.jit.script(mlp())))


# -- torch.compile


def compiled_case(backend: str) -> None:
    def run(watching: Watching) -> Outcome:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), Residual())
        compiled = torch.compile(model, backend=backend)
        return train(watching, compiled)

    run.__name__ = f"compiled_{backend}"
    case(run)


compiled_case("eager")
compiled_case("aot_eager")
compiled_case("inductor")


@case
def compiled_in_place(watching: Watching) -> Outcome:
    """Train a model on which module.compile() was called before the watch."""
    model = nn.Sequential(nn.Linear(8, 8), Residual())
    model.compile(backend="aot_eager")
    return train(watching, model)


@case
def compiled_in_place_inside(watching: Watching) -> Outcome:
    """Train a model on which module.compile() is called inside the watch."""
    model = nn.Sequential(nn.Linear(8, 8), Residual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with watching(model, optimizers=[optimizer]):
        for number, batch in enumerate(batches()):
            if number == 2:
                model[1].compile(backend="aot_eager")
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
    return Outcome([model], [optimizer], losses)


@case
def compiled_blocks(watching: Watching) -> Outcome:
    """Compile each block of an eager model separately, as in regional compilation."""
    model = nn.Sequential(nn.Linear(8, 8), Residual(), Residual())
    model[1] = torch.compile(model[1], backend="aot_eager")
    model[2].compile(backend="aot_eager")
    return train(watching, model)


@case
def compiled_loop_body(watching: Watching) -> Outcome:
    """Compile the whole step.

    Dynamo traces the calls of the model, of backward() and of the optimizer.
    """
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []

    @torch.compile(backend="aot_eager")
    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with watching(model, optimizers=[optimizer]):
        losses = [step(batch) for batch in batches()]
    return Outcome([model], [optimizer], losses)
