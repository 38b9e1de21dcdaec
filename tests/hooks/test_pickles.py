"""Modules saved during a watch have the same bytes in their files as without a watch."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import pickletools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.support.long import long
from tests.support.recording import EVERYTHING, recorded
from tests.support.servers import free_port

ARGUMENTS: dict[str, Callable[[], nn.Module]] = {
    # Constructor arguments of classes for which the default small numbers are not valid.
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 4]),
    "Bilinear": lambda: nn.Bilinear(2, 2, 2),
    "ChannelShuffle": lambda: nn.ChannelShuffle(2),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, 2),
    "FractionalMaxPool3d": lambda: nn.FractionalMaxPool3d(2, 2),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "Sequential": lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    "ModuleList": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "ParameterList": lambda: nn.ParameterList([torch.ones(2)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.ones(2)}),
    "RNNBase": lambda: nn.RNNBase("LSTM", 2, 2),
    "GRU": lambda: nn.GRU(2, 2),
    "LSTM": lambda: nn.LSTM(2, 2),
    "RNN": lambda: nn.RNN(2, 2),
    "Threshold": lambda: nn.Threshold(0.1, 2.0),
    "Transformer": lambda: nn.Transformer(4, 2, 1, 1, 4),
    "TransformerDecoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 4), 1),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(4, 2, 4),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4), 1),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 4),
    "TripletMarginWithDistanceLoss": lambda: nn.TripletMarginWithDistanceLoss(),
    "Unflatten": lambda: nn.Unflatten(1, (2, 2)),
    "UpsamplingBilinear2d": lambda: nn.UpsamplingBilinear2d(2),
    "UpsamplingNearest2d": lambda: nn.UpsamplingNearest2d(2),
}
# Classes that are not tested: base classes, and a wrapper for models on GPUs.
NOT_CONSTRUCTED = {"Module", "Container", "DataParallel"}


def torch_modules() -> list[str]:
    names = [
        name
        for name, each in vars(nn).items()
        if inspect.isclass(each) and issubclass(each, nn.Module)
    ]
    return sorted({*names} - NOT_CONSTRUCTED)


def make_torch_module(name: str) -> nn.Module:
    if name in ARGUMENTS:
        return ARGUMENTS[name]()
    kind = getattr(nn, name)
    required = [
        each
        for each in inspect.signature(kind.__init__).parameters.values()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return kind(*[2] * (len(required) - 1))


class OwnState(nn.Module):
    """A module that defines its pickled state, which is its whole dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


class OwnReduce(OwnState):
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make, (type(self), dict(self.__dict__))


class OwnCopyReg(OwnState):
    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), {}

    def __new__(cls, **state: Any) -> OwnCopyReg:
        return super().__new__(cls)


class WithSlots(OwnState):
    __slots__ = ("inside",)

    def __init__(self) -> None:
        super().__init__()
        self.inside = 3

    def __getstate__(self) -> Any:
        return {**self.__dict__, "inside": self.inside}


class Guarded(OwnState):
    """A module that answers all attribute look-ups itself."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("linear", "training") or name.startswith("_"), name
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class SavesAttributes(OwnState):
    """A module that saves the result of a loop over its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self), dict(vars(self).items()))


class WithDictHook(OwnState):
    """A module whose state_dict() contains a part of its dictionary."""

    def get_extra_state(self) -> list[str]:
        return sorted(vars(self))

    def set_extra_state(self, state: Any) -> None:
        pass


