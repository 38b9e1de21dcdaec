"""The NCCL plugin against an NCCL without a GPU: what becomes of each collective's record, and what is counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.nccl_plugin import costs_ns
from tests.support.collective_rig import on_thread, sequence
from tests.support.device.fake_nccl import INTERFACES, ON, SEEN, FakeNccl, NcclRig, compile_nccl
from tests.support.recorders import IDS, IMPLEMENTATIONS
from torchlens_perf.recorder import nccl_plugin
from torchlens_perf.recorder.nccl_plugin import Cause
from torchlens_perf.recorder.recorder import End
from torchlens_perf.run.ring import Flag

pytestmark = pytest.mark.skipif(IDS[0] != "native", reason="the plugin is not built: there is no C compiler")

TIMED = Flag.ASYNC | Flag.COMPLETED | Flag.DEVICE
MAX_OPERATIONS, MAX_TIMED = 4096, 1024  # native/nccl_operations.c, native/collective_parts.c
NATIVE = Path(nccl_plugin.__file__).parents[1] / "native"


@pytest.fixture
def make(nccl_library: Path, tmp_path: Path) -> Iterator[Callable[[int], NcclRig]]:
    made: list[NcclRig] = []

    def rig(interface: int) -> NcclRig:
        made.append(NcclRig(IMPLEMENTATIONS[0], tmp_path, nccl_library, interface))
        return made[-1]

    yield rig
    for each in made:
        each.close()


@pytest.fixture(params=INTERFACES)
def rig(request: pytest.FixtureRequest, make: Callable[[int], NcclRig]) -> NcclRig:
    """With each of the interfaces."""
    return make(request.param)


def ends(rig: NcclRig) -> list[tuple[int, Flag]]:
    """Which operations were written since the last look, and with which flags."""
    return [(sequence(each), Flag(each["flags"])) for each in rig.collectives()]


def test_kernel_becomes_the_collectives_time(rig: NcclRig) -> None:
    """From the first channel's start to the last one's end, on the host's line; the rest as the tap has it."""
    issued_ns = rig.recorder.now_ns()
    task = rig.collective(7, channels=3)
    assert rig.collectives() == []
    assert [(each.issued, each.ended) for each in rig.reader.groups()] == [(8, 0)]
    first_ns = rig.device_ns()
    for channel in range(3):
        rig.nccl.kernel_began(rig.context, task, channel, first_ns + 10 * (2 - channel))
    for channel in range(3):
        rig.nccl.kernel_ended(task, channel, first_ns + 5_000 + channel)
    learnt_ns = rig.recorder.now_ns()
    (record,) = rig.collectives()

    assert (record["flags"], record["duration_ns"], record["value0"]) == (TIMED, 5_002, 4096)
    assert issued_ns <= record["start_ns"] + record["duration_ns"] <= learnt_ns
    assert 0 < record["nested_ns"] < learnt_ns - issued_ns  # the issuing call's own
    assert [(each.issued, each.ended) for each in rig.reader.groups()] == [(8, 8)]
    assert rig.nccl.plugin.counters()._replace(communicators=0) == (0, 0, 0, 0, 0, 0, 0)


def test_kernel_that_ends_before_the_call_returns(rig: NcclRig) -> None:
    """A short one: the record waits for the call."""
    issued = rig.issue(0)
    task = rig.nccl.collective(rig.context, 0, 1)
    on_thread(rig.kernel, task)
    assert rig.collectives() == []
    rig.recorder.returned(issued, int(End.UNKNOWN))
    assert ends(rig) == [(0, TIMED & ~Flag.ASYNC)]


