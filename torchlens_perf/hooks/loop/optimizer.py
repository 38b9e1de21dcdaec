"""Optimizer steps, which are also where training steps end."""

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
"""Gets the optimizer, and the positional and the named arguments of its step, the optimizer first. Before a step it may
return others for the step to be called with."""


class Relay:
    """torch's global step hooks, handed on to whoever listens.

    torch calls the hooks while it iterates over them, and registering or removing one from inside raises
    "OrderedDict mutated during iteration" in the user's step. A watch that starts at the end of a step (autoload.py) is
    inside: so the hooks are there before it, and it only becomes their listener.
    """

    def __init__(self) -> None:
        self.before: Listener | None = None
        self.after: Listener | None = None
        self._handles: list[Any] = []

    @property
    def installed(self) -> bool:
        return bool(self._handles)

    def install(self) -> None:
        """Registers the hooks, once. Not from inside an optimizer's step."""
        if self._handles:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        guarded = guard("optimizer hook")
        step_begins, step_ended = guarded.calling(self, "before"), guarded.calling(self, "after")
        # Traced into a graph they would not run, and the step would not be seen. A compiled optimizer breaks its graph
        # around step() anyway, and its operations stay in one graph.
        self._handles = [
            register_optimizer_step_pre_hook(torch_private.break_in_compiled_code(step_begins)),
            register_optimizer_step_post_hook(torch_private.break_in_compiled_code(step_ended)),
        ]

    def remove(self) -> None:
        """Takes the hooks away. Not from inside an optimizer's step."""
        while self._handles:
            self._handles.pop().remove()


relay = Relay()


class _TimedClosure:
    """What the optimizer calls to evaluate the model: the time in it is not the optimizer's."""

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
    """Global step hooks, which fire for every torch.optim.Optimizer, and a wrap of GradScaler.step, which may skip one.

    A wrapper that calls another optimizer's step fires twice, nested; the outermost is the step. An optimizer of
    another class than torch's is seen where it was passed to watch().
    """

    name = "optimizer"

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        # (id of the optimizer, its name_id), outermost first; no name for a step inside a step of the same one.
        self._open: list[tuple[int, int | None]] = []
        self._ended = 0  # steps that have returned

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
                name_id = name_ids[type(optimizer)] = session.intern(f"optimizer {type(optimizer).__name__}")
            if opened:
                drop_raised(id(optimizer))
                if any(identity == id(optimizer) for identity, _ in opened):
                    opened.append((id(optimizer), None))  # it calls its base class's step
                    return None
            opened.append((id(optimizer), name_id))
            recorder.begin(_OPTIMIZER, name_id)
            return with_timed_closure(args, kwargs)

        def with_timed_closure(args: Any, kwargs: Any) -> Any:
            if len(args) > 1 and callable(args[1]):
                return (args[0], _TimedClosure(args[1], recorder, closure_id), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {**kwargs, "closure": _TimedClosure(kwargs["closure"], recorder, closure_id)}
            return None

        def drop_raised(beginning: int) -> None:
            """Forgets steps that raised: torch calls no post hook for them."""
            live = torch_private.steps_in_progress()
            # Where torch does not tell, an optimizer that begins a step is taken to be in no other one.
            if live is None:
                live = [each for each, _ in opened if each != beginning]
            elif live[:1] == [beginning]:  # not one of another class than torch's
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
            made(optimizer)

        made = guard("an optimizer was made")(self._loop.optimizer_made)
        scaled_step = torch.amp.GradScaler.step

        def noticed_step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.closed or torch.compiler.is_compiling() or not thread.is_current():
                return scaled_step(scaler, *args, **kwargs)
            ended = self._ended
            result = scaled_step(scaler, *args, **kwargs)
            if ended == self._ended:
                no_step(args[0] if args else kwargs["optimizer"])
            return result

        @guard("GradScaler.step")
        def no_step(optimizer: Any) -> None:
            # Other classes than torch's call no hooks: theirs may have stepped.
            self._loop.optimizer_stepped(optimizer, skipped=isinstance(optimizer, torch.optim.Optimizer))

        ours = not relay.installed
        relay.install()
        relay.before, relay.after = before, after
        try:
            with ExitStack() as attached:
                attached.enter_context(patched(torch.amp.GradScaler, "step", noticed_step))
                attached.enter_context(patched(torch.optim.Optimizer, "__init__", noticed_construct))
                for owner in {type(each) for each in self._loop.passed.without_hooks()}:
                    attached.enter_context(_stepping(owner, self._loop.passed, session))
                yield
        finally:
            relay.before = relay.after = None
            if ours:
                relay.remove()


@contextmanager
def _stepping(owner: type, passed: PassedOptimizers, session: Session) -> Iterator[None]:
    """Shows the steps of this class, for which torch calls no hooks, to who listens to those."""
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
        except TypeError:  # a class in C
            session.note(f"{owner.__name__}: its steps cannot be seen; call w.step() at the end of your loop")
        yield
