"""Time optimizer steps, which also end training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.interruption import ours
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import create_python_front, patched
from torchlens_perf.recorder.training_thread import Work
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.hooks.loop.passed_optimizers import PassedOptimizers
    from torchlens_perf.hooks.loop.training_loop import TrainingLoop
    from torchlens_perf.recorder.recorder import Recorder
    from torchlens_perf.recorder.session import Session

_OPTIMIZER, _CLOSURE = int(Kind.OPTIMIZER), int(Kind.CLOSURE)

Listener = Callable[[Any, Any, Any], Any]
"""Function whose arguments are the optimizer and the positional and named arguments of its step.

The optimizer is also the first of the positional arguments.

A listener that is called before a step may return other arguments for the step.
"""


class OptimizerHookRelay:
    """Installs torch's global optimizer step hooks, which call the current listeners.

    torch iterates over its hooks while it calls them. Registering or removing a hook inside a hook
    raises "OrderedDict mutated during iteration" in the user's step. A watch that starts at the end
    of a step (autoload.py) starts inside a hook. The hooks are therefore registered earlier, and
    the watch only sets the listeners.
    """

    def __init__(self) -> None:
        self.before: Listener | None = None
        self.after: Listener | None = None
        self.hooks: list[Callable[..., Any]] = []
        """The installed hooks."""

    def install_hooks(self) -> None:
        """Register the hooks once. This method must not be called inside an optimizer's step."""
        if self.hooks:
            return
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        # autoload.py imports this module also where the native recorder is missing.
        from torchlens_perf.recorder.recorder import native_hook

        guarded = guard("optimizer hook")
        step_begins = guarded.wrap_attribute(self, "before")
        step_ended = guarded.wrap_attribute(self, "after")
        # Hooks that are traced into a graph would not run. Dynamo breaks the graph around a
        # compiled optimizer's step() in any case, so the optimizer's operations stay in one graph.
        # Dynamo warns of calls of C functions.
        before = create_python_front(
            native_hook("optimizer_begins", torch_private.break_graph_at(step_begins))
        )
        after = create_python_front(
            native_hook("optimizer_ended", torch_private.break_graph_at(step_ended))
        )
        self.hooks = [before, after]
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def remove_hooks(self) -> None:
        """Remove the hooks. This method must not be called inside an optimizer's step."""
        # An interruption may have taken the handles that torch returned, so look for the hooks.
        torch_private.remove_optimizer_step_hooks(self.hooks)
        self.hooks = []


relay = OptimizerHookRelay()


