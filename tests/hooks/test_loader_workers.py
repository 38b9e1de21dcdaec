"""The time that a DataLoader's workers need for a batch is measured in the workers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data._utils import fetch

from tests.support.recording import recorded, ring_of_this_process
from torchlens_perf.run.loader_period import move_hidden_data_wait, move_hidden_data_waits
from torchlens_perf.run.records import PARTS
from torchlens_perf.run.ring import RingReader

BATCH_S, BATCHES = 0.02, 60
# The time is read less often on a busy machine.
MAX_BATCHES = 20 * BATCHES


class SlowRows(Dataset[Any]):
    """Rows with the time of day. The first of four takes a while."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        began_s = time.monotonic()
        if index % 4 == 0:
            time.sleep(BATCH_S)
        return torch.tensor(began_s, dtype=torch.float64)


def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return rows, and the time since the first one began."""
    return torch.ones(4, 4), time.monotonic() - rows[0].item()


class SlowStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for index in range(8):
            yield SlowRows()[index]


def train(
    folder: Path, data: Dataset[Any], most: int = MAX_BATCHES, **settings: Any
) -> tuple[dict[str, Any], list[float]]:
    """Train until the workers' time is known, or for so many batches that it should be.

    Return the recorded metadata, and the times of batches in s by the workers' own clocks.
    """
    loader = DataLoader(data, batch_size=4, collate_fn=collate, **settings)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    times_s = list[float]()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(folder, model, optimizer) as recording:
        ring = RingReader(ring_of_this_process(recording.watch.run_dir))
        for batch, took_s in itertools.islice(epochs, most):
            times_s.append(took_s)
            model(batch).sum().backward()
            optimizer.step()
            if ring.read_metadata().get("loader_period_ns"):
                break
        ring.close()
    return recording.metadata, times_s


@pytest.mark.parametrize("workers", [1, 2])
def test_period_is_the_time_of_a_batch_divided_by_the_workers(tmp_path: Path, workers: int) -> None:
    metadata, times_s = train(tmp_path, SlowRows(), num_workers=workers)

    period_s = metadata["loader_period_ns"] / 1e9
    assert BATCH_S / workers <= period_s < 3 * max(times_s) / workers
    total_ns, cpu_ns, collate_ns = metadata["training"]["loader"]["worker_ns"]
    assert total_ns // workers == metadata["loader_period_ns"]
    # The batch sleeps in the dataset.
    assert 0 <= collate_ns < total_ns - BATCH_S * 0.9e9
    assert 0 < cpu_ns < total_ns - BATCH_S * 0.9e9


def test_workers_of_an_iterable_dataset_are_measured(tmp_path: Path) -> None:
    """The end of the data, for which a worker also calls the dataset, is no batch."""
    metadata, times_s = train(tmp_path, SlowStream(), num_workers=1, persistent_workers=True)

    assert BATCH_S <= metadata["loader_period_ns"] / 1e9 < 3 * max(times_s)


@pytest.mark.parametrize(
    "loader", [{"num_workers": 0}, {"num_workers": 1, "multiprocessing_context": "spawn"}]
)
def test_period_is_not_measured_without_forked_workers(
    tmp_path: Path, loader: dict[str, Any]
) -> None:
    assert train(tmp_path, SlowRows(), BATCHES, **loader)[0]["loader_period_ns"] == 0


def test_fetch_is_replaced_only_while_workers_start(tmp_path: Path) -> None:
    before = fetch._MapDatasetFetcher.fetch
    with recorded(tmp_path, nn.Linear(2, 2)):
        batches = iter(DataLoader(SlowRows(), num_workers=1))
        assert fetch._MapDatasetFetcher.fetch is before
        next(batches)


def test_wait_for_data_that_another_wait_hides_is_moved() -> None:
    parts_ns = np.zeros((3, len(PARTS)), dtype=np.int64)
    parts_ns[:, PARTS.index("forward")] = 30
    parts_ns[:, PARTS.index("communication")] = [0, 10, 40]
    parts_ns[:, PARTS.index("data")] = [32, 2, 0]

    moved = move_hidden_data_wait(parts_ns, 60)

    assert moved[:, PARTS.index("data")].tolist() == [32, 12, 30]
    assert moved[:, PARTS.index("communication")].tolist() == [0, 0, 10]
    assert (moved.sum(axis=1) == parts_ns.sum(axis=1)).all()
    assert (move_hidden_data_wait(parts_ns, 0) == parts_ns).all()


def test_communication_of_the_rank_that_waits_least_hides_no_wait_for_data() -> None:
    parts_ns = np.zeros((2, 1, len(PARTS)))
    parts_ns[..., PARTS.index("forward")] = 30
    parts_ns[..., PARTS.index("data")] = [[25], [0]]
    parts_ns[..., PARTS.index("communication")] = [[5], [30]]

    moved = move_hidden_data_waits(parts_ns, np.array([60, 60]))

    assert moved[..., PARTS.index("data")].tolist() == [[25], [25]]
    assert moved[..., PARTS.index("communication")].tolist() == [[5], [5]]


@pytest.mark.parametrize("is_same", [True, False])
def test_only_iterators_of_the_same_loader_are_restarts(tmp_path: Path, is_same: bool) -> None:
    """A loader that is made for each epoch starts its workers in any case."""
    rows = TensorDataset(torch.ones(16, 4))
    model, loader = nn.Linear(4, 4), DataLoader(rows, batch_size=4, num_workers=1)
    other = DataLoader(rows, batch_size=8, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for _ in range(4):
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()
            assert sum(len(batch) for (batch,) in other) == 16
            if not is_same:
                loader = DataLoader(rows, batch_size=4, num_workers=1)

    found = recording.metadata["training"]["loader"]
    assert found["restarts"] == (3 if is_same else 0)
    assert (found["restart_ns"] > 0) == is_same
