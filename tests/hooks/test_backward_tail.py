"""The tail of the backward pass: waits for communication after the last gradient."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hooks.test_backward import Model, inside, train
from tests.support.recording import EVERYTHING, Recording, recorded
from torchlens_perf.hooks import backward as hooks_backward
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.session import Session
from torchlens_perf.run.ring import Flag, Kind


class Stalls:
    """A replacement for a device's Stalls that uses the host's clock and stores ends of passes."""

    def __init__(self, session: Session) -> None:
        self.known: list[bool] = []
        self._mark = session.clocks.current.mark
        session.clocks.stalls = self  # type: ignore[assignment]

    def begin_backward_tail(self, _: int) -> int | None:
        return self._mark()

    def end_backward_tail(self, *, raised: bool, is_known: bool) -> None:
        self.known.append(is_known or raised)


@pytest.fixture
def session_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Recording], Session]:
    """Return a function that returns the session of a recording, as in a job with several ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def of(recording: Recording) -> Session:
        assert recording.watch is not None
        assert recording.watch._session is not None
        return recording.watch._session

    return of


def busy(nanoseconds: int) -> tuple[int, int]:
    begin_ns = time.monotonic_ns()
    while (now_ns := time.monotonic_ns()) < begin_ns + nanoseconds:
        pass
    return begin_ns, now_ns


def test_wait_after_the_last_gradient_is_comm_wait_and_not_backward_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that is queued at the last gradient waits for communication, as in DDP."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = Model()
    waited = []

    def last_gradient(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: waited.append(busy(2_000_000))
        )

    model.first.weight.register_hook(last_gradient)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(tmp_path, model) as recording:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    assert len(waited) == 3
    tails = recording.of(Kind.WAIT)
    assert [(each.name, each.flags) for each in tails] == [("backward tail", Flag.TAIL)] * 3
    for tail, whole, (begin_ns, end_ns) in zip(
        tails, recording.of(Kind.BACKWARD), waited, strict=True
    ):
        assert tail.start_ns <= begin_ns
        assert end_ns <= tail.end_ns
        assert inside(tail, whole)
        assert whole.phase_ns >= tail.duration_ns


def test_backward_pass_of_a_single_process_has_no_tail(tmp_path: Path) -> None:
    assert train(Model(), tmp_path).of(Kind.WAIT) == []


class Output:
    """A model output of a plain class, in whose attributes no tensors are searched."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Returning(nn.Module):
    """A model in which the gradient of `first` is computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Output]:
        x = self.first(x)
        return x.square(), Output(self.second(x.relu()))


# The roots of the graph, which are passed to autograd's engine. `hidden` and `logits` are results
# of the model. The loop made `leaf` and `early` before the model ran, so autograd reaches them
# last.
ROOTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], list[Any]]] = {
    "the first tensor": lambda hidden, logits, leaf, early: [hidden],
    "a plain class's": lambda hidden, logits, leaf, early: [logits * 2],
    "the result itself": lambda hidden, logits, leaf, early: [logits],
    "two results": lambda hidden, logits, leaf, early: [hidden, logits],
    "an early one first": lambda hidden, logits, leaf, early: [early, logits],
    "a leaf first": lambda hidden, logits, leaf, early: [leaf, logits],
    "the same twice": lambda hidden, logits, leaf, early: [logits, logits],
    "an edge": lambda hidden, logits, leaf, early: [torch.autograd.graph.get_gradient_edge(logits)],
}


