"""Tests of NCCL times from the recording to the joined collective: two ranks, a device without
data, and a fake NCCL.

Below the tap (the hook on collectives), a call of the fake NCCL replaces c10d's operation on the
device. The kernel of the fake NCCL's call takes a planted time.

On the last rank the kernel begins later than on the other, as if it followed more work.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.device.fake_nccl import NCCL_S_CLOCK_NS, SEEN, FakeNccl, compile_nccl
from tests.support.gloo import run_ranks
from tests.support.long import long
from tests.support.recording import Recording, recorded, records_of
from torchlens_perf.analysis.collectives.join import CollectiveJoin
from torchlens_perf.commands import tap_build
from torchlens_perf.cuda import device_times as sections
from torchlens_perf.cuda.stalls import StallMarker
from torchlens_perf.diagnosis.facts.collective_rows import collective_rows
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl import NcclHook
from torchlens_perf.recorder import native_tap
from torchlens_perf.run.ring import Flag, Kind

pytestmark = [
    pytest.mark.distributed,
]

DEVICE, RANKS, ROUNDS = "privateuseone", 2, 5
MILLISECOND = 1_000_000
LATE_NS = 20 * MILLISECOND
# This time is longer than a busy host delays a call.
TRANSFER_NS = 100 * MILLISECOND


class OnDevice(torch.Tensor):
    """A tensor that passes through the tap as a CUDA tensor does."""

    @staticmethod
    def __new__(cls) -> OnDevice:
        return torch.Tensor._make_wrapper_subclass(
            cls, (8,), dtype=torch.float32, device=f"{DEVICE}:0"
        )

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


class PlantedClock:
    """A device clock that advances by a millisecond with each mark and reports at once.

    The device is far behind the host, and therefore no kernel begins before its call, even on a
    busy host.
    """

    name = "planted"
    stream = 0

    def __init__(self) -> None:
        self.base_ns, self.marks = time.monotonic_ns() + 10_000 * MILLISECOND, 0

    def mark(self, only_on: Any = None) -> int:
        self.marks += 1
        return self.marks

    def span(self, begin: int, end: int) -> tuple[int, int]:
        return self.base_ns + begin * MILLISECOND, (end - begin) * MILLISECOND


def one_rank(folder: Path) -> dict[str, Any]:
    """Return the records with the plugin and with events."""
    # The import registers the backend "fake".
    import torch.testing._internal.distributed.fake_pg
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend()
    # No real backend's class overrides Work.wait().
    del torch._C._distributed_c10d.FakeWork.wait
    rank = dist.get_rank()
    own = folder / f"nccl-{rank}"
    own.mkdir()
    nccl = FakeNccl(folder / "libnccl.so", own, 6)
    nccl_plugin.find_plugin_file, nccl_plugin.load_plugin = lambda: nccl.file, lambda: nccl.plugin  # type: ignore[assignment]
    group = dist.new_group(list(range(RANKS)), backend=f"cpu:gloo,{DEVICE}:fake")
    under_way: list[int] = []

    def all_reduce(tensors: Any, *_: Any) -> Any:
        """Replace the backend's operation below the tap."""
        under_way.append(nccl.collective(context, rank, 4))
        return tensors, torch._C._distributed_c10d.FakeWork().boxed()

    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", all_reduce, "PrivateUse1", allow_override=True)
    with recorded(folder / "plugin") as by_plugin:
        session = by_plugin.watch._session
        session.hooks.attach("nccl", lambda: NcclHook("auto", nccl=(2, 29, 7)).attach(session))
        assert nccl.load() == 6
        context = nccl.communicator(RANKS, rank)
        for _ in range(ROUNDS):
            dist.all_reduce(OnDevice(), group=group, async_op=True)
            # The two ranks have issued the operation before either kernel begins.
            dist.barrier()
            end_ns = torch.tensor([time.monotonic_ns() + LATE_NS + TRANSFER_NS + 5 * MILLISECOND])
            # All kernels end together.
            dist.broadcast(end_ns, 0)
            last_ns = int(end_ns)
            first_ns = last_ns - TRANSFER_NS - (0 if rank == RANKS - 1 else LATE_NS)
            time.sleep(max(0, last_ns - time.monotonic_ns()) / 1e9)
            nccl.kernel(
                context, under_way.pop(), first_ns + NCCL_S_CLOCK_NS, last_ns + NCCL_S_CLOCK_NS
            )
            by_plugin.watch.step()
    mask_afterwards = nccl.mask

    with recorded(folder / "events") as by_events:
        session = by_events.watch._session
        session.hooks.attach("nccl", lambda: NcclHook("auto", nccl=(2, 26, 2)).attach(session))
        clock: Any = PlantedClock()
        stalls = StallMarker(session, clock, lambda *span: None)
        session.clocks.use_clock(clock, stalls)
        sections.set_collective_timer(stalls.begin_collective)
        dist.all_reduce(OnDevice(), group=group)
        dist.all_reduce(OnDevice(), group=group, async_op=True)
        dist.all_reduce(torch.ones(2), group=group)
        by_events.watch.step()
        sections.set_collective_timer(None)
    library._destroy()
    nccl.finalize(context)
    told = {
        "mask": mask_afterwards,
        "marks": session.clocks.current.marks,
        "placed": {device for _, device in session.metadata.device_groups},
    }
    return {"plugin": by_plugin, "events": by_events, **told}


