"""Waits for batches of Ray Data are data loading, as those for batches of a DataLoader are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.recording import recorded
from torchlens_perf.run.ring import Kind

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[data]'")
_COLLATE_S = 0.05


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    import ray.data

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield ray.data.range(6, override_num_blocks=1).materialize()
    finally:
        ray.shutdown()


def test_waits_of_iterators_are_spans_and_end_with_the_watch(tmp_path: Path) -> None:
    """These iterators have no blocks, so they need no cluster. One is older than the watch."""
    batches = pytest.importorskip("ray.data._internal.block_batching.iter_batches")
    before = batches.BatchIterator.get_next_batch_context
    older = iter(batches.BatchIterator(iter([]), batch_size=2, prefetch_batches=0))
    with recorded(tmp_path) as recording:
        assert [*older, *batches.BatchIterator(iter([]), batch_size=2, prefetch_batches=0)] == []

    assert [(each.name, each.depth) for each in recording.of(Kind.DATA)] == [("data", 1)] * 2
    assert recording.unbalanced == 0
    assert batches.BatchIterator.get_next_batch_context is before


def test_each_batch_of_ray_data_is_a_span(tmp_path: Path, rows: Any) -> None:
    """The span of the end of the data is outermost too. The second iterator is older than the watch."""
    import torch

    def collate(batch: dict[str, Any]) -> torch.Tensor:
        time.sleep(_COLLATE_S)
        return torch.as_tensor(batch["id"].copy())

    older = iter(rows.iter_torch_batches(batch_size=2))
    next(older)
    with recorded(tmp_path) as recording:
        for batch in rows.iter_torch_batches(batch_size=2, prefetch_batches=0, collate_fn=collate):
            assert len(batch) == 2
            recording.watch.step()
        assert len(list(older)) == 2
    next(iter(rows.iter_torch_batches(batch_size=2)))

    assert recording.names(Kind.DATA) == ["data"] * (4 + 3)
    assert [each.depth for each in recording.of(Kind.DATA)] == [1] * 7
    waited_ns = sum(each.duration_ns for each in recording.of(Kind.DATA)[:4])
    assert waited_ns > 0.9e9 * 3 * _COLLATE_S
    assert recording.unbalanced == 0