def test_host_line(make: Callable[[int], NcclRig]) -> None:
    """An end of which the host learns late is put where it was, by others of which it learnt at once."""
    rig = make(6)
    for number in range(20):
        rig.kernel(rig.collective(number))
    task, done = rig.collective(20), threading.Event()
    ended_ns = rig.recorder.now_ns() + 1_000
    device_ns = rig.device_ns(1_000)
    done.wait(0.02)
    rig.nccl.kernel(rig.context, task, device_ns - 1_000, device_ns)
    *at_once, late = rig.collectives()
    learnt_after_ns = rig.recorder.now_ns() - ended_ns

    assert abs(late["start_ns"] + late["duration_ns"] - ended_ns) < learnt_after_ns / 5
    assert {each["duration_ns"] for each in (*at_once, late)} == {1_000}


def test_proxy_thread_out_of_order(rig: NcclRig) -> None:
    """Two operations whose channels end in any order, told by another thread: each gets its own times."""
    tasks = [rig.collective(number) for number in range(2)]
    base_ns, begun_ns = rig.device_ns(), rig.recorder.now_ns()

    def proxy() -> None:
        for index in (1, 0):
            for channel in (1, 0):
                rig.nccl.kernel_began(rig.context, tasks[index], channel, base_ns + 100 * index + channel)
        for channel, index in ((0, 1), (1, 0), (0, 0), (1, 1)):
            rig.nccl.kernel_ended(tasks[index], channel, base_ns + 1_000 * (index + 1) + channel)

    on_thread(proxy)
    records = {sequence(each): each for each in rig.collectives()}
    assert {number: each["duration_ns"] for number, each in records.items()} == {0: 1_001, 1: 1_901}
    drift_ns = (rig.recorder.now_ns() - begun_ns) / 2000 + 1  # of the line, between the two ends
    assert abs(records[1]["start_ns"] - records[0]["start_ns"] - 100) <= drift_ns


def test_stale_handles(rig: NcclRig) -> None:
    """What is told of an operation that is over changes nothing, also when its place is another one's."""
    task = rig.collective(0)
    rig.kernel(task)
    for _ in range(MAX_OPERATIONS - 1):
        rig.kernel(rig.collective(1, channels=1))
    following = rig.collective(2, channels=1)
    rig.records()
    before = rig.nccl.plugin.counters().stale
    rig.nccl.kernel(rig.context, task, 1, 2)
    rig.nccl.kernel_ended(task, 0, 3)
    assert rig.nccl.plugin.counters().stale > before
    assert rig.collectives() == []
    rig.kernel(following)
    assert ends(rig) == [(2, TIMED)]


def test_lost_operation(rig: NcclRig) -> None:
    """One whose kernel tells of no end has none when its communicator ends; its group is not said to have ended."""
    rig.kernel(rig.collective(0))
    rig.collective(1)
    rig.nccl.finalize(rig.context)

    assert ends(rig) == [(0, TIMED), (1, Flag.ASYNC)]
    assert rig.nccl.plugin.counters().lost == rig.recorder.lost_ends == 1
    assert [(each.issued, each.ended) for each in rig.reader.groups()] == [(2, 1)]


def test_more_under_way_than_are_remembered(rig: NcclRig) -> None:
    """The oldest are recorded without an end, and counted; what ends later is another's business."""
    tasks = [rig.collective(number, channels=1) for number in range(MAX_TIMED + 3)]
    assert ends(rig) == [(number, Flag.ASYNC) for number in range(3)]
    assert rig.recorder.lost_ends == 3
    for task in tasks:
        rig.kernel(task)
    assert ends(rig) == [(number, TIMED) for number in range(3, MAX_TIMED + 3)]


def test_more_launched_than_are_remembered(make: Callable[[int], NcclRig]) -> None:
    """An all-to-all of so many ranks: the parts that were lost leave it without an end, once all others are over."""
    rig = make(6)
    issued = rig.issue(0)
    rig.nccl.group_start()
    tasks = []
    for _ in range(17):
        tasks += [rig.nccl.call(rig.context, 1, 1, 0) for _ in range(250)]
        rig.nccl.group_end(rig.context, 0, 1)
    rig.recorder.returned(issued, int(End.UNKNOWN))
    lost = 17 * 250 - MAX_OPERATIONS
    assert rig.nccl.plugin.counters().lost == lost
    for task in tasks:
        assert rig.collectives() == []
        rig.kernel(task)
    assert ends(rig) == [(0, Flag(0))]
    assert rig.recorder.lost_ends == 1


