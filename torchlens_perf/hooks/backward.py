"""Time the backward pass: in total, per module, and its communication after the last gradient.

Modules are timed in sampled steps only. `full_backward_hook` is not used, because it turns outputs
into views, breaks in-place activations and costs 30 us per module.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks import module_tree
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.clocks import MAX_UNREAD_STEPS
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import native_hook
from torchlens_perf.recorder.training_thread import Work
from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

    from torchlens_perf.hooks.loop.selection import WatchedModule
    from torchlens_perf.hooks.loop.training_loop import TrainingLoop
    from torchlens_perf.hooks.recompute import RecomputeHook
    from torchlens_perf.recorder.clocks import Clock
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.recorder.training_thread import TrainingThread

_BACKWARD, _WAIT, _MODULE_BACKWARD = int(Kind.BACKWARD), int(Kind.WAIT), int(Kind.MODULE_BACKWARD)
_EXCEPTION, _TAIL, _DEVICE = int(Flag.EXCEPTION), int(Flag.TAIL), int(Flag.DEVICE)
_TAIL_NAME = "backward tail"


class _BackwardTail:
    """The part of an autograd engine call after the last gradient has been computed.

    DDP and FSDP wait for communication in this part.
    """

    def __init__(self, session: Session, name_id: int, *, ends_modules: bool) -> None:
        """ends_modules: True if backward passes of modules may end where this tail begins."""
        self._session = session
        self._name_id = name_id
        self._ends_modules = ends_modules
        self._queued = 0
        self.covers_all_roots = False
        self.start_ns = 0
        # Mark recorded at `start_ns` with the clock that times backward passes of modules.
        self.mark: int | None = None
        self.end_ns = 0
        self.waited_before_ns = 0
        self.waited_after_ns = 0

    @guard("hooks on the roots of a backward pass")
    def register_hooks(self, roots: Sequence[Any], handles: list[RemovableHandle]) -> bool:
        """Register a hook on the graph nodes where the pass begins, not on the user's tensors.

        The engine runs one of these nodes before it computes gradients. A leaf has no node.
        """
        from torch import Tensor

        for root in roots:
            # Roots are tensors or instances of torch.autograd.graph.GradientEdge.
            node = root.grad_fn if isinstance(root, Tensor) else root.node
            if node is not None:
                handles.append(node.register_prehook(self._on_first_gradient))
        return True

    @guard("hook of a backward pass")
    def _on_first_gradient(self, _: object) -> None:
        if not self._queued and not self.start_ns:
            self.queue_begin_callback()

    def queue_begin_callback(self) -> None:
        """Queue `_begin_tail` as a callback that runs at the end of the engine's work.

        The engine runs callbacks in the order in which they were queued. `_begin_tail` therefore
        runs before the callback that DDP queues at its last bucket. `_end_tail` is queued while
        callbacks run, so it runs after DDP's callback. Calling this method again moves
        `_begin_tail` behind callbacks that were queued in between.
        """
        self._queued += 1
        torch_private.queue_backward_end_callback(self._begin_tail)

    @guard("backward callback")
    def _begin_tail(self) -> None:
        self._queued -= 1
        if self._queued:
            return
        session, recorder = self._session, self._session.recorder
        recorder.computes_backward()
        recorder.pause_own_work(True)
        torch_private.queue_backward_end_callback(self._end_tail)
        if session.clocks.stalls is not None and session.identity.has_other_ranks:
            self.mark = session.clocks.stalls.begin_backward_tail(self._name_id)
        if self.mark is None and self._ends_modules:
            self.mark = session.clocks.current.mark()
        # The mark's time is charged, and is no part of the wait.
        self.start_ns, self.waited_before_ns = recorder.now_ns(), recorder.waited_ns

    @guard("backward callback")
    def _end_tail(self) -> None:
        recorder = self._session.recorder
        recorder.pause_own_work(False)
        self.end_ns, self.waited_after_ns = recorder.now_ns(), recorder.waited_ns

    def record(self) -> None:
        """Record the tail as a wait. Called after the engine has returned."""
        # Subtract calls of Work.wait inside the tail (FSDP), because they have their own spans.
        already_ns = self.waited_after_ns - self.waited_before_ns
        waited_ns = self.end_ns - self.start_ns - already_ns
        if self._session.identity.has_other_ranks and waited_ns > 0:
            self._session.recorder.record_span(
                _WAIT, self._name_id, self.start_ns, waited_ns, _TAIL
            )


def _guard_tensor_hook(place: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a tensor hook: its errors must not reach the user's backward pass."""

    def decorate(hook: Callable[..., None]) -> Callable[..., None]:
        guarded = guard(place)(hook)
        # Without this attribute, torch warns when a tensor with the hook is pickled.
        guarded.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return guarded

    return decorate


