"""The workload of a step, for all kinds of batches that a DataLoader returns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset

from tests.hooks.test_tags import workload
from tests.support.recording import Recording, recorded
from torchlens_perf.hooks import batch_size
from torchlens_perf.hooks.batch_size import BatchSize

STEPS = 40


def refuse(*args: object) -> NoReturn:
    raise AssertionError("code of a batch was called")


class Refusing:
    """Base class of batches whose own code must not be called."""

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = refuse
    __hash__ = object.__hash__
    numel = shape = size = property(refuse)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes in a process that has received a batch."""
        vars(self).update(state)


class Plain(Refusing):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots(Refusing):
    __slots__ = ("name", "unset", "x")

    def __init__(self, x: Any) -> None:
        self.name, self.x = "a name", x


class LazyMapping(Refusing, Mapping):  # type: ignore[type-arg]
    """A mapping that decodes an item when it is read."""

    def __init__(self, **stored: Any) -> None:
        self._stored = stored


class RefusingDict(dict):  # type: ignore[type-arg]
    __getitem__ = __iter__ = __len__ = keys = values = items = get = refuse


class RefusingList(list):  # type: ignore[type-arg]
    __getitem__ = __iter__ = __len__ = refuse


class RefusingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        refuse()


class IncomparableKey(str):
    """A key with the hash of another key, which cannot be compared with it."""

    __eq__ = refuse

    def __hash__(self) -> int:
        return hash("input_ids")


@dataclasses.dataclass
class Sample:
    name: str
    x: Any


@dataclasses.dataclass(slots=True)
class SlotsSample:
    x: Any


Pair = namedtuple("Pair", "x, y")


def make_tensor(length: int = 16) -> torch.Tensor:
    return torch.ones(8, length)


def make_ids() -> torch.Tensor:
    return torch.ones(8, 16, dtype=torch.int64)


def make_graph() -> Plain:
    """Return an object with the attributes of a graph of PyTorch Geometric."""
    store = Plain(_mapping={"x": make_tensor(), "edge_index": make_ids()}, _parent=None)
    return Plain(_store=store, _num_graphs=2, _slice_dict={"x": torch.ones(3)})


def make_nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


Y = torch.ones(2)
KINDS: dict[str, tuple[Callable[[], Any], BatchSize | None]] = {
    name: (make, None if size is None else BatchSize(*size))
    for name, make, size in [
        ("tensor", make_tensor, (128, 8, False)),
        ("list", lambda: [make_tensor(), Y], (128, 8, False)),
        ("tuple", lambda: (make_ids(), [Y]), (128, 8, True)),
        ("dict", lambda: {"x": Y, "input_ids": make_ids()}, (128, 8, True)),
        ("dict of dicts", lambda: {"a": {"x": make_tensor()}}, (128, 8, False)),
        ("list of dicts", lambda: [{"x": make_tensor()}] * 3, (128, 8, False)),
        ("deep list", lambda: [[[[[[make_tensor()]]]]]], (128, 8, False)),
        ("deeper list", lambda: [[[[[[[make_tensor()]]]]]]], None),
        ("named tuple", lambda: Pair(make_tensor(), Y), (128, 8, False)),
        ("packed", lambda: pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), (8, 4, False)),
        ("dataclass", lambda: Sample("a", {"x": make_tensor()}), (128, 8, False)),
        ("dataclass with slots", lambda: SlotsSample(make_tensor()), (128, 8, False)),
        ("UserDict", lambda: UserDict(labels=Y, input_ids=make_ids()), (128, 8, True)),
        ("OrderedDict", lambda: OrderedDict(x=make_tensor()), (128, 8, False)),
        ("lazy mapping", lambda: LazyMapping(x=make_tensor()), (128, 8, False)),
        ("dict with own code", lambda: RefusingDict(input_ids=make_ids()), (128, 8, True)),
        ("list with own code", lambda: RefusingList([make_tensor()]), (128, 8, False)),
        (
            "key that cannot be compared",
            lambda: {IncomparableKey(): make_tensor()},
            (128, 8, False),
        ),
        ("object", lambda: Plain(options=Plain(scale=Y), x=make_tensor()), (128, 8, False)),
        ("object with slots", lambda: Slots(make_tensor()), (128, 8, False)),
        ("namespace", lambda: SimpleNamespace(x=make_tensor()), (128, 8, False)),
        ("graph", make_graph, (128, 8, False)),
        ("list of graphs", lambda: [make_graph(), make_graph()], (128, 8, False)),
        ("text first", lambda: (["a", "b"] * 100, 7, None, make_tensor()), (128, 8, False)),
        ("empty list first", lambda: ([], {}, make_tensor()), (128, 8, False)),
        ("number as input_ids", lambda: {"input_ids": 3, "x": make_tensor()}, (128, 8, False)),
        ("array", lambda: np.ones((8, 16)), (128, 8, False)),
        ("array of tokens", lambda: {"input_ids": np.ones((8, 16), int)}, (128, 8, True)),
        ("array without dimensions", lambda: np.array(3.0), (1, 0, False)),
        ("scalar", lambda: torch.tensor(3), (1, 0, False)),
        ("no elements", lambda: torch.ones(0, 4), (0, 0, False)),
        ("nested", lambda: make_nested(torch.strided), (18, 2, False)),
        ("jagged", lambda: make_nested(torch.jagged), (18, 2, False)),
        ("sparse", lambda: torch.eye(4).to_sparse(), (16, 4, False)),
        ("compressed", lambda: torch.eye(4).to_sparse_csr(), (16, 4, False)),
        ("tensor subclass", lambda: make_tensor().as_subclass(RefusingTensor), (128, 8, False)),
        ("parameter", lambda: nn.Parameter(make_tensor()), (128, 8, False)),
        ("deque", lambda: deque([make_tensor()]), (128, 8, False)),
        ("module and tensor", lambda: [nn.Linear(2, 2), torch, make_tensor()], (128, 8, False)),
        ("generator", lambda: (make_tensor() for _ in range(2)), None),
        ("iterator", lambda: map(refuse, [make_tensor()]), None),
        ("endless", lambda: itertools.repeat(make_tensor()), None),
        ("partial", lambda: functools.partial(refuse, make_tensor()), None),
        ("text", lambda: "abc", None),
        ("None", lambda: None, None),
        ("number", lambda: 3, None),
        ("class", lambda: Sample, None),
        ("empty list", list, None),
        ("empty dict", dict, None),
    ]
}


