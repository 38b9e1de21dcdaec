"""Tests that a watch changes no result of a distributed run, and adds no collective to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.jobs.test_bit_equality import assert_same, seed, state_of
from tests.support.gloo import run_ranks
from tests.support.model_zoo import Outcome, Watching, batches, train
from tests.support.recording import EVERYTHING, Recording, recorded
from torchlens_perf.run.ring import Kind

# Names of gloo's operators in c10d's flight recorder. Three operators are missing there.
IN_FLIGHT_RECORDER = {
    "allreduce": "gloo:all_reduce",
    "broadcast": "gloo:broadcast",
    "allgather": "gloo:all_gather",
    "allgather_base": "gloo:all_gather",
    "reduce_scatter_base": "gloo:all_reduce",  # gloo implements this operator by another one.
    "monitored_barrier": "",
    "send": "",
    "recv": "",
}

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("whole_ends")]

STEPS = 4


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        y += x
        return y


def data_parallel(watching: Watching) -> Outcome:
    """Train with DDP, several buckets, and buffers that are broadcast."""
    model = DistributedDataParallel(
        nn.Sequential(Block(), nn.BatchNorm1d(8), Block()), bucket_cap_mb=1e-4
    )
    return train(watching, model)


def data_parallel_accumulating(watching: Watching) -> Outcome:
    """Train with three batches per step. DDP reduces only the gradients of the last batch."""
    model = DistributedDataParallel(nn.Sequential(Block(), Block()), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with watching(model, optimizers=[optimizer]):
        for _ in range(STEPS):
            for number, batch in enumerate(batches(count=3)):
                with model.no_sync() if number < 2 else nullcontext():
                    loss = model(batch).square().mean() / 3
                    loss.backward()
                losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
    return Outcome([model], [optimizer], losses)


def data_parallel_with_hook(watching: Watching) -> Outcome:
    """Train with a user's communication hook, parameters without a gradient, and checkpointing."""
    inner = nn.Sequential(Block(checkpointed=True), nn.Linear(8, 8))
    inner.unused = nn.Linear(8, 8)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    model.register_comm_hook(None, fp16_compress_hook)
    return train(watching, model)


def data_parallel_compiled(watching: Watching) -> Outcome:
    model = DistributedDataParallel(nn.Sequential(Block(), Block()))
    return train(watching, torch.compile(model, backend="aot_eager"))


def fully_sharded(watching: Watching) -> Outcome:
    """Train with FSDP2, block by block, with checkpointing and an optimizer on shards."""
    model = nn.Sequential(Block(), Block(checkpointed=True), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_reshard_after_forward(True)
    return train(watching, model)


def own_collectives(watching: Watching) -> Outcome:
    """Call collectives of every form, also in a subgroup, asynchronous, functional and point to
    point.
    """
    (group,) = GROUPS
    results = []
    other = 1 - dist.get_rank()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(model, optimizers=[optimizer]):
        for batch in batches():
            model(batch).sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            optimizer.step()
            optimizer.zero_grad()
            mine = batch + dist.get_rank()
            work = dist.all_reduce(mine, async_op=True)
            parts = [torch.empty_like(batch) for _ in range(2)]
            work.wait()
            dist.all_gather(parts, mine)
            dist.broadcast(batch, 0)
            dist.monitored_barrier()
            both = torch.empty(8, 8)
            dist.all_gather_into_tensor(both, mine, group=group)
            shard = torch.empty(2, 8)
            dist.reduce_scatter_tensor(shard, batch.clone())
            received = torch.empty_like(mine)
            sending = dist.isend(mine, other)
            dist.recv(received, other)
            sending.wait()
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, {"rank": dist.get_rank(), "step": len(results)})
            summed = functional.all_reduce(mine, "sum", group)
            results += [
                mine,
                *parts,
                both,
                shard,
                received,
                summed + 1,
                torch.tensor([one["step"] for one in objects]),
            ]
    return Outcome([model], [optimizer], results)


CASES: dict[str, Callable[[Watching], Outcome]] = {
    run.__name__: run
    for run in (
        data_parallel,
        data_parallel_accumulating,
        data_parallel_with_hook,
        data_parallel_compiled,
        fully_sharded,
        own_collectives,
    )
}


class Collective(NamedTuple):
    operation: str
    group: str
    sizes: str


