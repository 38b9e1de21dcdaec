"""Tests of the NCCL plugin with an NCCL without a GPU: records of collectives, and counters."""

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
from tests.support.native_facts import measure_floor_ns
from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.hooks.collectives.nccl_plugin import GiveUpCause
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Flag

TIMED = Flag.ASYNC | Flag.COMPLETED | Flag.DEVICE
# The values in native/nccl_operations.c and native/collective_parts.c.
MAX_OPERATIONS, MAX_TIMED = 4096, 1024
NATIVE = Path(nccl_plugin.__file__).parents[2] / "native"


@pytest.fixture
def make(nccl_library: Path, tmp_path: Path) -> Iterator[Callable[[int], NcclRig]]:
    made: list[NcclRig] = []

    def rig(interface: int) -> NcclRig:
        made.append(NcclRig(tmp_path, nccl_library, interface))
        return made[-1]

    yield rig
    for each in made:
        each.close()


@pytest.fixture(params=INTERFACES)
def rig(request: pytest.FixtureRequest, make: Callable[[int], NcclRig]) -> NcclRig:
    """Return a rig for each interface."""
    return make(request.param)


def operations_written(rig: NcclRig) -> list[tuple[int, Flag]]:
    """Return the operations written since the last call, with their flags."""
    return [(sequence(each), Flag(each["flags"])) for each in rig.collectives()]


def test_kernel_time_becomes_the_collectives_time(rig: NcclRig) -> None:
    """The time lasts from the first channel's start to the last channel's end, in host time.

    The tap sets the fields other than the times.
    """
    issued_ns = rig.recorder.now_ns()
    task = rig.collective(7, channels=3)
    assert rig.collectives() == []
    assert [(each.issued, each.ended) for each in rig.reader.read_group_progress()] == [(8, 0)]
    first_ns = rig.device_ns()
    for channel in range(3):
        rig.nccl.kernel_began(rig.context, task, channel, first_ns + 10 * (2 - channel))
    for channel in range(3):
        rig.nccl.kernel_ended(task, channel, first_ns + 5_000 + channel)
    learnt_ns = rig.recorder.now_ns()
    (record,) = rig.collectives()

    assert (record["flags"], record["duration_ns"], record["value0"]) == (TIMED, 5_002, 4096)
    assert issued_ns <= record["start_ns"] + record["duration_ns"] <= learnt_ns
    # The duration is the host time of the issuing call.
    assert 0 < record["nested_ns"] < learnt_ns - issued_ns
    assert [(each.issued, each.ended) for each in rig.reader.read_group_progress()] == [(8, 8)]
    assert rig.nccl.plugin.counters()._replace(communicators=0) == (0, 0, 0, 0, 0, 0)


def test_record_of_a_short_kernel_is_written_after_the_call_returns(rig: NcclRig) -> None:
    issued = rig.issue(0)
    task = rig.nccl.collective(rig.context, 0, 1)
    on_thread(rig.kernel, task)
    assert rig.collectives() == []
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    assert operations_written(rig) == [(0, TIMED & ~Flag.ASYNC)]


def test_kernel_end_that_is_reported_late_has_the_correct_time(
    make: Callable[[int], NcclRig],
) -> None:
    """The host time of the late end is computed from ends that were reported at once."""
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


def test_operations_that_end_in_any_order_get_their_own_times(rig: NcclRig) -> None:
    """Another thread reports the channels of two operations in any order."""
    tasks = [rig.collective(number) for number in range(2)]
    base_ns, begun_ns = rig.device_ns(), rig.recorder.now_ns()

    def proxy() -> None:
        for index in (1, 0):
            for channel in (1, 0):
                rig.nccl.kernel_began(
                    rig.context, tasks[index], channel, base_ns + 100 * index + channel
                )
        for channel, index in ((0, 1), (1, 0), (0, 0), (1, 1)):
            rig.nccl.kernel_ended(tasks[index], channel, base_ns + 1_000 * (index + 1) + channel)

    on_thread(proxy)
    records = {sequence(each): each for each in rig.collectives()}
    assert {number: each["duration_ns"] for number, each in records.items()} == {0: 1_001, 1: 1_901}
    # Drift of the clocks between the two ends.
    drift_ns = (rig.recorder.now_ns() - begun_ns) / 2000 + 1
    assert abs(records[1]["start_ns"] - records[0]["start_ns"] - 100) <= drift_ns