@dataclasses.dataclass(slots=True)
class _ModuleBackward:
    """One module's part of a backward pass: first output gradient to last input gradient."""

    name_id: int
    step: int
    clock: Clock
    inputs_left: int = 0
    start: int | None = None
    end: int | None = None

    @_guard_tensor_hook("gradient hook of a module's input")
    def on_input_gradient(self, _: Tensor) -> None:
        self.inputs_left -= 1
        if self.inputs_left == 0 and self.end is None:
            self.end = self.clock.mark()
            if self.end is None:
                self.start = None  # Without an end the pass is not recorded.

    @_guard_tensor_hook("gradient hook of a module's output")
    def on_output_gradient(self, _: Tensor) -> None:
        if self.start is None:
            self.start = self.clock.mark()


def iterate_tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield all tensors in a module's arguments or result.

    Tuples, lists, dicts and dataclasses are searched down to four levels.
    """
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4:
        if isinstance(value, (list, tuple)):
            parts: Any = value
        elif isinstance(value, dict):
            parts = value.values()
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            return
        for part in parts:
            yield from iterate_tensors(part, depth + 1)


def _contains_fsdp2(model: Module | None) -> bool:
    # Do not import FSDP, which takes a second. A model with FSDP2 has already imported it.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return (
        kind is not None
        and model is not None
        and any(isinstance(each, kind) for each in module_tree.modules(model))
    )


class BackwardHook:
    """Hook that wraps the autograd engine, and times modules in sampled steps by tensor hooks."""

    name = "backward"

    def __init__(self, loop: TrainingLoop, recompute: RecomputeHook) -> None:
        self.loop = loop
        self._recompute = recompute
        self._tail: _BackwardTail | None = None  # Tail of the innermost engine call.
        self._passes: list[_ModuleBackward] = []
        self._record: Callable[[], None] | None = None  # Set by attach().
        self._unreported = 0  # Number of backward passes without device times.
        self._thread: TrainingThread | None = None  # Set by attach().

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.autograd._engine_run_backward")
        import torch.autograd

        recorder = session.recorder
        thread = self._thread = session.thread
        name_id, tail_id = session.intern("backward"), session.intern(_TAIL_NAME)
        run_backward = torch.autograd._engine_run_backward
        tracing = torch_private.get_tracing_context_reader()
        out_of_sight = torch_private.get_no_torch_function_context()
        can_queue = torch_private.is_usable(
            "torch.autograd.Variable._execution_engine.queue_callback"
        )
        communicates = session.identity.has_other_ranks

        @guard("tail of a backward pass")
        def begin_tail(
            roots: Sequence[Any], handles: list[RemovableHandle], ends_modules: bool
        ) -> _BackwardTail:
            tail = self._tail = _BackwardTail(session, tail_id, ends_modules=ends_modules)
            with out_of_sight():
                tail.covers_all_roots = bool(tail.register_hooks(roots, handles))
            return tail

        @guard("tail of a backward pass")
        def end_tail(tail: _BackwardTail, outermost: bool) -> None:
            for each in self._passes if outermost else ():
                # The inputs of this module need no gradient.
                if each.start is not None and each.end is None:
                    each.end = tail.mark
            tail.record()

        def backward_on_other_thread(*args: Any, **kwargs: Any) -> Any:
            """Time a backward pass on an unrecorded thread, without reading gradients."""
            thread.stop_reading_gradients()
            recorder.begin(_BACKWARD, name_id)
            flags = _EXCEPTION
            try:
                result = run_backward(*args, **kwargs)
                flags = 0
                return result
            finally:
                recorder.end(_BACKWARD, name_id, flags)

        def timed_backward(*args: Any, **kwargs: Any) -> Any:
            if recorder.closed or tracing() is not None:
                return run_backward(*args, **kwargs)
            begun_ns = recorder.now_ns() - recorder.tool_ns
            if not thread.note_work(Work.BACKWARD):
                return backward_on_other_thread(*args, **kwargs)
            outermost, flags = not recorder.backwards, _EXCEPTION
            tail, outer = None, self._tail
            handles: list[RemovableHandle] = []
            if outermost:
                self.loop.on_backward_begin()
            elif not self._recompute.running:
                self.loop.on_nested_backward()
            recorder.add_overhead(recorder.now_ns() - recorder.tool_ns - begun_ns)
            recorder.begin(_BACKWARD, name_id)
            try:
                # On a single rank, the tail's begin is only needed as the end of modules' backward
                # passes, which may belong to a forward pass of an earlier step, for example in a
                # GAN.
                ends_modules = outermost and bool(recorder.sampled or self._passes)
                if (
                    (communicates or ends_modules)
                    and can_queue
                    and not torch_private.is_autograd_compiled()
                ):
                    tail = begin_tail(args[0], handles, ends_modules)
                result = run_backward(*args, **kwargs)
                flags = 0
                return result
            finally:
                self._tail = outer
                for handle in handles:
                    handle.remove()
                if tail is not None and tail.end_ns:
                    end_tail(tail, outermost)
                recorder.end(_BACKWARD, name_id, flags)
                if session.clocks.stalls is not None and communicates:
                    is_known = tail is not None and (
                        tail.start_ns > 0 or (tail.covers_all_roots and not handles)
                    )
                    # torch.autograd.grad() does not send gradients to other ranks.
                    accumulates = kwargs.get("accumulate_grad", True)
                    session.clocks.stalls.end_backward_tail(
                        raised=flags != 0, is_known=is_known or not accumulates
                    )
                # Reentrant checkpointing runs a backward pass inside another backward pass.
                if not recorder.backwards:
                    self.loop.on_backward_end()

        torch_private.break_graph_at(timed_backward)
        self._record = functools.partial(self._record_passes, session)
        # Ranks that communicate also need the tail of each backward pass.
        timed = (
            timed_backward
            if communicates
            else native_hook(
                "backward",
                timed_backward,
                recorder,
                run_backward,
                name_id,
                self.loop.on_backward_end,
            )
        )
        with patched(torch.autograd, "_engine_run_backward", timed):
            thread.find_running_backwards(getattr(run_backward, "__code__", None))
            try:
                yield
            finally:
                with guard("the last backward passes of modules"):
                    self._record_last_passes(session)

    def _record_passes(self, session: Session) -> None:
        """Record backward passes of modules whose times are known. Called at the end of a step.

        Device times may become known a few steps later.
        """
        # If an exception leaves this method, self._record stays None and modules get no more hooks.
        record, self._record = self._record, None
        passes, self._passes = self._passes, []
        recorder, later = session.recorder, self._passes
        for each in passes:
            if each.start is None or each.end is None:
                # A step may end before this pass: if the optimizer steps inside the backward pass,
                # or if another model's optimizer steps before this model's backward pass.
                waits = recorder.backwards or each.start is None
                if waits and each.step == recorder.step:
                    later.append(each)
                # Drop a backward pass that has not begun by the end of the next step.
                continue
            times = each.clock.span(each.start, each.end)
            if times is None:
                if recorder.step - each.step < MAX_UNREAD_STEPS:
                    later.append(each)
                else:
                    self._unreported += 1
                continue
            flags = 0 if each.clock is session.clocks.host else _DEVICE
            recorder.record_completed(_MODULE_BACKWARD, each.name_id, each.step, *times, flags)
        self._record = record
        if record is not None and not later:
            session.step_callbacks.remove(record)

    def _record_last_passes(self, session: Session) -> None:
        """Record the last passes of the watch, and note the number of passes without times."""
        record = self._record
        if record is not None and not session.recorder.closed:
            record()
            ended = [
                each for each in self._passes if each.start is not None and each.end is not None
            ]
            unreported = self._unreported + len(ended)
            if unreported:
                session.note(
                    f"the device did not report {unreported} backward times of modules before the"
                    " watch ended"
                )

    @property
    def times_modules(self) -> bool:
        """False if the backward passes of modules are not timed, because recording them failed."""
        return self._record is not None

    def add_pass(self, returned: _ModuleBackward, session: Session) -> None:
        """Add a module's backward pass, whose forward call has returned, to record its times."""
        if not self._passes and self._record is not None:
            session.step_callbacks.add(self.name, self._record)
        self._passes.append(returned)

    @_guard_tensor_hook("gradient hook of the model")
    def requeue_on_first_gradient(self, _: Tensor) -> None:
        if self._tail is not None and self._thread is not None and self._thread.is_current():
            self._tail.queue_begin_callback()


