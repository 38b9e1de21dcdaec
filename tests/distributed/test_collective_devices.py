"""Tests that the device of an operation's tensors decides if the operation's end is recorded, in a
group with several backends.

The device is fake: its tensors have no data, and its backend does nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import run_ranks
from tests.support.long import long
from tests.support.recording import Recording, recorded
from torchlens_perf.commands import tap_build
from torchlens_perf.hooks.collectives.groups import CollectiveGroups
from torchlens_perf.recorder import native_tap, torch_groups
from torchlens_perf.run.ring import Flag, Kind

pytestmark = pytest.mark.distributed

DEVICE = "privateuseone"
BACKENDS = f"cpu:gloo,{DEVICE}:fake"
# Bytes of payloads, which identify the device.
ON_CPU, ON_DEVICE = 16, 32


class OnDevice(torch.Tensor):
    """A tensor that passes through the tap as a CUDA tensor does."""

    @staticmethod
    def __new__(cls) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls, (ON_DEVICE // 4,), dtype=torch.float32, device=f"{DEVICE}:0"
        )

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function.namespace == "c10d", function
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


def one_rank(folder: Path) -> dict[str, Any]:
    """Run both orders of first use in separate groups, then query the groups' backends."""
    # The import registers the backend "fake".
    import torch.testing._internal.distributed.fake_pg
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend()
    # No real backend's class overrides Work.wait().
    del torch._C._distributed_c10d.FakeWork.wait
    results: dict[str, Any] = {}
    for order in ("cpu first", "device first"):
        group = dist.new_group([0, 1], backend=BACKENDS)
        tensors = [torch.ones(ON_CPU // 4), OnDevice()]
        with recorded(folder / order) as recording:
            for tensor in 2 * (tensors if order == "cpu first" else tensors[::-1]):
                dist.all_reduce(tensor, group=group)
            dist.all_reduce(torch.ones(ON_CPU // 4), group=group, async_op=True).wait()
            if dist.get_rank() == 1:
                dist.gather(OnDevice(), dst=0, group=group)
        results[order] = recording
    name = group.group_name
    results["backends"] = [
        torch_groups.get_group_backend(name, device) for device in ("cpu", DEVICE, "cuda")
    ]
    results["name"] = group.name()
    with recorded(folder / "described") as recording:
        groups = CollectiveGroups(recording.watch._session)
        for device in ("cpu", DEVICE, "cuda"):
            told = groups.describe_for_native_tap("c10d::allreduce_", name, "Float", -1, device, -1)
            results[f"described {device}"] = told[3:]
    return results


def one_rank_in_python(folder: Path) -> dict[str, Any]:
    """Run with the Python tap, which is used if the native tap is not built."""
    native_tap.tap_folders = lambda: ()
    assert native_tap.load_tap() is None
    return one_rank(folder)


@pytest.fixture(scope="module", params=["native", *long("python")])
def tap(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        tap_build.build_tap()
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(tap: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(
        one_rank if tap == "native" else one_rank_in_python, tmp_path_factory.mktemp("ranks")
    )


@pytest.mark.parametrize("order", ["cpu first", "device first"])
def test_end_of_an_operation_is_recorded_only_for_cpu_tensors(
    order: str, tap: str, ranks: list[dict[str, Any]]
) -> None:
    """A wait for a device's operation only orders streams, so no end is recorded."""
    for rank in ranks:
        recording: Recording = rank[order]
        reduced = [
            each for each in recording.of(Kind.COLLECTIVE) if each.name.startswith("allreduce")
        ]
        blocking = [each for each in reduced if not each.flags & Flag.ASYNC]
        (asynchronous,) = (each for each in reduced if each.flags & Flag.ASYNC)

        assert len(blocking) == 4
        for each in blocking:
            assert each.value0 in (ON_CPU, ON_DEVICE)
            assert bool(each.flags & Flag.COMPLETED) == (each.value0 == ON_CPU), each
            if each.value0 == ON_DEVICE:
                assert each.duration_ns == each.nested_ns
        assert bool(asynchronous.flags & Flag.COMPLETED) == (tap == "native")
        # The group counts operations of all devices together.
        assert sorted(each.value1 & 0xFFFFFFFF for each in reduced) == list(range(5))


def test_device_of_a_gather_without_outputs_is_that_of_its_input(
    ranks: list[dict[str, Any]],
) -> None:
    """The first argument of such an operation contains no tensor."""
    recording = ranks[1]["cpu first"]
    (gathered,) = (each for each in recording.of(Kind.COLLECTIVE) if each.name.startswith("gather"))

    assert gathered.value0 == 0
    assert not gathered.flags & Flag.COMPLETED


def test_backend_of_a_mixed_group_is_found_by_device(ranks: list[dict[str, Any]]) -> None:
    """The name of a mixed group does not identify its backends."""
    for rank in ranks:
        assert rank["name"] in ("undefined", "custom")
        assert rank["backends"] == ["gloo", "fake", ""]


def test_native_tap_records_end_times_only_for_cpu_operations(ranks: list[dict[str, Any]]) -> None:
    """A future and the end of a wait show the operation's end only on the CPU."""
    for rank in ranks:
        assert rank["described cpu"] == (True, True)
        assert rank[f"described {DEVICE}"] == rank["described cuda"] == (False, False)
