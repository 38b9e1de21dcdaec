"""Tests of recorded collectives of two gloo ranks.

The tests cover operations, groups, and the time in which the training thread is blocked.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import run_ranks
from tests.support.long import long
from tests.support.recording import EVERYTHING, Record, Recording, recorded
from torchlens_perf import section, watch
from torchlens_perf.commands import tap_build
from torchlens_perf.hooks.collectives import process_group_hooks
from torchlens_perf.hooks.collectives.hook import (
    is_tapped_by_another_tool,
    list_collective_operators,
)
from torchlens_perf.hooks.collectives.python_recording import count_payload_bytes
from torchlens_perf.recorder import native_tap, torch_dispatcher
from torchlens_perf.run.ring import MAX_RECENT, MICRO_STEPS_MASK, Flag, Kind

pytestmark = pytest.mark.distributed

STEPS = 3
FLOATS = 1024
# torch 2.11 has other names for these functions, which are deprecated in 2.13.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# This delay is longer than other programs usually delay the punctual rank.
LATE_NS = 150_000_000

SCENARIOS: dict[str, Callable[[Path], Any]] = {}


def scenario(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Register a scenario for both ranks. `results` has its value under the function's name."""
    SCENARIOS[run.__name__] = run
    return run


def every_scenario(folder: Path) -> dict[str, Any]:
    """Run all scenarios on one rank."""
    results = {}
    for name, run in SCENARIOS.items():
        dist.barrier()
        results[name] = run(folder / name)
    return results


def every_scenario_in_python(folder: Path) -> dict[str, Any]:
    """Run all scenarios on one rank with the Python tap, which is used if the native tap is not
    built.
    """
    native_tap.tap_folders = lambda: ()
    assert native_tap.load_tap() is None
    return every_scenario(folder)


@pytest.fixture(scope="module", params=["native", *long("python")])
def tap(request: pytest.FixtureRequest) -> str:
    """Return the kind of the ranks' tap. If the native tap is missing, it is built first."""
    if request.param == "native":
        tap_build.build_tap()
    return str(request.param)


