"""A running instrument: one recorder, the hooks attached to it, and the step boundary. watch.py makes and ends it."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchlens_perf.config import SIDECAR_SETTINGS
from torchlens_perf.errors import ConfigError, HookUnavailable, guard, swallowed
from torchlens_perf.output import logger
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.recorder import LOADING_PROBLEM, NATIVE, Recorder
from torchlens_perf.recorder.sampling import Boundary, SamplingSchedule
from torchlens_perf.recorder.training_thread import TrainingThread
from torchlens_perf.run.clock import Clock, HostClock
from torchlens_perf.run.identity import job_store, model_digest
from torchlens_perf.run.processes import age_s, cpu_wait_ns
from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.run.ring import MAX_GROUPS, MICRO_STEPS_MASK, WORKLOAD_SHIFT, Flag, RingFile

if TYPE_CHECKING:
    from torchlens_perf.config import Config
    from torchlens_perf.run.clock import Anchor, DeviceMark, Stalls
    from torchlens_perf.run.identity import DeviceClock, Gpu, Identity, ProcessGroup

_AT_STEP = guard("work at a step's end")
_THROTTLE_NS = 50_000_000
_CHANGE_TIMEOUT_S = 2.0
_MAX_NOTES = 24  # they share 8 KB with all else that the sidecar must know
_COMPILED = int(Flag.COMPILED)
_SAMPLED, _MANUAL, _INFERENCE = (int(flag) for flag in (Flag.SAMPLED, Flag.MANUAL, Flag.INFERENCE))


_start_reported_by = 0
"""The process whose first watch has reported when the process began."""


class Hook(Protocol):
    """A source of marks. Raises HookUnavailable on entering where this torch lacks what it needs."""

    name: str

    def attach(self, session: Session) -> AbstractContextManager[None]:
        """Attached while the context is entered; leaves nothing behind."""


CollectiveListener = Callable[[int, int], None]
"""Called with the device clock's marks around a collective that ran in its caller's stream, on its thread."""


class StepContent(NamedTuple):
    """What a step held."""

    flags: int
    micro_steps: int


class Loop(Protocol):
    """What the user's loop does, as hooks see it."""

    def manual_step(self) -> bool:
        """The user has called w.step()."""

    def step_ended(self, *, inference: bool) -> StepContent:
        """What the step that ends here held."""


