"""Times of the backward pass: in total, its tail of exposed communication, and per module.

Modules are timed in sampled steps only. `full_backward_hook` is not used: it turns outputs into
views, breaks in-place activations and costs 30 us per module.
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
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.clocks import MAX_UNREAD_STEPS
from torchlens_perf.recorder.patch import patched
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

_BACKWARD, _WAIT, _MODULE_BACKWARD = int(Kind.BACKWARD), int(Kind.WAIT), int(Kind.MODULE_BACKWARD)
_EXCEPTION, _TAIL, _DEVICE = int(Flag.EXCEPTION), int(Flag.TAIL), int(Flag.DEVICE)
_TAIL_NAME = "backward tail"


class _Tail:
    """The part of one autograd engine call after its last computed gradient.

    DDP and FSDP wait for their communication in this part.
    """

    def __init__(self, session: Session, name_id: int, *, ends_modules: bool) -> None:
        """ends_modules: True if backward passes of modules may end at the start of this tail."""
        self._session = session
        self._name_id = name_id
        self._ends_modules = ends_modules
        self._queued = 0
        self.covers_all_roots = False
        self.start_ns = 0
        # The instant of start_ns on the clock that times the modules' passes.
        self.mark: int | None = None
        self.end_ns = 0
        self.waited_before_ns = 0
        self.waited_after_ns = 0

    @guard("hooks on the roots of a backward pass")
    def register_on(self, roots: Sequence[Any], handles: list[RemovableHandle]) -> bool:
        """Register a hook on the graph nodes at which the pass begins, not on the user's tensors.

        All computation of gradients comes after the first of these nodes. A leaf has no node.
        """
        from torch import Tensor

        for root in roots:
            # Roots are tensors or instances of torch.autograd.graph.GradientEdge.
            node = root.grad_fn if isinstance(root, Tensor) else root.node
            if node is not None:
                handles.append(node.register_prehook(self._first_gradient))
        return True

    @guard("hook of a backward pass")
    def _first_gradient(self, _: object) -> None:
        if not self._queued and not self.start_ns:
            self.queue()

    def queue(self) -> None:
        """Queue `_gradients_computed` as a callback for the end of the engine's work.

        The engine runs callbacks in the order in which they were queued. `_gradients_computed`
        therefore runs before the callback that DDP queues at its last bucket. `_finished` is
        queued while callbacks run, so it comes after DDP's. Calling this method again moves
        `_gradients_computed` behind callbacks that were queued in between.
        """
        self._queued += 1
        torch_private.queue_callback(self._gradients_computed)

    @guard("backward callback")
    def _gradients_computed(self) -> None:
        self._queued -= 1
        if self._queued:
            return
        session, recorder = self._session, self._session.recorder
        recorder.computes_backward()
        recorder.own_work_paused()
        torch_private.queue_callback(self._finished)
        self.start_ns, self.waited_before_ns = recorder.now_ns(), recorder.waited_ns
        if session.clocks.stalls is not None and session.identity.has_other_ranks:
            self.mark = session.clocks.stalls.begin_tail(self._name_id)
        if self.mark is None and self._ends_modules:
            self.mark = session.clocks.current.mark()

    @guard("backward callback")
    def _finished(self) -> None:
        recorder = self._session.recorder
        recorder.own_work_resumed()
        self.end_ns, self.waited_after_ns = recorder.now_ns(), recorder.waited_ns

    def record(self) -> None:
        """Record the tail as a wait, after the engine has returned."""
        # FSDP calls Work.wait from Python inside the tail. Those waits have spans of their own.
        already_ns = self.waited_after_ns - self.waited_before_ns
        waited_ns = self.end_ns - self.start_ns - already_ns
        if self._session.identity.has_other_ranks and waited_ns > 0:
            self._session.recorder.record_span(
                _WAIT, self._name_id, self.start_ns, waited_ns, _TAIL
            )


def _gradient_hook(place: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a tensor hook so that its errors do not reach the user's backward pass."""

    def decorate(hook: Callable[..., None]) -> Callable[..., None]:
        guarded = guard(place)(hook)
        # Without this attribute torch warns when a tensor that has the hook is pickled.
        guarded.__torch_unserializable__ = True  # type: ignore[attr-defined]
        return guarded

    return decorate