@pytest.fixture(scope="module")
def results(tap: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the results by scenario and rank.

    One pair of processes runs all scenarios, because its start is slow.
    """
    function = every_scenario if tap == "native" else every_scenario_in_python
    by_rank = run_ranks(function, tmp_path_factory.mktemp("ranks"))
    return {name: [rank[name] for rank in by_rank] for name in SCENARIOS}


def in_order(recording: Recording) -> list[Record]:
    """Return the collectives in the order of issue.

    The ring has the records in the order of their ends.
    """
    return sorted(recording.of(Kind.COLLECTIVE), key=lambda each: each.start_ns)


def sequence(record: Record) -> int:
    """Return the collective's number in its group."""
    return record.value1 & 0xFFFFFFFF


def inside(inner: Record, outer: Record) -> bool:
    return outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns


def delay_this_rank(rank: int) -> None:
    """Delay this rank."""
    if dist.get_rank() == rank:
        # Sleeping leaves the processor to the other rank.
        time.sleep(LATE_NS / 1e9)


# -- recorded operations


@scenario
def split_by_rows(folder: Path) -> Recording:
    """Exchange rows of 12 bytes in two ways, and whole halves."""
    rank, rows = dist.get_rank(), torch.ones(4, 3)
    with recorded(folder) as recording:
        sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        dist.all_to_all_single(torch.empty(sum(received), 3), rows, received, sent)
        exchanged = functional.all_to_all_single(rows, received, sent, dist.group.WORLD)
        functional.wait_tensor(exchanged)
        dist.all_to_all_single(torch.empty(4, 3), rows)
        recording.watch.step()
    return recording


def test_all_to_all_that_is_split_by_rows_has_the_bytes_of_a_row(
    results: dict[str, list[Any]], tap: str
) -> None:
    """Only the native tap records them. The rows that arrive are in the bytes."""
    for received, rank in zip((3, 5), results["split_by_rows"], strict=True):
        split = "alltoall_base group=0 dtype=float32" + (" row=12" if tap == "native" else "")
        assert [(each.name, each.value0) for each in in_order(rank)] == [
            (split, received * 12), (split, received * 12),
            ("alltoall_base group=0 dtype=float32", 4 * 12),
        ]  # fmt: skip


@scenario
def forms(folder: Path) -> Recording:
    other = 1 - dist.get_rank()
    subgroup = dist.new_group([0, 1])
    tensor = torch.ones(FLOATS)
    with recorded(folder) as recording:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=subgroup, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.all_gather([torch.empty(FLOATS) for _ in range(2)], tensor)
        REDUCE_SCATTER(torch.empty(FLOATS // 2), tensor)
        sending = dist.isend(tensor.half(), other)
        dist.recv(torch.empty(FLOATS, dtype=torch.half), other)
        sending.wait()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(1), group=subgroup)
        dist.monitored_barrier()
        with section("in the end"):
            dist.barrier()
        recording.watch.step()
        dist.all_reduce(tensor)
    recording.metadata["subgroup"] = subgroup.group_name
    return recording


def test_each_operation_has_its_group_size_and_shared_number(
    results: dict[str, list[Recording]],
) -> None:
    """The number is the same on all ranks."""
    for index, rank in enumerate(results["forms"]):
        subgroup = rank.metadata["subgroup"]
        issued = in_order(rank)
        # The group was used before the watch, so the numbers continue from the backend's count.
        first = sequence(issued[0])

        assert [(each.name, each.value0, sequence(each)) for each in issued] == [
            ("allreduce group=0 dtype=float32", 4 * FLOATS, first),
            (f"allreduce group={subgroup} dtype=float32", 4 * FLOATS, 0),
            ("broadcast group=0 dtype=float32 root=0", 4 * FLOATS, first + 1),
            ("allgather group=0 dtype=float32", 8 * FLOATS, first + 2),
            ("reduce_scatter_base group=0 dtype=float32", 2 * FLOATS, first + 3),
            (f"send group=0 dtype=float16 peer={1 - index}", 2 * FLOATS, 0),
            (f"recv group=0 dtype=float16 peer={1 - index}", 2 * FLOATS, 0),
            (f"allreduce group={subgroup} dtype=float32", 4, 1),
            ("monitored_barrier group=0", 0, first + 4),
            ("barrier group=0", 0, first + 5),
            ("allreduce group=0 dtype=float32", 4 * FLOATS, first + 6),
        ]
        # This value is the operation's position in its step.
        assert [each.phase_ns for each in issued] == [*range(10), 0]
        assert [each.step for each in issued] == [0] * 10 + [1]
        assert rank.unbalanced == 0
    assert sequence(in_order(results["forms"][0])[0]) == sequence(in_order(results["forms"][1])[0])


def test_parent_of_an_operation_is_the_innermost_open_span(
    results: dict[str, list[Recording]],
) -> None:
    """The parent is a section, a module, the backward pass, or the step."""
    for rank in results["forms"]:
        within = [rank.interned[each.value1 >> 32] for each in in_order(rank)]
        assert within == ["(other)"] * 9 + ["in the end", "(other)"]
    for rank in results["data_parallel"]:
        reduced = [each for each in in_order(rank) if each.name.startswith("allreduce")]
        assert rank.interned[reduced[0].value1 >> 32] == "backward"


def test_ring_has_the_last_issued_and_ended_operation_of_each_group(
    results: dict[str, list[Recording]],
) -> None:
    """The ring's table serves to find missing ranks."""
    for index, rank in enumerate(results["forms"]):
        last = {each.name: sequence(each) + 1 for each in in_order(rank) if "group=0" in each.name}
        assert {each.name: (each.issued, each.ended) for each in rank.groups} == {
            "0": (last["allreduce group=0 dtype=float32"],) * 2,
            rank.metadata["subgroup"]: (2, 2),
            f"send group=0 peer={1 - index}": (1, 1),
            f"recv group=0 peer={1 - index}": (1, 1),
        }
        assert rank.metadata["groups"]["0"] == {"ranks": "0-1", "description": "default_pg"}
        issued = [(each.name, sequence(each), each.value0) for each in in_order(rank)]
        assert sorted(each[1:] for each in rank.last_operations) == sorted(
            (number, name, size) for name, number, size in issued[-MAX_RECENT:]
        )


def test_duration_is_marked_as_that_of_the_call_if_the_end_is_unknown(
    tap: str, results: dict[str, list[Recording]]
) -> None:
    """With a known end, the duration lasts until the operation's end."""
    untold = {"send", "recv"} if tap == "native" else {"send", "recv", "asynchronous"}
    for rank in results["forms"]:
        for each in in_order(rank):
            kind = each.name.partition(" ")[0]
            if kind == "allreduce" and each.flags & Flag.ASYNC:
                kind = "asynchronous"
            assert bool(each.flags & Flag.COMPLETED) == (kind not in untold), each
            if each.flags & Flag.COMPLETED:
                assert each.duration_ns >= each.nested_ns
            else:
                assert each.duration_ns == each.nested_ns


def test_operations_whose_caller_requested_a_handle_are_marked_asynchronous(
    results: dict[str, list[Recording]],
) -> None:
    """Sends and receives always return handles."""
    for rank in results["forms"]:
        flags = [bool(each.flags & Flag.ASYNC) for each in in_order(rank)]
        assert flags == [False, True, False, False, False, True, True, False, True, False, False]


def test_each_wait_of_the_training_thread_is_a_span(results: dict[str, list[Recording]]) -> None:
    """The wait inside a blocking call is a span too."""
    for rank in results["forms"]:
        waits = Counter(rank.names(Kind.WAIT))
        assert waits["monitored_barrier group=0"] == 1
        assert waits["wait"] >= 8


def meet(file: Path) -> None:
    """Synchronize both ranks by files instead of a collective, because attaching or other programs
    may delay one.
    """
    files = [file.with_suffix(f".{rank}") for rank in range(2)]
    files[dist.get_rank()].touch()
    while not all(each.exists() for each in files):
        time.sleep(0.001)


@scenario
def late_rank(folder: Path) -> Recording:
    with recorded(folder) as recording:
        for step in range(STEPS):
            meet(folder.with_name(f"late-{step}"))
            delay_this_rank(1)
            dist.all_reduce(torch.ones(FLOATS))
            recording.watch.step()
    return recording


def test_wait_for_a_late_rank_is_not_own_time_of_the_punctual_rank(
    results: dict[str, list[Recording]],
) -> None:
    """The wait is subtracted from the punctual rank's own time in the step."""
    punctual, late = results["late_rank"]

    for mine, theirs, issued in zip(
        punctual.of(Kind.WAIT), late.of(Kind.WAIT), late.of(Kind.COLLECTIVE), strict=True
    ):
        assert mine.end_ns >= issued.start_ns
        assert mine.duration_ns > theirs.duration_ns
    for mine, theirs in zip(punctual.steps, late.steps, strict=True):
        assert mine.duration_ns - mine.phase_ns < theirs.duration_ns - theirs.phase_ns
        assert theirs.duration_ns - theirs.phase_ns >= LATE_NS


@scenario
def messages(folder: Path) -> Recording:
    with recorded(folder) as recording:
        for dtype in (torch.float32, torch.half, torch.float32):
            tensor = torch.ones(4, dtype=dtype)
            dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)
    return recording


def test_messages_are_numbered_by_pair_and_direction(results: dict[str, list[Recording]]) -> None:
    """Messages of all data types are counted together."""
    for rank in results["messages"]:
        dtypes = [each.name.split()[2] for each in in_order(rank)]
        assert dtypes == ["dtype=float32", "dtype=float16", "dtype=float32"]
        assert [sequence(each) for each in in_order(rank)] == [0, 1, 2]


# -- code that issues collectives


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.outer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


def train(model: nn.Module, folder: Path, late: int | None = None) -> Recording:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(folder, model, **EVERYTHING) as recording:
        for _ in range(STEPS):
            if late is not None:
                delay_this_rank(late)
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


@scenario
def data_parallel(folder: Path) -> Recording:
    return train(DistributedDataParallel(Model()), folder, late=1)


def test_ddp_reducer_in_the_backward_pass_is_recorded(results: dict[str, list[Recording]]) -> None:
    """DDP issues collectives from C++ inside the backward pass, and waits after the last gradient.

    The time of DDP's wait after the last gradient counts as waiting.
    """
    punctual, late = results["data_parallel"]
    for rank in (punctual, late):
        reduced = rank.of(Kind.COLLECTIVE, "allreduce group=0 dtype=float32")
        # DDP rebuilds its buckets after the first step, so later collectives differ.
        assert len(reduced) >= STEPS
        passes = rank.of(Kind.BACKWARD)
        first = min(reduced, key=lambda each: each.start_ns)
        assert any(whole.start_ns <= first.start_ns <= whole.end_ns for whole in passes)
        tails = [each for each in rank.of(Kind.WAIT) if each.flags & Flag.TAIL]
        assert len(tails) == STEPS
        assert all(any(inside(tail, whole) for whole in passes) for tail in tails)
    waited = [sum(each.duration_ns for each in rank.of(Kind.WAIT)) for rank in (punctual, late)]
    assert waited[0] > waited[1]


def test_module_names_do_not_contain_ddp_or_fsdp2_wrappers(
    results: dict[str, list[Recording]],
) -> None:
    """Modules inside DDP and FSDP2 keep the names from the user's code."""
    for name in ("data_parallel", "fully_sharded"):
        for rank in results[name]:
            assert set(rank.names(Kind.MODULE)) == {"inner", "outer"}
            (root,) = set(rank.names(Kind.FORWARD))
            assert root.removeprefix("forward ").removeprefix("FSDP") == "Model"


@scenario
def fully_sharded(folder: Path) -> Recording:
    model = Model()
    for layer in (model.inner, model.outer):
        fully_shard(layer)
    return train(fully_shard(model), folder)


def test_fsdp2_gathers_scatters_and_waits_are_recorded(results: dict[str, list[Recording]]) -> None:
    """FSDP2 gathers in forward and backward, and scatters gradients.

    FSDP2's waits in Python are spans.
    """
    for rank in results["fully_sharded"]:
        issued = Counter(rank.names(Kind.COLLECTIVE))
        assert issued["reduce_scatter_base group=0 dtype=float32"] == 2 * STEPS
        assert issued["allgather_base group=0 dtype=float32"] >= 2 * STEPS
        assert rank.names(Kind.WAIT)
        assert rank.unbalanced == 0


@scenario
def accumulating(folder: Path) -> Recording:
    model = Model()
    for layer in (model.inner, model.outer):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded(folder, model, **EVERYTHING) as recording:
        for step in range(STEPS):
            for _ in range(2):
                model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 0)
    return recording