def test_full_ring(rig: NcclRig) -> None:
    """Records of the proxy thread overwrite the oldest as all others do, and readers count what they missed."""
    for number in range(20_000):
        rig.kernel(rig.collective(number, channels=1))
    batch = rig.reader.read()
    assert len(batch.records) == rig.reader.capacity == 1 << 14
    assert batch.lost == 20_000 - (1 << 14)
    assert (batch.records["flags"] == int(TIMED)).all()


def test_off_and_on(rig: NcclRig) -> None:
    """NCCL tells nothing of what is issued while it is off, and the record is as without the plugin."""
    seen, timed = (rig.nccl.expected_mask(timing=timing) for timing in (False, True))
    assert rig.nccl.mask == timed
    before = rig.collective(0)
    rig.nccl.plugin.switch(on=False)
    assert rig.nccl.mask == seen
    rig.collective(1)
    assert ends(rig) == [(1, Flag.ASYNC)]
    rig.kernel(before)
    another = rig.nccl.communicator()
    assert rig.nccl.mask == seen  # also in one that is made meanwhile
    rig.nccl.plugin.switch(on=True)
    rig.kernel(rig.collective(2))
    assert ends(rig) == [(0, TIMED), (2, TIMED)]
    rig.nccl.finalize(another)
    rig.nccl.plugin.switch(on=False)
    assert rig.nccl.mask == seen
    assert rig.nccl.plugin.counters()._replace(communicators=0) == (0, 0, 0, 0, 0, 0, 0)


def test_seen_before_it_is_attached(nccl_library: Path, tmp_path: Path) -> None:
    """From NCCL's first communicator on, whoever watches: what the two sides count otherwise must not be missed."""
    nccl = FakeNccl(nccl_library, tmp_path, 6)
    os.environ[nccl_plugin.VARIABLE] = str(nccl.file)
    try:
        nccl.load()
    finally:
        del os.environ[nccl_plugin.VARIABLE]
    context = nccl.communicator()
    assert nccl.mask == SEEN
    nccl.finalize(context)


def test_mask_of_an_nccl_that_is_gone(make: Callable[[int], NcclRig]) -> None:
    """After its last communicator NCCL's mask is left alone: it may have been unloaded."""
    rig = make(6)
    rig.nccl.finalize(rig.context)
    rig.nccl.plugin.switch(on=False)
    assert rig.nccl.mask == ON


def test_several_kernels_of_one_collective(rig: NcclRig) -> None:
    """A list of tensors, or a send to each peer: it lasts from the first one's start to the last one's end."""
    issued = rig.issue(0)
    rig.nccl.group_start()
    tasks = [rig.nccl.call(rig.context, peer, 2, 0) for peer in (1, 2, 3)]
    rig.nccl.group_end(rig.context, 0, 1)
    rig.recorder.returned(issued, int(End.UNKNOWN))
    began_ns = rig.device_ns()
    time.sleep(0.02)  # no kernel begins before it was issued
    ended_ns = rig.device_ns()
    for index, task in enumerate(tasks):
        assert rig.collectives() == []
        rig.nccl.kernel(rig.context, task, began_ns + 100_000 * index, ended_ns - 1_000_000 * index)
    (record,) = rig.collectives()
    # The first kernel's start and the last one's end are laid on the host's line when each is told: on a busy machine,
    # some time apart.
    assert record["duration_ns"] == pytest.approx(ended_ns - began_ns, rel=0.1)
    assert record["flags"] == Flag.COMPLETED | Flag.DEVICE


