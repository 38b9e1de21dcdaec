"""A running instrument: one recorder, the hooks attached to it, and the step boundary. watch.py makes and ends it."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torchlens_perf import torch_private
from torchlens_perf.clock import Clock, HostClock
from torchlens_perf.errors import ConfigError, HookUnavailable, guard, swallowed
from torchlens_perf.hooks.backward import BackwardHook
from torchlens_perf.hooks.capture import CaptureHook
from torchlens_perf.hooks.collective import CollectiveHook
from torchlens_perf.hooks.data import DataHook
from torchlens_perf.hooks.memory import MemoryHook
from torchlens_perf.hooks.module import MAX_MODULES, ModuleHook, device_of, select
from torchlens_perf.hooks.nvtx import NvtxHook
from torchlens_perf.hooks.on_device import device_hooks
from torchlens_perf.hooks.optimizer import OptimizerHook
from torchlens_perf.hooks.passed_optimizers import PassedOptimizers
from torchlens_perf.hooks.recompute import RecomputeHook
from torchlens_perf.hooks.section import SectionHook
from torchlens_perf.hooks.stack import StackHook
from torchlens_perf.hooks.tags import TagHook
from torchlens_perf.identity import job_store, model_digest
from torchlens_perf.probe_schedule import ProbeSchedule
from torchlens_perf.rank_ranges import ranges
from torchlens_perf.recorder import NATIVE, Recorder
from torchlens_perf.ring import MAX_GROUPS, MICRO_STEPS_MASK, WORKLOAD_SHIFT, Flag, RingFile
from torchlens_perf.training_loop import TrainingLoop

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.config import Config
    from torchlens_perf.hooks.collective_events import CollectiveEvents
    from torchlens_perf.hooks.trained_models import NamedModel
    from torchlens_perf.identity import Identity

logger = logging.getLogger("torchlens_perf")

_AT_STEP = guard("work at a step's end")
_NOW_AND_THEN_NS = 50_000_000
_TOLD = ("disk_bytes", "trace_every", "telemetry", "capture", "build_tap")  # settings that are the sidecar's to follow
_MOST_NOTES = 24  # they share 8 KB with all else that the sidecar must know
_PROBED, _MANUAL, _INFERENCE = (int(flag) for flag in (Flag.PROBED, Flag.MANUAL, Flag.INFERENCE))


class Hook(Protocol):
    """A source of marks. Raises HookUnavailable on entering where this torch lacks what it needs."""

    name: str

    def attach(self, session: Session) -> AbstractContextManager[None]:
        """Attached while the context is entered; leaves nothing behind."""
        ...


def default_hooks(config: Config, backward: BackwardHook) -> list[Hook]:
    """The hooks of a watch, in the order of attaching. A new hook is a line here."""
    wanted: list[tuple[bool, Hook]] = [
        (config.nvtx, NvtxHook()),
        (True, SectionHook()),
        (True, OptimizerHook()),
        (True, DataHook()),
        (True, backward),
        (True, RecomputeHook()),
        (config.collectives, CollectiveHook()),
        (config.memory, MemoryHook(config.memory_history)),
        (True, TagHook()),
        (config.faulthandler, StackHook()),
        (config.capture != "off", CaptureHook()),
    ]
    # The device's last, and so detached first: what it tells at the end, the others' marks, must still be recorded.
    return [*(hook for want, hook in wanted if want), *device_hooks(config)]


class Session:
    """The parts of one watch, on the training thread. Hooks hold it; nothing of it is public."""

    def __init__(
        self, config: Config, identity: Identity, ring: RingFile, passed: PassedOptimizers | None = None
    ) -> None:
        self.config = config
        self.identity = identity
        self.host_clock = HostClock()
        self.clock: Clock = self.host_clock  # of marks that may be read later; a device's, once there is one
        self.recorder = Recorder(ring.buffer, self.intern)
        self.memory_bytes = 0
        self.workload = -1  # of the step in progress, as its batches have it; -1: no batch with a tensor yet
        self.training_steps = 0  # that have ended: the same on all ranks, also where one of them has evaluated before
        self.memory_source = ""
        self.device: dict[str, Any] = {}  # of the device's times: how good they are, and which are missing
        self.gpus: list[dict[str, Any]] = []  # that this process computes on
        self.stack_file = ""  # where this process writes its stack when it is asked to; "": nowhere
        self.recomputing = 0  # how many checkpoints of torch's own are being run again
        self.missing_tap = ""  # the file of the native tap on collectives, where that is missed
        self.own_memory_history = False  # a history of device memory is recorded, and is ours and so bounded
        self.ring_path = ring.path
        self.compute_device = ""  # that the watched models are on: "cuda", "cpu", ...; "": not known yet
        self._deeper_modules = False  # there are others below those that are timed
        self.groups: dict[str, dict[str, Any]] = {}  # process groups that were used: members and description
        self.device_groups: set[tuple[str, str]] = set()  # process groups with tensors on a device, and which kind
        self.collective_events: CollectiveEvents | None = None  # times those that nothing else tells of
        self._group_slots: dict[str, int] = {}
        self._ring = ring
        self.passed = PassedOptimizers() if passed is None else passed
        self.loop = TrainingLoop(self, self.passed)
        self._probes = ProbeSchedule(config.backward_every)
        self._unprobed_since = self._before_probe = (0, 0, 0)  # _now() after the last probed step, before the next one
        self._at_step: dict[Callable[[], object], str] = {}
        self._now_and_then: dict[Callable[[], object], str] = {}
        self._now_and_then_ns = 0  # when that was last run
        self._new_name: list[Callable[[str], None]] = []
        self._known_names = 1
        self._new_names = threading.RLock()
        self._notes: list[str] = []
        self._not_measured: list[str] = []  # parts of the step
        self._charged_ns = 0  # so far, by charge()
        self._flags = 0
        self._report: dict[str, Any] = {}
        self._backward = BackwardHook()
        self._watched: dict[int, weakref.ref[Module]] = {}  # by id, which a later module may have again
        self._module_names: set[str] = set()
        self._attached = ExitStack()

    # -- for hooks

    def intern(self, name: str) -> int:
        """The id of a name in the ring file; 0 once the recorder is closed, for then the file is another process's."""
        if self.recorder.closed:
            return 0
        name_id = self._ring.intern(name)
        if name_id >= self._known_names:
            self._tell_new_names()
        return name_id

    def _tell_new_names(self) -> None:
        """In the order of their ids, whichever thread comes first."""
        with self._new_names:
            names = self._ring.names()
            while self._known_names < len(names):
                self._known_names += 1
                for told in self._new_name:
                    told(names[self._known_names - 1])

    def on_new_name(self, told: Callable[[str], None]) -> None:
        """Calls `told` with every name but the first, in the order of their ids, those of the past at once."""
        for name in self._ring.names()[1:]:
            told(name)
        self._new_name.append(told)

    def note(self, text: str) -> None:
        """Something that is not measured, or measured otherwise, and why: shown in the report's data quality."""
        if text not in self._notes and len(self._notes) < _MOST_NOTES:
            full = len(self._notes) == _MOST_NOTES - 1
            self._notes.append("further notes are left out: see the job's log" if full else text)
            if full:
                logger.warning("torchlens_perf: %s", text)
            self.publish()

    def not_measured(self, part: str) -> None:
        """A part of the step that is there, or may be, and that nothing tells from the others."""
        if part not in self._not_measured:
            self._not_measured.append(part)
            self.publish()

    def add_gc_ns(self, duration_ns: int) -> None:
        """Python has collected garbage for so long."""
        self._ring.add_gc_ns(duration_ns)

    def group_slot(self, name: str) -> int:
        """The row of a process group, or of a pair of peers, in the ring's table."""
        slot = self._group_slots.get(name)
        if slot is None and not self.recorder.closed:
            slot = self._group_slots[name] = self._ring.add_group(name)
        return MAX_GROUPS if slot is None else slot

    def know_group(self, name: str, members: list[int], description: str) -> None:
        """A process group has been used for the first time."""
        self.groups[name] = {"ranks": ranges(members), "description": description}
        self.publish()

    def start_work(self, name: str, work: Callable[[], object]) -> None:
        """Runs `work` at each step's end, before the step's record is written. If it fails, it is not run again."""
        self._at_step[work] = name

    def stop_work(self, work: Callable[[], object]) -> None:
        """Runs it no longer."""
        self._at_step.pop(work, None)

    @contextmanager
    def now_and_then(self, name: str, work: Callable[[], object]) -> Iterator[None]:
        """Like each_step(), but at most once in 50 ms: for what takes as long as all else at a step's end."""
        self._now_and_then[work] = name
        try:
            yield
        finally:
            self._now_and_then.pop(work, None)

    @contextmanager
    def each_step(self, name: str, work: Callable[[], object]) -> Iterator[None]:
        """Runs `work` at each step's end for as long as the context is entered."""
        self.start_work(name, work)
        try:
            yield
        finally:
            self.stop_work(work)

    def inside(self) -> list[str]:
        """What the training thread is inside of, outermost first."""
        return [] if self.recorder.closed else self._ring.inside()

    def tag(self, flag: Flag) -> None:
        """The step in progress gets this flag."""
        self._flags |= int(flag)

    def charge(self, duration_ns: int) -> None:
        """Work of ours that is no part of what every step costs: the step in which it is done is charged with it."""
        self._charged_ns += duration_ns
        self.recorder.charge(duration_ns)

    def communicates(self) -> bool:
        """Whether there are other ranks to wait for."""
        return self.identity.world_size > 1

    # -- for watch.py

    def start(
        self,
        models: Sequence[NamedModel] | None,
        in_the_middle: bool = False,
        after_step_of: Optimizer | None = None,
    ) -> None:
        """Attaches everything. From here on marks are recorded.

        models: None to find them when an optimizer steps. in_the_middle: the loop has made its first step, with
        after_step_of; None: a loop without an optimizer.
        """
        swallowed.on_error = self._ring.count_internal_error
        with guard("keeping torch.compile away from our hooks"):
            torch_private.skip_our_code()
        self._attach(default_hooks(self.config, self._backward))
        if models is not None:
            self.loop.models_given(models)
        if in_the_middle and after_step_of is None:
            self.loop.begins_without_optimizer()
            self.note("recording began after the second backward pass: the steps until there are not measured")
        elif after_step_of is not None:
            self.loop.begins_after_step_of(after_step_of)
            self.note("recording began after the first optimizer step, which is therefore not measured")
        recorder = self.recorder
        recorder.start_thread_time()
        recorder.probe = int(self._probes.wants(recorder.step))
        self._unprobed_since = self._before_probe = self._now()
        recorder.activate()

    def watch_models(self, models: Sequence[NamedModel]) -> None:
        """Times these models' modules too."""
        for model in models:
            selection = select(model, self.config, MAX_MODULES // len(models))
            modules = [each for each in selection.modules if not self._watches(each.module)]
            self._watched.update((id(each.module), weakref.ref(each.module)) for each in modules)
            self._module_names.update(each.name for each in modules)
            self._deeper_modules |= not selection.all_levels
            self.compute_device = self.compute_device or device_of(model.module)
            self._attach([ModuleHook(modules, self._backward)])

    def _watches(self, module: Module) -> bool:
        known = self._watched.get(id(module))
        return known is not None and known() is module

    def _attach(self, hooks: Sequence[Hook]) -> None:
        """Attaches the hooks in order. One that is unavailable is left out, and noted. Raises ConfigError."""
        for hook in hooks:
            attached = False
            try:
                with guard(f"attaching {hook.name}", passes=(HookUnavailable, ConfigError)):
                    self._attached.enter_context(hook.attach(self))
                    attached = True
            except HookUnavailable as unavailable:
                self.note(f"{hook.name}: {unavailable}")
            else:
                if not attached:
                    self.note(f"{hook.name} could not be attached: see the job's log")
        self.publish()

    @guard("step boundary")
    def manual_step(self, tokens: int | None = None) -> None:
        """The user's own boundary."""
        if tokens is not None:
            self.workload = tokens
        self.loop.manual_step()
        self.end_step(_MANUAL)

    def end_step(self, flags: int = 0) -> None:
        """Closes the step in progress and decides whether the next one is probed. Its callers are guarded."""
        recorder = self.recorder
        if recorder.closed:
            return
        start_ns, charged_ns = recorder.now_ns(), self._charged_ns
        self.training_steps += not flags & _INFERENCE
        if self._at_step:
            self._run(self._at_step)
        if start_ns - self._now_and_then_ns >= _NOW_AND_THEN_NS:
            self._now_and_then_ns = start_ns
            self._run(self._now_and_then)
        if recorder.probe:
            flags |= _PROBED
        content = self.loop.step_ended(inference=bool(flags & _INFERENCE))
        probed = recorder.probe
        packed = min(content.micro_steps, MICRO_STEPS_MASK) | (self.workload + 1) << WORKLOAD_SHIFT
        step = recorder.next_step(flags | self._flags | content.flags, self.memory_bytes, packed)
        self.workload = -1
        self._flags = 0
        recorder.probe = int(self._probes.wants(step))
        recorder.charge(recorder.now_ns() - start_ns - self._charged_ns + charged_ns)
        if probed:
            self._account_probe()
        if recorder.probe:
            self._before_probe = self._now()

    def _run(self, works: dict[Callable[[], object], str]) -> None:
        for failed in _AT_STEP.run(tuple(works)):
            name = works.pop(failed, "work at a step's end")
            self.note(f"{name} failed and was switched off: see the job's log")

    def _now(self) -> tuple[int, int, int]:
        """Index of the step in progress, the time, and the time spent in our hooks until now, but for charge()'s."""
        return self.recorder.step, self.recorder.now_ns(), self.recorder.tool_ns - self._charged_ns

    def _account_probe(self) -> None:
        """Tells the schedule what the probed step that has just ended has cost more than those before it."""
        now = self._now()
        (step, since_ns, tool_ns), (probed_step, begun_ns, begun_tool_ns) = self._unprobed_since, self._before_probe
        if probed_step > step:
            unprobed = probed_step - step
            more_ns = now[2] - begun_tool_ns - (begun_tool_ns - tool_ns) / unprobed
            # The gradient hooks' time is part of the backward pass. They take about as long as hanging them up.
            self._probes.probed(2 * max(0.0, more_ns), (begun_ns - since_ns) / unprobed)
        self._unprobed_since = now

    def close(self, report: dict[str, Any]) -> None:
        """Detaches everything, last first, and ends the ring file. report: how rank 0 wants the report."""
        try:
            with guard("detaching"):
                self._attached.close()
            self._report = report
            with guard("telling the sidecar of the end"):
                self.publish()
        finally:  # also where Ctrl-C comes meanwhile
            swallowed.on_error = None
            self.recorder.close()
            self._ring.close()

    def abandon(self) -> None:
        """In a forked child: records nothing more and detaches everything. The ring file stays the parent's.

        Else a watch of the child's own would find the taps taken, and wrap what is wrapped.
        """
        swallowed.on_error = None
        self.recorder.abandon()
        with guard("detaching in a forked child"):
            self._attached.close()

    def publish(self) -> None:
        """Writes what the sidecar must know of this rank into the ring file."""
        if self.recorder.closed:
            return
        self._ring.set_metadata(
            {
                "identity": self.identity.to_json(),
                "anchor": self.host_clock.anchor()._asdict(),
                "native": NATIVE,
                "model": model_digest(self._module_names),
                "memory_source": self.memory_source,
                "notes": self._notes,
                "not_measured": self._not_measured,
                "compute_device": self.compute_device,
                "deeper_modules": self._deeper_modules,
                "job_store": job_store(os.environ) if self.config.exchange else None,
                "device": self.device,
                "gpus": self.gpus,
                "stack_file": self.stack_file,
                "missing_tap": self.missing_tap,
                "groups": dict(list(self.groups.items())[:MAX_GROUPS]),
                "settings": {name: getattr(self.config, name) for name in _TOLD} | self._report,
            }
        )