class _TimedClosure:
    """Wrapper of an optimizer's closure, which times the closure separately from the optimizer."""

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

    torch calls the hooks for every torch.optim.Optimizer. GradScaler.step is wrapped because it may
    skip a step. If an optimizer calls another optimizer's step, only the outermost step counts.
    Optimizers that do not derive from torch's class are timed if they were passed to watch().
    """

    name = "optimizer"

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        # Steps in progress as (id of the optimizer, name_id), outermost first. A step inside a step
        # of the same optimizer has None as name_id.
        self._open: list[tuple[int, int | None]] = []

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch

        recorder, thread, opened = session.recorder, session.thread, self._open
        name_ids: dict[type, int] = {}
        calls = 0
        hidden = torch_private.get_no_torch_function_context()()
        recorder.use_torch(
            opened,
            hidden.__enter__,
            hidden.__exit__,
            torch.Tensor,
            torch.nn.Parameter,
            torch.is_grad_enabled,
            torch_private.get_tracing_locals(),
        )
        closure_id = session.intern("optimizer closure")

        def on_step_begin(optimizer: Any, args: Any, kwargs: Any) -> Any:
            begun_ns = recorder.now_ns()
            if not thread.note_work(Work.OPTIMIZER):
                self._loop.on_unrecorded_optimizer_step(optimizer)
                return None
            recorder.show_open_step()
            name_id = name_ids.get(type(optimizer))
            if name_id is None:
                name_id = name_ids[type(optimizer)] = session.intern(
                    f"optimizer {type(optimizer).__name__}"
                )
            if opened:
                drop_failed_steps(id(optimizer))
                if any(identity == id(optimizer) for identity, _ in opened):
                    # The optimizer's step() calls the step() of its base class.
                    opened.append((id(optimizer), None))
                    return None
            opened.append((id(optimizer), name_id))
            # This time is outside of the optimizer's span.
            recorder.add_overhead(recorder.now_ns() - begun_ns)
            recorder.begin(_OPTIMIZER, name_id)
            return replace_closure(args, kwargs)

        def replace_closure(args: Any, kwargs: Any) -> Any:
            if len(args) > 1 and callable(args[1]):
                return (args[0], _TimedClosure(args[1], recorder, closure_id), *args[2:]), kwargs
            if callable(kwargs.get("closure")):
                return args, {
                    **kwargs,
                    "closure": _TimedClosure(kwargs["closure"], recorder, closure_id),
                }
            return None

        def drop_failed_steps(beginning: int) -> None:
            """Drop steps that ended by an exception, for which torch calls no post hook."""
            live = torch_private.find_steps_in_progress()
            # If the steps are unknown, assume that this optimizer has no other step in progress.
            if live is None:
                live = [each for each, _ in opened if each != beginning]
            # torch lists only steps of its own optimizers, so the step that begins may be missing.
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

        def on_step_end(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal calls
            begun_ns = recorder.now_ns()
            if not thread.is_current():
                return
            recorder.show_open_step()
            recorder.returned_steps += 1
            calls = max(calls, [identity for identity, _ in opened].count(id(optimizer)))
            while opened:
                identity, name_id = opened.pop()
                if identity == id(optimizer):
                    # The end of a span is charged there. It may wait for the device.
                    recorder.add_overhead(recorder.now_ns() - begun_ns)
                    if name_id is not None:
                        recorder.end(_OPTIMIZER, name_id)
                    break
            if not opened:
                self._loop.on_optimizer_step(optimizer, calls=calls)
                calls = 0

        construct = torch.optim.Optimizer.__init__

        def construct_and_report(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            report_made(optimizer)

        report_made = guard("an optimizer was made")(self._loop.on_optimizer_created)
        scaled_step = torch.amp.GradScaler.step

        def scaler_step_and_report(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.closed or torch.compiler.is_compiling() or not thread.is_current():
                return scaled_step(scaler, *args, **kwargs)
            returned = recorder.returned_steps
            result = scaled_step(scaler, *args, **kwargs)
            if returned == recorder.returned_steps:
                report_step_without_hook(args[0] if args else kwargs["optimizer"])
            return result

        @guard("GradScaler.step")
        def report_step_without_hook(optimizer: Any) -> None:
            # An optimizer that is not torch's calls no hooks, so its step may have run.
            self._loop.on_optimizer_step(
                optimizer, skipped=isinstance(optimizer, torch.optim.Optimizer)
            )

        installs_hooks = not relay.hooks
        try:
            relay.install_hooks()
            relay.before, relay.after = on_step_begin, on_step_end
            with (
                patched(torch.amp.GradScaler, "step", scaler_step_and_report),
                patched(torch.optim.Optimizer, "__init__", construct_and_report),
                ExitStack() as attached,
            ):
                for owner in {type(each) for each in self._loop.passed.find_without_hooks()}:
                    attached.enter_context(
                        _report_steps_of_class(owner, self._loop.passed, session)
                    )
                yield
        finally:
            recorder.settled = 0
            relay.before = relay.after = None
            try:
                if installs_hooks:
                    relay.remove_hooks()
            finally:
                if installs_hooks:
                    relay.remove_hooks()


@contextmanager
def _report_steps_of_class(
    owner: type, passed: PassedOptimizers, session: Session
) -> Iterator[None]:
    """Call the step hooks' listeners for a class of optimizers for which torch calls no hooks."""
    step: Callable[..., Any] = owner.step  # type: ignore[attr-defined]

    def step_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.recorder.closed or passed.find_position(self) is None:
            return step(self, *args, **kwargs)
        arguments = (self, *args), kwargs
        arguments = step_begins(self, *arguments) or arguments
        result = step(*arguments[0], **arguments[1])
        step_ended(self, *arguments)
        return result

    guarded = guard("optimizer hook")
    step_begins = guarded.wrap_attribute(relay, "before")
    step_ended = guarded.wrap_attribute(relay, "after")
    with ExitStack() as attached:
        try:
            attached.enter_context(patched(owner, "step", step_and_report))
        except ours(TypeError):  # A class written in C cannot be patched.
            session.note(
                f"{owner.__name__}: its steps cannot be seen; call w.step() at the end of your loop"
            )
        yield