@pytest.mark.parametrize("interface", [5, 6])
def test_group_that_is_launched_later(interface: int, make: Callable[[int], NcclRig]) -> None:
    """torch's coalescing: two calls in a group, launched together when neither is being issued any more."""
    rig = make(interface)
    rig.nccl.group_start()
    tasks = []
    for number in range(2):
        issued = rig.issue(number)
        tasks.append(rig.nccl.call(rig.context, -1, 1, 0))
        rig.recorder.returned(issued, int(End.UNKNOWN))
    rig.nccl.group_end(rig.context, 0, 1)
    assert rig.collectives() == []
    for task in reversed(tasks):
        rig.kernel(task)
    assert [number for number, _ in ends(rig)] == [1, 0]


def test_group_that_is_launched_later_with_interface_4(make: Callable[[int], NcclRig]) -> None:
    """Which tells of it only when it is launched: that is counted, and the records are as without the plugin."""
    rig = make(4)
    rig.nccl.group_start()
    issued = rig.issue(0)
    rig.nccl.call(rig.context, -1, 1, 0)
    rig.recorder.returned(issued, int(End.UNKNOWN))
    rig.nccl.group_end(rig.context, 0, 1)
    assert ends(rig) == [(0, Flag(0))]
    assert rig.nccl.plugin.counters()[:4] == (1, 0, 1, 0)


@pytest.mark.parametrize("interface", [5, 6])
def test_what_runs_as_no_kernel_of_its_own(interface: int, make: Callable[[int], NcclRig]) -> None:
    """Copy engines and symmetric memory: NCCL tells of the call and of no kernel. Nothing is waited for, or lost."""
    rig = make(interface)
    issued = rig.issue(0)
    rig.nccl.group_start()
    rig.nccl.call(rig.context, -1, 2, 0)
    rig.nccl.group_end(rig.context, 0, 0)
    rig.recorder.returned(issued, int(End.UNKNOWN))
    assert ends(rig) == [(0, Flag(0))]
    assert rig.recorder.lost_ends == 0
    rig.kernel(rig.collective(1))
    assert ends(rig) == [(1, TIMED)]


def test_issued_elsewhere(rig: NcclRig) -> None:
    """Operations of another library, or of a thread that issues nothing of torch, are counted and not recorded."""
    rig.kernel(int(rig.nccl.collective(rig.context, 0, 2)))
    issued = rig.issue(0)
    on_thread(rig.nccl.collective, rig.context, 0, 2)
    rig.recorder.returned(issued, int(End.UNKNOWN))
    assert ends(rig) == [(0, Flag(0))]
    counters = rig.nccl.plugin.counters()
    assert (counters.unnamed, counters.elsewhere) == ((2, 0) if rig.nccl.interface == 4 else (0, 2))


@pytest.mark.parametrize("interface", [5, 6])
def test_more_in_a_group_than_are_remembered(interface: int, make: Callable[[int], NcclRig]) -> None:
    """The 65th collective of one group of NCCL has no end, and is counted, once."""
    rig = make(interface)
    rig.nccl.group_start()
    tasks = []
    for number in range(66):
        issued = rig.issue(number)
        tasks += [rig.nccl.call(rig.context, -1, 1, 0) for _ in range(2)]
        rig.recorder.returned(issued, int(End.UNKNOWN))
    rig.nccl.group_end(rig.context, 0, 1)
    assert ends(rig) == [(64, Flag(0)), (65, Flag(0))]
    for task in tasks[: 2 * 64]:
        rig.kernel(task)
    assert [number for number, _ in ends(rig)] == list(range(64))
    assert rig.nccl.plugin.counters().crowded == 2


def test_device_without_a_clock(rig: NcclRig) -> None:
    """The host's times of what NCCL told, which are not called the device's."""
    task = rig.collective(0)
    before_ns = rig.recorder.now_ns()
    rig.nccl.kernel(rig.context, task, 0, 0)
    (record,) = rig.collectives()
    assert record["flags"] == Flag.ASYNC | Flag.COMPLETED
    assert before_ns <= record["start_ns"] <= record["start_ns"] + record["duration_ns"] <= rig.recorder.now_ns()


