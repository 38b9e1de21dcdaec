"""Step flags for garbage collections, checkpoints and compilation, and the workload of steps."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.support.recording import Record, Recording, recorded
from torchlens_perf.errors import ConfigError
from torchlens_perf.run import ring
from torchlens_perf.run.ring import MICRO_STEPS_MASK, WORKLOAD_SHIFT, Flag, Kind

GC, SAVE = "python gc", "torch.save"


@pytest.fixture(autouse=True)
def _no_automatic_collection():
    """Switch off automatic garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def flags(recording: Recording, flag: Flag) -> list[bool]:
    """Return for each step whether it has a flag."""
    return [bool(step.flags & flag) for step in recording.steps]


def workload(step: Record) -> int:
    """Return the recorded workload, or -1 if it is unknown."""
    return (step.value1 >> WORKLOAD_SHIFT) - 1


# -- garbage collection


def test_full_garbage_collection_is_a_section_and_flags_its_step(tmp_path: Path) -> None:
    """Collections of younger generations take microseconds. They are not recorded."""
    with recorded(tmp_path) as recording:
        for generation in (0, 1, 2, 0):
            gc.collect(generation)
            recording.watch.step()

    assert flags(recording, Flag.COLLECTED) == [False, False, True, False]
    (section,) = recording.of(Kind.SECTION, GC)
    assert (section.step, section.depth, section.flags) == (2, 1, Flag(0))
    assert 0 < section.duration_ns < recording.steps[2].duration_ns


def test_time_of_all_garbage_collections_is_summed_in_the_ring(tmp_path: Path) -> None:
    """All generations are counted until the watch ends."""
    totals_ns = []
    with recorded(tmp_path) as recording:
        session = recording.watch._session
        assert session is not None
        for generation in (0, 1, 2):
            began_ns = time.perf_counter_ns()
            gc.collect(generation)
            took_ns = time.perf_counter_ns() - began_ns
            totals_ns.append(session.ring._words[ring.GC_NS])
            assert 0 < totals_ns[-1] - (totals_ns[-2] if generation else 0) <= took_ns
    callbacks = len(gc.callbacks)
    gc.collect()

    # The callback must be removed, because the ring file is unmapped.
    assert len(gc.callbacks) == callbacks


def test_garbage_collection_counts_as_nested_time_of_the_interrupted_phase(tmp_path: Path) -> None:
    """The span around the collection has the collection's time as nested time."""
    with recorded(tmp_path) as recording:
        with perf.section("interrupted"):
            gc.collect()
        recording.watch.step()
    collection, around = recording.of(Kind.SECTION)

    assert (collection.name, around.name) == (GC, "interrupted")
    assert collection.depth == around.depth + 1
    assert around.nested_ns == collection.duration_ns


def test_garbage_collection_on_another_thread_flags_the_step(tmp_path: Path) -> None:
    """The collection stops the training thread too, but does not count as nested time of its step."""
    with recorded(tmp_path) as recording:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        recording.watch.step()

    assert [each.flags for each in recording.of(Kind.SECTION, GC)] == [Flag.OTHER_THREAD]
    assert recording.steps[0].nested_ns < recording.of(Kind.SECTION, GC)[0].duration_ns
    assert flags(recording, Flag.COLLECTED) == [True]


# -- checkpoints


def test_torch_save_is_a_section_and_flags_its_step(tmp_path: Path) -> None:
    """torch.save works with positional and named arguments, and its file can be loaded."""
    state = nn.Linear(4, 4).state_dict()
    with recorded(tmp_path) as recording:
        recording.watch.step()
        with perf.section("checkpoint"):
            assert torch.save(state, tmp_path / "plain") is None
            torch.save(obj=state, f=tmp_path / "named", _use_new_zipfile_serialization=True)
        recording.watch.step()
        recording.watch.step()

    assert flags(recording, Flag.CHECKPOINT) == [False, True, False]
    assert [(each.step, each.depth, each.flags) for each in recording.of(Kind.SECTION, SAVE)] == [
        (1, 2, Flag(0))
    ] * 2
    for name in ("plain", "named"):
        loaded = torch.load(tmp_path / name)
        assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_error_of_torch_save_is_passed_on_and_the_step_is_flagged(tmp_path: Path) -> None:
    """The error is that of an unwatched run. A flagged step is not compared with other steps."""

    class Unwritable:
        error = OSError(28, "No space left on device")

        def write(self, data: bytes) -> int:
            raise self.error

        def flush(self) -> None: ...

    with recorded(tmp_path) as recording:
        with pytest.raises(RuntimeError, match=r"Parent directory .* does not exist"):
            torch.save({}, tmp_path / "missing" / "file")
        with pytest.raises(OSError, match="No space left") as caught:
            torch.save(torch.ones(3), Unwritable(), _use_new_zipfile_serialization=False)
        recording.watch.step()

    assert caught.value is Unwritable.error
    assert [each.flags for each in recording.of(Kind.SECTION, SAVE)] == [Flag.EXCEPTION] * 2
    assert flags(recording, Flag.CHECKPOINT) == [True]
    assert recording.unbalanced == 0


