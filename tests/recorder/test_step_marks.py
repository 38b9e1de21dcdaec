"""Steps that the native recorder ends itself have the same records as steps ended by Python."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.support.recording import recorded
from torchlens_perf.hooks.loop.training_loop import TrainingLoop
from torchlens_perf.recorder.sampling import SamplingSchedule
from torchlens_perf.run.ring import MICRO_STEPS_MASK, Flag, Kind

STEPS = 24


class Job:
    """A small training job. quiet: number of steps that native code has ended."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.watch: Any = None

    def backward(self, batch: Any = None) -> None:
        self.model(torch.randn(2, 4) if batch is None else batch).sum().backward()

    def step(self, batch: Any = None) -> None:
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(job: Job) -> None:
    for _ in range(STEPS):
        job.step()


def accumulating(job: Job) -> None:
    for _ in range(STEPS):
        job.backward()
        job.backward()
        job.step()


def keeping_gradients(job: Job) -> None:
    for number in range(STEPS):
        job.backward()
        if number % 3:
            job.backward()
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)


class Rows(Dataset[Any]):
    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> Any:
        return self._kind(torch.full((4,), float(index)))


def loading(kind: Callable[[torch.Tensor], Any], get: Callable[[Any], Any]) -> Callable[..., None]:
    def run(job: Job) -> None:
        for _ in range(2):
            for batch in DataLoader(Rows(kind), batch_size=8):
                job.step(get(batch))

    return run


def loading_until_an_error(job: Job) -> None:
    def fail_late(row: torch.Tensor) -> torch.Tensor:
        if row[0] > 3 * STEPS:
            raise ValueError("no such row")
        return row

    with pytest.raises(ValueError, match="no such row"):
        loading(fail_late, lambda batch: batch)(job)


def evaluating(job: Job) -> None:
    for number in range(STEPS):
        job.step()
        if number % 7 == 5:
            with torch.no_grad():
                job.model(torch.randn(2, 4))


def evaluating_in_each_step(job: Job) -> None:
    for _ in range(STEPS):
        with torch.no_grad():
            job.model(torch.randn(2, 4))
        job.step()


def evaluating_more_and_less_often(job: Job) -> None:
    """The share of the steps with an evaluation goes below and above a half."""
    for number in range(4 * STEPS):
        job.step()
        if number < STEPS or number % 3 == 0 or number > 3 * STEPS:
            with torch.no_grad():
                job.model(torch.randn(2, 4))


def with_a_reference_network(job: Job) -> None:
    reference = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for number in range(STEPS):
        with torch.no_grad():
            batch = reference(torch.randn(2, 4))
        job.step(batch)
        if number > STEPS / 2:
            reference(batch)  # Passes with gradients have no span.


class Interrupted(Exception):
    pass


def failing_backward(job: Job) -> None:
    for number in range(STEPS):
        if number % 5 == 4:
            loss = job.model(torch.randn(2, 4)).sum()
            loss.register_hook(lambda gradient: raising())
            with pytest.raises(Interrupted):
                loss.backward()
        job.step()


def raising() -> None:
    raise Interrupted


def failing_step(job: Job) -> None:
    handle = None
    for number in range(STEPS):
        if number % 6 == 4:
            handle = job.optimizer.register_step_pre_hook(lambda *_: raising())
            with pytest.raises(Interrupted):
                job.step()
            handle.remove()
        job.step()


def marking_by_hand(job: Job) -> None:
    for number in range(STEPS):
        job.backward()
        if number > STEPS / 2:
            job.watch.step()
        job.optimizer.step()


def with_a_second_optimizer(job: Job) -> None:
    second = torch.optim.SGD(job.model[0].parameters(), lr=0.1)
    for number in range(STEPS):
        job.step()
        if number > STEPS / 2:
            second.step()


