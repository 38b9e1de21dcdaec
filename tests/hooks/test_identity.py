"""Objects of the program are compared by identity: their classes may define `__eq__` in any way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.recording import recorded
from torchlens_perf.hooks import module_tree
from torchlens_perf.hooks.collectives import nccl
from torchlens_perf.run.ring import Kind


def _raise(*_: object) -> Any:
    raise RuntimeError("not comparable")


def _compare_elements(*_: object) -> torch.Tensor:
    return torch.tensor([True, False])


MEMBERS: dict[str, dict[str, Callable[..., Any] | None]] = {
    "unhashable": {"__eq__": lambda a, b: a is b, "__hash__": None},
    "comparison raises": {"__eq__": _raise, "__hash__": lambda _: 1},
    "comparison returns a tensor": {"__eq__": _compare_elements, "__hash__": lambda _: 1},
    "truth raises": {"__bool__": _raise},
}


def make(base: type[Any], members: dict[str, Any]) -> type[Any]:
    return type(f"Odd{base.__name__}", (base,), members)


class Pair(nn.Module):
    def __init__(self, members: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.second = (make(nn.Linear, members)(2, 2) for _ in range(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(batch))
        return result


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_modules_are_timed_whatever_their_comparison_does(
    members: dict[str, Any],
    given: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The optimizers, the loader and the data set also belong to such classes."""
    model = make(Pair, members)(members)
    parameters = [each for _, each in module_tree.named_parameters(model)]
    optimizers = [make(torch.optim.SGD, members)(parameters[i : i + 2], lr=0.1) for i in (0, 2)]
    data = make(torch.utils.data.TensorDataset, members)(torch.ones(8, 2))
    loader = make(torch.utils.data.DataLoader, members)(data, batch_size=2)
    arguments: Any = (model, optimizers) if given else ()
    with recorded(tmp_path, *arguments, modules="all") as recording:
        for _ in range(2):
            for (batch,) in loader:
                model(batch).sum().backward()
                for each in optimizers:
                    each.step()

    assert capfd.readouterr().err == ""
    assert {"first", "second"} <= set(recording.names(Kind.MODULE))


@pytest.mark.parametrize("shared", [False, True])
def test_walk_finds_what_torch_finds(shared: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2)), nn.ModuleDict())
    model = nn.ModuleDict({"a": inner, "b": inner[1] if shared else nn.Linear(2, 2)})
    model.register_module("empty", None)

    assert list(module_tree.named_modules(model)) == list(model.named_modules())
    assert list(module_tree.named_children(model)) == list(model.named_children())
    found, expected = (
        [(name, id(each)) for name, each in named]
        for named in (module_tree.named_parameters(model), model.named_parameters())
    )
    assert found == expected


def test_captured_graph_is_known_by_identity_until_it_is_deleted() -> None:
    graph = make(Pair, MEMBERS["unhashable"])({})
    nccl._remember_graph(graph)
    key = id(graph)
    assert key in nccl._captured
    del graph
    gc.collect()
    assert key not in nccl._captured