class ModuleObserver:
    """Callbacks for the calls of one module: for arguments, for results, and for the results of
    outermost calls.

    Models may have tens of thousands of modules, so this object is small and creates nothing until
    a callback runs.
    """

    __slots__ = (
        "_holds_fsdp2",
        "_hook",
        "_identity",
        "_is_root",
        "_module",
        "_name_id",
        "_session",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self, hook: BackwardHook, watched: WatchedModule, name_id: int, session: Session
    ) -> None:
        self._hook = hook
        self._session = session
        self._module = weakref.ref(watched.module)
        self._identity = id(watched.module)
        self._is_root = watched.is_root
        self._name_id = name_id
        self._holds_fsdp2: bool | None = None
        # Calls in progress, of which a module that calls itself has several.
        self._waiting: list[_ModuleBackward] | None = None

    @guard("forward hook of a model")
    def on_forward_result(self, result: Any) -> bool:
        """Find out whether an outermost call was part of training or of an evaluation. Return True
        if further calls only need to be counted while the loop is settled.

        A call is outermost if it is not made by another watched module.
        """
        import torch

        session = self._session
        if not session.thread.note_work(Work.FORWARD):
            return False
        with_gradient, communicates = torch.is_grad_enabled(), session.identity.has_other_ranks
        self._hook.loop.on_forward_end(with_gradient, self._identity, self._is_root)
        if not with_gradient or not communicates:
            return not communicates or self._holds_fsdp2 is False
        if self._holds_fsdp2 is None:
            self._holds_fsdp2 = _contains_fsdp2(self._module())
        # At the first gradient of the module's result, FSDP2 queues a callback that computes.
        # Our callback is queued again behind it, which keeps the computation out of the tail.
        if not self._holds_fsdp2 or torch_private.is_autograd_compiled():
            return not self._holds_fsdp2
        out_of_sight = torch_private.get_no_torch_function_context()
        for tensor in iterate_tensors(result):
            with out_of_sight():
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self._hook.requeue_on_first_gradient)
                    return False
        return False

    def _is_not_observed(self) -> bool:
        import torch

        return (
            not torch.is_grad_enabled()
            or not self._session.thread.is_current()
            or bool(self._session.recorder.backwards)
            or not self._hook.times_modules
            or torch_private.is_autograd_compiled()
        )

    @guard("backward hook of a module")
    def on_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Register tensor hooks at the end of the module's part of the backward pass. Called in
        sampled steps.
        """
        if self._is_not_observed():
            return
        session = self._session
        entered = _ModuleBackward(self._name_id, session.recorder.step, session.clocks.current)
        if self._waiting is None:
            self._waiting = []
        self._waiting.append(entered)
        inputs = list(iterate_tensors((args, kwargs)))
        with torch_private.get_no_torch_function_context()():
            for tensor in inputs:
                # Hooks on a leaf tensor would accumulate with every step.
                if tensor.requires_grad and not tensor.is_leaf:
                    entered.inputs_left += 1
                    tensor.register_hook(entered.on_input_gradient)

    @guard("backward hook of a module")
    def on_results(self, result: Any) -> None:
        """Register tensor hooks at the begin of the module's part of the backward pass. Called in
        sampled steps.
        """
        if self._is_not_observed():
            return
        waiting, step = self._waiting, self._session.recorder.step
        while waiting and waiting[0].step != step:
            waiting.pop(0)  # The forward call of this pass raised an exception.
        if not waiting:
            return
        returned = waiting.pop()
        if not waiting:
            # The lists of all modules would lie between the memory of tensors, and each later step
            # of 10,000 small modules would take a fifth longer.
            self._waiting = None
        hooked, results = False, list(iterate_tensors(result))
        with torch_private.get_no_torch_function_context()():
            for tensor in results:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(returned.on_output_gradient)
                    hooked = True
        if hooked:
            self._hook.add_pass(returned, self._session)