def test_end_without_a_clock(rig: NcclRig) -> None:
    """A start by the device's clock and an end without one (nccl#1961) are no duration."""
    task = rig.collective(0, channels=1)
    rig.nccl.kernel(rig.context, task, rig.device_ns(), 0)
    assert ends(rig) == [(0, Flag.ASYNC)]


def test_begun_kernels_show_in_the_ring(rig: NcclRig) -> None:
    """As soon as NCCL tells of the first channel: who hangs has one that has not begun."""

    def begun() -> list[int]:
        return [each.began for each in rig.reader.groups()]

    first = rig.collective(7, channels=2)
    second = rig.collective(8, channels=2)
    assert begun() == [0]
    rig.nccl.kernel_began(rig.context, first, 1, rig.device_ns())
    assert begun() == [8]
    rig.nccl.kernel_began(rig.context, first, 0, rig.device_ns())
    rig.nccl.kernel_began(rig.context, second, 0, rig.device_ns())
    assert begun() == [9]
    rig.recorder.returned(rig.issue(9), int(End.BY_CALLBACK))  # of which NCCL tells nothing
    assert begun() == [0], "the last one that is known says nothing of the last one that was issued"
    third = rig.collective(10)
    rig.nccl.kernel_began(rig.context, third, 0, rig.device_ns())
    assert begun() == [11]
    rig.kernel(rig.collective(11), -1)  # impossible: timing is given up
    assert begun() == [0]


@pytest.mark.parametrize("wrong", ["began before it was issued", "ended before it began"])
def test_times_of_another_kernel(wrong: str, rig: NcclRig) -> None:
    """NCCL has lost count (nccl#2369): from then on none of its times is believed, and it is asked for none."""
    rig.kernel(rig.collective(0))
    earlier_ns = rig.device_ns() - 50_000_000
    task, under_way = rig.collective(1), rig.collective(2)
    if wrong == "ended before it began":
        now_ns = rig.device_ns()
        rig.nccl.kernel(rig.context, task, now_ns, now_ns - 500)
    else:
        rig.nccl.kernel(rig.context, task, earlier_ns, earlier_ns + 10)
    assert rig.nccl.mask == 0
    rig.kernel(under_way)
    rig.collective(3)
    assert ends(rig) == [(0, TIMED), (1, Flag.ASYNC), (2, Flag.ASYNC), (3, Flag.ASYNC)]
    assert (rig.nccl.plugin.counters().given_up, rig.recorder.lost_ends) == (Cause.IMPOSSIBLE_TIME, 0)
    rig.nccl.communicator()
    rig.nccl.plugin.switch(on=True)
    assert rig.nccl.mask == 0


def test_lines_of_several_devices(make: Callable[[int], NcclRig]) -> None:
    """Each communicator has its own device's clock: one that is a second behind, beside another or in its place."""
    rig = make(6)

    def behind(number: int) -> None:
        rig.context = rig.nccl.communicator()
        task = rig.collective(number)
        behind_ns = rig.device_ns(-1_000_000_000)
        rig.nccl.kernel(rig.context, task, behind_ns - 1_000, behind_ns)

    rig.kernel(rig.collective(0))
    first = rig.context
    behind(1)
    rig.context = first
    rig.kernel(rig.collective(2))
    rig.nccl.finalize(first)
    behind(3)
    assert ends(rig) == [(number, TIMED) for number in range(4)]
    assert rig.nccl.plugin.counters().given_up == Cause.NOT_GIVEN_UP