@dataclasses.dataclass(slots=True)
class _ModulePass:
    """One module's part of a backward pass: from its first output to its last input gradient."""

    name_id: int
    step: int
    clock: Clock
    inputs_left: int = 0
    start: int | None = None
    end: int | None = None

    @_gradient_hook("gradient hook of a module's input")
    def input_gradient(self, _: Tensor) -> None:
        self.inputs_left -= 1
        if self.inputs_left == 0 and self.end is None:
            self.end = self.clock.mark()
            if self.end is None:
                self.start = None  # Without an end the pass is not recorded.

    @_gradient_hook("gradient hook of a module's output")
    def output_gradient(self, _: Tensor) -> None:
        if self.start is None:
            self.start = self.clock.mark()

    def span(self) -> tuple[int, int] | None:
        """Return start and duration in ns, or None while they are not known."""
        return (
            None
            if self.start is None or self.end is None
            else self.clock.span(self.start, self.end)
        )


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in a module's arguments or result.

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
            yield from tensors(part, depth + 1)


def _holds_fsdp2(model: Module | None) -> bool:
    # Importing FSDP takes a second, so it is only looked up: a model with FSDP2 has imported it.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return (
        kind is not None
        and model is not None
        and any(isinstance(each, kind) for each in model.modules())
    )