# -- compilation


def test_step_that_compiles_is_flagged(tmp_path: Path) -> None:
    """The first call and a new shape of tensor compile.

    Calls of compiled code do not compile again.
    """
    torch._dynamo.reset()

    @torch.compile(backend="eager", dynamic=False)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    with recorded(tmp_path) as recording:
        recording.watch.step()
        for x in (torch.ones(3), torch.ones(3), torch.ones(5), torch.ones(3), torch.ones(5)):
            function(x)
            recording.watch.step()

    assert flags(recording, Flag.COMPILED) == [False, True, False, True, False, False]


def test_compilation_before_the_watch_flags_no_step(tmp_path: Path) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + 1

    function(torch.ones(3))
    with recorded(tmp_path) as recording:
        function(torch.ones(3))
        recording.watch.step()

    assert flags(recording, Flag.COMPILED) == [False]


# -- attaching


def test_garbage_collector_callbacks_and_torch_save_are_restored(tmp_path: Path) -> None:
    before = list(gc.callbacks), torch.save
    with recorded(tmp_path) as recording:
        assert len(gc.callbacks) == len(before[0]) + 1
        assert torch.save is not before[1]
        assert torch.save.__wrapped__ is before[1]
    gc.collect()
    torch.save({}, tmp_path / "after")

    assert (list(gc.callbacks), torch.save) == before
    assert recording.of(Kind.SECTION) == []


# -- workload


@pytest.mark.parametrize("tokens", [-1, 1 << 40, True, 1.0, "3", [3]])
def test_invalid_token_count_raises_with_its_value(tokens: Any, tmp_path: Path) -> None:
    """An invalid count does not end the step."""
    with recorded(tmp_path) as recording:
        with pytest.raises(ConfigError, match=r"^tokens=.*whole number"):
            recording.watch.step(tokens=tokens)

    assert recording.steps == []


def test_token_count_from_the_user_replaces_the_number_of_batch_elements(tmp_path: Path) -> None:
    """The user's number, also 0, counts for that step only."""
    loader = iter(DataLoader(TensorDataset(torch.ones(9, 7)), 3))
    with recorded(tmp_path) as recording:
        for tokens in (5, 0, (1 << 40) - 1, None):
            recording.watch.step(tokens=tokens)
        next(loader)
        recording.watch.step()
        next(loader)
        recording.watch.step(tokens=12)
        with perf.watch() as joined:
            joined.step(tokens=13)

    assert [workload(step) for step in recording.steps] == [5, 0, (1 << 40) - 1, -1, 21, 12, 13]
    assert {step.value1 & MICRO_STEPS_MASK for step in recording.steps} == {1}


def test_workload_of_a_step_is_the_sum_over_its_batches(tmp_path: Path) -> None:
    """With gradient accumulation, a step has several batches."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model, optimizer) as recording:
        for number, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(10, 4)), 2)):
            model(x).sum().backward()
            if number in (2, 4):
                optimizer.step()

    assert [workload(step) for step in recording.steps] == [3 * 8, 2 * 8]
    assert [step.value1 & MICRO_STEPS_MASK for step in recording.steps] == [3, 2]


X, Y = torch.ones(3, 5), torch.ones(2)


def test_batch_without_elements_has_an_unknown_workload(tmp_path: Path) -> None:
    """An unknown workload is not recorded as zero, and the batch is not changed."""

    class Graph:
        numel = "not a method"

    graph = Graph()
    with recorded(tmp_path) as recording:
        (batch,) = DataLoader([graph], None)
        recording.watch.step()

    assert batch is graph
    assert [workload(step) for step in recording.steps] == [-1]
