"""Tests of two ranks on the asynchronous device.

One rank works longer, so the other rank's stream stalls, although its own work stays the same.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device import device
from tests.support.device_ranks import DEVICE, Trained, begin, host_is_ahead, train
from tests.support.gloo import run_ranks
from tests.support.long import long
from torchlens_perf.recorder import native_tap
from torchlens_perf.run.ring import Kind

pytestmark = pytest.mark.skipif(device.missing() is not None, reason=str(device.missing()))
# Rank 1 works longer by LATE_S from step LATE_FROM on.
LATE_FROM, LATE_S, SLOW = 12, 0.02, 1
QUIET, STEADY = range(4, LATE_FROM), range(LATE_FROM + 2, 23)
LATE_MS = LATE_S * 1e3
# Tolerance for transfers and the device's time for events.
OVER_MS = 1.0
# A watched and an unwatched run.
Both = tuple[Trained, Trained]


class _Spin(torch.autograd.Function):
    """A module that works in the backward pass."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        device.spin(context.seconds)
        return gradient, None


def late_s(number: int) -> float:
    """Return by how many seconds this rank works longer in a step."""
    return LATE_S if number >= LATE_FROM and dist.get_rank() == SLOW else 0.0


class Block(nn.Module):
    """A block that works 10 ms forward and 5 ms backward, plus late_s.

    Device times of this length keep the host ahead of the device on a busy machine.
    """

    late_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        device.spin(0.01)
        return self.norm(_Spin.apply(self.linear(value), 0.005 + Block.late_s))


def model_and_optimizer(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], tuple[Any, Any]]:
    """Return two blocks, parallelized by `wrap`, and their optimizer."""

    def make() -> tuple[Any, Any]:
        model = wrap(nn.Sequential(Block(), Block()).to(DEVICE))
        return model, torch.optim.SGD(model.parameters(), 0.01)

    return make


def usual_step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
    # The model has two blocks.
    Block.late_s = late_s(number) / 2
    loss: torch.Tensor = model(torch.ones(8, 32, device=DEVICE)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_with_and_without_watch(
    folder: Path, make: Callable[[], tuple[Any, Any]], step: Callable[[Any, Any, int], torch.Tensor]
) -> Both:
    return train(folder, make, step), train(folder, make, step, watched=False)


def ddp_ranks(folder: Path) -> Both:
    begin(folder)
    return train_with_and_without_watch(
        folder, model_and_optimizer(nn.parallel.DistributedDataParallel), usual_step
    )


class Result:
    """A model's result of a class in which no code searches for tensors."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Returning(nn.Module):
    """A model of two blocks that returns several results. The loss does not use the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, Result]:
        value = self.first(value)
        return value.square(), Result(self.second(value))


class Recomputing(Returning):
    """Two blocks whose last gradients come from a checkpoint, in which the engine runs again."""

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, Result]:
        value = checkpoint(self.first, value.requires_grad_(), use_reentrant=True)
        return value.square(), Result(self.second(value))


FORMS = (Returning, Recomputing)


def ddp_forms_ranks(folder: Path) -> dict[str, Both]:
    begin(folder)

    def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
        return usual_step(lambda value: model(value)[1].logits, optimizer, number)

    found = {}
    for form in FORMS:

        def make(form: type[nn.Module] = form) -> tuple[Any, Any]:
            model = nn.parallel.DistributedDataParallel(form().to(DEVICE))
            return model, torch.optim.SGD(model.parameters(), 0.01)

        (folder / form.__name__).mkdir(exist_ok=True)
        found[form.__name__] = train_with_and_without_watch(folder / form.__name__, make, step)
    return found


def side_stream_ranks(folder: Path) -> dict[str, Trained]:
    """Run forward and backward on a separate stream.

    The optimizer's stream waits for the separate stream.
    """
    begin(folder)

    def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
        main = torch.accelerator.current_stream()
        own = streams.setdefault("own", torch.Stream(device=DEVICE))
        own.wait_stream(main)
        with own:
            loss: torch.Tensor = model(torch.ones(8, 32, device=DEVICE)).square().mean()
            loss.backward()
        main.wait_stream(own)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    streams: dict[str, Any] = {}
    return {
        "ddp": train(
            folder, model_and_optimizer(nn.parallel.DistributedDataParallel), step, steps=12
        )
    }


