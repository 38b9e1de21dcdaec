"""Tests of NCCL's profiler works: NCCL counts some on host and device, and some on one side only.

fake_works.h describes works.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.collective_rig import sequence
from tests.support.device.fake_nccl import INTERFACES, ON, SEEN, NcclRig
from torchlens_perf.hooks.collectives.nccl_plugin import POOL_BYTES, GiveUpCause
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Flag

TIMED = Flag.ASYNC | Flag.COMPLETED | Flag.DEVICE
RING = 64


class Job:
    """One of two ranks with an NCCL that numbers its works and a device that runs them in order."""

    def __init__(self, rig: NcclRig) -> None:
        self.rig, self.number = rig, 0
        rig.nccl.number_works(rig.context)

    def run(self, task: int) -> int:
        """Run the task, then poll once on NCCL's thread.

        Return the number of works that the thread still waits for.
        """
        now_ns = self.rig.device_ns()
        self.rig.nccl.run(self.rig.context, task, now_ns - 1_000, now_ns)
        return int(self.rig.nccl.progress(self.rig.context))

    def eager(self, times: int) -> list[int]:
        """Run `count` collectives in turn.

        Return the number of works that NCCL's thread waits for after each collective.
        """
        waits = []
        for _ in range(times):
            waits.append(self.run(self.rig.collective(self.number, channels=1)))
            self.number += 1
        return waits

    def capture(self) -> int:
        """Capture a collective in a graph."""
        task = int(self.rig.nccl.call(self.rig.context, -1, 1, 1))
        self.rig.nccl.group_end(self.rig.context, 0, 1)
        return task

    def replay(self, task: int) -> int:
        self.rig.nccl.replay(self.rig.context, 0, task)
        return self.run(task)

    def send(self, *peers: int) -> list[int]:
        """Issue the sends of an all-to-all in one group."""
        issued = self.rig.issue(self.number, flags=int(Flag.ASYNC))
        self.number += 1
        self.rig.nccl.group_start()
        tasks = [int(self.rig.nccl.call(self.rig.context, peer, 1, 0)) for peer in peers]
        self.rig.nccl.group_end(self.rig.context, 0, 1)
        self.rig.recorder.returned(issued, int(EndDetection.UNKNOWN))
        return tasks

    def posted(self) -> int:
        """Return the number of works posted to NCCL's thread so far."""
        return int(self.rig.nccl.posted(self.rig.context))

    def ends(self) -> dict[int, Flag]:
        return {sequence(each): Flag(each["flags"]) for each in self.rig.collectives()}


