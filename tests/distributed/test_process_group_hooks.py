"""Tests of collectives that are recorded by torch's own hooks, which exist from torch 2.14 on.

tests/distributed/test_hooks_collective.py runs with these hooks too, if the native tap is missing.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import run_ranks
from tests.support.processes import ROOT, run
from tests.support.recording import Recording, recorded
from torchlens_perf.hooks.collectives import process_group_hooks
from torchlens_perf.recorder import native_tap
from torchlens_perf.run.ring import Flag, Kind

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not process_group_hooks.are_available(),
        reason=f"torch {torch.__version__} has no hooks on collectives",
    ),
]
FLOATS = 8


def issue_every_kind(group: dist.ProcessGroup) -> int:
    """Issue each kind of operation once. Return how many were issued."""
    rank, other = dist.get_rank(group), 1 - dist.get_rank(group)
    whole, half = torch.ones(FLOATS), torch.ones(FLOATS // 2)

    def many(size: int) -> list[torch.Tensor]:
        return [torch.ones(size) for _ in range(2)]

    kinds: list[Callable[[], Any]] = [
        lambda: dist.broadcast(whole, 0, group=group),
        lambda: dist.all_reduce(whole, group=group),
        lambda: dist.all_reduce(whole.half(), group=group, async_op=True).wait(),
        lambda: group.allreduce_coalesced(many(FLOATS)).wait(),
        lambda: dist.reduce(whole, 1, group=group),
        lambda: dist.all_gather(many(FLOATS), whole, group=group),
        lambda: dist.all_gather_into_tensor(torch.empty(2 * FLOATS), whole, group=group),
        lambda: group.allgather_into_tensor_coalesced(many(2 * FLOATS), many(FLOATS)).wait(),
        lambda: dist.reduce_scatter(half, many(FLOATS // 2), group=group),
        lambda: dist.reduce_scatter_tensor(half, whole, group=group),
        lambda: group.reduce_scatter_tensor_coalesced(many(FLOATS // 2), many(FLOATS)).wait(),
        lambda: dist.gather(whole, many(FLOATS) if rank == 0 else None, group=group),
        lambda: dist.scatter(whole, many(FLOATS) if rank == 0 else None, group=group),
        lambda: dist.all_to_all_single(torch.empty(FLOATS), whole, group=group),
        lambda: dist.barrier(group=group),
        lambda: dist.monitored_barrier(group=group),
        lambda: (dist.send if rank == 0 else dist.recv)(whole, other, group=group),
        lambda: dist.send(whole, other, group=group) if rank else dist.recv(whole, group=group),
    ]
    for issue in kinds:
        issue()
    return len(kinds)


def every_kind(folder: Path) -> dict[str, Any]:
    """Record every kind with this way in two groups, and calls after the watch."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    calls: Counter[str] = Counter()
    groups[0].register_pre_hook(1, lambda arguments: calls.update([arguments.name.name]))
    with recorded(folder) as recording:
        issued = sum(map(issue_every_kind, groups))
        inside = dict(calls)
    tensor = torch.full((4,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    recording.metadata["group"] = groups[1].group_name
    return {
        "recording": recording, "issued": issued, "other tool": inside, "sum": tensor.tolist(),
        "hooked": len(process_group_hooks._hooked_groups),
        "recording after": process_group_hooks._GroupHooks.recording,
    }  # fmt: skip


def every_kind_by_hooks(folder: Path) -> dict[str, Any]:
    native_tap.tap_folders = lambda: ()
    assert native_tap.load_tap() is None
    result, rank = every_kind(folder), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    result["hooked at the end"] = len(process_group_hooks._hooked_groups)
    # run_ranks() ends with a barrier.
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}-again", 2), rank=rank, world_size=2
    )
    return result


def every_kind_by_python_tap(folder: Path) -> dict[str, Any]:
    process_group_hooks.are_available = lambda: False
    native_tap.tap_folders = lambda: ()
    assert native_tap.load_tap() is None
    return every_kind(folder)


def every_kind_by_native_tap(folder: Path) -> dict[str, Any]:
    assert native_tap.load_tap() is not None
    return every_kind(folder)


@pytest.fixture(scope="module")
def by_hooks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(every_kind_by_hooks, tmp_path_factory.mktemp("hooks"))


def describe(recording: Recording) -> list[tuple[str, int, int, bool]]:
    """Return name, bytes, number and asynchrony of each operation, in the order of issue."""
    issued = sorted(recording.of(Kind.COLLECTIVE), key=lambda each: each.start_ns)
    return [
        (each.name, each.value0, each.value1 & 0xFFFFFFFF, bool(each.flags & Flag.ASYNC))
        for each in issued
    ]


@pytest.mark.parametrize("way", [every_kind_by_native_tap, every_kind_by_python_tap])
def test_hooks_record_the_same_operations_as_the_taps(
    way: Callable[[Path], Any], by_hooks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Ranks of one job may record in different ways, and their operations are matched."""
    if way is every_kind_by_native_tap and native_tap.load_tap() is None:
        pytest.skip("the native tap is not built for this torch")
    for hooked, tapped in zip(by_hooks, run_ranks(way, tmp_path), strict=True):
        assert describe(hooked["recording"]) == describe(tapped["recording"])


def test_hooks_record_each_operation_once(by_hooks: list[dict[str, Any]]) -> None:
    """Hooks of other tools on the same group are called too."""
    for rank in by_hooks:
        names = describe(rank["recording"])
        assert len(names) == rank["issued"]
        assert rank["recording"].unbalanced == rank["recording"].internal_errors == 0
        second = f"group={rank['recording'].metadata['group']}"
        assert sum(second in name for name, *_ in names) == rank["issued"] // 2
        assert sum(rank["other tool"].values()) == rank["issued"] // 2 - 1  # monitored_barrier


def test_hooks_do_nothing_after_the_watch_and_keep_no_group(
    by_hooks: list[dict[str, Any]],
) -> None:
    """Registered hooks stay with their group: torch's table of hooks has no lock."""
    for rank in by_hooks:
        assert rank["sum"] == [1.0] * 4
        assert rank["recording after"] is None
        assert (rank["hooked"], rank["hooked at the end"]) == (2, 0)


PROGRAM = """
import os
import torch, torch.distributed as dist
import torchlens_perf as perf
from torchlens_perf.hooks.collectives.process_group_hooks import _hooked_groups
from torchlens_perf.recorder import native_tap
native_tap.tap_folders = lambda: ()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
watch = perf.watch(model, dir="runs", sidecar=False, report="off")
with watch:
    model(torch.ones(2, 4)).sum().backward()
    work = dist.all_reduce(torch.ones(4), async_op=True)
assert len(_hooked_groups) == 1
"""
ENDS = {
    "destroyed": "dist.destroy_process_group()",
    "not destroyed": "",
    "work in progress": "work = dist.all_reduce(torch.ones(1 << 20), async_op=True)",
    "forked child": """
with perf.watch(model, dir="runs", sidecar=False, report="off"):
    child = os.fork()
    if child == 0:
        raise SystemExit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.all_reduce(torch.ones(4))
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_hooks_do_not_disturb_the_end_of_the_process(end: str, tmp_path: Path) -> None:
    """torch frees hooks with their group, which may be after the interpreter's end."""
    program = [sys.executable, "-X", "faulthandler", "-c", PROGRAM + ENDS[end]]
    done = run(program, tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