def one_rank_in_python(folder: Path) -> dict[str, Any]:
    """Run with the Python tap, which is used if the native tap is not built."""
    native_tap.tap_folders = lambda: ()
    return one_rank(folder)


@pytest.fixture(scope="module", params=["native", *long("python")])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    if request.param == "native":
        tap_build.build_tap()
    folder = tmp_path_factory.mktemp("ranks")
    compile_nccl(folder / "libnccl.so", "-shared", "-fPIC")
    return run_ranks(one_rank if request.param == "native" else one_rank_in_python, folder, RANKS)


def reduced(recording: Recording) -> list[Any]:
    return [each for each in recording.of(Kind.COLLECTIVE) if each.name.startswith("allreduce")]


def test_asynchronous_all_reduce_is_recorded_with_its_kernel_time(
    ranks: list[dict[str, Any]],
) -> None:
    """Each operation is recorded once, with its time on the device."""
    for rank, told in enumerate(ranks):
        found = reduced(told["plugin"])
        assert [each.value1 & 0xFFFFFFFF for each in found] == list(range(ROUNDS))
        assert {each.flags for each in found} == {Flag.ASYNC | Flag.COMPLETED | Flag.DEVICE}
        planted_ns = TRANSFER_NS + (0 if rank == RANKS - 1 else LATE_NS)
        assert {each.duration_ns for each in found} == {planted_ns}
        # The duration is the host time of the call.
        assert all(each.nested_ns < planted_ns for each in found)
        assert told["mask"] == SEEN


def test_late_rank_is_named_from_joined_kernels(ranks: list[dict[str, Any]]) -> None:
    """Joined kernels give the last rank, its delay, and the transfer time after all ranks have
    arrived.
    """
    join = CollectiveJoin()
    for rank, told in enumerate(ranks):
        recording = told["plugin"]
        join.set_ranks([rank])
        join.add_records(
            rank, records_of(recording), recording.interned, recording.metadata["groups"]
        )
    join.join()
    (row,) = (row for row in collective_rows([join]) if row["operation"] == "allreduce")

    assert (row["joined"], row["by_device"], row["slowest_rank"]) == (
        ROUNDS,
        RANKS * ROUNDS,
        RANKS - 1,
    )
    assert row["by_rank"][str(RANKS - 1)]["last"] == ROUNDS
    assert row["by_rank"]["0"]["overlapped_wait_s"] == pytest.approx(ROUNDS * LATE_NS / 1e9)
    assert row["transfer_s"]["p50_s"] == pytest.approx(TRANSFER_NS / 1e9, rel=0.05)
    assert any("a rank's kernel began" in text for text in row["cannot_tell"])


def test_end_times_of_collectives_come_from_events_without_the_plugin(
    ranks: list[dict[str, Any]],
) -> None:
    """The end is known for operations that the caller waits for, and unknown for asynchronous ones.

    On CPUs, the recorded end is that of the host.
    """
    for told in ranks:
        waited_for, asynchronous, on_cpu = sorted(
            reduced(told["events"]), key=lambda each: each.value1 & 0xFFFFFFFF
        )
        assert (waited_for.flags, waited_for.duration_ns) == (
            Flag.COMPLETED | Flag.DEVICE,
            MILLISECOND,
        )
        assert not asynchronous.flags & Flag.COMPLETED
        assert on_cpu.flags & (Flag.COMPLETED | Flag.DEVICE) == Flag.COMPLETED
        assert told["marks"] == 2
        assert told["placed"] == {DEVICE}