def test_reports_about_a_finished_operation_change_nothing(rig: NcclRig) -> None:
    """The plugin may have reused the finished operation's memory for a new operation."""
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
    assert operations_written(rig) == [(2, TIMED)]


def test_operation_has_no_end_if_its_communicator_is_closed_before_the_report(rig: NcclRig) -> None:
    """The operation does not count as ended in the table of its group."""
    rig.kernel(rig.collective(0))
    rig.collective(1)
    rig.nccl.finalize(rig.context)

    assert operations_written(rig) == [(0, TIMED), (1, Flag.ASYNC)]
    assert rig.nccl.plugin.counters().lost == rig.recorder.lost_ends == 1
    assert [(each.issued, each.ended) for each in rig.reader.read_group_progress()] == [(2, 1)]


def test_oldest_running_operations_are_recorded_without_an_end(rig: NcclRig) -> None:
    """The dropped operations are counted.

    Later ends of dropped operations affect no other operation.
    """
    tasks = [rig.collective(number, channels=1) for number in range(MAX_TIMED + 3)]
    assert operations_written(rig) == [(number, Flag.ASYNC) for number in range(3)]
    assert rig.recorder.lost_ends == 3
    for task in tasks:
        rig.kernel(task)
    assert operations_written(rig) == [(number, TIMED) for number in range(3, MAX_TIMED + 3)]


def test_operation_with_lost_parts_has_no_end(make: Callable[[int], NcclRig]) -> None:
    """Parts of an all-to-all of many ranks were lost, and all other parts have ended."""
    rig = make(6)
    issued = rig.issue(0)
    rig.nccl.group_start()
    tasks = []
    for _ in range(17):
        tasks += [rig.nccl.call(rig.context, 1, 1, 0) for _ in range(250)]
        rig.nccl.group_end(rig.context, 0, 1)
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    lost = 17 * 250 - MAX_OPERATIONS
    assert rig.nccl.plugin.counters().lost == lost
    for task in tasks:
        assert rig.collectives() == []
        rig.kernel(task)
    assert operations_written(rig) == [(0, Flag(0))]
    assert rig.recorder.lost_ends == 1


def test_oldest_records_of_a_full_ring_are_overwritten_and_counted(rig: NcclRig) -> None:
    """The proxy thread writes the records, and readers count the lost ones."""
    for number in range(20_000):
        rig.kernel(rig.collective(number, channels=1))
    batch = rig.reader.read_records()
    assert len(batch.records) == rig.reader.capacity == 1 << 14
    assert batch.lost == 20_000 - (1 << 14)
    assert (batch.records["flags"] == int(TIMED)).all()


def test_operations_issued_while_timing_is_off_have_no_end(rig: NcclRig) -> None:
    """NCCL does not report these operations, so their records are as without the plugin."""
    assert rig.nccl.mask == ON
    before = rig.collective(0)
    rig.nccl.plugin.switch_timing(on=False)
    assert rig.nccl.mask == SEEN
    rig.collective(1)
    assert operations_written(rig) == [(1, Flag.ASYNC)]
    rig.kernel(before)
    another = rig.nccl.communicator()
    # A communicator that is created while timing is off has the same mask.
    assert rig.nccl.mask == SEEN
    rig.nccl.plugin.switch_timing(on=True)
    rig.kernel(rig.collective(2))
    assert operations_written(rig) == [(0, TIMED), (2, TIMED)]
    rig.nccl.finalize(another)
    rig.nccl.plugin.switch_timing(on=False)
    assert rig.nccl.mask == SEEN
    assert rig.nccl.plugin.counters()._replace(communicators=0) == (0, 0, 0, 0, 0, 0)


