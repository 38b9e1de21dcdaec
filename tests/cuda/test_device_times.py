"""Device times of a watched training loop on the fake device."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device.fake_device import FakeDevice, FakeStreams
from tests.support.device.shim_kernels import COMPILER, WITHOUT_COMPILER
from tests.support.recording import Record, Recording, recorded
from torchlens_perf import config
from torchlens_perf.analysis.statistics.device_steps import DeviceStepJoin
from torchlens_perf.analysis.statistics.steps import assemble_steps
from torchlens_perf.cuda import device_times as hooks_device
from torchlens_perf.cuda.device_times import DeviceTimesHook
from torchlens_perf.hooks import attach
from torchlens_perf.hooks.device_hooks import create_device_hooks
from torchlens_perf.recorder.devices import CONNECTIONS
from torchlens_perf.recorder.recorder import section
from torchlens_perf.run.clock import read_device_mark
from torchlens_perf.run.ring import Flag, Kind, RingReader

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WITHOUT_COMPILER)
MILLISECOND = 1_000_000
FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 3 * MILLISECOND, 6 * MILLISECOND, MILLISECOND
STEP_NS = FORWARD_NS + BACKWARD_NS + OPTIMIZER_NS
# `OVER_NS` is the time that launches and events of a span need on the fake device.
OVER_NS = 20_000


class _Work(torch.autograd.Function):
    """Enqueues work in the forward and the backward pass."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, device: FakeDevice) -> torch.Tensor:
        context.device = device
        device.spin(FORWARD_NS)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.device.spin(BACKWARD_NS)
        return gradient, None


class Inner(torch.nn.Module):
    """The part of the model that enqueues work."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Work.apply(value, self.device)


class Model(torch.nn.Module):
    """A linear layer and work for the device."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.inner = Inner(device)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(value))


class Sgd(torch.optim.SGD):
    """An optimizer that enqueues work for the device."""

    device: FakeDevice

    def step(self, closure: Any = None) -> Any:
        self.device.spin(OPTIMIZER_NS)
        # Torch adds hooks to SGD.step too, once an SGD exists: C leaves such nested steps to Python.
        step: Any = torch.optim.SGD.step
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)


