"""Times of optimizer steps, which also end training steps."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.training_thread import Work
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.hooks.loop.passed_optimizers import PassedOptimizers
    from torchlens_perf.hooks.loop.training_loop import TrainingLoop
    from torchlens_perf.recorder.recorder import Recorder
    from torchlens_perf.recorder.session import Session

_OPTIMIZER, _CLOSURE = int(Kind.OPTIMIZER), int(Kind.CLOSURE)

Listener = Callable[[Any, Any, Any], Any]
"""Receives the optimizer and the positional and named arguments of its step.

The optimizer is also the first positional argument.

A listener that is called before a step may return other arguments for the step.
"""


class Relay:
    """torch's global step hooks, which forward calls to the current listeners.

    torch iterates over its hooks while it calls them. Registering or removing one inside a hook
    raises "OrderedDict mutated during iteration" in the user's step. A watch that starts at the end
    of a step (autoload.py) runs inside a hook. The hooks are therefore registered earlier, and the
    watch only becomes their listener.
    """

    def __init__(self) -> None:
        self.before: Listener | None = None
        self.after: Listener | None = None
        self._handles: list[Any] = []

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        """Register the hooks once. Must not be called inside an optimizer's step."""
        if self._handles:
            return
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        guarded = guard("optimizer hook")
        step_begins, step_ended = guarded.calling(self, "before"), guarded.calling(self, "after")
        # Hooks traced into a graph would not run, and the step would go unnoticed. A compiled
        # optimizer breaks its graph around step() anyway, so its operations stay in one graph.
        self._handles = [
            register_optimizer_step_pre_hook(torch_private.break_in_compiled_code(step_begins)),
            register_optimizer_step_post_hook(torch_private.break_in_compiled_code(step_ended)),
        ]

    def remove(self) -> None:
        """Remove the hooks. Must not be called inside an optimizer's step."""
        while self._handles:
            self._handles.pop().remove()


relay = Relay()


class _TimedClosure:
    """An optimizer's closure, which evaluates the model and is timed apart from the optimizer."""

    __slots__ = ("_closure", "_name_id", "_recorder")

    def __init__(self, closure: Callable[..., Any], recorder: Recorder, name_id: int) -> None:
        self._closure, self._recorder, self._name_id = closure, recorder, name_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.begin(_CLOSURE, self._name_id)
        try:
            return self._closure(*args, **kwargs)
        finally:
            self._recorder.end(_CLOSURE, self._name_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._closure, name)