class Recurrent(nn.Module):
    """A module like the language model of PyTorch's examples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.rnn = getattr(nn, kind)(4, 4, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0])


def _make(kind: type, state: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    made.__dict__.update(state)
    return made


def _with_hooks() -> nn.Module:
    model = OwnState()
    model.register_forward_hook(_hook)
    model.linear.register_forward_pre_hook(_hook)
    return model


def _hook(*args: Any) -> None:
    pass


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(2), nn.ReLU())
    model(torch.ones(1, 2))
    return model


def _compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    model[0].compile(backend="eager")
    return model


def _shared() -> nn.Module:
    linear = nn.Linear(2, 2)
    return nn.Sequential(linear, linear)


def _swa() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(OwnState())


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)
    )


ZOO: dict[str, Callable[[], nn.Module]] = {
    "own __getstate__": OwnState,
    "own __reduce_ex__": OwnReduce,
    "own __reduce__ over vars()": SavesAttributes,
    "own __getnewargs_ex__": OwnCopyReg,
    "__slots__": WithSlots,
    "__setattr__, __getattr__, __getattribute__": Guarded,
    "extra state": WithDictHook,
    "hooks of the user's": _with_hooks,
    "LSTM language model": lambda: Recurrent("LSTM"),
    "GRU language model": lambda: Recurrent("GRU"),
    "RNN language model": lambda: Recurrent("RNN"),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "lazy": _lazy,
    "module.compile()": _compiled_in_place,
    "shared": _shared,
    "AveragedModel": _swa,
    "convolutions": _convolutions,
    "frozen": lambda: OwnState().requires_grad_(False),
    "double": lambda: OwnState().double(),
    "in evaluation": lambda: OwnState().eval(),
    "GraphModule": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))),
}
STATES_ONLY: dict[str, Callable[[], nn.Module]] = {
    # For these models, which cannot be pickled or copied, states and attributes are compared.
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "weight_norm of old": lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    "OptimizedModule": lambda: torch.compile(OwnState(), backend="eager"),
    "ScriptModule": lambda: torch.jit.script(OwnState()),
}


def saved(model: nn.Module) -> dict[str, bytes]:
    """Save a model in all ways.

    The key of a storage in pickles is its address. Results can therefore be compared only for the
    same objects.
    """
    files = {"state": io.BytesIO(), "torch.save": io.BytesIO()}
    torch.save(model.state_dict(), files["state"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(model, files["torch.save"])
        pickles = {f"pickle {protocol}": pickle.dumps(model, protocol) for protocol in (2, 4, 5)}
    return {name: file.getvalue() for name, file in files.items()} | pickles


@pytest.fixture(scope="module")
def torch_models() -> list[nn.Module]:
    return [make_torch_module(name) for name in torch_modules()]


def test_every_torch_module_is_saved_with_the_same_bytes_during_a_watch(
    torch_models: list[nn.Module], tmp_path: Path
) -> None:
    """One object of each class in torch.nn is saved inside and outside a watch."""
    without = [saved(each) for each in torch_models]
    with recorded(tmp_path, nn.ModuleList(torch_models), **EVERYTHING):
        inside = [saved(each) for each in torch_models]

    different = [
        name for name, a, b in zip(torch_modules(), without, inside, strict=True) if a != b
    ]
    assert different == []
    assert len(torch_models) > 150


@pytest.mark.parametrize("name", ZOO)
def test_custom_model_is_saved_with_the_same_bytes_during_a_watch(
    name: str, tmp_path: Path
) -> None:
    """Some models define their own saved state, and others are created or changed by torch."""
    model = ZOO[name]()
    without = saved(model), sorted(map(str, vars(model)))
    with recorded(tmp_path, model, **EVERYTHING):
        assert (saved(model), sorted(map(str, vars(model)))) == without
        copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    assert [list(each.state_dict()) for each in copies] == [list(model.state_dict())] * 3
    assert saved(model) == without[0]


@pytest.mark.parametrize("name", STATES_ONLY)
def test_state_and_attributes_of_a_model_are_unchanged_during_a_watch(
    name: str, tmp_path: Path
) -> None:
    model = STATES_ONLY[name]()

    def seen() -> list[Any]:
        states = io.BytesIO()
        torch.save(model.state_dict(), states)
        return [states.getvalue(), [[*vars(each)] for each in model.modules()], dir(model)]

    without = seen()
    with recorded(tmp_path, model, **EVERYTHING):
        assert seen() == without


def exported(model: nn.Module) -> list[str]:
    """Return the results of torch.export, torch.jit and torch.fx for a model."""
    x = torch.ones(3, 2)
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    scripted = torch.jit.script(model)
    return [
        str(torch.export.export(model, (x,)).graph),
        torch.fx.symbolic_trace(model).code,
        re.sub(r"___torch_mangle_\d+\.", "", str(scripted.inlined_graph)),
        torch.jit.trace(model, x).code,
    ]


def test_exports_of_a_model_are_unchanged_during_a_watch(tmp_path: Path) -> None:
    model = OwnState()
    without = exported(model)
    with recorded(tmp_path, model, **EVERYTHING):
        inside = exported(model)

    assert without == inside


def test_ddp_model_is_saved_with_the_same_bytes_during_a_watch(tmp_path: Path) -> None:
    """DistributedDataParallel pickles its whole dictionary except its process group."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Recurrent("LSTM"))

        def state() -> list[Any]:
            attributes = model.__getstate__()
            return [
                sorted(attributes),
                [str(each) for each in attributes.values()],
                pickle.dumps(model.module),
            ]

        without = state()
        with recorded(tmp_path, model, **EVERYTHING):
            assert state() == without
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("method", ["spawn", *long("forkserver")])
def test_watched_module_loads_in_a_process_without_this_package(
    method: str, tmp_path: Path
) -> None:
    """A worker process receives the module without importing torchlens_perf."""
    script = tmp_path / "crosses.py"
    script.write_text(CROSSES.format(method=method, folder=str(tmp_path / "runs")))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.stdout.split() == ["True"], done.stderr


CROSSES = """
import multiprocessing
import torch
import torchlens_perf as perf
from torch import nn

def forward(model, queue):
    with torch.no_grad():
        queue.put(float(model(torch.ones(2, 1, 4))[0].sum()))

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    model = nn.LSTM(4, 4)
    with perf.watch(model, dir="{folder}", sidecar=False, report="off"):
        expected = float(model(torch.ones(2, 1, 4))[0].sum())
        queue = context.Queue()
        worker = context.Process(target=forward, args=(model, queue))
        worker.start()
        print(abs(queue.get(timeout=200) - expected) < 1e-5)
        worker.join()
"""


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_model_saved_during_a_watch_loads_with_weights_only(kind: str, tmp_path: Path) -> None:
    """PyTorch's word_language_model loads its best checkpoint with weights_only=True."""
    model = Recurrent(kind)
    with recorded(tmp_path / "run", model, **EVERYTHING):
        model(torch.zeros(2, 1, dtype=torch.long)).sum().backward()
        torch.save(model, tmp_path / "model.pt")
    with torch.serialization.safe_globals([Recurrent, getattr(nn, kind), nn.Embedding, nn.Linear]):
        loaded = torch.load(tmp_path / "model.pt")

    assert str(loaded) == str(model)
    used = {each for _, each, _ in pickletools.genops(pickle.dumps(model)) if isinstance(each, str)}
    assert not any("torchlens" in each for each in used)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()