class Rig:
    """A training loop on the fake device with the hook for device times."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.events = device, FakeStreams(device)
        self.model = Model(device)
        self.optimizer = Sgd(self.model.parameters(), lr=0.1)
        self.optimizer.device = device
        self.hook = DeviceTimesHook(asked_for=False)

    def attach(self, recording: Recording) -> None:
        """Start the hook in the way the end of the first step does on a GPU."""
        assert recording.watch is not None
        session = recording.watch._session
        assert session is not None
        session.hooks.attach("device times", lambda: self.hook.attach(session))
        self.hook.start_marking(session, self.events.create_clock())

    def step(self) -> None:
        """Run one step. The host only enqueues the work of the step."""
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def device_spans(recording: Recording, kind: Kind) -> list[Record]:
    """Return the spans on the device that belong to host spans of a kind."""
    return [each for each in recording.of(Kind.DEVICE) if each.value0 == kind]


@pytest.mark.parametrize(("there", "known"), [("", "cpu"), ("cuda", "")])
def test_device_is_unknown_while_the_model_is_still_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, known: str
) -> None:
    """On a machine with an accelerator, `model.cuda()` may be called later, or FSDP may offload to
    the CPU.
    """
    monkeypatch.setattr(attach, "find_accelerator", lambda: there)
    with recorded(tmp_path, torch.nn.Linear(2, 2)) as recording:
        recording.watch.step()
    assert recording.metadata["compute_device"] == known


def test_step_with_an_interrupted_stall_has_no_device_record_and_is_counted(
    device: FakeDevice, tmp_path: Path
) -> None:
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        for number in range(12):
            if number == 5:
                recording.watch._session.clocks.stalls.begin_wait()
            rig.step()
            device.advance(2 * STEP_NS)
    steps = {span.step for span in device_spans(recording, Kind.STEP)}
    assert {1, 2, 3, 4, 6, 7, 8} <= steps
    assert 5 not in steps
    assert recording.metadata["device"]["open_ended"] == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["host waits", "host runs ahead"])
def test_forward_backward_and_optimizer_have_device_times(
    device: FakeDevice, tmp_path: Path, ahead: bool
) -> None:
    """The times are recorded for the right step, whether or not the device is behind the host."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        synchronizations = device.synchronizations
        for _ in range(20):
            rig.step()
            device.advance(STEP_NS // 2 if ahead else 2 * STEP_NS)
        for _ in range(12):
            recording.watch.step()
            device.advance(STEP_NS)
        assert device.synchronizations == synchronizations
    for kind, planted_ns in (
        (Kind.FORWARD, FORWARD_NS), (Kind.BACKWARD, BACKWARD_NS), (Kind.OPTIMIZER, OPTIMIZER_NS),
    ):  # fmt: skip
        spans = device_spans(recording, kind)
        assert [span.step for span in spans] == list(range(20))
        assert all(planted_ns <= span.duration_ns < planted_ns + OVER_NS for span in spans), kind
        assert {span.name for span in spans} == set(recording.names(kind))
    steps = [span for span in device_spans(recording, Kind.STEP) if 0 < span.step < 20]
    assert [span.step for span in steps] == list(range(1, 20))
    if ahead:
        assert all(STEP_NS <= span.duration_ns < STEP_NS + 3 * OVER_NS for span in steps)
    host = recording.of(Kind.FORWARD)[10]
    assert host.duration_ns != device_spans(recording, Kind.FORWARD)[10].duration_ns
    assert recording.metadata["device"]["unread"] == 0
    assert recording.metadata["device"]["error_ns"] < 5000


def test_delay_between_host_and_device_is_recorded(device: FakeDevice, tmp_path: Path) -> None:
    """When the host enters the end of a pass, the device is idle in one step and behind
    in another.
    """
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        for _ in range(4):
            rig.step()
            device.advance(2 * STEP_NS)
        device.spin(50 * MILLISECOND)
        rig.step()
        for _ in range(3):
            device.advance(50 * MILLISECOND)
            recording.watch.step()
    behind = {span.step: span.value1 for span in device_spans(recording, Kind.OPTIMIZER)}
    for step in range(1, 4):
        # The host's own work takes no time in this test.
        assert behind[step] == pytest.approx(STEP_NS, rel=0.02)
    assert behind[4] == pytest.approx(50 * MILLISECOND + STEP_NS, rel=0.02)


def test_modules_and_sections_have_device_times_in_sampled_steps_only(
    device: FakeDevice, tmp_path: Path
) -> None:
    """Forward and backward passes of modules have separate times."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer, modules="all", backward_every=1) as recording:
        rig.attach(recording)
        for _ in range(12):
            recording.watch._session.recorder.sampled = 0
            rig.step()
            device.advance(2 * STEP_NS)
            recording.watch._session.recorder.sampled = 1
            with section("work"):
                device.spin(2 * MILLISECOND)
            rig.step()
            device.advance(2 * STEP_NS)
        recording.watch.step()
    sampled = {step.step for step in recording.steps if step.flags & Flag.SAMPLED}
    modules = {
        span.step: span for span in device_spans(recording, Kind.MODULE) if span.name == "inner"
    }
    # A garbage collection is a section, too.
    sections = {
        span.step: span for span in device_spans(recording, Kind.SECTION) if span.name == "work"
    }
    assert len(modules) == 12
    assert set(modules) == set(sections) <= sampled
    assert all(FORWARD_NS <= span.duration_ns < FORWARD_NS + OVER_NS for span in modules.values())
    assert all(
        2 * MILLISECOND <= span.duration_ns < 2 * MILLISECOND + OVER_NS
        for span in sections.values()
    )
    backward = [
        each for each in recording.of(Kind.MODULE_BACKWARD, "inner") if each.flags & Flag.DEVICE
    ]
    assert {each.step for each in backward} == set(modules)
    assert all(BACKWARD_NS <= each.duration_ns < BACKWARD_NS + OVER_NS for each in backward)


def test_step_in_a_graph_capture_has_no_device_times_and_is_counted(
    device: FakeDevice, tmp_path: Path
) -> None:
    """No event is recorded into the graph."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        rig.step()
        device.advance(2 * STEP_NS)
        rig.events.stream = device.new_stream()
        device.begin_capture(rig.events.stream)
        events = device.calls("cuEventRecord"), device.calls("cuEventQuery")
        rig.step()
        assert (device.calls("cuEventRecord"), device.calls("cuEventQuery")) == events
        device.end_capture(rig.events.stream)
        rig.events.stream = 0
        for _ in range(3):
            rig.step()
            device.advance(2 * STEP_NS)
        recording.watch.step()
    assert [span.step for span in device_spans(recording, Kind.FORWARD)] == [0, 2, 3, 4]
    assert recording.metadata["device"]["captured"] > 0


def test_step_with_a_missing_mark_has_no_device_record(device: FakeDevice, tmp_path: Path) -> None:
    """One case is a missing mark of a stall. Later steps have records."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        for number in range(6):
            if number == 3:
                rig.events.stream = device.new_stream()
                device.begin_capture(rig.events.stream)
                recording.watch._session.clocks.stalls.begin_wait()
                device.end_capture(rig.events.stream)
                rig.events.stream = 0
            rig.step()
            device.advance(2 * STEP_NS)
        recording.watch.step()  # This call ends no step, because the optimizer has.
        for _ in range(2):
            recording.watch.step()
            device.advance(STEP_NS)
    assert [span.step for span in device_spans(recording, Kind.STEP)] == [1, 2, 4, 5, 6, 7]
    assert [span.step for span in device_spans(recording, Kind.FORWARD)] == list(range(6))


def test_stalls_are_recorded_before_the_record_of_their_step(
    device: FakeDevice, tmp_path: Path
) -> None:
    """A stall is a DEVICE record of kind WAIT with the name of the wait."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        session = recording.watch._session
        for _ in range(5):
            rig.step()
            session.clocks.stalls.begin_wait()
            device.spin(4 * MILLISECOND)
            session.clocks.stalls.end()
            device.advance(2 * STEP_NS)
        recording.watch.step()  # This call ends no step, because the optimizer has.
        recording.watch.step()
    stalls = device_spans(recording, Kind.WAIT)
    assert {(each.name, each.kind) for each in stalls} == {("wait", Kind.DEVICE)}
    assert all(4 * MILLISECOND <= each.duration_ns < 4 * MILLISECOND + OVER_NS for each in stalls)
    spans = recording.of(Kind.DEVICE)
    for stall in stalls[1:]:
        (step,) = [each for each in spans if each.value0 == Kind.STEP and each.step == stall.step]
        assert spans.index(stall) < spans.index(step)


def test_time_to_read_marks_is_charged_to_the_sampled_step(
    device: FakeDevice, tmp_path: Path
) -> None:
    """Marks of a sampled step are read during later steps."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer, modules="all", backward_every=1) as recording:
        rig.attach(recording)
        session = recording.watch._session
        late_ns = []
        for sampled in (0, 0, 1, 0, 0, 0):
            session.recorder.sampled = sampled
            rig.step()
            session.recorder.sampled = 0
            late_ns.append(session.recorder.late_ns)
            device.advance(2 * STEP_NS)
    assert late_ns[:3] == [0, 0, 0]
    assert late_ns[3] > 0
    assert late_ns[3:] == [late_ns[3]] * 3


@pytest.mark.parametrize("steps", [1, 30], ids=["Python ends the step", "C ends the step"])
def test_wait_for_room_in_a_full_device_queue_is_not_overhead(
    device: FakeDevice, tmp_path: Path, steps: int
) -> None:
    """A mark waits for space in the queue. Without that space, the job's next launch would wait."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer, backward_every=0) as recording:
        rig.attach(recording)
        for _ in range(steps):
            rig.step()
            device.advance(2 * STEP_NS)
        recorder = recording.watch._session.recorder
        assert bool(recorder.settled) == (steps > 1)
        recorder.due_ns = 1 << 62
        phases_ns, tool_ns, begun = recorder.phases_ns, recorder.tool_ns, time.monotonic()
        device.slow_records(20_000)
        rig.step()
        device.slow_records(0)
        assert time.monotonic() - begun > 5 * 0.02
        assert recorder.tool_ns - tool_ns < 20 * MILLISECOND
        assert recorder.phases_ns - phases_ns < MILLISECOND, "phases are not thinned for it"


def test_time_of_a_mark_is_charged_once(device: FakeDevice, tmp_path: Path) -> None:
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer, backward_every=0) as recording:
        rig.attach(recording)
        for _ in range(30):
            rig.step()
            device.advance(2 * STEP_NS)
        recorder = recording.watch._session.recorder
        assert recorder.settled
        recorder.due_ns = 1 << 62
        device.slow_records(10)
        gc.disable()
        charged_ns = []
        for _ in range(20):
            tool_ns, phases_ns = recorder.tool_ns, recorder.phases_ns
            rig.step()
            charged_ns.append((recorder.tool_ns - tool_ns, recorder.phases_ns - phases_ns))
        gc.enable()
        device.slow_records(0)
    others_ns = [tool_ns - phases_ns for tool_ns, phases_ns in charged_ns]
    assert min(others_ns) < min(phases_ns for _, phases_ns in charged_ns) / 2