class OptimizerHook:
    """Hook that times optimizer steps by global step hooks and a wrapper of GradScaler.step.

    The hooks fire for every torch.optim.Optimizer. GradScaler.step is wrapped because it may skip a
    step. A wrapper that calls another optimizer's step fires the hooks twice, nested; the outermost
    call counts. Optimizers that do not derive from torch's class are timed if they were passed to
    watch().
    """

    name = "optimizer"

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        # Steps in progress as (id of the optimizer, name_id), outermost first. The name_id is None
        # for a step inside a step of the same optimizer.
        self._open: list[tuple[int, int | None]] = []
        self._ended = 0  # Number of steps that have returned.

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch

        recorder, thread, opened = session.recorder, session.thread, self._open
        name_ids: dict[type, int] = {}
        closure_id = session.intern("optimizer closure")

        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            if not thread.does(Work.OPTIMIZER):
                self._loop.optimizer_elsewhere(optimizer)
                return None
            name_id = name_ids.get(type(optimizer))
            if name_id is None:
                name_id = name_ids[type(optimizer)] = session.intern(
                    f"optimizer {type(optimizer).__name__}"
                )
            if opened:
                drop_raised(id(optimizer))
                if any(identity == id(optimizer) for identity, _ in opened):
                    # The optimizer's step() calls that of its base class.
                    opened.append((id(optimizer), None))
                    return None
            opened.append((id(optimizer), name_id))
            recorder.begin(_OPTIMIZER, name_id)
            return with_timed_closure(args, kwargs)

        def with_timed_closure(args: Any, kwargs: Any) -> Any:
            if len(args) > 1 and callable(args[1]):
                return (args[0], _TimedClosure(args[1], recorder, closure_id), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {
                    **kwargs,
                    "closure": _TimedClosure(kwargs["closure"], recorder, closure_id),
                }
            return None

        def drop_raised(beginning: int) -> None:
            """Drop steps that raised an exception, for which torch calls no post hook."""
            live = torch_private.steps_in_progress()
            # Without this information from torch, assume that the optimizer was in no other step.
            if live is None:
                live = [each for each, _ in opened if each != beginning]
            # torch lists its own optimizers only, so the beginning step may be missing from the
            # list.
            elif live[:1] == [beginning]:
                del live[0]
            around = Counter(live)
            for index, (identity, name_id) in enumerate(opened):
                around[identity] -= 1
                if around[identity] < 0:
                    if name_id is not None:
                        recorder.drop(_OPTIMIZER, name_id)
                    del opened[index:]
                    return

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not thread.is_current():
                return
            self._ended += 1
            while opened:
                identity, name_id = opened.pop()
                if identity == id(optimizer):
                    if name_id is not None:
                        recorder.end(_OPTIMIZER, name_id)
                    break
            if not opened:
                self._loop.optimizer_stepped(optimizer)

        construct = torch.optim.Optimizer.__init__

        @functools.wraps(construct)
        def noticed_construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            report_made(optimizer)

        report_made = guard("an optimizer was made")(self._loop.optimizer_made)
        scaled_step = torch.amp.GradScaler.step

        def noticed_step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.closed or torch.compiler.is_compiling() or not thread.is_current():
                return scaled_step(scaler, *args, **kwargs)
            ended = self._ended
            result = scaled_step(scaler, *args, **kwargs)
            if ended == self._ended:
                step_without_hook(args[0] if args else kwargs["optimizer"])
            return result

        @guard("GradScaler.step")
        def step_without_hook(optimizer: Any) -> None:
            # Without hooks, as in classes that do not derive from torch's, the step may have run.
            self._loop.optimizer_stepped(
                optimizer, skipped=isinstance(optimizer, torch.optim.Optimizer)
            )

        ours = not relay.installed
        relay.install()
        relay.before, relay.after = before, after
        try:
            with ExitStack() as attached:
                attached.enter_context(patched(torch.amp.GradScaler, "step", noticed_step))
                attached.enter_context(
                    patched(torch.optim.Optimizer, "__init__", noticed_construct)
                )
                for owner in {type(each) for each in self._loop.passed.without_hooks()}:
                    attached.enter_context(_stepping(owner, self._loop.passed, session))
                yield
        finally:
            relay.before = relay.after = None
            if ours:
                relay.remove()


@contextmanager
def _stepping(owner: type, passed: PassedOptimizers, session: Session) -> Iterator[None]:
    """Report steps of a class for which torch calls no hooks to the listeners of the hooks."""
    step: Callable[..., Any] = owner.step  # type: ignore[attr-defined]

    def noticed_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.recorder.closed or passed.position(self) is None:
            return step(self, *args, **kwargs)
        arguments = (self, *args), kwargs
        arguments = step_begins(self, *arguments) or arguments
        result = step(*arguments[0], **arguments[1])
        step_ended(self, *arguments)
        return result

    guarded = guard("optimizer hook")
    step_begins, step_ended = guarded.calling(relay, "before"), guarded.calling(relay, "after")
    with ExitStack() as attached:
        try:
            attached.enter_context(patched(owner, "step", noticed_step))
        except TypeError:  # The class is written in C.
            session.note(
                f"{owner.__name__}: its steps cannot be seen; call w.step() at the end of your loop"
            )
        yield