def stepping_inside_a_step(job: Job) -> None:
    """From the middle of the run on, an optimizer's step contains the step of another one."""
    second = torch.optim.SGD(job.model[0].parameters(), lr=0.1)
    for number in range(STEPS):
        if number == STEPS / 2:
            job.optimizer.register_step_pre_hook(lambda *_: second.step())
        job.step()


def with_another_optimizer(job: Job) -> None:
    for number in range(STEPS):
        if number == STEPS / 2:
            job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
        job.step()


def scaling(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    for number in range(STEPS):
        loss = job.model(torch.randn(2, 4)).sum()
        scaler.scale(loss * (float("inf") if number % 6 == 5 else 1.0)).backward()
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()


def checkpointing(job: Job) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    job.model[1] = Checkpointed(nn.Linear(4, 4))
    job.optimizer = torch.optim.AdamW(job.model.parameters())
    plain(job)


def collecting(job: Job) -> None:
    for number in range(STEPS):
        if number % 8 == 7:
            gc.collect()
        job.step()


class Counting(TorchFunctionMode):
    """Mode whose calls by hooks would be visible to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.calls.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def in_a_mode(job: Job) -> None:
    with Counting() as mode:
        plain(job)
    assert "_version" not in mode.calls


class Derived(torch.optim.SGD):
    """An optimizer that calls its base class's step, for which torch calls the hooks again."""

    raises = ""

    def step(self, closure: Any = None) -> None:
        if self.raises == "before":
            raise Interrupted
        super().step()
        if self.raises == "after":
            raise Interrupted


def derive_optimizer(job: Job) -> Derived:
    torch.optim.SGD(job.model.parameters(), lr=0.1)  # It installs the hooks in its class.
    job.optimizer = Derived(job.model.parameters(), lr=0.1)
    return job.optimizer


def calling_the_base_class(job: Job) -> None:
    derive_optimizer(job)
    plain(job)


def failing_around_the_base_class(job: Job) -> None:
    optimizer = derive_optimizer(job)
    for number in range(2 * STEPS):
        if number % 8 >= 6:
            optimizer.raises = "before" if number % 8 == 6 else "after"
            with pytest.raises(Interrupted):
                job.step()
            if number % 16 >= 8:
                with pytest.raises(Interrupted):
                    optimizer.step()
            optimizer.raises = ""
        job.step()


def with_a_closure(job: Job) -> None:
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)

    def closure() -> float:
        job.optimizer.zero_grad()
        job.backward()
        return 0.0

    for number in range(STEPS):
        if number % 4 == 3:
            job.optimizer.step(closure)
        else:
            job.step()