def test_both_backward_passes_of_accumulated_fsdp2_gradients_are_recorded(
    results: dict[str, list[Recording]],
) -> None:
    """FSDP2 accumulates into another tensor than the rank's gradient."""
    for rank in results["accumulating"]:
        assert [each.value1 & MICRO_STEPS_MASK for each in rank.of(Kind.STEP)] == [2] * STEPS


@scenario
def compiled(folder: Path) -> Recording:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def summed(x: Tensor) -> Tensor:
        return functional.all_reduce(x.sin(), "sum", "0").cos()

    with recorded(folder) as recording:
        for _ in range(STEPS):
            summed(torch.randn(8))
            recording.watch.step()
    return recording


def test_compiled_collective_is_recorded_once_per_call_without_a_graph_break(
    results: dict[str, list[Recording]],
) -> None:
    """No collective is recorded during compilation."""
    for rank in results["compiled"]:
        assert [(each.name, each.step) for each in rank.of(Kind.COLLECTIVE)] == [
            ("allreduce group=0 dtype=float32", step) for step in range(STEPS)
        ]
        assert [each.step for each in rank.of(Kind.WAIT)] == list(range(STEPS))


@scenario
def other_thread(folder: Path) -> Recording:
    with recorded(folder) as recording:
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(4),))
        thread.start()
        thread.join()
        recording.watch.step()
    return recording