class BackwardHook:
    """Hook that wraps the autograd engine, and times modules by tensor hooks in sampled steps."""

    name = "backward"

    def __init__(self, loop: TrainingLoop, recompute: RecomputeHook) -> None:
        self._loop = loop
        self._recompute = recompute
        self._tail: _Tail | None = None  # The tail of the engine's innermost call.
        self._passes: list[_ModulePass] = []
        self._record: Callable[[], None] | None = None  # Set by attach().
        self._unreported = 0  # Number of passes whose times the device's clock did not report.

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.autograd._engine_run_backward")
        import torch.autograd

        recorder, thread = session.recorder, session.thread
        name_id, tail_id = session.intern("backward"), session.intern(_TAIL_NAME)
        run_backward = torch.autograd._engine_run_backward
        tracing, out_of_sight = torch_private.tracing_context(), torch_private.out_of_sight()
        can_queue = torch_private.works("torch.autograd.Variable._execution_engine.queue_callback")
        communicates = session.identity.has_other_ranks

        @guard("tail of a backward pass")
        def begin_tail(
            roots: Sequence[Any], handles: list[RemovableHandle], ends_modules: bool
        ) -> _Tail:
            tail = self._tail = _Tail(session, tail_id, ends_modules=ends_modules)
            with out_of_sight():
                tail.covers_all_roots = bool(tail.register_on(roots, handles))
            return tail

        @guard("tail of a backward pass")
        def end_tail(tail: _Tail, outermost: bool) -> None:
            if outermost:
                self._gradients_computed(tail.mark)
            tail.record()

        def backward_elsewhere(*args: Any, **kwargs: Any) -> Any:
            """Record that another thread runs a pass, without touching the state of that pass."""
            thread.backward_elsewhere()
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
            if not thread.does(Work.BACKWARD):
                return backward_elsewhere(*args, **kwargs)
            outermost, flags = not recorder.backwards, _EXCEPTION
            tail, outer = None, self._tail
            handles: list[RemovableHandle] = []
            if outermost:
                self._loop.backward_begins()
            elif not self._recompute.running:
                self._loop.backward_inside_backward()
            recorder.begin(_BACKWARD, name_id)
            try:
                # On a single rank only the modules' passes need the end of the computation. They
                # may belong to an earlier step's forward pass: a GAN's generator gets its loss a
                # step later.
                ends_modules = outermost and bool(recorder.sampled or self._passes)
                if (
                    (communicates or ends_modules)
                    and can_queue
                    and not torch_private.compiled_autograd()
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
                    # Gradients of torch.autograd.grad() are not sent to other ranks.
                    accumulates = kwargs.get("accumulate_grad", True)
                    session.clocks.stalls.end_tail(
                        raised=flags != 0, is_known=is_known or not accumulates
                    )
                # Reentrant checkpointing runs a backward pass inside another one.
                if not recorder.backwards:
                    self._loop.backward_ended()

        torch_private.break_in_compiled_code(timed_backward)
        self._record = functools.partial(self._record_passes, session)
        with patched(torch.autograd, "_engine_run_backward", timed_backward):
            thread.look_for_passes(getattr(run_backward, "__code__", None))
            try:
                yield
            finally:
                with guard("the last backward passes of modules"):
                    self._record_last(session)

    def _gradients_computed(self, mark: int | None) -> None:
        """End the passes of modules whose inputs need no gradient with the computation."""
        for each in self._passes:
            if each.start is not None and each.end is None:
                each.end = mark

    def _record_passes(self, session: Session) -> None:
        """Record the passes whose times are known at the end of a step.

        Times of a device may become known a few steps later.
        """
        # If an exception leaves this method, self._record stays None and modules get no more hooks.
        record, self._record = self._record, None
        passes, self._passes = self._passes, []
        recorder, later = session.recorder, self._passes
        for each in passes:
            if each.start is None or each.end is None:
                # The step may end before this pass does: when the optimizer steps inside the
                # backward pass, or when another model's optimizer steps before this model's
                # backward pass.
                waits = recorder.backwards or each.start is None
                if waits and each.step == recorder.step:
                    later.append(each)
                # A pass that the next step's backward passes do not reach either is dropped.
                continue
            times = each.span()
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

    def _record_last(self, session: Session) -> None:
        """Record the last passes at the end of the watch and note those without device times."""
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

    def forward_observer(self, watched: WatchedModule, session: Session) -> Callable[[Any], None]:
        """Return a callback for the results of outermost module calls.

        An outermost call is one that no other watched module makes. Its results distinguish
        training steps from evaluations.
        """
        import torch

        identity, is_root, out_of_sight = (
            id(watched.module),
            watched.is_root,
            torch_private.out_of_sight(),
        )
        thread = session.thread
        communicates, module, holds_fsdp2 = (
            session.identity.has_other_ranks,
            weakref.ref(watched.module),
            None,
        )

        @_gradient_hook("gradient hook of the model")
        def first_gradient(_: Tensor) -> None:
            if self._tail is not None and thread.is_current():
                self._tail.queue()

        def seen(result: Any) -> None:
            nonlocal holds_fsdp2
            if not thread.does(Work.FORWARD):
                return
            with_gradient = torch.is_grad_enabled()
            self._loop.forward_ended(with_gradient, identity, is_root)
            if not with_gradient or not communicates:
                return
            if holds_fsdp2 is None:
                holds_fsdp2 = _holds_fsdp2(module())
            # FSDP2 queues a callback at the first gradient of its result and computes in it.
            # Queueing our callback again behind it keeps that computation out of the tail.
            if not holds_fsdp2 or torch_private.compiled_autograd():
                return
            for tensor in tensors(result):
                with out_of_sight():
                    if tensor.requires_grad and tensor.grad_fn is not None:
                        tensor.register_hook(first_gradient)
                        return

        return seen

    def module_observers(
        self, watched: WatchedModule, session: Session
    ) -> tuple[Callable[..., None], Callable[[Any], None]] | None:
        """Return callbacks for a module's arguments and for its results in sampled steps.

        They register tensor hooks that bracket the module's part of the backward pass. None if
        recording has failed before.
        """
        import torch

        if self._record is None:
            return None
        recorder, thread, out_of_sight = (
            session.recorder,
            session.thread,
            torch_private.out_of_sight(),
        )
        name_id = session.intern(watched.name)
        # Calls that have not returned. A module that calls itself has several.
        waiting: list[_ModulePass] = []

        def unobserved() -> bool:
            return (
                not torch.is_grad_enabled()
                or not thread.is_current()
                or bool(recorder.backwards)
                or self._record is None
                or torch_private.compiled_autograd()
            )

        def before(*args: Any, **kwargs: Any) -> None:
            if unobserved():
                return
            entered = _ModulePass(name_id, recorder.step, session.clocks.current)
            waiting.append(entered)
            inputs = list(tensors((args, kwargs)))
            with out_of_sight():
                for tensor in inputs:
                    # A hook on a leaf would stay there and pile up with every step.
                    if tensor.requires_grad and not tensor.is_leaf:
                        entered.inputs_left += 1
                        tensor.register_hook(entered.input_gradient)

        def after(result: Any) -> None:
            if unobserved():
                return
            while waiting and waiting[0].step != recorder.step:
                waiting.pop(0)  # The forward call of this pass raised an exception.
            if not waiting:
                return
            returned = waiting.pop()
            hooked, results = False, list(tensors(result))
            with out_of_sight():
                for tensor in results:
                    if tensor.requires_grad and tensor.grad_fn is not None:
                        tensor.register_hook(returned.output_gradient)
                        hooked = True
            if hooked:
                if not self._passes and self._record is not None:
                    session.step_callbacks.add(self.name, self._record)
                self._passes.append(returned)

        return before, after
