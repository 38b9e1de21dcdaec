"""The forward pass, per module."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import itertools
import site
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchlens_perf import torch_private
from torchlens_perf.errors import guard
from torchlens_perf.hooks.patch import patched
from torchlens_perf.recorder import ModuleCall
from torchlens_perf.ring import Flag

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from torchlens_perf.config import Config
    from torchlens_perf.hooks.trained_models import NamedModel
    from torchlens_perf.session import Session

MAX_MODULES = 128  # with modules="auto": 128 calls cost about 30 us a step
_AUTO_LEVELS = 2
# What wrappers call the module that they wrap: no part of the name that the user knows. DDP's "module" is one only
# around the whole model; inside it may be the user's own.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SLOT = "_compiled_call_impl"
_SLOT_NEEDS = ("torch.nn.Module._compiled_call_impl", "torch.nn.Module._replicate_for_data_parallel")
_NONE: tuple[Callable[..., Any], tuple[()]] = (type(None), ())
# In pickles and deep copies our call is None, which is what the slot holds without us. nn.Module leaves the slot out
# itself; its subclasses that say on their own what is copied do not: nn.LSTM, DistributedDataParallel, fx.GraphModule.
copyreg.pickle(ModuleCall, lambda call: _NONE)


@dataclasses.dataclass(frozen=True)
class WatchedModule:
    """A module to time, under the name that the user knows it by; a root's is the model's name, or its class."""

    name: str
    module: Module
    is_root: bool


class Observers(Protocol):
    """Sees the arguments and results of module calls: hooks/backward.py, which hangs its tensor hooks on them."""

    def of_forward(self, watched: WatchedModule, session: Session) -> Callable[[Any], None]:
        """What sees each result of a call that is a forward pass: no other watched module has called the module."""
        ...

    def of_module(
        self, watched: WatchedModule, session: Session
    ) -> tuple[Callable[..., None], Callable[[Any], None]] | None:
        """What sees a module's arguments and results, in probed steps; None for none."""
        ...


class Selection(NamedTuple):
    """The modules of a model that are timed."""

    modules: list[WatchedModule]
    """The root first. Shared modules count once."""
    all_levels: bool
    """Whether there are no others below them."""


def select(model: NamedModel, config: Config, most: int = MAX_MODULES) -> Selection:
    """What config.modules asks for. most: how many with "auto"."""
    root = model.module
    prefix, inner = _unwrap(root)
    shown_root = WatchedModule(model.name or class_name(root), root, is_root=True)
    levels = _levels(inner)
    candidates: dict[str, WatchedModule] = {}
    for name, module in root.named_modules():
        shown = _user_name(name.removeprefix(prefix).removeprefix("."))
        # A wrapper inside the model and what it wraps have the same name for the user: the wrapper is timed.
        if shown and not isinstance(module, _containers()) and shown not in candidates:
            full = f"{model.name}.{shown}" if model.name else shown
            candidates[shown] = WatchedModule(full, module, is_root=False)
    every = {name: each for name, each in candidates.items() if each.module is not root}

    def down_to(level: int) -> list[WatchedModule]:
        return [each for each in every.values() if levels.get(id(each.module), 1) <= level]

    if config.modules == "none":
        chosen = []
    elif config.modules == "all":
        chosen = list(every.values())
    elif isinstance(config.modules, int):
        chosen = down_to(config.modules)
    elif isinstance(config.modules, tuple):
        chosen = [each for name, each in every.items() if config.wants_module(name) or config.wants_module(each.name)]
    else:
        fitting = [down_to(level) for level in range(_AUTO_LEVELS, 0, -1) if len(down_to(level)) <= most]
        chosen = fitting[0] if fitting else []
    return Selection([shown_root, *chosen], all_levels=len(chosen) == len(every))


