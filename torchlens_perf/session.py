"""A running instrument: one recorder, the hooks attached to it, and the step boundary. watch.py makes and ends it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from torchlens_perf import torch_private
from torchlens_perf.clock import Clock, HostClock
from torchlens_perf.errors import HookUnavailable, guard, swallowed
from torchlens_perf.hooks.backward import BackwardHook
from torchlens_perf.hooks.collective import CollectiveHook
from torchlens_perf.hooks.data import DataHook
from torchlens_perf.hooks.memory import MemoryHook
from torchlens_perf.hooks.module import ModuleHook, models_of, select
from torchlens_perf.hooks.nvtx import NvtxHook
from torchlens_perf.hooks.optimizer import OptimizerHook
from torchlens_perf.hooks.section import SectionHook
from torchlens_perf.recorder import NATIVE, Recorder
from torchlens_perf.ring import Flag, RingFile
from torchlens_perf.steps import StepRule

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.config import Config
    from torchlens_perf.identity import Identity

_AT_STEP = guard("work at a step's end")
_PROBED, _MANUAL = int(Flag.PROBED), int(Flag.MANUAL)


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
        (config.collectives, CollectiveHook()),
        (config.memory, MemoryHook()),
    ]
    return [hook for want, hook in wanted if want]


class Session:
    """The parts of one watch, on the training thread. Hooks hold it; nothing of it is public."""

    def __init__(self, config: Config, identity: Identity, ring: RingFile, optimizers: Sequence[int] = ()) -> None:
        self.config = config
        self.identity = identity
        self.clock: Clock = HostClock()
        self.recorder = Recorder(ring.buffer, self.intern)
        self.at_step: list[Callable[[], None]] = []  # run at each step's end, before its record is written
        self.waited_ns = 0  # time the training thread was blocked in collectives, in total
        self.memory_bytes = 0
        self.memory_source = ""
        self.collective_sequences: defaultdict[str, int] = defaultdict(int)
        self._ring = ring
        self._rule = StepRule(optimizers)
        self._new_name: list[Callable[[str], None]] = []
        self._known_names = 1
        self._notes: list[str] = []
        self._flags = 0
        self._forwards = 0  # with gradients, since the last boundary
        self._backwards = 0
        self._report: dict[str, Any] = {}
        self._backward = BackwardHook()
        self._watched: dict[int, weakref.ref[Module]] = {}  # by id, which a later module may have again
        self._models_known = False
        self._attached = ExitStack()

    # -- for hooks

    def intern(self, name: str) -> int:
        """The id of a name in the ring file; 0 once the recorder is closed, for then the file is another process's."""
        if self.recorder.closed:
            return 0
        name_id = self._ring.intern(name)
        if name_id == self._known_names:
            self._known_names += 1
            for told in self._new_name:
                told(name)
        return name_id

    def on_new_name(self, told: Callable[[str], None]) -> None:
        """Calls `told` with every name but the first, in the order of their ids, those of the past at once."""
        for name in self._ring.names()[1:]:
            told(name)
        self._new_name.append(told)

    def note(self, text: str) -> None:
        """Something that is not measured, or measured otherwise, and why: shown in the report's data quality."""
        if text not in self._notes:
            self._notes.append(text)
            self.publish()

    def communicates(self) -> bool:
        """Whether there are other ranks to wait for."""
        return self.identity.world_size > 1

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """An optimizer's step has returned, or GradScaler has skipped it."""
        if self.recorder.closed:
            return
        if skipped:
            self._flags |= int(Flag.SKIPPED)
        if self._rule.optimizer_stepped(id(optimizer)):
            self.end_step()
        if not self._models_known:
            self._models_known = True  # looked for once: looking takes long
            with guard("finding the model"):
                self.watch_models(models_of(optimizer))

    def backward_ended(self) -> None:
        """A backward pass has returned."""
        self._backwards += 1
        self._rule.backward_ended()

    def forward_ended(self, with_gradient: bool) -> None:
        """The model has returned a result."""
        if with_gradient:
            self._forwards += 1
        ends = self._rule.forward_ended(with_gradient=with_gradient)
        if self._rule.trains:
            self._flags |= 0 if with_gradient else int(Flag.EVALUATION)
        elif ends:
            self.end_step(int(Flag.INFERENCE))

    # -- for watch.py

    def start(self, models: list[Module] | None, after_step_of: Optimizer | None = None) -> None:
        """Attaches everything. From here on marks are recorded.

        models: None to find them when an optimizer steps. after_step_of: an optimizer that has just stepped.
        """
        swallowed.on_error = self._ring.count_internal_error
        with guard("keeping torch.compile away from our hooks"):
            torch_private.skip_our_code()
        self._attach(default_hooks(self.config, self._backward))
        if after_step_of is not None:
            self._rule.optimizer_stepped(id(after_step_of))
            models = models_of(after_step_of)
            self.note("recording began after the first optimizer step, which is therefore not measured")
        if models is not None:
            self.watch_models(models)
        self._choose_probe()
        self.recorder.activate()

    def watch_models(self, models: Sequence[Module]) -> None:
        """Times these models' modules too."""
        for model in models:
            modules = [each for each in select(model, self.config) if not self._watches(each.module)]
            self._watched.update((id(each.module), weakref.ref(each.module)) for each in modules)
            self._attach([ModuleHook(modules, self._backward)])
        self._models_known = True

    def _watches(self, module: Module) -> bool:
        known = self._watched.get(id(module))
        return known is not None and known() is module

    def _attach(self, hooks: Sequence[Hook]) -> None:
        """Attaches the hooks in order. One that is unavailable is left out, and noted."""
        for hook in hooks:
            try:
                self._attached.enter_context(hook.attach(self))
            except HookUnavailable as unavailable:
                self.note(f"{hook.name}: {unavailable}")
            except Exception as error:
                if swallowed.strict:
                    raise
                swallowed.add(f"attaching {hook.name}", error)
                self.note(f"{hook.name} could not be attached: {type(error).__name__}")
        self.publish()

    def manual_step(self) -> None:
        """The user's own boundary."""
        self._rule.manual_step()
        self.end_step(_MANUAL)

    @guard("step boundary")
    def end_step(self, flags: int = 0) -> None:
        """Closes the step in progress and decides whether the next one is probed."""
        recorder = self.recorder
        if recorder.closed:
            return
        start_ns = recorder.now_ns()
        for hook in tuple(self.at_step):
            if not _AT_STEP.succeeds(hook):
                self.at_step.remove(hook)
                self.note(f"{hook.__qualname__.partition('.')[0]} failed and was switched off: see the job's log")
        if recorder.probe:
            flags |= _PROBED
        recorder.next_step(flags | self._flags, self.memory_bytes, self._micro_steps())
        self._flags = self._forwards = self._backwards = 0
        self._choose_probe()
        recorder.charge(recorder.now_ns() - start_ns)

    def _micro_steps(self) -> int:
        """How often gradients were accumulated: neither two calls of the model for one loss nor a gradient penalty's
        second backward pass are another micro-step."""
        return max(1, min(self._forwards, self._backwards or self._forwards))

    def _choose_probe(self) -> None:
        """Whether module backward times are taken in the step that begins."""
        every, step = self.config.backward_every, self.recorder.step
        self.recorder.probe = int(every > 0 and step % every == every // 2)

    def close(self, report: dict[str, Any]) -> None:
        """Detaches everything, last first, and ends the ring file. report: how rank 0 wants the report."""
        with guard("detaching"):
            self._attached.close()
        swallowed.on_error = None
        self._report = report
        self.publish()
        self.recorder.close()
        self._ring.close()

    def abandon(self) -> None:
        """In a forked child: records nothing more. The ring file stays the parent's."""
        swallowed.on_error = None
        self.recorder.abandon()

    def publish(self) -> None:
        """Writes what the sidecar must know of this rank into the ring file."""
        if self.recorder.closed:
            return
        self._ring.set_metadata(
            {
                "identity": self.identity.to_json(),
                "anchor": self.clock.anchor()._asdict(),
                "native": NATIVE,
                "memory_source": self.memory_source,
                "notes": self._notes,
                "settings": {
                    "disk_bytes": self.config.disk_bytes,
                    "trace_every": self.config.trace_every,
                    **self._report,
                },
            }
        )