GROUPS: list[dist.ProcessGroup] = []


class Collectives:
    """The job's collectives, read from c10d's flight recorder, which does not use the
    dispatcher.
    """

    def __init__(self) -> None:
        self._seen = self._newest()
        self.all: list[Collective] = []

    def take(self) -> list[Collective]:
        """Return the collectives since the last call, ordered by start."""
        newest = self._newest()
        new = [entry for entry in self._entries() if entry["record_id"] > self._seen]
        assert len(new) == newest - self._seen, "the flight recorder has lost some"
        self._seen = newest
        taken = [
            Collective(each["profiling_name"], each["process_group"][0], str(each["input_sizes"]))
            for each in new
        ]
        self.all += taken
        return taken

    def _newest(self) -> int:
        return max((entry["record_id"] for entry in self._entries()), default=-1)

    def _entries(self) -> list[dict[str, Any]]:
        return json.loads(_dump_fr_trace_json(True, False)).get("entries", [])


class Result(NamedTuple):
    """Result of one case on one rank."""

    difference: str
    """Difference between the runs with and without a watch, or an empty string."""
    plain: list[Collective]
    watched: list[Collective]
    """Collectives of the whole run, without and with the watch."""
    inside: list[Collective]
    """Collectives that the watch could record. The model is created before it."""
    recording: Recording


def one_rank(folder: Path) -> dict[str, Result]:
    """Run every case without and with a watch."""
    # Create the group once, because a second group would have a different name.
    GROUPS.append(dist.new_group([0, 1]))
    return {name: one_case(case, folder / name) for name, case in CASES.items()}


def one_case(case: Callable[[Watching], Outcome], folder: Path) -> Result:
    inside: list[Collective] = []
    recordings: list[Recording] = []

    @contextmanager
    def watching(*models: nn.Module, optimizers: Iterable[Any] = ()) -> Iterator[None]:
        with recorded(folder, list(models), list(optimizers), **EVERYTHING) as recording:
            collectives.take()
            yield
            inside.extend(collectives.take())
        recordings.append(recording)

    expected, plain = run_case(case, lambda *models, optimizers=(): nullcontext(), Collectives())
    collectives = Collectives()
    actual, watched = run_case(case, watching, collectives)
    difference = ""
    try:
        assert_same(expected, actual)
    except AssertionError as error:
        difference = str(error)
    return Result(difference, plain, watched, inside, recordings[0])


def run_case(
    case: Callable[[Watching], Outcome], watching: Watching, collectives: Collectives
) -> tuple[dict[str, Any], list[Collective]]:
    seed()
    outcome = case(watching)
    state = state_of(outcome)
    collectives.take()
    return state, collectives.all


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Result]]:
    """Return the results by rank and case.

    One pair of processes runs all cases, because starting processes is slow.
    """
    return run_ranks(one_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_watched_distributed_run_is_bit_identical(
    name: str, results: list[dict[str, Result]]
) -> None:
    """All parameters, buffers, gradients, optimizers, losses, results and random numbers are equal
    on every rank.
    """
    for rank in results:
        assert rank[name].difference == ""
        assert (rank[name].recording.internal_errors, rank[name].recording.unbalanced) == (0, 0)
        assert len(rank[name].recording.steps) == STEPS


@pytest.mark.parametrize("name", CASES)
def test_watch_adds_no_collective_to_the_job(name: str, results: list[dict[str, Result]]) -> None:
    """c10d recorded the same operations, groups and sizes in the same order."""
    for rank in results:
        assert len(rank[name].plain) >= STEPS
        assert rank[name].plain == rank[name].watched


@pytest.mark.parametrize("name", CASES)
def test_every_collective_is_recorded_once(name: str, results: list[dict[str, Result]]) -> None:
    """The tap's records equal those of the flight recorder, which does not use the dispatcher."""
    for rank in results:
        issued = sorted(rank[name].recording.of(Kind.COLLECTIVE), key=lambda each: each.start_ns)
        recorded_names = [each.name.partition(" group=") for each in issued]
        actual = [
            (IN_FLIGHT_RECORDER[operation], rest.partition(" ")[0])
            for operation, _, rest in recorded_names
        ]

        assert [(each.operation, each.group) for each in rank[name].inside] == [
            each for each in actual if each[0]
        ]