class Endless(IterableDataset):  # type: ignore[type-arg]
    """All kinds of batches, each for STEPS steps."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds

    def __iter__(self) -> Iterator[Any]:
        for name in self.kinds:
            for _ in range(STEPS):
                yield KINDS[name][0]()


def train(tmp_path: Path, kinds: list[str], **loader: Any) -> Recording:
    """Train with every kind of batch. The batches themselves are not used."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(Endless(kinds), batch_size=None, collate_fn=lambda batch: batch, **loader)
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in data:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return recording


def expected(kinds: list[str]) -> list[int]:
    sizes = [KINDS[name][1] for name in kinds for _ in range(STEPS)]
    return [-1 if size is None else size.elements for size in sizes]


@pytest.mark.parametrize("name", KINDS)
def test_size_of_a_batch_is_that_of_its_first_tensor(name: str) -> None:
    make, size = KINDS[name]

    assert BatchSize.of_batch(make()) == size


def test_every_step_has_a_workload_whatever_the_batches_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python sees the sampled steps and native code the others."""
    kinds = list(KINDS)
    recording = train(tmp_path, kinds)

    assert [workload(step) for step in recording.steps] == expected(kinds)
    assert caplog.records == []


def test_batches_of_worker_processes_have_a_workload_in_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Batches are pickled between the processes."""
    kinds = ["named tuple", "dataclass", "UserDict", "graph", "array", "text first", "packed"]
    torch.set_num_threads(1)
    recording = train(tmp_path, kinds, num_workers=1, multiprocessing_context="fork")

    assert [workload(step) for step in recording.steps] == expected(kinds)
    assert caplog.records == []


def test_generator_in_a_batch_is_not_consumed(tmp_path: Path) -> None:
    rows = iter([1, 2, 3])
    with recorded(tmp_path) as recording:
        (batch,) = DataLoader([{"rows": rows, "x": [rows]}], None, collate_fn=lambda batch: batch)
        recording.watch.step()

    assert list(batch["rows"]) == [1, 2, 3]


def test_search_of_a_large_batch_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    monkeypatch.setattr(batch_size, "_is_array", searched.append)
    rows = [[object()] * 1000] * 1000

    assert BatchSize.of_batch(rows) is None
    assert len(searched) < 200


def test_modes_of_the_user_do_not_see_the_size_of_a_batch(tmp_path: Path) -> None:
    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    called: list[Any] = []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with recorded(tmp_path, model, optimizer) as recording:
        batches = iter(DataLoader([torch.ones(2, 4)] * STEPS, None, collate_fn=lambda batch: batch))
        for _ in range(STEPS):
            with Calls():
                batch = next(batches)
            model(batch).sum().backward()
            optimizer.step()

    assert [workload(step) for step in recording.steps] == [8] * STEPS
    assert [each for each in called if "numel" in str(each)] == []