class Session:
    """The parts of one watch, on the training thread. Hooks hold it and report to it; nothing of it is public."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        ring: RingFile,
        now_ns: Callable[[], int] | None = None,
        simulated_from: Anchor | None = None,
    ) -> None:
        """now_ns: the recorder's clock; None: the host's. simulated_from: the anchor of a simulated rank's clock."""
        # Hooks read these and never set them. No properties: some are read at every collective.
        self.config = config
        self.identity = identity
        self.ring_path = ring.path
        self.recorder = Recorder(ring.buffer, self.intern, now_ns)
        self.thread = TrainingThread(self.recorder, self.note)
        self.host_clock = HostClock()
        self.clock: Clock = self.host_clock  # of marks that may be read later; a device's, once there is one
        self.stalls: Stalls | None = None  # while that is a device's
        self.training_steps = 0  # that have ended: the same on all ranks, also where one of them has evaluated before
        self.groups: dict[str, ProcessGroup] = {}  # that were used
        self.device_groups: set[tuple[str, str]] = set()  # process groups with tensors on a device, and which kind
        self.collective_listener: CollectiveListener | None = None  # takes the times that nothing else reports
        self.own_memory_history = False  # a history of device memory is recorded, and is ours and so bounded

        self._memory_bytes = 0
        self._workload = -1  # of the step in progress, as its batches have it; -1: no batch with a tensor yet
        self._published: dict[str, Any] = {
            "memory_source": "", "device": {}, "gpus": [], "stack_file": "", "missing_tap": ""
        }  # fmt: skip
        is_real = now_ns is None and simulated_from is None
        self._process_began_ns = _process_began_ns(identity) if is_real else 0
        self._start_cpu_wait_ns: int | None = None
        self._compute_device = ""  # that the watched models are on: "cuda", "cpu", ...; "": not known yet
        self._roots: list[str] = []  # the names of whole models
        self._unopened: list[str] = []  # timed modules with others inside that are not timed
        self._deeper_modules = False  # there are others below those that are timed
        self._group_slots: dict[str, int] = {}
        self._simulated_from = simulated_from
        self._ring = ring
        self._loop: Loop | None = None  # once recording has begun
        self._sampling = SamplingSchedule(config.backward_every)
        self._at_step: dict[Callable[[], object], str] = {}
        self._throttled: dict[Callable[[], object], str] = {}
        self._throttled_ns = 0  # when that was last run
        self._new_name: list[Callable[[str], None]] = []
        self._known_names = 1
        self._new_names = threading.RLock()
        self._notes: list[str] = []
        self._not_measured: list[str] = []  # parts of the step
        self._flags = self._overhead_ns = 0  # the latter so far, by add_overhead()
        self._report: dict[str, Any] = {}
        self._module_names: set[str] = set()
        self._attached = ExitStack()
        self._detached = False
        # Held while hooks are attached, detached, or work at a step's end: each may be on another thread.
        self._changing = threading.RLock()

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
                for callback in self._new_name:
                    callback(names[self._known_names - 1])

    def on_new_name(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with every name but the first, in the order of their ids; existing names at once."""
        for name in self._ring.names()[1:]:
            callback(name)
        self._new_name.append(callback)

    def note(self, text: str) -> None:
        """Something that is not measured, or measured otherwise, and why: shown in the report's data quality."""
        if text not in self._notes and len(self._notes) < _MAX_NOTES:
            full = len(self._notes) == _MAX_NOTES - 1
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
        self._ring.add_gc_ns(duration_ns)

    def group_slot(self, name: str) -> int:
        """The row of a process group, or of a pair of peers, in the ring's table."""
        slot = self._group_slots.get(name)
        if slot is None and not self.recorder.closed:
            slot = self._group_slots[name] = self._ring.add_group(name)
        return MAX_GROUPS if slot is None else slot

    def add_group(self, name: str, members: list[int], description: str) -> None:
        """A process group has been used for the first time. Any thread that issues collectives."""
        self.groups[name] = {"ranks": ranges(members), "description": description}
        self.publish()

    def add_device_group(self, name: str, device: str) -> None:
        """A process group has had tensors on a device of that kind. Any thread that issues collectives."""
        self.device_groups.add((name, device))

    def add_workload(self, elements: int) -> None:
        """The step in progress has had a batch with so many elements. Training thread, once a batch."""
        self._workload = max(0, self._workload) + elements

    def set_memory(self, memory_bytes: int) -> None:
        """What the records of this step and of later ones have as memory; 0: not known. Training thread."""
        self._memory_bytes = memory_bytes

    def use_clock(self, clock: Clock | None, stalls: Stalls | None = None) -> None:
        """Marks are taken by a device's clock from here on; None: by the host's. Training thread."""
        self.clock, self.stalls = clock or self.host_clock, stalls

    def computes_on(self, device: str) -> bool:
        """Whether the watched models, or a process group's tensors, are on a device of that kind."""
        return self._compute_device == device or any(kind == device for _, kind in self.device_groups)

    def hear_collectives(self, listener: CollectiveListener | None) -> None:
        """Who hears of synchronous collectives on a device from here on; None: nobody. Training thread."""
        self.collective_listener = listener

    def set_own_memory_history(self, on: bool) -> None:
        """Whether a history of device memory is recorded that is ours. Any thread: the job may replace it."""
        self.own_memory_history = on

    def modules_timed(
        self, are_roots: Mapping[str, bool], *, device: str, all_levels: bool, unopened: Iterable[str]
    ) -> None:
        """Modules of these names are timed, and whether each is a whole model.

        device: that their model is on. all_levels: there are none below them. unopened: those with untimed ones inside.
        """
        self._module_names.update(are_roots)
        self._roots += [name for name, is_root in are_roots.items() if is_root]
        self._unopened += unopened
        self._deeper_modules |= not all_levels
        self._compute_device = self._compute_device or device

    def add_step_callback(self, name: str, work: Callable[[], object]) -> None:
        """Runs `work` at each step's end, before the step's record is written. If it fails, it is not run again."""
        self._at_step[work] = name

    def stop_work(self, work: Callable[[], object]) -> None:
        self._at_step.pop(work, None)
        self._throttled.pop(work, None)

    @contextmanager
    def throttled(self, name: str, work: Callable[[], object]) -> Iterator[None]:
        """Like each_step(), but at most once in 50 ms: for what takes as long as all else at a step's end."""
        self._throttled[work] = name
        try:
            yield
        finally:
            self._throttled.pop(work, None)

    @contextmanager
    def each_step(self, name: str, work: Callable[[], object]) -> Iterator[None]:
        """Runs `work` at each step's end for as long as the context is entered."""
        self.add_step_callback(name, work)
        try:
            yield
        finally:
            self.stop_work(work)

    def set_device_mark(self, mark: DeviceMark) -> None:
        """How far the device is. Training thread, at steps' ends."""
        if not self.recorder.closed:
            self._ring.set_device_mark(mark.words())

    def inside(self) -> list[str]:
        """What the training thread is inside of, outermost first."""
        return [] if self.recorder.closed else self._ring.inside()

    def tag(self, flag: Flag) -> None:
        self._flags |= int(flag)

    def add_overhead(self, duration_ns: int, *, ours: bool = True) -> None:
        """Work that is no part of what every step costs: the step in which it is done has it, as the tool's if ours."""
        self._overhead_ns += duration_ns
        if ours:
            self.recorder.add_overhead(duration_ns)

    def add_probe_cost(self, duration_ns: int) -> None:
        """Work of ours for an earlier step that was sampled."""
        self.add_overhead(duration_ns)
        self._sampling.add_cost(duration_ns)

    def communicates(self) -> bool:
        """Whether there are other ranks to wait for."""
        return self.identity.world_size > 1

    # -- for watch.py

    def prepare(self) -> None:
        """Before hooks are attached: their errors are counted from here on, and torch.compile leaves them alone."""
        swallowed.on_error = self._ring.count_internal_error
        if LOADING_PROBLEM:
            self.note(LOADING_PROBLEM)
        with guard("keeping torch.compile away from our hooks"):
            torch_private.skip_our_code()

    def begin(self, loop: Loop) -> None:
        """From here on marks are recorded. loop: says what a step has held."""
        self._loop = loop
        recorder = self.recorder
        recorder.start_thread_time()
        recorder.sampled = int(self._sampling.wants(recorder.step))
        self._sampling.recording_begins(self._boundary())
        recorder.activate()

    def attach(self, hooks: Sequence[Hook]) -> None:
        """Attach the hooks in order. An unavailable hook is left out, and noted. Raises ConfigError."""
        with self._changing:
            if self._detached:
                return
            for hook in hooks:
                self._attach(hook)
            self.publish()

    def _attach(self, hook: Hook) -> None:
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

    @guard("step boundary")
    def manual_step(self, tokens: int | None = None) -> None:
        if not self.thread.may_end_step():
            return
        if self._loop is not None and not self._loop.manual_step():
            return
        if tokens is not None:
            self._workload = tokens
        self.end_step(_MANUAL)

    def end_step(self, flags: int = 0) -> None:
        """Closes the step in progress and decides whether the next one is sampled. Its callers are guarded."""
        if self._loop is not None and not self.recorder.closed:
            with self._changing:
                if not self._detached:
                    self._end_step(self._loop, flags)

    def _end_step(self, loop: Loop, flags: int) -> None:
        recorder = self.recorder
        start_ns, charged_ns = recorder.now_ns(), self._overhead_ns
        self.training_steps += not flags & _INFERENCE
        if self._at_step:
            self._run(self._at_step)
        if start_ns - self._throttled_ns >= _THROTTLE_NS:
            self._throttled_ns = start_ns
            self._run(self._throttled)
        if recorder.sampled:
            flags |= _SAMPLED
        content = loop.step_ended(inference=bool(flags & _INFERENCE))
        sampled = recorder.sampled
        packed = min(content.micro_steps, MICRO_STEPS_MASK) | (self._workload + 1) << WORKLOAD_SHIFT
        step = recorder.next_step(flags | self._flags | content.flags, self._memory_bytes, packed)
        if (self._flags | content.flags) & _COMPILED:
            self.publish()  # how long it took: the process may be killed before the watch ends
        self._workload = -1
        self._flags = 0
        recorder.sampled = int(self._sampling.wants(step))
        recorder.add_overhead(recorder.now_ns() - start_ns - self._overhead_ns + charged_ns)
        if sampled:
            self._sampling.step_ended(self._boundary())
        if recorder.sampled:
            self._sampling.step_begins(self._boundary())

    def _run(self, works: dict[Callable[[], object], str]) -> None:
        for failed in _AT_STEP.run(tuple(works)):
            name = works.pop(failed, "work at a step's end")
            self.note(f"{name} failed and was switched off: see the job's log")

    def _boundary(self) -> Boundary:
        """Here and now. What add_overhead() got is no part of what every step costs."""
        return Boundary(self.recorder.step, self.recorder.now_ns(), self.recorder.tool_ns - self._overhead_ns)

    def close(self, report: dict[str, Any]) -> None:
        """Detach everything, last first, and end the ring file. report: how rank 0 wants the report."""
        try:
            with guard("detaching"):
                self._detach()
            self._report = report
            with guard("telling the sidecar of the end"):
                self.publish()
        finally:  # also where Ctrl-C comes meanwhile
            swallowed.on_error = None
            self.recorder.close()
            self._ring.close()

    def _detach(self) -> None:
        # With a limit: a callback of the user's may wait for this thread at the step's end.
        waited = self._changing.acquire(timeout=_CHANGE_TIMEOUT_S)
        try:
            self._detached = True
            self._attached.close()
        finally:
            if waited:
                self._changing.release()

    def abandon(self) -> None:
        """In a forked child: records nothing more and detaches everything. The ring file stays the parent's.

        Else a watch of the child's own would find the taps taken, and wrap what is wrapped.
        """
        swallowed.on_error = None
        self.recorder.abandon()
        self._detached = True
        with guard("detaching in a forked child"):
            self._attached.close()

    def publish(
        self,
        *,
        memory_source: str | None = None,
        device: DeviceClock | None = None,
        gpus: list[Gpu] | None = None,
        stack_file: str | None = None,
        missing_tap: str | None = None,
    ) -> None:
        """Writes what the sidecar must know of this rank into the ring file. Any thread.

        What a hook has found out is passed to it; None: as before. memory_source: what memory readings are of. device:
        of the device's times, how good they are and which are missing. gpus: that this process computes on. stack_file:
        where it writes its stack when it is asked to. missing_tap: the file of the native tap, where that is missed.
        """
        news = {
            "memory_source": memory_source, "device": device, "gpus": gpus, "stack_file": stack_file,
            "missing_tap": missing_tap,
        }  # fmt: skip
        self._published.update({name: value for name, value in news.items() if value is not None})
        if self.recorder.closed:
            return
        if self.recorder.step <= 1 and self._process_began_ns:  # the first step compiles; inference counts no others
            self._start_cpu_wait_ns = cpu_wait_ns(os.getpid())
        self._ring.set_metadata(
            {
                "identity": dataclasses.asdict(self.identity),
                "anchor": (self._simulated_from or self.host_clock.anchor())._asdict(),
                "simulated": self._simulated_from is not None,
                "run_dir": self._ring.run_dir,
                "native": NATIVE,
                "model": model_digest(self._module_names),
                "notes": self._notes,
                "not_measured": self._not_measured,
                "compute_device": self._compute_device,
                "deeper_modules": self._deeper_modules,
                "threads": _threads(has_computed=self.training_steps > 0),
                "root_modules": self._roots,
                "unopened_modules": self._unopened,
                "job_store": job_store(os.environ) if self.config.exchange != "off" else None,
                "process_began_ns": self._process_began_ns,
                "compile_s": self._compile_s(),
                "start_cpu_wait_ns": self._start_cpu_wait_ns,
                "interactive": hasattr(sys, "ps1") or bool(sys.flags.interactive),
                **self._published,
                "groups": dict(list(self.groups.items())[:MAX_GROUPS]),
                "settings": {name: getattr(self.config, name) for name in SIDECAR_SETTINGS} | self._report,
            }
        )

    @staticmethod
    def _compile_s() -> float | None:
        with guard("asking torch how long it compiled"):
            return torch_private.compile_s()
        return None


def _process_began_ns(identity: Identity) -> int:
    """Return when this process began, by CLOCK_MONOTONIC.

    0 for a later watch of the process: the earlier one's training is no part of the start.
    """
    global _start_reported_by
    if not identity.process_started or _start_reported_by == os.getpid():
        return 0
    _start_reported_by = os.getpid()
    return max(1, time.monotonic_ns() - int(age_s(identity.process_started) * 1e9))


def _threads(*, has_computed: bool) -> int:
    """Return how many threads an operation of torch uses; 0 where that is not known.

    Before the first operation, asking torch would fix the number that the program may still choose.
    """
    torch = sys.modules.get("torch")
    if has_computed and torch is not None:
        return int(torch.get_num_threads())
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdecimal() else 0
