"""The forward pass, per module."""

from __future__ import annotations

import copyreg
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import ModuleCall
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from torchlens_perf.hooks.backward import BackwardHook
    from torchlens_perf.hooks.loop.selection import WatchedModule
    from torchlens_perf.recorder.session import Session

_SLOT = "_compiled_call_impl"
_SLOT_NEEDS = ("torch.nn.Module._compiled_call_impl", "torch.nn.Module._replicate_for_data_parallel")
_NONE: tuple[Callable[..., Any], tuple[()]] = (type(None), ())
# In pickles and deep copies our call is None, which is what the slot holds without us. nn.Module leaves the slot out
# itself; its subclasses that say on their own what is copied do not: nn.LSTM, DistributedDataParallel, fx.GraphModule.
copyreg.pickle(ModuleCall, lambda call: _NONE)


class ModuleHook:
    """Times each selected module's calls through its `_compiled_call_impl` slot.

    Compiled code keeps its graphs: a compiled module is timed where eager code calls it, and the modules inside its
    graph are not timed. Dynamo does not look at that slot, unless the module has hooks, as DTensor's have: then it sees
    the call that ours stands for, and guards on the slot, so that a graph made before the watch is made once more.
    Pickles and copies of a module leave the slot out.

    Nothing here holds a module: one that the user deletes inside the watch is freed at once.
    """

    name = "module"

    def __init__(self, modules: Sequence[WatchedModule], observers: BackwardHook) -> None:
        self._modules = list(modules)
        self._observers = observers  # hangs its tensor hooks on arguments and results

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        by_slot = all(torch_private.works(name) for name in _SLOT_NEEDS)
        if not by_slot:
            torch_private.require("torch._C._dynamo.eval_frame.set_code_exec_strategy")
            session.note("modules are timed by public hooks, at 20 times the usual cost: see torchlens-perf doctor")
        compiled = [each.name for each in self._modules if _is_compiled(each.module)]
        if compiled:
            others = f" and {len(compiled) - 4} more" if len(compiled) > 4 else ""
            session.note(f"{', '.join(compiled[:4])}{others}: compiled: no inner times")
        with ExitStack() as attached:
            if by_slot:
                attached.enter_context(_replicas_without_call())
            while self._modules:
                put = self._in_slot if by_slot else self._by_hooks
                attached.callback(put(self._modules.pop(0), session))
            yield

    def _in_slot(self, watched: WatchedModule, session: Session) -> Callable[[], None]:
        """Returns what takes it out again."""
        slots, module = watched.module.__dict__, weakref.ref(watched.module)
        earlier = slots.get(_SLOT)  # module.compile() puts its compiled call here
        call = ModuleCall(
            session.recorder,
            session.intern(_recorded_name(watched)),
            type(watched.module)._call_impl if earlier is None else earlier,
            watched.module if earlier is None else None,
            *self._observing(watched, session),
        )
        slots[_SLOT] = call
        watched_name = watched.name
        in_slot = weakref.ref(call)

        def take_out() -> None:
            owner = module()
            if owner is None:
                return  # it was deleted
            if owner.__dict__.get(_SLOT) is in_slot():
                _empty_slot(owner)
            elif _is_compiled(owner):
                session.note(f"{watched_name}: compiled inside the watch: no times since then")

        return take_out

    def _by_hooks(self, watched: WatchedModule, session: Session) -> Callable[[], None]:
        """Returns what removes them again."""
        pre, post = _hook_pair(session, watched, *self._observing(watched, session))
        handles = (
            watched.module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True),
            watched.module.register_forward_hook(post, always_call=True),
        )

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _observing(
        self, watched: WatchedModule, session: Session
    ) -> tuple[Callable[..., None] | None, Callable[[Any], None] | None, Callable[[Any], None]]:
        """What sees its arguments in sampled steps, its results in sampled steps, and those of its forward passes."""
        forward = guard("forward hook of a model")(self._observers.of_forward(watched, session))
        pair = None if watched.is_root else self._observers.of_module(watched, session)
        if pair is None:
            return None, None, forward
        return guard("backward hook of a module")(pair[0]), guard("backward hook of a module")(pair[1]), forward


def _is_compiled(module: Module) -> bool:
    """Whether torch.compile(module) made this one, or module.compile() was called on it."""
    return type(module).__name__ == "OptimizedModule" or module.__dict__.get(_SLOT) is not None


def _empty_slot(module: Module) -> None:
    """Takes our call out of the module's slot, and puts back what was there before."""
    call = module.__dict__.pop(_SLOT, None)
    if isinstance(call, ModuleCall):
        call = None if call.function is type(module)._call_impl else call.function
    if call is not None:
        module.__dict__[_SLOT] = call


@contextmanager
def _replicas_without_call() -> Iterator[None]:
    """nn.DataParallel copies a module's dictionary, and our call in it would compute with the original's weights."""
    from torch.nn import Module

    replicate = Module._replicate_for_data_parallel

    def replicate_and_empty_slot(self: Module) -> Module:
        replica = replicate(self)
        _empty_slot(replica)
        return replica

    with patched(Module, "_replicate_for_data_parallel", replicate_and_empty_slot):
        yield


def _recorded_name(watched: WatchedModule) -> str:
    return f"forward {watched.name}" if watched.is_root else watched.name


# Of the standard library, so that a saved model loads where this package is not installed. Takes any arguments.
_DO_NOTHING = nullcontext().__exit__


class _Hook:
    """A forward hook that copies of the module leave behind: in them it is a function that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _DO_NOTHING.__reduce__()  # type: ignore[return-value]


def _hook_pair(
    session: Session,
    watched: WatchedModule,
    before: Callable[..., None] | None,
    after: Callable[[Any], None] | None,
    forward: Callable[[Any], None],
) -> tuple[_Hook, _Hook]:
    """The fallback without the slot: public hooks that Dynamo passes over."""
    recorder, name_id = session.recorder, session.intern(_recorded_name(watched))

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if before is not None and recorder.sampled:
            before(*args, **kwargs)
        recorder.begin_module(name_id)

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        # Without a result, torch is handling an exception of the module's, or the module has returned None.
        raised = result is None and sys.exc_info()[1] is not None
        was_forward = recorder.end_module(name_id, int(Flag.EXCEPTION) if raised else 0)
        if raised:
            return
        if after is not None and recorder.sampled:
            after(result)
        if was_forward:
            forward(result)

    return _Hook(enter), _Hook(leave)