def stepping_inside_the_backward_pass(job: Job) -> None:
    parameter = next(job.model.parameters())
    for _ in range(STEPS // 2):
        job.backward()
        job.optimizer.step()
    handle = parameter.register_post_accumulate_grad_hook(lambda _: job.optimizer.step())
    for _ in range(STEPS // 2):
        job.backward()
    handle.remove()


def training_on_another_thread(job: Job) -> None:
    def train() -> None:
        nn.Linear(4, 4)(torch.randn(1, 4)).sum().backward()

    for number in range(STEPS):
        if number == STEPS / 2:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
        job.step()


# The loops, and the fewest steps that native code has to end.
LOOPS: dict[str, tuple[Callable[[Job], None], int]] = {
    "plain": (plain, STEPS // 2),
    "accumulating": (accumulating, STEPS // 2),
    "keeping gradients": (keeping_gradients, STEPS // 2),
    "loading tensors": (loading(lambda row: row, lambda batch: batch), STEPS // 2),
    "loading lists": (loading(lambda row: [row, 1], lambda batch: batch[0]), STEPS // 2),
    "loading dicts": (
        loading(lambda row: {"labels": 1, "input_ids": row}, lambda batch: batch["input_ids"]),
        STEPS // 2,
    ),
    "loading dicts of other names": (
        loading(lambda row: {"x": row, "y": 1}, lambda batch: batch["x"]),
        STEPS // 2,
    ),
    "loading until an error": (loading_until_an_error, 4),
    "evaluating": (evaluating, STEPS // 3),
    "evaluating in each step": (evaluating_in_each_step, STEPS // 2),
    "evaluating more and less often": (evaluating_more_and_less_often, STEPS),
    "with a reference network": (with_a_reference_network, STEPS // 2),
    "failing backward": (failing_backward, STEPS // 3),
    "failing step": (failing_step, STEPS // 3),
    "marking by hand": (marking_by_hand, 4),
    "with a second optimizer": (with_a_second_optimizer, 4),
    "stepping inside a step": (stepping_inside_a_step, 4),
    "with another optimizer": (with_another_optimizer, 4),
    "scaling": (scaling, STEPS // 3),
    "checkpointing": (checkpointing, STEPS // 2),
    "collecting": (collecting, STEPS // 3),
    "in a mode": (in_a_mode, STEPS // 2),
    "calling the base class": (calling_the_base_class, STEPS // 2),
    "failing around the base class": (failing_around_the_base_class, STEPS // 2),
    "with a closure": (with_a_closure, 4),
    "stepping inside the backward pass": (stepping_inside_the_backward_pass, 4),
    "training on another thread": (training_on_another_thread, 4),
}


@contextlib.contextmanager
def ended_by_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_hand_over", lambda *_: None)
        yield


def run(folder: Path, loop: Callable[[Job], None]) -> tuple[list[tuple[Any, ...]], int]:
    """Return the records without times, and how many steps native code has ended."""
    gc.collect()  # Models of an earlier run would be found, too.
    job = Job()
    with recorded(folder, memory="off", backward_every=0) as recording:
        assert recording.watch is not None
        assert recording.watch._session is not None
        job.watch, recorder = recording.watch, recording.watch._session.recorder
        ended, count = 0, TrainingLoop._take_over

        def count_quiet_steps(self: TrainingLoop) -> None:
            nonlocal ended
            ended += recorder.quiet_steps
            count(self)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(TrainingLoop, "_take_over", count_quiet_steps)
            loop(job)
        ended += recorder.quiet_steps
        assert recorder.training_steps == recorder.step
    assert recording.internal_errors == 0
    ignored = (Kind.THREAD_TIME, Kind.OPERATORS)
    return [
        (each.kind, each.name, each.step, each.depth, each.flags, each.value1)
        for each in recording.records
        if each.kind not in ignored and each.name != "python gc"
    ], ended


@pytest.mark.parametrize("name", LOOPS)
def test_native_steps_have_the_records_of_python_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, fewest = LOOPS[name]
    with ended_by_python(monkeypatch):
        expected, none = run(tmp_path / "python", loop)
    records, ended = run(tmp_path / "native", loop)

    assert records == expected
    assert none == 0
    assert ended >= fewest


def test_native_steps_by_hand_have_the_records_of_steps_by_hand(tmp_path: Path) -> None:
    """A forward pass without gradients is no event for Python then."""
    found, ended, passes = [], [], []
    for folder in ("python", "native"):
        model = nn.Linear(4, 4)
        with recorded(tmp_path / folder, model, memory="off", backward_every=0) as recording:
            assert recording.watch is not None
            assert recording.watch._session is not None
            watch, recorder = recording.watch, recording.watch._session.recorder
            loop = watch._loop
            assert loop is not None
            counted = patch.object(loop, "on_forward_end", wraps=loop.on_forward_end)
            observed = counted.start()
            watch.steps_by_hand()
            for number in range(STEPS):
                with torch.inference_mode():
                    model(torch.ones(2, 4))
                quiet = folder == "native" and recorder.end_step_by_hand(number)
                ended.append(quiet)
                if not quiet:
                    watch.step(tokens=number)
            passes.append(observed.call_count)
            counted.stop()
            assert recorder.training_steps == recorder.step == STEPS
        assert recording.internal_errors == 0
        found.append([
            (each.kind, each.name, each.step, each.depth, each.flags, each.value1)
            for each in recording.records
            if each.kind not in (Kind.THREAD_TIME, Kind.OPERATORS) and each.name != "python gc"
        ])  # fmt: skip
    python, native = found
    assert native == python
    assert {each[4] & Flag.MANUAL for each in native if each[0] is Kind.STEP} == {Flag.MANUAL}
    assert sum(ended) > STEPS / 2
    assert passes[0] == STEPS > 2 * passes[1]


def test_step_by_hand_is_left_to_python_if_its_callback_is_due(tmp_path: Path) -> None:
    with recorded(tmp_path, backward_every=0) as recording:
        assert recording.watch is not None
        session = recording.watch._session
        assert session is not None
        recording.watch.steps_by_hand()
        for _ in range(3):
            session.recorder.end_step_by_hand(1)
            recording.watch.step()
        session.recorder.due_ns = 1 << 62
        assert session.recorder.end_step_by_hand(1)
        with session.running_each_step("counting", lambda: None):
            assert not session.recorder.end_step_by_hand(1)
        session.recorder.due_ns = 0
        assert not session.recorder.end_step_by_hand(1)
        with pytest.raises(TypeError):
            session.recorder.end_step_by_hand("a")  # type: ignore[arg-type]


def test_native_steps_count_micro_steps_and_batches(tmp_path: Path) -> None:
    records, ended = run(tmp_path, loading(lambda row: row, lambda batch: batch))
    values = [value for kind, *_, value in records if kind is Kind.STEP]

    assert ended > STEPS / 2
    assert {(value & MICRO_STEPS_MASK, value >> 16) for value in values[4:]} == {(1, 8 * 4 + 1)}


def test_python_ends_steps_in_which_a_callback_is_due(tmp_path: Path) -> None:
    job, calls = Job(), []
    with recorded(tmp_path, backward_every=0) as recording:
        session = recording.watch._session
        plain(job)
        with session.running_each_step("counting", lambda: calls.append(session.recorder.step)):
            plain(job)
        assert calls == list(range(STEPS, 2 * STEPS))
        quiet = session.recorder.quiet_steps
        with session.run_throttled("counting rarely", lambda: calls.append(-1)):
            session.recorder.due_ns = 0
            job.step()
        assert (calls[-1], session.recorder.quiet_steps) == (-1, 0)
    assert quiet == 0


def test_sampled_steps_are_ended_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingSchedule, "set_period", lambda *_: None)
    job = Job()
    with recorded(tmp_path, job.model, backward_every=8, modules="all") as recording:
        plain(job)

    sampled = [each.step for each in recording.steps if Flag.SAMPLED in each.flags]
    assert sampled == [4, 12, 20]
    assert {each.step for each in recording.of(Kind.MODULE_BACKWARD)} == {4, 12, 20}


@pytest.mark.parametrize("clears", [False, True], ids=["", "after a clear"])
def test_step_in_which_dynamo_compiles_is_tagged(clears: bool, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()  # What another test has compiled would not be compiled again.
    job = Job()
    torch.compile(lambda x: x - 1, backend="eager")(torch.ones(1))
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with recorded(tmp_path, backward_every=0) as recording:
        for number in range(STEPS):
            job.step()
            if number == STEPS / 4 and clears:
                counters.clear()
            if number == STEPS / 2:
                compiled(torch.ones(1))

    tagged = [each.step for each in recording.steps if Flag.COMPILED in each.flags]
    assert tagged == [STEPS / 2 + 1]


def test_steps_of_a_watch_after_another_one_are_native_too(tmp_path: Path) -> None:
    first, ended = run(tmp_path / "first", plain)
    second, again = run(tmp_path / "second", plain)

    assert first == second
    assert min(ended, again) >= STEPS // 2
    assert not torch_optimizer._global_optimizer_pre_hooks