def fsdp_ranks(folder: Path) -> Both:
    begin(folder)
    mesh = dist.init_device_mesh(DEVICE, (2,))

    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    result = train_with_and_without_watch(folder, model_and_optimizer(wrap), usual_step)
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    left = (groups.record_function, groups.foreach_reduce, groups.foreach_all_gather_copy_out)
    assert not any("torchlens" in function.__code__.co_filename for function in left[1:])
    assert left[0] is torch.profiler.record_function
    return result


def tensor_parallel_ranks(folder: Path) -> Both:
    begin(folder)
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh(DEVICE, (2,))

    def make() -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).to(DEVICE)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model, torch.optim.SGD(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
        device.spin(0.02 + late_s(number))
        loss: torch.Tensor = model(torch.ones(8, 32, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_with_and_without_watch(folder, make, step)


def exchange(how: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Run one operation between the ranks, and use the result of the operation."""

    def of(value: torch.Tensor) -> torch.Tensor:
        other = 1 - dist.get_rank()
        if how == "synchronous":
            dist.all_reduce(value)
        elif how == "Work.wait":
            work = dist.all_reduce(value, async_op=True)
            # The multiplication overlaps with the operation.
            device.spin(0.001)
            work.wait()
        elif how == "wait_tensor":
            # The multiplication waits for the operation's result.
            return functional.all_reduce(value, "sum", dist.group.WORLD) * 0.5
        else:
            received = torch.empty_like(value)
            operations = [
                dist.P2POp(dist.isend, value, other),
                dist.P2POp(dist.irecv, received, other),
            ]
            for each in dist.batch_isend_irecv(operations):
                each.wait()
            return received
        return value * 0.5

    return of


def exchanging_ranks_without_the_tap(folder: Path) -> dict[str, Both]:
    """Record collectives from Python."""
    native_tap.find_tap_files = lambda name: iter(())
    native_tap.load_tap.cache_clear()
    assert native_tap.load_tap() is None
    return exchanging_ranks(folder)


HOWS = ("synchronous", "Work.wait", "wait_tensor", "pipeline")


def exchanging_ranks(folder: Path) -> dict[str, Both]:
    begin(folder)
    found = {}
    for how in HOWS:
        communicate = exchange(how)

        def make() -> tuple[Any, Any]:
            model = nn.Linear(32, 32).to(DEVICE)
            return model, torch.optim.SGD(model.parameters(), 0.01)

        def step(
            model: Any, optimizer: Any, number: int, communicate: Any = communicate
        ) -> torch.Tensor:
            device.spin(0.02 + late_s(number))
            loss: torch.Tensor = (
                model(communicate(torch.ones(8, 32, device=DEVICE))).square().mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        (folder / how).mkdir(exist_ok=True)
        found[how] = train_with_and_without_watch(folder / how, make, step)
    return found


def check(ranks: list[Both]) -> tuple[Trained, Trained]:
    """Check the conditions that apply to any way of communication. Return the two watched ranks."""
    for watched, alone in ranks:
        assert watched.loss == alone.loss
        assert len(watched.loss) == 3
        assert all(
            torch.equal(a, b) for a, b in zip(watched.parameters, alone.parameters, strict=True)
        )
        assert watched.synchronizations == alone.synchronizations, (
            "the watch adds no wait for the device"
        )
        assert watched.metadata["device"]["clock"] == f"{DEVICE} events"
        assert watched.metadata["device"]["unread"] <= 2, "of the two empty steps at the end"
        for step in STEADY:
            in_order(watched, step)
    fast, slow = ranks[0][0], ranks[1][0]
    assert median_work_ms(slow, STEADY) - median_work_ms(slow, QUIET) == pytest.approx(
        LATE_MS, abs=OVER_MS
    )
    assert median_work_ms(fast, STEADY) - median_work_ms(fast, QUIET) == pytest.approx(
        0, abs=OVER_MS
    )
    assert low_median(fast.stalls_ms(step) for step in STEADY) == pytest.approx(
        LATE_MS, abs=OVER_MS
    )
    assert low_median(slow.stalls_ms(step) for step in STEADY) < OVER_MS
    return fast, slow


def median_work_ms(trained: Trained, steps: range) -> float:
    """Return the median of the device's own work in the given steps."""
    work = trained.work_ms()
    return low_median(work[step] for step in steps)


def low_median(values: Iterable[float]) -> float:
    """Return the lower median, because on a busy machine some hosts issue work late."""
    return statistics.median_low(list(values))


def in_order(trained: Trained, step: int) -> None:
    """Check that a step's stalls do not overlap and are recorded before the step."""
    spans = [(index, each) for index, each in enumerate(trained.spans) if each.step == step]
    (boundary,) = [index for index, each in spans if each.value0 == Kind.STEP]
    assert all(index <= boundary for index, _ in spans)
    stalls = sorted((each.start_ns, each.end_ns) for _, each in spans if each.value0 == Kind.WAIT)
    assert stalls
    assert all(end <= begin + 1000 for (_, end), (begin, _) in itertools.pairwise(stalls))


def names(trained: Trained) -> dict[str, float]:
    """Return the number of stalls per step, by name."""
    found = Counter(each.name for each in trained.of(Kind.WAIT) if each.step in STEADY)
    return {name: count / len(STEADY) for name, count in found.items()}


@host_is_ahead
def test_ddp_waits_for_gradients_and_buffers_are_stalls(tmp_path: Path) -> None:
    """The other rank waits at the end of its backward pass, and for buffers before its forward
    pass.
    """
    ranks = run_ranks(ddp_ranks, tmp_path)
    fast, _ = check(ranks)
    for trained, alone in ranks:
        assert names(trained) == {"backward tail": 1, "ddp buffers": 1}
        assert trained.marks == 10, (
            "a boundary, three phases, a tail that ends with one, and the buffers"
        )
        assert trained.events - alone.events < 10.5, "an anchor a second is all that comes to them"
    assert low_median(fast.stalls_ms(step, "backward tail") for step in STEADY) == pytest.approx(
        LATE_MS, abs=OVER_MS
    )


@pytest.mark.long
@host_is_ahead
def test_ddp_stall_starts_after_the_last_gradient_for_any_model_output(tmp_path: Path) -> None:
    """The stall starts where the engine has computed the last gradient, also inside a
    checkpoint.
    """
    ranks = run_ranks(ddp_forms_ranks, tmp_path)
    for form in FORMS:
        check([rank[form.__name__] for rank in ranks])
        for rank in ranks:
            stalls = names(rank[form.__name__][0])
            assert stalls == {"backward tail": 1 + (form is Recomputing), "ddp buffers": 1}


@host_is_ahead
def test_step_on_a_side_stream_never_counts_as_complete(tmp_path: Path) -> None:
    """Stalls on a side stream are not stalls of the stream on which steps are timed."""
    for rank in run_ranks(side_stream_ranks, tmp_path):
        trained = rank["ddp"]
        assert len(trained.of(Kind.FORWARD)) > 10
        assert len(trained.of(Kind.STEP)) <= 2, "the two empty steps at the end"
        assert trained.metadata["device"]["aside"] >= 10


@host_is_ahead
def test_fsdp2_waits_for_parameters_and_gradients_are_stalls(tmp_path: Path) -> None:
    """The rank waits by Stream.wait_event, which no tap records, for each module's parameters and
    gradients.
    """
    ranks = run_ranks(fsdp_ranks, tmp_path)
    check(ranks)
    for trained, _ in ranks:
        assert trained.metadata["device"]["aside"] == 0, "what its own streams wait for"
        assert names(trained) == {
            "fsdp unshard": 2 + 2, "fsdp reduce-scatter": 1, "fsdp last reduce-scatter": 1, "backward tail": 1,
        }  # fmt: skip


@host_is_ahead
def test_tensor_parallel_waits_are_stalls(tmp_path: Path) -> None:
    """DTensor waits for functional collectives."""
    ranks = run_ranks(tensor_parallel_ranks, tmp_path)
    check(ranks)
    for trained, _ in ranks:
        assert set(names(trained)) == {"wait", "backward tail"}


@pytest.mark.parametrize("function", [exchanging_ranks, *long(exchanging_ranks_without_the_tap)])
@host_is_ahead
def test_each_kind_of_wait_is_a_stall(tmp_path: Path, function: Callable[[Path], Any]) -> None:
    """The kinds are collectives in the current stream, Work.wait, wait_tensor, and pipelines' sends
    and receives.
    """
    ranks = run_ranks(function, tmp_path)
    for how in HOWS:
        fast, _ = check([rank[how] for rank in ranks])
        name = "synchronous collective" if how == "synchronous" else "wait"
        assert names(fast)[name] == 1, how
