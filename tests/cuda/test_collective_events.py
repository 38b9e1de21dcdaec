"""Tests of CollectiveEvents (times of collectives without the NCCL plugin) on a fake device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.collective_rig import CollectiveRig, sequence
from tests.support.device.fake_device import FakeDevice, FakeStreams
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from torchlens_perf.cuda.stalls import StallMarker
from torchlens_perf.hooks.collectives.nccl import CollectiveEvents
from torchlens_perf.recorder.clocks import Clocks
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.recorder.training_thread import TrainingThread
from torchlens_perf.run.ring import Flag, Kind

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER),
]
# `OVER_NS` is the time that launches and events need on the fake device.
KERNEL_NS, OVER_NS = 3_000_000, 20_000
TIMED = Flag.COMPLETED | Flag.DEVICE


class Loop(CollectiveRig):
    """A training loop with one collective per step, and the parts of a session for its events."""

    def __init__(self, device: FakeDevice, folder: Path) -> None:
        self.device, self.fake = device, FakeStreams(device)
        super().__init__(folder, clock=self.fake.now_ns)
        self.clock_of_device = self.fake.create_clock()
        self.session: Any = type("Session", (), {"clocks": Clocks(), "intern": self.ring.intern})()
        self.session.clocks.use_clock(self.clock_of_device)
        self.session.recorder = self.recorder
        self.session.thread = TrainingThread(self.recorder, lambda note: None)
        self.events = CollectiveEvents(self.session)
        self.session.clocks.collective_listener = self.events.store_marks
        self.spans: list[tuple[int, ...]] = []
        self.stalls = StallMarker(
            self.session, self.clock_of_device, lambda *span: self.spans.append(span)
        )
        self.clock_of_device.stream = self.fake.stream

    def collective(self, number: int, *, raises: bool = False) -> None:
        """Issue a collective in the way a tap does."""
        issued = self.issue(number)
        end = self.stalls.begin_collective()
        self.device.spin(KERNEL_NS, self.fake.stream)
        if not raises and end is not None:
            end()
        self.recorder.returned(
            issued, int(EndDetection.UNKNOWN), int(Flag.EXCEPTION) if raises else 0
        )

    def step(self) -> None:
        """Read the marks that the device has reached, and end a step."""
        self.clock_of_device.read_reached_marks()
        self.events.report_known_times()
        self.recorder.next_step()


@pytest.fixture
def loop(device: FakeDevice, tmp_path: Path) -> Iterator[Loop]:
    rings = tmp_path / "rings"
    rings.mkdir()
    made = Loop(device, rings)
    yield made
    made.close()


def test_collective_has_its_device_time_some_steps_later(loop: Loop) -> None:
    """The host does not wait for the device."""
    synchronizations = loop.device.synchronizations
    for number in range(3):
        loop.collective(number)
        assert loop.collectives() == []
        loop.step()
    loop.device.advance(10 * KERNEL_NS)
    for _ in range(3):
        loop.step()
    found = loop.collectives()
    assert [(sequence(each), each["flags"], each["step"]) for each in found] == [
        (n, TIMED, n) for n in range(3)
    ]
    assert all(KERNEL_NS <= each["duration_ns"] < KERNEL_NS + OVER_NS for each in found)
    starts = [each["start_ns"] for each in found]
    assert all(KERNEL_NS <= b - a < KERNEL_NS + OVER_NS for a, b in itertools.pairwise(starts))
    assert loop.device.synchronizations == synchronizations


def test_collective_in_a_graph_capture_is_recorded_without_events(loop: Loop) -> None:
    """The record is the same as on a machine without events."""
    loop.fake.stream = loop.device.new_stream()
    loop.device.begin_capture(loop.fake.stream)
    assert loop.stalls.begin_collective() is None
    loop.collective(0)
    loop.device.end_capture(loop.fake.stream)
    assert [(sequence(each), each["flags"]) for each in loop.collectives()] == [(0, 0)]


def test_collective_is_a_stall_only_on_the_compute_stream(loop: Loop) -> None:
    """On the compute stream, the collective and the stall share their marks."""
    loop.fake.stream = loop.device.new_stream()
    loop.collective(0)
    assert loop.spans == []
    loop.fake.stream = 0
    marked = loop.clock_of_device.marked
    loop.collective(1)
    assert len(loop.spans) == 1
    assert loop.clock_of_device.marked == marked + 2
    loop.step()
    loop.device.advance(10 * KERNEL_NS)
    loop.step()
    assert [sequence(each) for each in loop.collectives()] == [0, 1]
    kind, _, begin, end = loop.spans[0]
    times = loop.clock_of_device.span(begin, end)
    assert kind == Kind.WAIT
    assert times is not None
    assert KERNEL_NS <= times[1] < KERNEL_NS + OVER_NS


def test_collective_that_raises_is_recorded_at_once(loop: Loop) -> None:
    loop.collective(0, raises=True)
    assert [(sequence(each), each["flags"]) for each in loop.collectives()] == [(0, Flag.EXCEPTION)]
    loop.step()


def test_collective_still_running_after_256_steps_is_recorded_without_end(loop: Loop) -> None:
    loop.collective(0)
    for _ in range(256):
        loop.step()
    assert loop.collectives() == []
    loop.step()
    assert [(sequence(each), each["flags"]) for each in loop.collectives()] == [(0, 0)]