def test_host_line_after_a_gap(make: Callable[[int], NcclRig]) -> None:
    """A second and more without an end: the next one may be told late, and is still put where it was, but for what the
    clocks may have drifted apart meanwhile."""
    rig = make(6)
    rig.kernel(rig.collective(0))
    idle = threading.Event()
    idle.wait(1.2)
    task = rig.collective(1)
    ended_ns = rig.recorder.now_ns() + 1_000
    device_ns = rig.device_ns(1_000)
    idle.wait(0.02)
    rig.nccl.kernel(rig.context, task, device_ns - 1_000, device_ns)
    learnt_after_ns = rig.recorder.now_ns() - ended_ns
    late = rig.collectives()[-1]
    assert abs(late["start_ns"] + late["duration_ns"] - ended_ns) < learnt_after_ns / 5


def test_call_that_raises(rig: NcclRig) -> None:
    """It is recorded at once, with what it raised, and its kernel says nothing more."""
    issued = rig.issue(0)
    task = rig.nccl.collective(rig.context, 0, 1)
    rig.recorder.returned(issued, int(End.UNKNOWN), int(Flag.EXCEPTION))
    assert ends(rig) == [(0, Flag.EXCEPTION)]
    rig.kernel(task)
    assert rig.collectives() == []


def test_watch_ends_first(rig: NcclRig) -> None:
    """What is under way is recorded without an end; its kernel says nothing to the next watch, or to nobody."""
    task = rig.collective(0)
    rig.recorder.close()
    assert ends(rig) == [(0, Flag.ASYNC)]
    rig.kernel(task)
    rig.nccl.plugin.detach()
    rig.kernel(rig.nccl.collective(rig.context, 0, 1))
    assert rig.collectives() == []


def test_another_version_of_the_recorder(rig: NcclRig) -> None:
    """A plugin and a recorder that were not built together do not write into each other."""
    import ctypes

    other = (ctypes.c_int * 32)(2)
    assert rig.nccl.plugin._attach(ctypes.addressof(other)) == 0
    rig.kernel(rig.collective(0))
    assert ends(rig) == [(0, TIMED)]


def test_cost(make: Callable[[int], NcclRig]) -> None:
    """Against two readings of the clock and a store: for 1 and 32 channels, seen only, given up. Twice of it."""
    found = {name: min(values) for name, values in costs_ns(make(6), rounds=15, calls=500).items()}
    floor_ns = min(IMPLEMENTATIONS[0].floor_ns(10_000) for _ in range(10)) / 10_000
    floors = {name: (found[name] - found[f"{name} idle"]) / floor_ns for name in ("1", "32", "between", "off")}
    assert floors["1"] < 8, floors
    assert floors["32"] < 40, floors
    assert floors["between"] < 2, floors
    assert floors["off"] < 1, floors


@pytest.mark.slow
def test_thread_sanitizer(tmp_path: Path) -> None:
    """Three communicators with a proxy thread each; one switches, makes others and gives up: all claims are told."""
    compiler = shutil.which("gcc") or "cc"
    sources = [str(NATIVE / name) for name in ("nccl_profiler.c", "nccl_operations.c", "nccl_mask.c")]
    flags = ["-std=gnu11", "-g", "-O1", "-fsanitize=thread", "-fvisibility=hidden", "-shared", "-fPIC"]
    plugin = tmp_path / "plugin.so"
    built = subprocess.run([compiler, *flags, "-o", str(plugin), *sources], capture_output=True, text=True)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("the compiler came without the thread sanitizer's library")
    assert built.returncode == 0, built.stderr
    program = compile_nccl(tmp_path / "program", "-g", "-fsanitize=thread", "-DPROGRAM")
    environ = {**os.environ, nccl_plugin.VARIABLE: str(plugin), "TSAN_OPTIONS": "exitcode=66"}
    run = subprocess.run([str(program)], env=environ, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stdout + run.stderr
    claimed, told, lost = (int(word) for word in run.stdout.split()[1::2])
    assert claimed == told > 1_000
    assert lost <= told // 100  # of those that another thread held just then: counted
