"""Tests of device stalls in compiled graphs that contain collectives.

The compiler backends call the graph's operators one by one, as Inductor's code calls collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.utils import counters

from tests.device import device
from tests.distributed.test_device_stalls import (
    LATE_MS,
    OVER_MS,
    STEADY,
    Both,
    check,
    late_s,
    low_median,
    names,
)
from tests.support.device_ranks import DEVICE, begin, host_is_ahead, train
from tests.support.gloo import run_ranks

pytestmark = pytest.mark.skipif(device.missing() is not None, reason=str(device.missing()))
BACKENDS = ("aot_eager", "eager")


@torch.library.custom_op("torchlens_perf_tests::work", mutates_args=())
def work(value: torch.Tensor, seconds: float, has_late: bool) -> torch.Tensor:
    """A kernel inside the graph. The compiled graph does not depend on this rank's delay."""
    device.spin(seconds + Late.s * has_late)
    return value.clone()


@work.register_fake
def _(value: torch.Tensor, seconds: float, has_late: bool) -> torch.Tensor:
    return torch.empty_like(value)


def _work_backward(context: Any, gradient: torch.Tensor) -> Any:
    return work(gradient, 0.005, True), None, None


work.register_autograd(_work_backward)


class Late:
    s = 0.0


class Block(nn.Module):
    """Works 10 ms forward and 5 ms backward, plus this rank's delay in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(work(self.linear(value), 0.01, False))
        return result


class Dynamo(NamedTuple):
    """Dynamo's counts in a run. A recompilation is an additional graph."""

    graphs: int
    operations: int
    breaks: int


class Compiled(NamedTuple):
    """Results with and without a watch, and Dynamo's counts in each run."""

    both: Both
    dynamo: tuple[Dynamo, Dynamo]


def compiled(
    folder: Path, make: Callable[[], Any], parts: int = 1, evaluates: bool = False
) -> Compiled:
    """Train the model of `make`, which has `parts` blocks that are late in the backward pass.

    The watched run comes first, so it is also the first watch of the process.

    `evaluates` adds one evaluation, in a step when the device's times are available.
    """

    def made() -> tuple[Any, Any]:
        model = make()
        return model, torch.optim.SGD(model.parameters(), 0.01)

    def step(model: Any, optimizer: Any, number: int) -> torch.Tensor:
        Late.s = late_s(number) / parts
        if evaluates and number == 4:
            with torch.no_grad():
                model(torch.ones(8, 32, device=DEVICE))
        loss: torch.Tensor = model(torch.ones(8, 32, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    from torch._dynamo import convert_frame

    trained, dynamo = [], []
    for watched in (True, False):
        torch._dynamo.reset()
        counters.clear()
        convert_frame.input_codes.clear()
        trained.append(train(folder, made, step, watched=watched))
        stats = counters["stats"]
        breaks = counters["graph_break"]
        dynamo.append(Dynamo(stats["unique_graphs"], stats["calls_captured"], sum(breaks.values())))
        assert [reason for reason in breaks if "Recorder" in reason] == [], (
            "nor does it try and fail inside"
        )
        files = [
            code().co_filename for code in convert_frame.input_codes.seen if code() is not None
        ]
        assert [file for file in files if "/torchlens_perf/" in file] == [], (
            "Dynamo is never asked to compile ours"
        )
    return Compiled((trained[0], trained[1]), (dynamo[0], dynamo[1]))


def ddp_ranks(folder: Path) -> Compiled:
    begin(folder)

    def make() -> Any:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(Block(), Block()).to(DEVICE))
        # A block has 4.3 KB of parameters, so each block gets a separate bucket and graph.
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = model.bucket_bytes_cap = 3000
        return torch.compile(model, backend="aot_eager")

    return compiled(folder, make, parts=2, evaluates=True)


def fsdp_ranks(folder: Path) -> Compiled:
    begin(folder)
    mesh = dist.init_device_mesh(DEVICE, (2,))

    def make() -> Any:
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(Block(), Block()).to(DEVICE)
        for block in model:
            block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return compiled(folder, make, parts=2)


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(work(value, 0.02, True)).relu())
        return result


