"""Tests that the asynchronous device behaves as tests of device time expect of a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device import device
from tests.support import warm_python
from tests.support.busy_machine import busy_machine
from tests.support.gloo import run_ranks
from tests.support.processes import clean_environ

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        device.missing() is not None,
        reason=f"the device cannot be built: {device.missing()}",
    ),
]

MS = 1e-3
DEVICE = device.NAME
# Duration of a kernel before the timed ones, which keeps the device from waiting for a slow host.
LEAD = 60 * MS
SOON_S, LATE_S = 0.05, 20.0
EXACT_MS = 0.2


# -- programs that ranks run


def transformer() -> nn.Module:
    """Return a small transformer with the same weights at each call."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = (
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )
            self.mlp = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = (
                self.qkv(self.norm(x))
                .view(batch, length, 3, 4, width // 4)
                .permute(2, 0, 3, 1, 4)
                .unbind(0)
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp(x)

    return nn.Sequential(
        nn.Embedding(50, 32), Block(32), Block(32), nn.LayerNorm(32), nn.Linear(32, 50)
    )


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def trained_transformer(where: str, *, foreach: bool) -> list[torch.Tensor]:
    """Return the losses of three steps and the weights after these steps."""
    model = transformer().to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(1)).to(where)
    losses = []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    return [each.detach().cpu() for each in [*losses, *model.parameters()]]


def inputs(where: str) -> torch.Tensor:
    """Return the inputs of this rank."""
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(where)


def train(model: nn.Module, batch: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Return the losses on the model's device, without waiting for the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def ddp(where: str) -> list[torch.Tensor]:
    """Train four steps with DDP, and return losses, weights and gradients."""
    model = nn.parallel.DistributedDataParallel(mlp().to(where))
    losses = train(model, inputs(where), 4)
    gradients = [each.grad for each in model.parameters()]
    return [each.detach().cpu() for each in [*losses, *model.parameters(), *gradients]]


def sharded(where: str) -> list[float]:
    """Train with FSDP2, and return the losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh(where, (dist.get_world_size(),)), mlp().to(where)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return [loss.item() for loss in train(model, inputs(where), 4)]


def tensor_parallel(where: str) -> list[float]:
    """Train with DTensor's tensor parallelism, and return the losses."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(where)
    mesh = init_device_mesh(where, (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).to(where)
    return [loss.item() for loss in train(model, batch, 4)]


def event() -> torch.Event:
    """Return an event recorded on the current stream."""
    recorded = torch.Event(DEVICE, enable_timing=True)
    recorded.record(torch.accelerator.current_stream())
    return recorded


def timed_ms(work: Callable[[], Any]) -> tuple[float, float]:
    """Return the time to issue the work on the host, and its time on the device."""
    torch.accelerator.synchronize()
    device.spin(LEAD)
    begin, host_s = event(), time.perf_counter()
    work()
    host_s, end = time.perf_counter() - host_s, event()
    end.synchronize()
    return host_s / MS, begin.elapsed_time(end)


def run_during_a_kernel(work: Callable[[], Any], until_s: float) -> tuple[bool, dict[str, int]]:
    """Run `work` while a kernel runs that ends after `until_s` or when `work` has been issued.

    Return whether `work` waited for the kernel, and the counters.
    """
    torch.accelerator.synchronize()
    before = device.counters()
    release = device.start_endless_kernel()
    passed = event()
    timer = threading.Timer(until_s, release)
    timer.start()
    work()
    was_held = passed.query()
    counted = {name: count - before[name] for name, count in device.counters().items()}
    timer.cancel()
    release()
    return was_held, counted


def check_in_one_process(folder: Path) -> dict[str, Any]:
    """Run all checks in one process with the device."""
    device.load()
    host = {foreach: trained_transformer("cpu", foreach=foreach) for foreach in (True, False)}
    results: dict[str, Any] = {"accelerator": str(torch.accelerator.current_accelerator())}
    results["transformer"] = {
        foreach: (host[foreach], trained_transformer(DEVICE, foreach=foreach))
        for foreach in (True, False)
    }

    model, batch = mlp().to(DEVICE), torch.randn(16, 64).to(DEVICE)
    device.set_kernel_time(20 * MS)
    results["ahead"] = [timed_ms(lambda: model(batch)) for _ in range(3)]
    device.set_kernel_time(0)
    results["free"] = timed_ms(lambda: model(batch))[1]
    device.set_kernel_time(20e-6)

    with busy_machine(2):
        results["spins"] = [timed_ms(lambda: device.spin(7 * MS))[1] for _ in range(5)]
        device.set_slowness(1.2)
        results["slow spin"] = timed_ms(lambda: device.spin(7 * MS))[1]
        device.set_slowness(1.0)
    results["streams"] = streams()
    x = torch.ones(8, device=DEVICE)
    pinned = torch.zeros(8).pin_memory()
    waiting: dict[str, Callable[[], Any]] = {
        "item": lambda: x.sum().item(),
        "cpu": lambda: x.cpu(),
        "nonzero": lambda: x.nonzero(),
        "to pageable": lambda: torch.zeros(8).copy_(x, non_blocking=True),
        "from host": lambda: torch.zeros(8).to(DEVICE),
        "synchronize": torch.accelerator.synchronize,
        "full queue": lambda: [device.spin(0) for _ in range(1500)],
    }
    going_on: dict[str, Callable[[], Any]] = {
        "to pinned": lambda: pinned.copy_(x, non_blocking=True),
        "kernel": lambda: x + 1,
    }
    results["waits"] = {name: run_during_a_kernel(work, SOON_S) for name, work in waiting.items()}
    results["waits"] |= {name: run_during_a_kernel(work, LATE_S) for name, work in going_on.items()}
    results["freed"] = freed_early()
    results["failure"] = failure()
    return results


def streams() -> dict[str, Any]:
    """Check two streams with and without an event between them."""
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    x = torch.zeros(8, device=DEVICE)
    torch.accelerator.synchronize()
    begin = event()
    release = device.start_endless_kernel()
    x += 1
    main_passed = event()
    with side:
        unordered = event()
    unordered.synchronize()
    results: dict[str, Any] = {"independent": not main_passed.query()}
    with side:
        side.wait_event(main_passed)
        y = x * 2
        side_passed = event()
        results["current"] = torch.accelerator.current_stream() == side
    time.sleep(0.05)
    results["held"] = not side_passed.query()
    release()
    side_passed.synchronize()
    results["value"] = y.cpu().tolist()
    results["never ms"] = begin.elapsed_time(main_passed)
    results["ordered ms"] = main_passed.elapsed_time(side_passed)

    def both() -> None:
        begin = event()
        with side:
            side.wait_event(begin)
            device.spin(20 * MS)
            end = event()
        device.spin(20 * MS)
        main.wait_event(end)

    def one_after_the_other() -> None:
        device.spin(20 * MS)
        first = event()
        with side:
            side.wait_event(first)
            device.spin(20 * MS)
            second = event()
        main.wait_event(second)

    results["both ms"], results["one after the other ms"] = (
        timed_ms(both)[1],
        timed_ms(one_after_the_other)[1],
    )

    seen: list[torch.Stream] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch.accelerator.current_stream())
            return gradient

    with side:
        Look.apply(torch.ones(3, device=DEVICE, requires_grad=True)).sum().backward()
    results["backward"] = seen == [side]
    return results


def freed_early() -> list[float]:
    """Free tensors on the host before the device has used them, and empty a storage."""
    x = torch.full((1000,), 3.0, device=DEVICE)
    release = device.start_endless_kernel()
    y = x * 2
    x.untyped_storage().resize_(0)
    del x
    other = torch.full((1000,), 7.0, device=DEVICE)
    release()
    return [float(y.sum()), float(other.sum())]


def failure() -> list[str]:
    """Return the errors of a failed kernel, which the next wait must raise once."""
    results = []
    table = torch.ones(4, 4, device=DEVICE)
    F.embedding(torch.tensor([9], device=DEVICE), table)
    for _ in range(2):
        try:
            torch.accelerator.synchronize()
        except RuntimeError as error:
            results.append(str(error))
    return results


def use_device(folder: Path) -> None:
    """Replace gloo's process group with one of the device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        DEVICE, store=dist.FileStore(str(folder / "device"), ranks), rank=rank, world_size=ranks
    )


def pair(folder: Path) -> dict[str, Any]:
    device.load()
    on_host = {
        "ddp": ddp("cpu"),
        "sharded": sharded("cpu"),
        "tensor parallel": tensor_parallel("cpu"),
    }
    use_device(folder)
    results: dict[str, Any] = {"backend": dist.get_backend_config()}
    results["pairs"] = {
        "ddp": (on_host["ddp"], ddp(DEVICE)),
        "sharded": (on_host["sharded"], sharded(DEVICE)),
        "tensor parallel": (on_host["tensor parallel"], tensor_parallel(DEVICE)),
    }

    model = nn.parallel.DistributedDataParallel(mlp().to(DEVICE))
    train(model, inputs(DEVICE), 2)  # DDP rebuilds its buckets in the first step.
    batch = inputs(DEVICE)
    results["ddp step"] = run_during_a_kernel(lambda: train(model, batch, 1), LATE_S)
    results["collectives"] = collectives()
    results["late"] = late_rank()
    results["overlap"] = overlap()
    return results


def collectives() -> dict[str, list[float]]:
    """Run each collective once while a kernel runs until all are issued.

    Check that no collective waits for the kernel.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, torch.Tensor] = {}

    def mine(*size: int) -> torch.Tensor:
        return torch.arange(float(torch.Size(size).numel()), device=DEVICE).view(size) + 10 * rank

    release = device.start_endless_kernel()
    timer = threading.Timer(LATE_S, release)
    timer.start()
    for op in ("SUM", "AVG", "MAX", "PRODUCT"):
        results[op] = mine(2)
        dist.all_reduce(results[op], getattr(dist.ReduceOp, op))
    results["broadcast"] = mine(2)
    dist.broadcast(results["broadcast"], 1)
    results["all_gather"] = torch.empty(2 * ranks, device=DEVICE)
    dist.all_gather_into_tensor(results["all_gather"], mine(2))
    parts = [torch.empty(2, device=DEVICE) for _ in range(ranks)]
    dist.all_gather(parts, mine(2))
    results["all_gather list"] = torch.cat(parts)
    results["reduce_scatter"] = torch.empty(2, device=DEVICE)
    dist.reduce_scatter_tensor(results["reduce_scatter"], mine(2 * ranks))
    results["all_to_all"] = torch.empty(ranks, device=DEVICE)
    dist.all_to_all_single(results["all_to_all"], mine(ranks))
    results["received"] = torch.empty(2, device=DEVICE)
    sends = dist.P2POp(dist.isend, mine(2), 1 - rank)
    receives = dist.P2POp(dist.irecv, results["received"], 1 - rank)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    results["sent alone"] = mine(2)
    (dist.send if rank else dist.recv)(results["sent alone"], 1 - rank)
    results["scattered"] = torch.empty(2, device=DEVICE)
    dist.scatter(results["scattered"], [mine(2), mine(2) + 1] if rank == 0 else None, 0)
    first, second = mine(1), mine(1)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    pending = [work.is_completed() for work in works]
    works[1].wait()
    results["order"] = first + second  # The second collective of a group ends after the first one.
    del works[0]
    held_up = not timer.is_alive()
    timer.cancel()
    release()
    torch.accelerator.synchronize()
    result = {name: tensor.cpu().tolist() for name, tensor in results.items()}
    result["completed"] = [float(each) for each in [held_up, *pending, works[0].is_completed()]]
    return result


def late_rank() -> dict[str, float]:
    """Time a collective that the last rank's device reaches 100 ms later."""
    x = torch.ones(8, device=DEVICE)
    device.set_collective_time(5 * MS)
    dist.barrier()
    before_ns = time.monotonic_ns()
    device.spin(LEAD)
    after_ns = time.monotonic_ns()
    begin = event()
    if dist.get_rank() == 1:
        device.spin(100 * MS)
    dist.all_reduce(x)
    end = event()
    end.synchronize()
    return {"before": before_ns, "after": after_ns, "device ms": begin.elapsed_time(end)}


def overlap() -> dict[str, float]:
    """Time a collective of 40 ms during and after a kernel of 40 ms."""
    x = torch.ones(8, device=DEVICE)
    device.set_collective_time(40 * MS)
    results = {}
    for name in ("overlapping", "after"):
        dist.barrier()
        device.spin(LEAD)
        begin = event()
        work = dist.all_reduce(x, async_op=name == "overlapping")
        device.spin(40 * MS)
        if work is not None:
            work.wait()
        end = event()
        end.synchronize()
        results[name] = begin.elapsed_time(end)
    device.set_collective_time(50e-6)
    return results


def four(folder: Path) -> Any:
    device.load()
    on_host = ddp("cpu")
    use_device(folder)
    return on_host, ddp(DEVICE)


def synchronizations(counted: dict[str, int]) -> int:
    return sum(count for name, count in counted.items() if name.endswith("synchronizations"))


# -- one process


@pytest.fixture(scope="module")
def built() -> None:
    device.build()


@pytest.fixture(scope="module")
def results(built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = run_ranks(check_in_one_process, tmp_path_factory.mktemp("alone"), 1)
    return dict(result)


def test_asynchronous_device_is_the_current_accelerator_of_torch(results: dict[str, Any]) -> None:
    assert results["accelerator"] == DEVICE


@pytest.mark.parametrize("foreach", [True, False])
def test_training_results_equal_those_on_the_cpu(foreach: bool, results: dict[str, Any]) -> None:
    """Three steps of a transformer with clipped gradients and AdamW are compared bit for bit."""
    on_host, on_device = results["transformer"][foreach]
    assert all(torch.equal(*each) for each in zip(on_host, on_device, strict=True))


def test_host_returns_before_the_device_has_finished(results: dict[str, Any]) -> None:
    """A forward pass of three linear layers and two activations takes 100 ms on the device."""
    for _, device_ms in results["ahead"]:
        assert device_ms == pytest.approx(5 * 20, abs=EXACT_MS)
    assert min(host_ms for host_ms, _ in results["ahead"]) < 10
    assert results["free"] < EXACT_MS


def test_device_times_are_exact_on_a_busy_machine(results: dict[str, Any]) -> None:
    assert results["spins"] == pytest.approx([7] * 5, abs=EXACT_MS)
    assert results["slow spin"] == pytest.approx(7 * 1.2, abs=EXACT_MS)


def test_streams_run_independently_and_events_order_their_work(results: dict[str, Any]) -> None:
    streams = results["streams"]
    assert streams["independent"]  # A kernel does not delay another stream.
    assert streams["held"]
    assert streams["value"] == [2.0] * 8
    assert streams["ordered ms"] >= 0.02 - 1e-6  # The kernel of the side stream.
    assert streams["both ms"] == pytest.approx(20, abs=EXACT_MS)
    assert streams["one after the other ms"] == pytest.approx(40, abs=EXACT_MS)
    assert streams["never ms"] > 50  # The test released the kernel after 50 ms.
    assert streams["current"]
    assert streams["backward"]


@pytest.mark.parametrize(
    ("what", "counter"),
    [
        ("item", "item_synchronizations"),
        ("cpu", "copy_synchronizations"),
        ("nonzero", "operator_synchronizations"),
        ("to pageable", "copy_synchronizations"),
        ("from host", "copy_synchronizations"),
        ("synchronize", "device_synchronizations"),
    ],
)
def test_reading_a_value_waits_for_the_device(
    what: str, counter: str, results: dict[str, Any]
) -> None:
    was_held, counted = results["waits"][what]
    assert was_held
    assert counted[counter] == synchronizations(counted) == 1


@pytest.mark.parametrize("what", ["to pinned", "kernel"])
def test_operations_that_read_no_value_do_not_wait_for_the_device(
    what: str, results: dict[str, Any]
) -> None:
    was_held, counted = results["waits"][what]
    assert not was_held
    assert synchronizations(counted) == 0


def test_memory_freed_early_is_kept_until_the_device_has_used_it(results: dict[str, Any]) -> None:
    assert results["freed"] == [6000.0, 7000.0]


def test_full_queue_of_a_stream_blocks_the_host(results: dict[str, Any]) -> None:
    was_held, counted = results["waits"]["full queue"]
    assert was_held
    assert counted["full_queues"] > 0
    assert synchronizations(counted) == 0


def test_device_error_is_raised_at_the_next_wait(results: dict[str, Any]) -> None:
    (message,) = results["failure"]
    assert "index" in message


# -- several processes


@pytest.fixture(scope="module")
def two(built: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(pair, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("how", ["sharded", "tensor parallel"])
def test_training_of_two_ranks_equals_training_on_gloo(how: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        on_host, on_device = rank["pairs"][how]
        assert on_device == on_host


def test_ddp_of_two_ranks_equals_ddp_on_gloo(two: list[dict[str, Any]]) -> None:
    """Weights, gradients and losses are equal bit for bit, because two ranks can be summed in one
    order only.
    """
    for rank in two:
        assert rank["backend"] == f"{DEVICE}:{DEVICE}"
        assert all(torch.equal(*each) for each in zip(*rank["pairs"]["ddp"], strict=True))


@pytest.mark.long
def test_ddp_of_four_ranks_equals_ddp_on_gloo(built: None, tmp_path: Path) -> None:
    for on_host, on_device in run_ranks(four, tmp_path, 4):
        for one, other in zip(on_host, on_device, strict=True):
            torch.testing.assert_close(other, one)


def test_ddp_step_does_not_wait_for_the_device(two: list[dict[str, Any]]) -> None:
    for rank in two:
        was_held, counted = rank["ddp step"]
        assert not was_held
        assert counted["collectives"] == 1
        assert synchronizations(counted) == 0


def test_each_collective_has_its_expected_result(two: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(two):
        found, shift = rank["collectives"], 10 * number
        assert found["SUM"] == [10, 12]
        assert found["AVG"] == [5, 6]
        assert found["MAX"] == [10, 11]
        assert found["PRODUCT"] == [0, 11]
        assert found["broadcast"] == [10, 11]
        assert found["all_gather"] == found["all_gather list"] == [0, 1, 10, 11]
        assert found["reduce_scatter"] == [[10, 12], [14, 16]][number]
        assert found["all_to_all"] == [number, number + 10]
        assert found["received"] == [10 - shift, 11 - shift]
        assert found["sent alone"] == [10, 11]
        assert found["scattered"] == [number, number + 1]
        assert found["order"] == [20]
        assert found["completed"] == [0, 0, 0, 1]


def test_last_rank_delays_the_devices_of_other_ranks(two: list[dict[str, Any]]) -> None:
    """The hosts do not wait for the collective. The delay is exact within the hosts' clocks."""
    first, last = (rank["late"] for rank in two)
    assert last["device ms"] == pytest.approx(105, abs=EXACT_MS)
    assert 105 + (last["before"] - first["after"]) / 1e6 - EXACT_MS < first["device ms"]
    assert first["device ms"] < 105 + (last["after"] - first["before"]) / 1e6 + EXACT_MS


def test_collective_runs_in_parallel_with_a_kernel_of_another_stream(
    two: list[dict[str, Any]],
) -> None:
    """Times are measured on the last rank, which does not wait for other ranks."""
    took_ms = {
        name: min(rank["overlap"][name] for rank in two) for name in ("overlapping", "after")
    }
    assert took_ms == pytest.approx({"overlapping": 40, "after": 80}, abs=EXACT_MS)


# -- end of the process

LEAVES_WORK = f"""
import torch
from tests.device import device
device.load()
device.start_endless_kernel()
x = torch.ones(1000, device="{DEVICE}")
for _ in range(500):
    x = x * 2
pinned = torch.zeros(1000).pin_memory().copy_(x, non_blocking=True)
print("done", flush=True)
"""

PEER_LEAVES = f"""
import os, sys, torch
import torch.distributed as dist
from tests.device import device
device.load()
rank = int(sys.argv[1])
dist.init_process_group(store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
x = torch.ones(10, device="{DEVICE}")
dist.all_reduce(x)
torch.accelerator.synchronize()
if rank == 1:
    os._exit(0)
dist.all_reduce(x)
try:
    torch.accelerator.synchronize()
except RuntimeError as error:
    print(error, flush=True)
"""


def program(code: str, *arguments: str) -> subprocess.Popen[str]:
    environ = clean_environ({"PYTHONPATH": os.pathsep.join(sys.path)})
    return warm_python.WarmPython(
        [sys.executable, "-c", code, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_process_with_pending_work_on_the_device_ends_normally(built: None) -> None:
    process = program(LEAVES_WORK)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "done\n"), errors


def test_error_is_raised_on_a_rank_whose_peer_has_left(built: None, tmp_path: Path) -> None:
    processes = [program(PEER_LEAVES, str(rank), str(tmp_path / "store")) for rank in range(2)]
    try:
        output, errors = processes[0].communicate(timeout=60)
        processes[1].communicate(timeout=60)
    finally:
        for each in processes:
            each.kill()
    assert "rank 1 has left" in output, errors
    assert processes[0].returncode == 0, errors