def test_span_whose_begin_is_forgotten_does_not_hold_up_later_steps(
    device: FakeDevice, tmp_path: Path
) -> None:
    """A section of a sampled step may end many steps later."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        assert recording.watch is not None
        rig.events.create_clock, create = (
            lambda: create(max_events=64),
            rig.events.create_clock,
        )  # type: ignore[method-assign]
        rig.attach(recording)
        recorder = recording.watch._session.recorder
        recorder.sampled = 1
        with section("epoch"):
            for _ in range(60):
                rig.step()
                device.advance(2 * STEP_NS)
                recorder.sampled = 0
        for _ in range(10):
            rig.step()
            device.advance(2 * STEP_NS)
        recording.watch.step()
    steps = {each.step for each in device_spans(recording, Kind.STEP)}
    assert {62, 63, 64, 65, 66, 67, 68} <= steps
    assert "epoch" not in {each.name for each in device_spans(recording, Kind.SECTION)}
    assert recording.metadata["device"]["unread"] >= 1


def test_progress_of_a_device_with_thinned_phases_is_not_published(
    device: FakeDevice, tmp_path: Path
) -> None:
    """Its marks in a step cannot be compared with those of other ranks."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer, budget=0) as recording:
        rig.attach(recording)
        reader = RingReader(recording.watch._session.ring_path)
        found = []
        for mask in (-1, 3, -1):
            recording.watch._session.recorder.phase_mask = mask
            for _ in range(3):
                rig.step()
                device.advance(2 * STEP_NS)
            found.append(read_device_mark(reader) is not None)
        reader.close()
    assert found == [True, False, True]