def test_wait_on_another_thread_is_not_time_of_the_training_thread(
    results: dict[str, list[Recording]],
) -> None:
    """A wait on a thread of the user is recorded."""
    for rank in results["other_thread"]:
        assert [each.flags & Flag.OTHER_THREAD for each in rank.of(Kind.COLLECTIVE)] == [
            Flag.OTHER_THREAD
        ]
        assert {each.flags for each in rank.of(Kind.WAIT)} == {Flag.OTHER_THREAD}
        assert (
            rank.steps[0].phase_ns < rank.of(Kind.WAIT)[0].duration_ns + rank.steps[0].duration_ns
        )


@scenario
def raising(folder: Path) -> tuple[Recording, str, str]:
    def message() -> str:
        with pytest.raises(RuntimeError) as caught:
            # The output buffer is too small for two elements of each rank.
            ALL_GATHER(torch.empty(3), torch.ones(2))
        return str(caught.value)

    with recorded(folder) as recording:
        watched = message()
        dist.all_reduce(torch.ones(4))
    return recording, watched, message()


def test_error_of_a_collective_is_passed_on_and_recorded(results: dict[str, list[Any]]) -> None:
    """The user gets the same error as in an unwatched run.

    The collective after the failed one is recorded too.
    """
    for recording, watched, plain in results["raising"]:
        assert plain == watched
        raised, following = recording.of(Kind.COLLECTIVE)
        assert (raised.name, raised.flags) == (
            "allgather_base group=0 dtype=float32",
            Flag.EXCEPTION,
        )
        assert (following.name, following.flags) == (
            "allreduce group=0 dtype=float32",
            Flag.COMPLETED,
        )
        assert recording.unbalanced == 0