def test_plugin_requests_events_before_a_watch(nccl_library: Path, tmp_path: Path) -> None:
    """Events are requested from NCCL's first communicator on.

    The plugin must not miss the works that host and device count differently.
    """
    nccl = FakeNccl(nccl_library, tmp_path, 6)
    os.environ[nccl_plugin.VARIABLE] = str(nccl.file)
    try:
        nccl.load()
    finally:
        del os.environ[nccl_plugin.VARIABLE]
    context = nccl.communicator()
    assert nccl.mask == SEEN
    nccl.finalize(context)


def test_event_mask_of_an_unloaded_nccl_is_not_written(make: Callable[[int], NcclRig]) -> None:
    """NCCL may have been unloaded after its last communicator."""
    rig = make(6)
    rig.nccl.finalize(rig.context)
    rig.nccl.plugin.switch_timing(on=False)
    assert rig.nccl.mask == ON


def test_collective_lasts_from_its_first_kernel_to_its_last(rig: NcclRig) -> None:
    """The collective is a list of tensors, or a send to each peer."""
    issued = rig.issue(0)
    rig.nccl.group_start()
    tasks = [rig.nccl.call(rig.context, peer, 2, 0) for peer in (1, 2, 3)]
    rig.nccl.group_end(rig.context, 0, 1)
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    began_ns = rig.device_ns()
    # No kernel may begin before the collective is issued.
    time.sleep(0.02)
    ended_ns = rig.device_ns()
    for index, task in enumerate(tasks):
        assert rig.collectives() == []
        rig.nccl.kernel(rig.context, task, began_ns + 100_000 * index, ended_ns - 1_000_000 * index)
    (record,) = rig.collectives()
    # The first start and the last end are converted to host time when each is reported. On a busy
    # machine some time may pass between the two conversions.
    assert record["duration_ns"] == pytest.approx(ended_ns - began_ns, rel=0.1)
    assert record["flags"] == Flag.COMPLETED | Flag.DEVICE


@pytest.mark.parametrize("interface", [5, 6])
def test_calls_of_a_coalesced_group_get_their_own_times(
    interface: int, make: Callable[[int], NcclRig]
) -> None:
    """torch's coalescing launches two calls of a group together, after both have returned."""
    rig = make(interface)
    rig.nccl.group_start()
    tasks = []
    for number in range(2):
        issued = rig.issue(number)
        tasks.append(rig.nccl.call(rig.context, -1, 1, 0))
        rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    rig.nccl.group_end(rig.context, 0, 1)
    assert rig.collectives() == []
    for task in reversed(tasks):
        rig.kernel(task)
    assert [number for number, _ in operations_written(rig)] == [1, 0]


@pytest.mark.parametrize("interface", [5, 6])
def test_operation_without_a_kernel_has_no_end(
    interface: int, make: Callable[[int], NcclRig]
) -> None:
    """With copy engines and symmetric memory, NCCL reports the call but no kernel.

    Such an operation neither waits for an end nor counts as lost.
    """
    rig = make(interface)
    issued = rig.issue(0)
    rig.nccl.group_start()
    rig.nccl.call(rig.context, -1, 2, 0)
    rig.nccl.group_end(rig.context, 0, 0)
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    assert operations_written(rig) == [(0, Flag(0))]
    assert rig.recorder.lost_ends == 0
    rig.kernel(rig.collective(1))
    assert operations_written(rig) == [(1, TIMED)]


def test_operations_of_other_libraries_are_counted_but_not_recorded(rig: NcclRig) -> None:
    """Other operations come from another library, or from a thread without torch operations."""
    rig.kernel(int(rig.nccl.collective(rig.context, 0, 2)))
    issued = rig.issue(0)
    on_thread(rig.nccl.collective, rig.context, 0, 2)
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    assert operations_written(rig) == [(0, Flag(0))]
    assert rig.nccl.plugin.counters().elsewhere == 2