def test_negative_time_of_the_driver_is_counted_and_not_shown(
    device: FakeDevice, tmp_path: Path
) -> None:
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        for number in range(10):
            device.set_drift(-2 if number == 5 else 0)  # Marks of step 4 are read in step 5.
            rig.step()
            device.advance(2 * STEP_NS)
        device.set_drift(0)
    for kind, planted_ns in ((Kind.FORWARD, FORWARD_NS), (Kind.BACKWARD, BACKWARD_NS)):
        spans = device_spans(recording, kind)
        assert [span.step for span in spans] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert all(planted_ns <= span.duration_ns < planted_ns + OVER_NS for span in spans)
    # The mark that ends step 4 begins step 5.
    assert [span.step for span in device_spans(recording, Kind.STEP)] == [1, 2, 3, 6, 7, 8, 9]
    assert recording.metadata["device"]["unread"] == 5, "phases of step 4, and both steps"


def test_span_that_ends_before_it_begins_is_counted_and_not_shown(
    device: FakeDevice, tmp_path: Path
) -> None:
    """The span begins on a stream that is behind, and ends on another one."""
    rig = Rig(device)
    other = device.new_stream()

    def move(*_: Any) -> None:
        rig.events.stream = other

    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        for number in range(8):
            handle = None
            if number == 4:
                device.spin(50 * MILLISECOND)
                handle = rig.model.inner.register_forward_hook(move)
            result = rig.model(torch.ones(2, 4)).sum()
            rig.events.stream = 0
            if handle is not None:
                handle.remove()
            result.backward()
            rig.optimizer.step()
            rig.optimizer.zero_grad()
            device.advance(100 * MILLISECOND)
        recording.watch.step()  # This call ends no step, because the optimizer has.
        recording.watch.step()
    assert [span.step for span in device_spans(recording, Kind.FORWARD)] == [0, 1, 2, 3, 5, 6, 7]
    assert [span.step for span in device_spans(recording, Kind.BACKWARD)] == list(range(8))
    assert [span.step for span in device_spans(recording, Kind.STEP)][:6] == [1, 2, 3, 5, 6, 7]
    assert all(span.duration_ns >= 0 for span in recording.of(Kind.DEVICE))
    assert recording.metadata["device"]["unread"] >= 2, "the forward pass and its step"


