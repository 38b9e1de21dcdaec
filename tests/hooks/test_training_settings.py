"""Settings of the training process that actions depend on are read once, and are small."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.recording import Recording, recorded
from torchlens_perf.hooks.training_settings import find_ddp
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.training_settings import TrainingSettings


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def settings_of(recording: Recording) -> TrainingSettings:
    known = recording.metadata["training"]
    assert len(json.dumps(known)) < 1024
    return msgspec.convert(known, TrainingSettings)


def train(
    folder: Path, model: nn.Module, watched: Any = None, *, to_none: bool = True, **loader: Any
) -> TrainingSettings:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batches = DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=8, **loader)
    with recorded(folder, watched or model, optimizer) as recording:
        for (batch,) in batches:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    return settings_of(recording)


@pytest.mark.parametrize("to_none", [True, False])
def test_loader_optimizer_and_gradients_are_read(tmp_path: Path, to_none: bool) -> None:
    found = train(tmp_path, nn.Linear(4, 4), to_none=to_none, num_workers=1)

    assert found.loader is not None
    assert (found.loader.workers, found.loader.persistent_workers) == (1, False)
    assert not found.loader.is_iterable
    assert found.optimizer is not None
    assert (found.optimizer.kind, found.optimizer.tensors) == ("AdamW", 2)
    assert found.optimizer.foreach is False
    assert found.optimizer.can_fuse
    assert found.zeroes_gradients is not to_none
    assert found.compiled is False
    assert (found.ddp, found.cuda_graphs) == (None, None)


@pytest.mark.parametrize(
    ("settings", "graphs"),
    [
        ({}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "eager"}, None),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_cuda_graphs_of_compiled_modules_are_read(
    tmp_path: Path, settings: dict[str, Any], graphs: bool | None, in_place: bool
) -> None:
    """The compiled module is not called, because only its settings count."""
    inner = nn.Linear(4, 4)
    if in_place:
        inner.compile(**settings)
    compiled = inner if in_place else torch.compile(inner, **settings)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].never_called = compiled
    found = train(tmp_path, model)

    assert found.compiled is True
    assert found.cuda_graphs is graphs


class Odd(torch.optim.Optimizer):
    """An optimizer of another package, whose settings have the names of torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"foreach": object(), "fused": "no"})

    def step(self, closure: Any = None) -> None:
        """Leave the parameters as they are."""


def test_settings_of_other_types_are_left_out(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = Odd(model.parameters())
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    found = RankFacts.from_metadata(recording.metadata).training

    assert found.optimizer is not None
    assert (found.optimizer.kind, found.optimizer.foreach, found.optimizer.fused) == (
        f"{__name__}.Odd", None, None,
    )  # fmt: skip


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(32, 4))


def test_dataset_without_an_index_is_read_as_such(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    imaginary = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.AdamW([*model.parameters(), imaginary])
    with recorded(tmp_path, model, optimizer) as recording:
        for batch in DataLoader(Numbers(), batch_size=8):
            model(batch).sum().backward()
            optimizer.step()
    found = settings_of(recording)

    assert found.loader is not None
    assert found.loader.is_iterable
    assert found.optimizer is not None
    assert not found.optimizer.can_fuse


def test_several_ddp_models_have_no_settings_in_common(one_rank: None) -> None:
    models = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    assert find_ddp([models[0], models[0].module, models[0]]) is models[0]
    assert find_ddp([*models, models[1].module]) is None


def test_iterator_and_gradients_are_not_kept_alive(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer):
        for (batch,) in DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=8):
            model(batch).sum().backward()
            optimizer.step()
        assert model.weight.grad is not None
        gradient = weakref.ref(model.weight.grad)
        optimizer.zero_grad()
        gc.collect()
        assert gradient() is None


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(batch)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("inside", [True, False], ids=["model in DDP is watched", "DDP is watched"])
def test_arguments_of_ddp_are_read(tmp_path: Path, inside: bool) -> None:
    model = Unused()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=7)
    found = train(tmp_path, wrapped, watched=model if inside else None).ddp

    assert found is not None
    assert (found.bucket_bytes, found.gradient_bytes, found.unused) == (7 << 20, 80, 2)
    assert found.find_unused_parameters
    assert not found.static_graph