@pytest.mark.parametrize("interface", [5, 6])
def test_collectives_beyond_64_in_a_group_have_no_end(
    interface: int, make: Callable[[int], NcclRig]
) -> None:
    """The 65th collective of an NCCL group has no end and is counted once."""
    rig = make(interface)
    rig.nccl.group_start()
    tasks = []
    for number in range(66):
        issued = rig.issue(number)
        tasks += [rig.nccl.call(rig.context, -1, 1, 0) for _ in range(2)]
        rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
    rig.nccl.group_end(rig.context, 0, 1)
    assert operations_written(rig) == [(64, Flag(0)), (65, Flag(0))]
    for task in tasks[: 2 * 64]:
        rig.kernel(task)
    assert [number for number, _ in operations_written(rig)] == list(range(64))
    assert rig.nccl.plugin.counters().crowded == 2


def test_host_times_are_used_without_a_device_clock(rig: NcclRig) -> None:
    """The times are those of NCCL's reports, and are not marked as device times."""
    task = rig.collective(0)
    before_ns = rig.recorder.now_ns()
    rig.nccl.kernel(rig.context, task, 0, 0)
    (record,) = rig.collectives()
    assert record["flags"] == Flag.ASYNC | Flag.COMPLETED
    assert (
        before_ns
        <= record["start_ns"]
        <= record["start_ns"] + record["duration_ns"]
        <= rig.recorder.now_ns()
    )


def test_kernel_end_without_a_device_time_gives_no_duration(rig: NcclRig) -> None:
    """NCCL may report the start with a time of the device's clock, but the end without one
    (nccl#1961).
    """
    task = rig.collective(0, channels=1)
    rig.nccl.kernel(rig.context, task, rig.device_ns(), 0)
    assert operations_written(rig) == [(0, Flag.ASYNC)]


def test_ring_shows_a_kernel_from_its_first_channels_start(rig: NcclRig) -> None:
    """A hanging rank has a kernel that has not begun."""

    def begun() -> list[int]:
        return [each.began for each in rig.reader.read_group_progress()]

    first = rig.collective(7, channels=2)
    second = rig.collective(8, channels=2)
    assert begun() == [0]
    rig.nccl.kernel_began(rig.context, first, 1, rig.device_ns())
    assert begun() == [8]
    rig.nccl.kernel_began(rig.context, first, 0, rig.device_ns())
    rig.nccl.kernel_began(rig.context, second, 0, rig.device_ns())
    assert begun() == [9]
    # NCCL reports nothing about this operation.
    rig.recorder.returned(rig.issue(9), int(EndDetection.BY_CALLBACK))
    assert begun() == [0], "the last one that is known says nothing of the last one that was issued"
    third = rig.collective(10)
    rig.nccl.kernel_began(rig.context, third, 0, rig.device_ns())
    assert begun() == [11]
    # An impossible kernel time, which stops NCCL timing.
    rig.kernel(rig.collective(11), -1)
    assert begun() == [0]


@pytest.mark.parametrize("wrong", ["began before it was issued", "ended before it began"])
def test_impossible_kernel_times_stop_the_use_of_nccl_times(wrong: str, rig: NcclRig) -> None:
    """NCCL's count is wrong (nccl#2369).

    From that moment on, NCCL's times are neither used nor requested.
    """
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
    assert operations_written(rig) == [
        (0, TIMED),
        (1, Flag.ASYNC),
        (2, Flag.ASYNC),
        (3, Flag.ASYNC),
    ]
    assert (rig.nccl.plugin.counters().given_up, rig.recorder.lost_ends) == (
        GiveUpCause.IMPOSSIBLE_TIME,
        0,
    )
    rig.nccl.communicator()
    rig.nccl.plugin.switch_timing(on=True)
    assert rig.nccl.mask == 0


