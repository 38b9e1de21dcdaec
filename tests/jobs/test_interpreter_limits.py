"""Tests of a watch with an almost full stack, and with a garbage collector that runs
all the time.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from tests.jobs.test_bit_equality import (
    FEW,
    _one_thread,  # noqa: F401 - a fixture
    assert_harmless,
)
from tests.support.model_zoo import CASES
from tests.support.recording import EVERYTHING, recorded
from torchlens_perf.errors import RAISE, swallowed

# Maximum depth around a user's call. The native recorder adds no Python frames around a call.
FRAMES_OF_OURS = 5


@pytest.fixture
def collecting() -> Iterator[None]:
    """Run the collector at each allocation of a container."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("name", FEW)
def test_garbage_collection_at_each_allocation_changes_no_result(
    name: str, collecting: None, tmp_path: Path
) -> None:
    """Results and recorded steps are the same, whatever the collector frees or calls during a
    recording call.
    """
    recording = assert_harmless(CASES[name], tmp_path, **EVERYTHING)
    assert len(recording.steps) == CASES[name].steps


def trained(watching: Callable[..., Any], limit: int) -> list[Any] | None:
    """Return the parameters after some steps under the recursion limit, or None if the limit is too
    low.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def step() -> None:
        with perf.section("all of it"):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    usual = sys.getrecursionlimit()
    with watching(model, optimizer):
        # The first step imports modules.
        step()
        try:
            sys.setrecursionlimit(limit)
            for _ in range(4):
                step()
        except RecursionError:
            return None
        finally:
            sys.setrecursionlimit(usual)
    return [parameter.tolist() for parameter in model.parameters()]


def test_low_recursion_limit_raises_recursion_error_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits near the lowest one for training are tested.

    A watch needs only a few more frames, and the next watch works.
    """
    monkeypatch.setenv(RAISE, "0")
    here = len(inspect.stack(0))
    limits = range(here, here + 80)
    plain = {limit: trained(lambda *given: nullcontext(), limit) for limit in limits}
    least = min(limit for limit in limits if plain[limit] is not None)
    near = range(max(here, least - 3), least + FRAMES_OF_OURS + 3)
    watched = {
        limit: trained(lambda *given: recorded(tmp_path, *given, **EVERYTHING), limit)
        for limit in near
    }
    swallowed.by_place.clear()
    lowest = [
        min(limit for limit in near if found[limit] is not None) for found in (plain, watched)
    ]

    assert plain[limits[0]] is None
    assert 0 <= lowest[1] - lowest[0] <= FRAMES_OF_OURS
    assert {str(found) for found in watched.values()} == {str(found) for found in plain.values()}
    with recorded(tmp_path, **EVERYTHING) as recording:
        trained(lambda *given: nullcontext(), 1000)
    assert len(recording.steps) > 1
    assert recording.unbalanced == 0
