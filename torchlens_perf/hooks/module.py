"""Time the forward pass of each module."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import HookUnavailable, guard
from torchlens_perf.hooks.backward import BackwardHook, ModuleObserver
from torchlens_perf.hooks.loop.selection import has_parameters
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.recorder import (
    ModuleCall,
    observe_calls,
    route_calls,
    set_module_call,
    unroute_calls,
)

if TYPE_CHECKING:
    from torch.nn import Module

    from torchlens_perf.hooks.loop.selection import WatchedModule
    from torchlens_perf.recorder.session import Session


class _ModuleReference(weakref.ref):  # type: ignore[type-arg] # not generic at run time
    """Weak reference to a timed module."""

    __slots__ = ("address", "router")

    address: int
    router: ModuleCallRouter

    def stop_timing(self) -> None:
        self.router.stop_timing(self.address)


class ModuleCallRouter:
    """Routes calls of watched modules to their ModuleCall objects.

    Pickles, copies, state dicts, torch.export and torch.jit are not affected, because modules and
    their classes are not changed. The recorder keeps the function of nn.Module.__call__ and its
    code, so torch.compile is not affected (native/module_call.c).

    Each outermost module that is called on the training thread is shown once to
    `on_new_module`, if it has parameters: it may be a model that the loop trains.

    References to modules are weak: a module that the user deletes is freed at once.
    """

    name = "module calls"

    def __init__(self, on_new_module: Callable[[Module], None]) -> None:
        self._on_new_module = on_new_module
        self._references: dict[int, _ModuleReference] = {}
        # Classes of the modules, whose own functions have been looked up.
        self._classes: weakref.WeakSet[type] = weakref.WeakSet()
        # Functions of classes that override nn.Module.__call__, whose calls are routed too.
        self._own_call_functions: list[weakref.ref[types.FunctionType]] = []
        self._function: Any = None
        self._routed = False

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        try:
            self._function = torch_private.get_module_call_function()
            if not route_calls(self._function):
                raise HookUnavailable(
                    "another tool has replaced the code of nn.Module.__call__, so neither modules"
                    " nor forward passes are timed"
                )
            observe_calls(guard("finding the trained models")(self._observe_call))
            self._routed = True
            yield
        finally:
            try:
                self._stop_all()
            # Complete the work if an interruption arrives.
            finally:
                self._stop_all()

    def _stop_all(self) -> None:
        observe_calls(None)
        for function in (self._function, *(each() for each in self._own_call_functions)):
            unroute_calls(function)
        for address in list(self._references):
            self.stop_timing(address)

    def time_module(self, module: Module, make: Callable[[Any], ModuleCall]) -> None:
        """Time the module's calls from now on.

        make: creates the ModuleCall for the function that runs the module.
        """
        if not self._routed:
            return
        set_module_call(self._add_reference(module), make(self._function))
        kind = type(module)
        if kind not in self._classes:
            self._classes.add(kind)
            own = next(vars(each)["__call__"] for each in kind.__mro__ if "__call__" in vars(each))
            if isinstance(own, types.FunctionType):
                self._own_call_functions.append(weakref.ref(own))
                if not route_calls(own):
                    self._own_call_functions.pop()

    def _observe_call(self, module: Module) -> bool:
        """Return True if the module is known from now on.

        A module without parameters stays unknown: it may call the model, or be a loss function.
        """
        if id(module) not in self._references:
            if not has_parameters(module):
                return False
            set_module_call(self._add_reference(module), ...)
            self._on_new_module(module)
        return True

    def _add_reference(self, module: Module) -> int:
        # All references share one callback, because a garbage collection visits each function.
        reference = _ModuleReference(module, _ModuleReference.stop_timing)
        address = id(module)
        reference.address, reference.router = address, self
        self._references[address] = reference
        return address

    def stop_timing(self, address: int) -> None:
        set_module_call(address, None)
        self._references.pop(address, None)


class ModuleHook:
    """Hook that times the calls of each selected module.

    A compiled module is timed when eager code calls it. Modules inside it are not timed.
    """

    name = "module"

    def __init__(self, session: Session, observers: BackwardHook, calls: ModuleCallRouter) -> None:
        self._session = session
        self._observers = observers
        self._calls = calls
        self._eager: dict[str, weakref.ref[Module]] = {}

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        yield
        for name, reference in self._eager.items():
            module = reference()
            if module is not None and torch_private.is_module_compiled(module):
                session.note(f"{name}: compiled inside the watch: no inner times since then")

    def time_modules(self, modules: Sequence[WatchedModule]) -> None:
        """Time the calls of these modules from now on."""
        compiled = {each.name for each in modules if torch_private.is_module_compiled(each.module)}
        if compiled:
            others = f" and {len(compiled) - 4} more" if len(compiled) > 4 else ""
            shown = ", ".join([each.name for each in modules if each.name in compiled][:4])
            self._session.note(f"{shown}{others}: compiled: no inner times")
        for each in modules:
            # Keep no reference: the user may delete modules inside the watch to free their memory.
            if each.name not in compiled:
                self._eager[each.name] = weakref.ref(each.module)
            self._time_module(each, self._session)

    def _time_module(self, watched: WatchedModule, session: Session) -> None:
        name_id = session.intern(f"forward {watched.name}" if watched.is_root else watched.name)
        observer = ModuleObserver(self._observers, watched, name_id, session)
        # The backward pass of a root is timed as a whole.
        before, after = (
            (None, None)
            if watched.is_root or not self._observers.times_modules
            else (observer.on_arguments, observer.on_results)
        )
        self._calls.time_module(
            watched.module,
            lambda function: ModuleCall(
                session.recorder, name_id, function, before, after, observer.on_forward_result
            ),
        )