def test_each_communicator_uses_its_own_devices_clock(make: Callable[[int], NcclRig]) -> None:
    """In one case, the clock of the second device is a second behind.

    In another case, the first communicator is closed before the second one is used.
    """
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
    assert operations_written(rig) == [(number, TIMED) for number in range(4)]
    assert rig.nccl.plugin.counters().given_up == GiveUpCause.NOT_GIVEN_UP


def test_kernel_end_reported_late_after_a_gap_has_the_correct_time(
    make: Callable[[int], NcclRig],
) -> None:
    """After a second without an end, only possible clock drift makes a difference."""
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


def test_failed_call_is_recorded_at_once_with_its_error(rig: NcclRig) -> None:
    """A later report on the failed call's kernel changes nothing."""
    issued = rig.issue(0)
    task = rig.nccl.collective(rig.context, 0, 1)
    rig.recorder.returned(issued, int(EndDetection.UNKNOWN), int(Flag.EXCEPTION))
    assert operations_written(rig) == [(0, Flag.EXCEPTION)]
    rig.kernel(task)
    assert rig.collectives() == []


def test_operations_running_at_the_watchs_end_are_recorded_without_an_end(rig: NcclRig) -> None:
    """Kernels of these operations add nothing to the next watch."""
    task = rig.collective(0)
    rig.recorder.close()
    assert operations_written(rig) == [(0, Flag.ASYNC)]
    rig.kernel(task)
    rig.nccl.plugin.detach()
    rig.kernel(rig.nccl.collective(rig.context, 0, 1))
    assert rig.collectives() == []


def test_plugin_rejects_a_recorder_of_another_build(rig: NcclRig) -> None:
    """The builds could write into each other's memory."""
    import ctypes

    other = (ctypes.c_int * 32)(2)
    assert rig.nccl.plugin._attach(ctypes.addressof(other)) == 0
    rig.kernel(rig.collective(0))
    assert operations_written(rig) == [(0, TIMED)]


def test_plugin_overhead_of_an_operation_is_limited(make: Callable[[int], NcclRig]) -> None:
    """The limit is twice the cost of two clock readings and a store.

    Cases are 1 and 32 channels, timing off, and timing stopped.
    """
    found = {name: min(values) for name, values in costs_ns(make(6), rounds=15, calls=500).items()}
    floor_ns = min(measure_floor_ns(10_000) for _ in range(10))
    floors = {
        name: (found[name] - found[f"{name} idle"]) / floor_ns
        for name in ("1", "32", "between", "off")
    }
    assert floors["1"] < 8, floors
    assert floors["32"] < 40, floors
    assert floors["between"] < 2, floors
    assert floors["off"] < 1, floors


@pytest.mark.slow
def test_thread_sanitizer_finds_no_race_in_the_plugin(tmp_path: Path) -> None:
    """Three communicators have a proxy thread each.

    One of the communicators is switched, recreated and stopped. All operations are reported.
    """
    compiler = shutil.which("gcc") or "cc"
    sources = [
        str(NATIVE / name) for name in ("nccl_profiler.c", "nccl_operations.c", "nccl_mask.c")
    ]
    flags = [
        "-std=gnu11",
        "-g",
        "-O1",
        "-fsanitize=thread",
        "-fvisibility=hidden",
        "-shared",
        "-fPIC",
    ]
    plugin = tmp_path / "plugin.so"
    built = subprocess.run(
        [compiler, *flags, "-o", str(plugin), *sources], capture_output=True, text=True
    )
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("the compiler came without the thread sanitizer's library")
    assert built.returncode == 0, built.stderr
    program = compile_nccl(tmp_path / "program", "-g", "-fsanitize=thread", "-DPROGRAM")
    environ = {**os.environ, nccl_plugin.VARIABLE: str(plugin), "TSAN_OPTIONS": "exitcode=66"}
    run = subprocess.run([str(program)], env=environ, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stdout + run.stderr
    claimed, told, lost = (int(word) for word in run.stdout.split()[1::2])
    assert claimed == told > 1_000
    # Operations that another thread was using are counted as lost.
    assert lost <= told // 100