@pytest.mark.parametrize("steps", [3, 30], ids=["Python ends the step", "C ends the step"])
def test_step_ends_on_the_stream_that_is_current_then(
    device: FakeDevice, tmp_path: Path, steps: int
) -> None:
    """Waits are marked on this stream from then on."""
    rig = Rig(device)
    other = device.new_stream()
    compute_streams = []
    with recorded(tmp_path, rig.model, rig.optimizer, backward_every=0) as recording:
        rig.attach(recording)
        session = recording.watch._session
        clock = session.clocks.current
        for number in range(steps + 12):
            if number == steps:
                rig.events.stream = other
                assert bool(session.recorder.settled) == (steps > 3)
                session.recorder.due_ns = 1 << 62  # No callback is due.
            if number == steps + 2:
                device.spin(9 * STEP_NS, other)
            rig.step()
            compute_streams.append(clock.stream)
            device.advance(2 * STEP_NS)
        marked = clock.marked
        session.clocks.stalls.begin_wait()
        session.clocks.stalls.end()
        assert clock.marked == marked + 2
        rig.events.stream = 0
        session.clocks.stalls.begin_wait()
        session.clocks.stalls.end()
        assert clock.marked == marked + 2
    assert compute_streams == [0] * steps + [other] * 12
    durations = {span.step: span.duration_ns for span in device_spans(recording, Kind.STEP)}
    assert durations[steps + 2] >= 9 * STEP_NS
    assert max(durations[step] for step in (steps, steps + 1)) < 4 * STEP_NS


def test_host_time_of_a_step_in_an_optimizers_closure_counts_once(
    device: FakeDevice, tmp_path: Path
) -> None:
    """Lightning's automatic optimization calls both passes in `optimizer.step(closure)`."""
    rig = Rig(device)

    def closure() -> torch.Tensor:
        rig.optimizer.zero_grad()
        loss = rig.model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    rig.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        reader = RingReader(recording.watch._session.ring_path)
        for _ in range(8):
            rig.optimizer.step(closure)
            device.advance(2 * STEP_NS)
        records = reader.read_records(final=True).records
        reader.close()
    steps = DeviceStepJoin().add_records(records, assemble_steps(records))
    host_ns = {step.step: step.duration_ns for step in recording.steps}
    assert len(steps) >= 5
    for step, issue_ns in zip(
        steps.step.tolist(), steps.issue_ns.sum(axis=1).tolist(), strict=True
    ):
        # Without the time without a CPU.
        assert 0 < issue_ns <= host_ns[step]


def test_spans_not_reached_when_the_watch_ends_are_counted(
    device: FakeDevice, tmp_path: Path
) -> None:
    """The end of the watch does not wait for the device."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        synchronizations = device.synchronizations
        for _ in range(3):
            rig.step()
    assert device.synchronizations == synchronizations
    assert recording.of(Kind.DEVICE) == []
    assert recording.metadata["device"]["unread"] == 3 * 3 + 2


def test_exception_in_the_forward_pass_is_passed_on_with_device_times(
    device: FakeDevice, tmp_path: Path
) -> None:
    """Steps after the exception have device times."""
    rig = Rig(device)

    class Failing(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            raise KeyError("the user's")

    rig.model.failing = Failing()
    with recorded(tmp_path, rig.model, rig.optimizer, modules="all", backward_every=1) as recording:
        rig.attach(recording)
        rig.step()
        with pytest.raises(KeyError, match="the user's"):
            rig.model.failing(torch.ones(1))
        rig.step()
        device.advance(3 * STEP_NS)
        recording.watch.step()
    assert [
        span.step for span in device_spans(recording, Kind.FORWARD) if span.name == "forward Model"
    ] == [0, 1]


def test_device_times_are_off_with_one_connection_to_the_device(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one connection, events would serialize overlapping work.

    A note gives the reason, and a setting turns device times on.
    """
    monkeypatch.setenv(CONNECTIONS, "1")
    for asked_for in (False, True):
        with recorded(tmp_path) as recording:
            assert recording.watch is not None
            recording.watch._session.attach([DeviceTimesHook(asked_for=asked_for)])
        assert any(CONNECTIONS in note for note in recording.notes) is not asked_for


def test_forked_child_does_not_destroy_events(device: FakeDevice, tmp_path: Path) -> None:
    """Destroying an event calls CUDA, which crashes a forked child."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        rig.step()
        child = os.fork()
        if child == 0:
            kept = hooks_device._never_freed == [rig.hook._clock]
            os._exit(0 if kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert hooks_device._never_freed == []


def test_no_device_hook_is_attached_with_a_cpu_build_of_torch() -> None:
    """A setting that asks for device times does not change this."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch was built for a device")
    assert create_device_hooks(config.Config(device_times="on")) == []


