"""The choice of the training thread, and reads of gradients on other threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from tests.support.collective_rig import on_thread
from tests.support.recording import EVERYTHING, Recording, recorded, records_of
from torchlens_perf.analysis.statistics.rank import RankStatistics
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.run.ring import MICRO_STEPS_MASK, Flag, Kind

PHASES = [Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER]
STEPS = 5


class Trainer:
    """A model and its optimizer that train one step at a time."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.step()

    def infer(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, 4))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def kinds(recording: Recording, *, elsewhere: bool = False) -> Counter[Kind]:
    """Return the number of spans of each kind on the recorded thread, or on other threads."""
    return Counter(
        each.kind for each in recording.records if bool(each.flags & Flag.OTHER_THREAD) == elsewhere
    )


def notes(recording: Recording) -> str:
    return "; ".join(recording.metadata["notes"])


def test_steps_on_another_thread_than_the_watchs_are_recorded(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """Only the first forward pass is missing, because it precedes the first sign of training."""
    trainer = Trainer()
    with recorded(tmp_path, trainer.model, trainer.optimizer) as recording:
        pool.submit(trainer.steps).result()

    found = kinds(recording)
    assert (found[Kind.STEP], found[Kind.BACKWARD], found[Kind.OPTIMIZER]) == (STEPS, STEPS, STEPS)
    assert found[Kind.FORWARD] == STEPS - 1
    assert "on another thread than the one that entered watch()" in notes(recording)
    assert recording.metadata["thread_id"] == 0


def test_thread_of_the_watch_is_published_if_it_trains(tmp_path: Path) -> None:
    trainer = Trainer()
    with recorded(tmp_path, trainer.model, trainer.optimizer) as recording:
        trainer.steps()

    assert recording.metadata["thread_id"] == threading.get_native_id()


@pytest.mark.parametrize("by_hand", [False, True])
def test_steps_of_a_coroutine_are_recorded(tmp_path: Path, by_hand: bool) -> None:
    """asyncio.to_thread() runs the training code, and the event loop's thread may mark the end of a
    step.
    """
    trainer = Trainer()

    async def main(watch: perf.Watch) -> None:
        for _ in range(STEPS):
            await asyncio.to_thread(trainer.step)
            if by_hand:
                watch.step()

    with recorded(tmp_path, trainer.model, trainer.optimizer) as recording:
        assert recording.watch is not None
        asyncio.run(main(recording.watch))

    found = kinds(recording)
    assert found[Kind.STEP] == STEPS
    assert [found[kind] for kind in PHASES[1:]] == [STEPS, STEPS]
    # On each thread of the pool, the first forward pass comes before the thread is known to train.
    assert found[Kind.FORWARD] + kinds(recording, elsewhere=True)[Kind.FORWARD] == STEPS


def test_steps_on_alternating_threads_of_a_pool_are_recorded(tmp_path: Path) -> None:
    """Each step runs on another thread, while the others wait for work."""
    trainer, together = Trainer(), threading.Barrier(3)
    with (
        ThreadPoolExecutor(3) as executor,
        recorded(tmp_path, trainer.model, trainer.optimizer) as recording,
    ):
        list(executor.map(lambda _: together.wait(60), range(3)))
        for _ in range(3 * STEPS):
            executor.submit(trainer.step).result()
            time.sleep(0.001)

    assert kinds(recording)[Kind.STEP] == 3 * STEPS
    assert kinds(recording, elsewhere=True)[Kind.BACKWARD] == 0


def test_inference_on_another_thread_is_recorded(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    trainer = Trainer()
    with recorded(tmp_path, trainer.model) as recording:
        for _ in range(STEPS):
            pool.submit(trainer.infer).result()

    assert kinds(recording)[Kind.STEP] == STEPS
    assert kinds(recording)[Kind.FORWARD] == STEPS - 1


def test_thread_that_trains_is_recorded_although_another_ran_the_model_first(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """An actor's thread runs the model, and the learner's thread trains it later."""
    trainer = Trainer()
    with recorded(tmp_path, trainer.model, trainer.optimizer) as recording:
        pool.submit(trainer.infer).result()
        for _ in range(STEPS):
            trainer.step()
            pool.submit(trainer.infer).result()

    here, there = kinds(recording), kinds(recording, elsewhere=True)
    assert (here[Kind.BACKWARD], here[Kind.OPTIMIZER]) == (STEPS, STEPS)
    assert there[Kind.FORWARD] >= STEPS
    assert there[Kind.BACKWARD] == 0


def test_second_training_thread_ends_no_step_and_is_noted(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """Passes of the second thread are recorded as those of another thread."""
    first, second = Trainer(), Trainer()
    with recorded(
        tmp_path, [first.model, second.model], [first.optimizer, second.optimizer]
    ) as recording:
        for _ in range(STEPS):
            first.step()
            pool.submit(second.step).result()
            assert recording.watch is not None
            pool.submit(recording.watch.step).result()

    here, there = kinds(recording), kinds(recording, elsewhere=True)
    # The second thread's optimizer was passed last, so the first step does not end before that
    # optimizer has stepped.
    assert [here[kind] for kind in (Kind.STEP, *PHASES)] == [STEPS - 1, STEPS, STEPS, STEPS]
    assert (there[Kind.FORWARD], there[Kind.BACKWARD], there[Kind.STEP]) == (STEPS, STEPS, 0)
    assert "their steps are not counted" in notes(recording)
    assert recording.unbalanced == recording.internal_errors == 0


def test_next_training_thread_is_recorded_after_the_first_has_ended(tmp_path: Path) -> None:
    """Cross-validation may use one thread after the other, one for each fold."""
    ended = threading.Event()
    with recorded(tmp_path) as recording:
        trainer = Trainer()
        on_thread(trainer.steps)
        # This thread prevents the next one from getting the id of the ended one.
        keeps_its_id = threading.Thread(target=ended.wait)
        keeps_its_id.start()
        on_thread(trainer.steps)
        ended.set()
        keeps_its_id.join()

    assert kinds(recording)[Kind.STEP] == 2 * STEPS


def test_work_of_other_threads_is_counted_separately_in_a_section(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """The watch's thread waits inside a section, so it remains the recorded thread."""
    trainer = Trainer()
    with recorded(tmp_path, trainer.model, trainer.optimizer) as recording:
        for _ in range(20):
            with perf.section("request"):
                pool.submit(trainer.step).result()
            assert recording.watch is not None
            recording.watch.step()
    records = records_of(recording)
    table, statistics = assemble_steps(records), RankStatistics()
    statistics.add_records(records, table, recording.interned, 0)

    assert kinds(recording)[Kind.STEP] == 20
    assert set(statistics.other_threads_ns) == {"forward", "backward"}
    assert 0 < sum(statistics.other_threads_ns.values()) <= table.duration_ns.sum()
    assert "their steps are not counted" in notes(recording)


class Counted(nn.Parameter):
    """A parameter that counts reads of its gradient."""

    reads = 0

    @property
    def grad(self) -> Any:
        type(self).reads += 1
        return super().grad

    @grad.setter
    def grad(self, value: Any) -> None:
        nn.Parameter.grad.__set__(self, value)  # type: ignore[attr-defined]


def compute_backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def compute_grad(model: nn.Module) -> None:
    torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))


def compute_inputs(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward(inputs=list(model.parameters()))


@pytest.mark.parametrize("elsewhere", [None, compute_backward, compute_grad, compute_inputs])
def test_no_gradient_is_read_while_another_thread_computes_gradients(
    tmp_path: Path, pool: ThreadPoolExecutor, elsewhere: Callable[[nn.Module], None] | None
) -> None:
    """While only the training thread computes, its gradients are read to count accumulations."""
    trainer = Trainer()
    trainer.model.weight = Counted(trainer.model.weight.detach())
    trainer.optimizer = torch.optim.SGD([trainer.model.weight], lr=0.1)
    with recorded(tmp_path, trainer.model, trainer.optimizer):
        trainer.steps(2)
        if elsewhere is not None:
            pool.submit(elsewhere, nn.Linear(4, 4)).result()
        Counted.reads = 0
        compute_backward(trainer.model)
        reads = Counted.reads

    assert (reads > 0) == (elsewhere is None)


def step_without_gradients(trainer: Trainer) -> None:
    trainer.optimizer.step()


@pytest.mark.parametrize("step", [Trainer.step, step_without_gradients])
def test_step_of_another_thread_reads_no_gradient_that_native_steps_left_unread(
    tmp_path: Path, pool: ThreadPoolExecutor, step: Callable[[Trainer], None]
) -> None:
    """The training thread may be in a backward pass, which writes its gradients."""
    trainer, other = Trainer(), Trainer()
    trainer.model.weight = Counted(trainer.model.weight.detach())
    trainer.optimizer = torch.optim.SGD([trainer.model.weight], lr=0.1)
    with recorded(tmp_path, trainer.model, trainer.optimizer) as recording:
        trainer.steps(2 * STEPS)
        settled = recording.watch._session.recorder.settled
        compute_backward(trainer.model)
        Counted.reads = 0
        pool.submit(step, other).result()
        reads = Counted.reads
        trainer.steps()

    assert (settled, reads) == (1, 0)
    values = [each.value1 for each in recording.records if each.kind == Kind.STEP]
    assert {value & MICRO_STEPS_MASK for value in values[-STEPS + 1 :]} == {1}


def test_no_gradient_is_read_during_a_backward_pass_that_started_before_the_watch(
    tmp_path: Path,
) -> None:
    """The pass runs on another thread while the hooks are attached, so no hook has seen its
    start.
    """
    inside, finish = threading.Event(), threading.Event()
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def hold(_: Any) -> None:
        inside.set()
        finish.wait(60)

    y.register_hook(hold)
    thread = threading.Thread(target=y.backward)
    thread.start()
    inside.wait(60)
    with perf.watch(dir=str(tmp_path), sidecar=False, report="off") as watch:
        assert watch._session is not None
        reads = watch._session.thread.reads_gradients
        finish.set()
        thread.join()
    with perf.watch(dir=str(tmp_path), sidecar=False, report="off") as watch:
        assert watch._session is not None
        assert (reads, watch._session.thread.reads_gradients) == (False, True)


def test_models_are_not_found_by_gradients_while_another_thread_computes(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has no optimizer, so its models are found by their gradients.

    Optimizers of other tests may still exist, for example in the traceback of a failed one.
    """
    monkeypatch.setattr("torchlens_perf.hooks.loop.training_loop.has_optimizer_class", bool)
    model = nn.Linear(4, 4)
    with recorded(tmp_path) as recording:
        compute_backward(model)
        pool.submit(compute_backward, nn.Linear(4, 4)).result()
        compute_backward(model)
        compute_backward(model)

    assert "pass them to watch(model)" in notes(recording)
    assert not kinds(recording)[Kind.FORWARD]


def test_modules_of_two_threads_have_separate_backward_times(tmp_path: Path) -> None:
    """The two threads call the same module at the same time, in sampled steps."""
    model, together = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), threading.Barrier(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def infer() -> None:
        for _ in range(STEPS):
            together.wait(60)
            model(torch.ones(2, 4))

    with recorded(tmp_path, model, optimizer, **EVERYTHING) as recording:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        thread = threading.Thread(target=infer)
        thread.start()
        for _ in range(STEPS):
            together.wait(60)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        thread.join()

    times = [
        each for each in recording.records if each.kind == Kind.MODULE_BACKWARD and each.name == "0"
    ]
    assert len(times) == STEPS + 1
    assert recording.internal_errors == recording.unbalanced == 0