@pytest.fixture
def make(nccl_library: Path, tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    made: list[NcclRig] = []

    def job(interface: int) -> Job:
        made.append(NcclRig(tmp_path, nccl_library, interface))
        return Job(made[-1])

    yield job
    for each in made:
        each.close()


@pytest.fixture(params=INTERFACES)
def job(request: pytest.FixtureRequest, make: Callable[[int], Job]) -> Job:
    return make(request.param)


def given_up(job: Job) -> GiveUpCause:
    """Return why timing stopped, and check that no work is posted or waited for any more."""
    before = job.posted()
    job.rig.nccl.plugin.switch_timing(on=True)
    assert job.rig.nccl.mask == 0
    graph = job.capture()
    assert set(job.eager(RING + 2)) == {0}
    assert {job.replay(graph) for _ in range(3)} == {0}
    assert set(job.eager(2)) == {0}
    assert job.posted() == before
    return GiveUpCause(job.rig.nccl.plugin.counters().given_up)


def test_nccl_works_of_eager_collectives_are_posted_and_reported(job: Job) -> None:
    """NCCL reports a work when it has run on the device."""
    assert set(job.eager(RING + 5)) == {0}
    assert set(job.ends().values()) == {TIMED}
    assert job.posted() == RING + 5
    assert job.rig.nccl.plugin.counters().given_up == GiveUpCause.NOT_GIVEN_UP


def test_switching_timing_in_a_capture_breaks_the_count_of_nccl_works(
    make: Callable[[int], Job],
) -> None:
    """With a plugin that does nothing, NCCL's thread waits for missing works, or uses another
    work's times.
    """
    job = make(6)
    job.rig.nccl.use_nothing(1)
    job.rig.nccl.set_mask(SEEN)
    graph = job.capture()
    job.rig.nccl.set_mask(ON)
    # NCCL takes the end of the next work for the end of each work.
    assert job.eager(3) == [1, 1, 1]
    assert job.replay(graph) == 0
    assert job.replay(graph) == 0
    task = job.rig.collective(job.number, channels=1)
    # The work counts as ended although it has not run.
    assert job.rig.nccl.progress(job.rig.context) == 0
    assert job.run(task) == 0
    job.rig.nccl.use_nothing(0)


@pytest.mark.parametrize("interface", [5, 6])
@pytest.mark.parametrize("timing", [True, False])
def test_captured_operation_stops_nccl_timing(
    timing: bool, interface: int, make: Callable[[int], Job]
) -> None:
    """NCCL timing may be on or off during the capture."""
    job = make(interface)
    assert set(job.eager(3)) == {0}
    job.rig.nccl.plugin.switch_timing(on=timing)
    graph = job.capture()
    assert job.rig.nccl.mask == 0
    assert set(job.eager(2)) == {0}
    assert job.replay(graph) == 0
    if not timing:
        assert given_up(job) == GiveUpCause.CAPTURED_OPERATION
    ends = job.ends()
    assert ends == {number: TIMED if number < 3 else Flag.ASYNC for number in ends}
    assert len(ends) == job.number


def test_replay_of_a_graph_with_unknown_contents_stops_nccl_timing(job: Job) -> None:
    """The graph may contain captured operations that the plugin has not seen."""
    assert set(job.eager(3)) == {0}
    job.rig.nccl.plugin.note_unseen_graph()
    assert given_up(job) == GiveUpCause.UNSEEN_GRAPH


@pytest.mark.parametrize("timing", [True, False])
def test_copy_to_the_same_rank_stops_nccl_timing(timing: bool, job: Job) -> None:
    """A rank's own part of an all-to-all is counted only on the device, even while
    timing is off.
    """
    assert set(job.eager(3)) == {0}
    job.rig.nccl.plugin.switch_timing(on=timing)
    tasks = job.send(1, 0)
    assert job.rig.nccl.mask == 0
    for task in tasks:
        job.run(task)
    assert given_up(job) == GiveUpCause.SELF_COPY
    ends = job.ends()
    assert ends == {number: TIMED if number < 3 else Flag.ASYNC for number in ends}
    assert len(ends) == job.number
    assert job.rig.recorder.lost_ends == 0


def test_sends_to_other_ranks_are_timed(job: Job) -> None:
    """NCCL counts sends to other ranks on both host and device."""
    for _ in range(3):
        assert [job.run(task) for task in job.send(1, 2)][-1] == 0
    assert set(job.ends().values()) == {TIMED}
    assert job.rig.nccl.plugin.counters().given_up == GiveUpCause.NOT_GIVEN_UP


def test_too_many_communicators_stop_nccl_timing(job: Job) -> None:
    """An unobserved communicator might send to its own rank or be captured."""
    # Each communicator has two ranks and needs shared memory for both.
    has_room = shutil.disk_usage("/dev/shm").free >= 1024 * 2 * POOL_BYTES
    more = [job.rig.nccl.communicator() for _ in range(1023)]
    assert job.rig.nccl.mask == (ON if has_room else 0)
    assert job.rig.nccl.library.fake_communicator(2, 0) is None
    assert given_up(job) == (GiveUpCause.MANY_COMMUNICATORS if has_room else GiveUpCause.NO_ROOM)
    for each in more:
        job.rig.nccl.finalize(each)