# -- attaching and detaching


@scenario
def before_the_group(folder: Path) -> Recording:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    with recorded(folder) as recording:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}-again", 2), rank=rank, world_size=2
        )
        dist.all_reduce(torch.ones(4))
    return recording


def test_group_created_inside_the_watch_is_recorded(results: dict[str, list[Recording]]) -> None:
    for rank in results["before_the_group"]:
        assert "allreduce group=0 dtype=float32" in rank.names(Kind.COLLECTIVE)


@scenario
def another_tool(folder: Path) -> tuple[Recording, int]:
    calls = []
    library = torch.library.Library("c10d", "IMPL")
    rest = torch_dispatcher.get_remaining_keys()

    def theirs(keys: Any, *args: Any) -> Any:
        calls.append(1)
        return torch.ops.c10d.allreduce_.default.redispatch(keys & rest, *args)

    library.impl("allreduce_", theirs, "BackendSelect", with_keyset=True)
    try:
        with recorded(folder) as recording:
            dist.all_reduce(torch.ones(4))
            dist.broadcast(torch.ones(4), 0)
        dist.all_reduce(torch.ones(4))
    finally:
        library._destroy()
    return recording, len(calls)


def test_tap_of_another_tool_is_kept_and_reported(tap: str, results: dict[str, list[Any]]) -> None:
    """Two kernels on one operator do not chain, so the other tool's kernel stays.

    torch's own hooks, which are used without the native tap from torch 2.14 on, need no kernel.
    """
    hooked = tap == "python" and process_group_hooks.are_available()
    reduced = ["allreduce group=0 dtype=float32"] * hooked
    for recording, calls in results["another_tool"]:
        assert calls == 2
        names = recording.names(Kind.COLLECTIVE)
        assert names == [*reduced, "broadcast group=0 dtype=float32 root=0"]
        notes = [note for note in recording.notes if "allreduce_ is not recorded" in note]
        assert bool(notes) != hooked


@scenario
def detached(folder: Path) -> dict[str, Any]:
    wait = Work.wait
    hooked = native_tap.load_tap() is None and process_group_hooks.are_available()
    had = [name for name in list_collective_operators() if is_tapped_by_another_tool(name)]
    with recorded(folder) as recording:
        inside_watch = [
            name
            for name in list_collective_operators()
            if not torch_dispatcher.find_kernel_owner(name)
            and not (hooked and process_group_hooks.is_hooked(name))
        ]
        assert Work.wait is not wait
        work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    tensor = torch.full((4,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    with watch(dir=str(folder), sidecar=False, report="off", collectives=False):
        off = [name for name in list_collective_operators() if is_tapped_by_another_tool(name)]
        off_wait = Work.wait is wait
    return {
        "taps before": had,
        "not tapped inside": inside_watch,
        "taps after": [
            name for name in list_collective_operators() if is_tapped_by_another_tool(name)
        ],
        "taps with collectives=False": off,
        "functional after": is_tapped_by_another_tool("_c10d_functional::wait_tensor"),
        "wait is back": Work.wait is wait and off_wait,
        "sum": tensor.tolist(),
        "recording": recording,
    }


def test_operators_are_tapped_only_inside_the_watch(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    """After the watch, our kernel passes calls on. An operation's handle may outlive the watch."""
    for rank in results["detached"]:
        assert rank["taps before"] == rank["not tapped inside"] == rank["taps after"] == []
        assert rank["taps with collectives=False"] == []
        assert not rank["functional after"]
        assert rank["wait is back"]
        assert rank["sum"] == [1.0] * 4
        assert rank["recording"].names(Kind.COLLECTIVE) == ["allreduce group=0 dtype=float32"]
        assert rank["recording"].of(Kind.WAIT) == []


def test_payload_size_includes_tensors_in_nested_lists() -> None:
    """First arguments of other types do not count."""
    tensor = torch.ones(3, dtype=torch.float64)
    assert count_payload_bytes([[tensor, tensor], [tensor]]) == 72
    assert count_payload_bytes((tensor, None, 3, "text")) == 24
    assert count_payload_bytes(None) == 0