@pytest.mark.parametrize("roots", ROOTS.values(), ids=ROOTS)
def test_tail_of_the_backward_pass_includes_callbacks_of_ddp(
    roots: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP queues its callback at its last bucket.

    The tail is the same for all forms of model output.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, waited = Returning(), []

    def last_gradient(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: waited.append(busy(2_000_000))
        )

    model.first.weight.register_hook(last_gradient)
    with recorded(tmp_path, model) as recording:
        for _ in range(2):
            leaf = torch.ones(2, 4, requires_grad=True)
            early = leaf * 2
            hidden, output = model(torch.randn(2, 4))
            begun_at = roots(hidden, output.logits, leaf, early)
            torch.autograd.backward(begun_at, [torch.ones(2, 4)] * len(begun_at))
    tails = recording.of(Kind.WAIT)
    assert [each.name for each in tails] == ["backward tail"] * len(waited) == ["backward tail"] * 2
    for each, (begin_ns, end_ns) in zip(tails, waited, strict=True):
        assert each.start_ns <= begin_ns
        assert end_ns <= each.end_ns


def test_tail_begins_correctly_if_the_last_gradient_is_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks queued during the checkpoint's inner engine call run at the end of that call."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    waited = []

    def last_gradient(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: waited.append(busy(2_000_000))
        )

    first.weight.register_hook(last_gradient)
    with recorded(tmp_path, nn.ModuleList([first, second])) as recording:
        x = torch.randn(2, 4, requires_grad=True)
        second(checkpoint(first, x, use_reentrant=True)).sum().backward()
    ((begin_ns, end_ns),) = waited
    nested, whole = sorted(recording.of(Kind.WAIT), key=lambda each: each.start_ns)
    assert nested.start_ns <= begin_ns
    assert end_ns <= nested.end_ns <= whole.start_ns
    outer = next(each for each in recording.of(Kind.BACKWARD) if each.depth == 1)
    assert inside(nested, outer)
    assert outer.phase_ns >= nested.duration_ns, "waiting is not the backward pass's"


def test_inner_pass_of_a_checkpoint_does_not_end_unfinished_modules(
    tmp_path: Path, session_of: Callable[[Recording], Session]
) -> None:
    """Modules end with the outermost backward pass."""
    model = nn.Sequential(Model(use_reentrant=True), nn.Linear(4, 4))
    with recorded(tmp_path, model, **EVERYTHING) as recording:
        session = session_of(recording)
        Stalls(session)
        model(torch.randn(2, 4)).sum().backward()
        recording.watch.step()
        session.clocks.stalls = None
    (nested,) = [each for each in recording.of(Kind.BACKWARD) if each.depth > 1]
    (around,) = [each for each in recording.of(Kind.MODULE_BACKWARD) if each.name == "0"]
    assert inside(nested, around)


def compute(folder: Path, *, watched: bool) -> tuple[list[Tensor], list[Any], Recording]:
    """Return the gradients of each kind of backward pass and the order in which user hooks ran."""
    torch.manual_seed(3)
    model, calls, found = Returning(), [], []
    recording = Recording()

    def passes() -> None:
        x = torch.randn(2, 4, requires_grad=True)
        hidden, output = model(x)
        loss = (output.logits * 3).square().sum() + hidden.sum()
        loss.register_hook(lambda gradient: calls.append(("tensor", float(gradient))))
        loss.grad_fn.register_prehook(lambda gradients: calls.append(("node", float(gradients[0]))))
        plain = output.logits.sum()
        before = plain._backward_hooks
        (penalty,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty.norm().backward(retain_graph=True)
        for _ in range(2):
            loss.backward(retain_graph=True)
        plain.backward(retain_graph=True)
        torch.autograd.backward([loss, plain, penalty.sum()], [torch.tensor(2.0), None, None])
        batched = torch.autograd.grad((model(x)[0]), x, torch.ones(3, 2, 4), is_grads_batched=True)
        assert plain._backward_hooks is before is None
        found.extend(
            [penalty.detach(), *batched, x.grad, *(each.grad for each in model.parameters())]
        )

    if watched:
        with recorded(folder, model) as recording:
            passes()
    else:
        passes()
    return found, calls, recording


def test_gradients_and_user_hooks_are_the_same_with_a_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples are several roots, double backward, batched gradients, and a retained graph."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone, alone_calls, _ = compute(tmp_path, watched=False)
    seen, seen_calls, recording = compute(tmp_path, watched=True)
    assert len(alone) == len(seen) > 6
    assert all(torch.equal(a, b) for a, b in zip(alone, seen, strict=True))
    assert alone_calls == seen_calls
    assert len(seen_calls) == 8
    assert recording.internal_errors == 0


def test_no_tail_hook_stays_on_a_graph_after_its_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases include backward passes that raised and graphs that the user keeps."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def refuse(_: Tensor) -> None:
        raise ValueError("no gradient today")

    def tails() -> int:
        gc.collect()
        return sum(type(each) is hooks_backward._BackwardTail for each in gc.get_objects())

    before = tails()  # A traceback of an earlier test may refer to a tail object.
    with recorded(tmp_path, model := Model()):
        kept = model(torch.randn(2, 4)).sum()
        kept.backward(retain_graph=True)
        result = model(torch.randn(2, 4))
        result.register_hook(refuse)
        with pytest.raises(ValueError, match="today"):
            result.sum().backward()
        assert tails() == before


def test_tail_is_not_measured_with_compiled_autograd(
    tmp_path: Path, session_of: Callable[[Recording], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of computation is still known for a single leaf, and for torch.autograd.grad, where
    no other rank waits.
    """
    with recorded(tmp_path, model := Model()) as recording:
        session = session_of(recording)
        stalls = Stalls(session)
        model(torch.randn(2, 4)).sum().backward()
        torch.ones(1, requires_grad=True).backward()
        with monkeypatch.context() as patched:
            patched.setattr(torch_private, "is_autograd_compiled", lambda: True)
            model(torch.randn(2, 4)).sum().backward()
            torch.autograd.grad(model(torch.randn(2, 4)).sum(), model.first.weight)
        session.clocks.stalls = None
    assert stalls.known == [True, True, False, True]
