"""Times of the DataLoader: batches, start of workers, and workers, which record nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchlens_perf as perf
from tests.support.recording import EVERYTHING, recorded
from torchlens_perf import watching
from torchlens_perf.run.ring import Flag, Kind

BATCHES, WORKERS = "data", "data workers start"


def data_names(recording: Any) -> list[str]:
    return recording.names(Kind.DATA)


def test_each_batch_of_a_dataloader_is_a_span(tmp_path: Path) -> None:
    """The spans of the end of the epoch and of the iterator's creation are outermost spans too."""
    loader = DataLoader(TensorDataset(torch.randn(6, 4)), 2)
    with recorded(tmp_path) as recording:
        for _ in range(2):
            batches = list(loader)
            recording.watch.step()

    assert len(batches) == 3
    assert data_names(recording) == [WORKERS, *[BATCHES] * 4] * 2
    assert {(each.depth, each.flags) for each in recording.of(Kind.DATA)} == {(1, Flag(0))}
    assert [each.step for each in recording.of(Kind.DATA)] == [0] * 5 + [1] * 5


@pytest.mark.parametrize("persistent", [False, True])
def test_start_of_dataloader_workers_is_a_span(persistent: bool, tmp_path: Path) -> None:
    """A persistent worker starts once."""
    loader = DataLoader(
        TensorDataset(torch.arange(8)), 2, num_workers=2, persistent_workers=persistent
    )
    with recorded(tmp_path) as recording:
        epochs = [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2)]

    assert epochs == [list(range(8))] * 2
    assert data_names(recording) == [WORKERS, *[BATCHES] * 5] * 2
    first, second = recording.of(Kind.DATA, WORKERS)
    assert first.flags == second.flags == Flag(0)


def test_dataloader_iterator_created_before_the_watch_is_timed(tmp_path: Path) -> None:
    iterator = iter(DataLoader(TensorDataset(torch.randn(6, 4)), 2))
    next(iterator)
    with recorded(tmp_path) as recording:
        next(iterator)
    next(iterator)

    assert data_names(recording) == [BATCHES]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        with perf.section("reading"):
            yield from range(3)


def test_sections_in_an_iterable_dataset_are_inside_the_data_span(tmp_path: Path) -> None:
    """The dataset's code runs while the loop waits for a batch."""
    with recorded(tmp_path) as recording:
        assert [int(batch) for batch in DataLoader(Stream(), None)] == [0, 1, 2]

    assert data_names(recording) == [WORKERS, *[BATCHES] * 4]


class Broken(Dataset):
    error = KeyError("no such sample")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if index == 1:
            raise self.error
        return torch.tensor(index)


def test_exception_of_the_dataset_is_passed_on_and_flagged(tmp_path: Path) -> None:
    """The StopIteration at the end of an epoch is not flagged as an exception."""
    data = Broken()
    iterator = iter(DataLoader(data, None))
    with recorded(tmp_path) as recording:
        next(iterator)
        with pytest.raises(KeyError) as caught:
            next(iterator)
        next(iterator)
        assert list(iterator) == []

    assert caught.value is data.error
    assert [each.flags for each in recording.of(Kind.DATA)] == [
        Flag(0),
        Flag.EXCEPTION,
        Flag(0),
        Flag(0),
    ]


class Busy(Dataset):
    """A dataset that does in a worker everything that is recorded in a training process."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int, bool]:
        optimizer = torch.optim.RMSprop(self.model.parameters())
        with perf.section(f"in a worker {index}"):
            self.model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        inner = DataLoader(TensorDataset(torch.randn(2, 4)))
        for _ in inner:
            pass
        return torch.tensor(index), os.getpid(), watching._running is None


def test_forked_dataloader_workers_record_nothing(tmp_path: Path) -> None:
    """Workers inherit all hooks and the ring's memory, but add no record or name to the ring."""
    data = Busy()
    torch.set_num_threads(1)  # Threads do not exist in a forked child.
    with recorded(tmp_path, data.model, **EVERYTHING) as recording:
        loader = DataLoader(data, 2, num_workers=2, multiprocessing_context="fork")
        rows = list(loader)
        recording.watch.step()

    assert sorted(index for batch, _, _ in rows for index in batch.tolist()) == list(range(8))
    assert os.getpid() not in {pid for _, pids, _ in rows for pid in pids.tolist()}
    assert all(alone.all() for _, _, alone in rows)
    kinds = {each.kind for each in recording.records} - {Kind.OPERATORS}
    assert kinds == {Kind.DATA, Kind.STEP}
    assert data_names(recording) == [WORKERS, *[BATCHES] * 5]
    assert recording.known_names.isdisjoint(
        {f"in a worker {index}" for index in range(8)} | {"optimizer RMSprop"}
    )
    assert (recording.unbalanced, recording.internal_errors) == (0, 0)


def test_forked_child_writes_nothing_into_the_parents_ring(tmp_path: Path) -> None:
    """Names, notes and steps stay unchanged, whichever inherited hook the child calls."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        session = recording.watch._session
        child = os.fork()
        if child == 0:
            try:
                assert session.intern("a name of the child") == 0
                session.note("a note of the child")
                recording.watch._loop.on_optimizer_step(optimizer)
                session.step.end_by_user()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        recording.watch.step()

    assert "a name of the child" not in recording.known_names
    assert "a note of the child" not in recording.notes
    assert len(recording.steps) == 1


def test_patched_dataloader_methods_are_restored_after_the_watch(tmp_path: Path) -> None:
    before = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    with recorded(tmp_path):
        assert DataLoader.__iter__ is not before[0]
        assert _BaseDataLoaderIter.__next__ is not before[1]

    assert (DataLoader.__iter__, _BaseDataLoaderIter.__next__) == before