def _containers() -> tuple[type[Module], ...]:
    """Modules that nobody calls."""
    from torch import nn

    return nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def _user_name(name: str) -> str:
    """A qualified name without the parts that wrappers inside the model put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED_NAMES)


def _unwrap(root: Module) -> tuple[str, Module]:
    """The model inside its wrappers (DDP, compile, Fabric's), and its qualified name there."""
    path: list[str] = []
    while True:
        only = _only_child(root)
        if only is None or not (only[0] in ("module", *_WRAPPED_NAMES) or _is_frameworks(root, only[1])):
            return ".".join(path), root
        path.append(only[0])
        root = only[1]


def class_name(model: Module) -> str:
    """The name of the class of the model inside its wrappers."""
    return type(_unwrap(model)[1]).__name__


def _only_child(module: Module) -> tuple[str, Module] | None:
    """The child that holds all of the module's parameters, if there is one; others are the same, or inside of it."""
    if any(True for _ in module.parameters(recurse=False)):
        return None
    holding = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    for name, child in holding:
        inside = {id(each) for each in child.modules()}
        if all(id(other) in inside for _, other in holding):
            return name, child
    return None


def _is_frameworks(wrapper: Module, inner: Module) -> bool:
    """Whether a framework has put its own module around the user's: both are of different packages, the outer one's is
    installed, and nn.Sequential is no wrapper."""
    from torch import nn

    if isinstance(wrapper, nn.Sequential):
        return False
    outer, inside = (type(each).__module__.partition(".")[0] for each in (wrapper, inner))
    file = getattr(sys.modules.get(outer), "__file__", None) or ""
    return outer != inside and outer != "__main__" and file.startswith(_installed_packages())


@functools.cache
def _installed_packages() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return tuple(f"{path}/" for path in [*paths, *site.getsitepackages(), site.getusersitepackages()])


def _levels(model: Module) -> dict[int, int]:
    """How deep each module lies.

    No level of their own have containers and wrappers, which nobody calls or sees, and what only holds another module,
    which takes all of its time: a Transformer's encoder around its list of layers, or a trainer's class around the
    model and its loss.
    """
    only = _only_child(model)
    levels: dict[int, int] = {id(model): 0}

    def has_no_level(name: str, child: Module) -> bool:
        only_holds = len(list(child.children())) == 1 and _only_child(child) is not None
        is_the_model = only is not None and child is only[1]
        return only_holds or is_the_model or name in _WRAPPED_NAMES or isinstance(child, _containers())

    def descend(module: Module, level: int) -> None:
        for name, child in module.named_children():
            if id(child) not in levels:
                levels[id(child)] = level if has_no_level(name, child) else level + 1
                descend(child, levels[id(child)])

    descend(model, 0)
    return levels


class ModuleHook:
    """Times each selected module's calls through its `_compiled_call_impl` slot.

    Dynamo does not look at that slot, so compiled code keeps its graphs: a compiled module is timed where eager code
    calls it, and the modules inside its graph are not timed. Pickles and copies of a module leave the slot out.

    Nothing here holds a module: one that the user deletes inside the watch is freed at once.
    """

    name = "module"

    def __init__(self, modules: Sequence[WatchedModule], observers: Observers) -> None:
        self._modules = list(modules)
        self._observers = observers

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        by_slot = all(torch_private.works(name) for name in _SLOT_NEEDS)
        if not by_slot:
            torch_private.require("torch._C._dynamo.eval_frame.set_code_exec_strategy")
            session.note("modules are timed by public hooks, at 20 times the usual cost: see torchlens-perf doctor")
        _note_compiled([each.name for each in self._modules if _is_compiled(each.module)], session)
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
        """What sees its arguments in probed steps, its results in probed steps, and those of its forward passes."""
        forward = guard("forward hook of a model")(self._observers.of_forward(watched, session))
        pair = None if watched.is_root else self._observers.of_module(watched, session)
        if pair is None:
            return None, None, forward
        return guard("backward hook of a module")(pair[0]), guard("backward hook of a module")(pair[1]), forward


def _is_compiled(module: Module) -> bool:
    """Whether torch.compile(module) made this one, or module.compile() was called on it."""
    return type(module).__name__ == "OptimizedModule" or module.__dict__.get(_SLOT) is not None


def _note_compiled(names: list[str], session: Session) -> None:
    if names:
        others = f" and {len(names) - 4} more" if len(names) > 4 else ""
        session.note(f"{', '.join(names[:4])}{others}: compiled: no inner times")


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


class _Hook:
    """A forward hook that copies of the module leave behind: in them it is a function that does nothing.

    That function is one of the standard library, so that a saved model loads where this package is not installed.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


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
        if before is not None and recorder.probe:
            before(*args, **kwargs)
        recorder.begin_module(name_id)

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        # Without a result, torch is handling an exception of the module's, or the module has returned None.
        raised = result is None and sys.exc_info()[1] is not None
        was_forward = recorder.end_module(name_id, int(Flag.EXCEPTION) if raised else 0)
        if raised:
            return
        if after is not None and recorder.probe:
            after(result)
        if was_forward:
            forward(result)

    return _Hook(enter), _Hook(leave)


def device_of(model: Module) -> str:
    """The kind of device that a model's first parameter is on; "" where it has none yet."""
    with torch_private.out_of_sight()():
        kinds = {parameter.device.type for parameter in itertools.islice(model.parameters(), 1)} - {"meta"}
    return next(iter(kinds), "")