def tensor_parallel_ranks(folder: Path) -> Compiled:
    begin(folder)
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh(DEVICE, (2,))

    def make() -> Any:
        model = Parallel().to(DEVICE)
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    return compiled(folder, make)


HOWS = ("all_reduce", "all_gather", "reduce_scatter", "synchronous")


class Exchanging(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(32, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value, world = work(value, 0.02, True), dist.group.WORLD
        if self.how == "all_reduce":
            value = functional.all_reduce(value, "sum", world) * 0.5
        elif self.how == "all_gather":
            value = functional.all_gather_tensor(value, 0, world)[:8]
        elif self.how == "reduce_scatter":
            value = (
                functional.reduce_scatter_tensor(torch.cat([value, value]), "sum", 0, world) * 0.5
            )
        else:
            # Dynamo converts the call to a functional collective.
            dist.all_reduce(value)
        result: torch.Tensor = self.linear(value)
        return result


def exchanging_ranks(folder: Path) -> dict[tuple[str, str], Compiled]:
    begin(folder)
    found = {}
    for how, backend in [*((how, BACKENDS[0]) for how in HOWS), (HOWS[0], BACKENDS[1])]:

        def make(how: str = how, backend: str = backend) -> Any:
            return torch.compile(Exchanging(how).to(DEVICE), backend=backend, fullgraph=True)

        part = folder / how / backend
        part.mkdir(parents=True, exist_ok=True)
        found[how, backend] = compiled(part, make)
    return found


def check_compiled(ranks: list[Compiled], graphs: int) -> list[dict[str, float]]:
    """Check the conditions of all cases. Return the stalls per step of each rank."""
    fast, _ = check([rank.both for rank in ranks])
    for _, (watched, alone) in ranks:
        assert watched == alone, "no break, operation or graph more"
        assert watched.graphs == graphs
    assert low_median(fast.stalls_ms(step) for step in STEADY) == pytest.approx(
        LATE_MS, abs=OVER_MS
    )
    return [names(rank.both[0]) for rank in ranks]


@pytest.mark.long
@host_is_ahead
def test_ddp_stalls_are_recorded_with_several_graphs(tmp_path: Path) -> None:
    """DDPOptimizer splits the graph at the buckets.

    A bucket is sent after its graph's backward pass.

    The evaluation adds a graph without gradients, which ends at the broadcast of DDP's buffers.
    """
    stalls = check_compiled(run_ranks(ddp_ranks, tmp_path), graphs=2 + 1)
    assert stalls == [{"backward tail": 1, "ddp buffers": 1}] * 2


@pytest.mark.long
@host_is_ahead
def test_fsdp2_stalls_are_recorded_with_compiled_blocks(tmp_path: Path) -> None:
    """FSDP2's waits stay outside the graphs."""
    stalls = check_compiled(run_ranks(fsdp_ranks, tmp_path), graphs=2)
    waits = {
        "fsdp unshard": 2 + 2,
        "fsdp reduce-scatter": 1,
        "fsdp last reduce-scatter": 1,
        "backward tail": 1,
    }
    assert stalls == [waits] * 2


@pytest.mark.long
@host_is_ahead
def test_tensor_parallel_stalls_are_recorded_in_one_graph(tmp_path: Path) -> None:
    """DTensor's collectives become part of the graph."""
    for stalls in check_compiled(run_ranks(tensor_parallel_ranks, tmp_path), graphs=1):
        assert set(stalls) == {"wait", "backward tail"}


@pytest.mark.long
@host_is_ahead
def test_functional_collectives_in_one_graph_are_one_stall_each(tmp_path: Path) -> None:
    """The graph waits once for each collective, by torch.ops._c10d_functional.wait_tensor."""
    ranks = run_ranks(exchanging_ranks, tmp_path)
    for key in ranks[0]:
        for stalls in check_compiled([rank[key] for rank in ranks], graphs=1):
            assert stalls["wait"] == 1, key