def test_last_mark_reached_by_the_device_is_published(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published mark has its step, position, span, and the times of the first and last check.

    The host does not wait for the device.
    """
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        reader = RingReader(recording.watch._session.ring_path)
        for _ in range(5):
            rig.step()
            device.advance(2 * STEP_NS)
        keeps_up = read_device_mark(reader)
        synchronizations = device.synchronizations
        with monkeypatch.context() as once:
            # This kernel is still running when the test ends.
            once.setattr(sys.modules[__name__], "FORWARD_NS", 1000 * STEP_NS)
            rig.step()
        for _ in range(5):
            device.advance(3 * STEP_NS)
            rig.step()
        stuck = read_device_mark(reader)
        reader.close()
        assert device.synchronizations == synchronizations
    assert keeps_up is not None
    assert (keeps_up[0].step, keeps_up[0].place) == (4, 0)
    assert keeps_up[0].looked_ns == keeps_up[0].since_ns
    assert stuck is not None
    mark, name = stuck
    assert (mark.step, mark.kind, name, mark.is_end) == (
        5,
        Kind.FORWARD,
        recording.names(Kind.FORWARD)[0],
        False,
    )
    assert mark.looked_ns - mark.since_ns >= 9 * STEP_NS


def test_publishing_progress_needs_no_query_if_the_device_keeps_up(
    device: FakeDevice, tmp_path: Path
) -> None:
    """The host makes one query per step, as without publishing."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer) as recording:
        rig.attach(recording)
        for _ in range(8):
            rig.step()
            device.advance(2 * STEP_NS)
        questions = device.calls("cuEventQuery")
        rig.step()
        assert device.calls("cuEventQuery") - questions <= 2


def test_usual_step_with_device_times_runs_no_python_code_of_this_package(
    device: FakeDevice, tmp_path: Path
) -> None:
    """Steps are ended in C, with the times of all phases. The only Python functions of this package
    pass arguments on to C.
    """
    rig = Rig(device)
    called: list[str] = []

    def note_call(frame: Any, event: str, argument: Any) -> None:
        # The test launches its kernels with cuda/driver.py.
        path = frame.f_code.co_filename.rpartition("/torchlens_perf/")[2]
        if event == "call" and not path.startswith(("/", "cuda/driver.py")):
            called.append(frame.f_code.co_name)

    with recorded(tmp_path, rig.model, rig.optimizer, backward_every=0) as recording:
        session = recording.watch._session
        rig.attach(recording)
        for _ in range(30):
            rig.step()
            device.advance(2 * STEP_NS)
        assert session.recorder.settled
        session.recorder.due_ns = 1 << 62  # No callback is due.
        gc.disable()  # Python ends a step in which the oldest generation was collected.
        sys.setprofile(note_call)
        try:
            for _ in range(20):
                rig.step()
                device.advance(2 * STEP_NS)
        finally:
            sys.setprofile(None)
            gc.enable()
        session.recorder.due_ns = 0
        for _ in range(3):
            rig.step()
            device.advance(2 * STEP_NS)

    assert set(called) <= {"call_native", "call_hook"}
    for kind, planted_ns in (
        (Kind.FORWARD, FORWARD_NS), (Kind.BACKWARD, BACKWARD_NS), (Kind.OPTIMIZER, OPTIMIZER_NS),
    ):  # fmt: skip
        spans = device_spans(recording, kind)
        assert [span.step for span in spans][:50] == list(range(50))
        assert all(planted_ns <= span.duration_ns < planted_ns + OVER_NS for span in spans), kind
    assert [span.step for span in device_spans(recording, Kind.STEP)][:49] == list(range(1, 50))


def test_phases_are_timed_in_some_steps_only_if_the_budget_leaves_them_out(
    device: FakeDevice, tmp_path: Path
) -> None:
    """All steps have device times. Those without phases have a flag."""
    rig = Rig(device)
    with recorded(tmp_path, rig.model, rig.optimizer, budget=0) as recording:
        rig.attach(recording)
        recording.watch._session.recorder.phase_mask = 3
        for _ in range(64):
            rig.step()
            device.advance(2 * STEP_NS)
        assert recording.watch._session.recorder.phase_steps < 40
        for _ in range(3):
            recording.watch.step()
            device.advance(STEP_NS)
    steps = {each.step: each for each in device_spans(recording, Kind.STEP)}
    timed = {each.step for each in device_spans(recording, Kind.FORWARD)}

    assert set(range(1, 64)) <= set(steps)
    assert 8 <= len(timed & set(range(1, 64))) <= 32
    for step in range(1, 64):
        assert bool(steps[step].flags & Flag.WITHOUT_PHASES) == (step not in timed), step
