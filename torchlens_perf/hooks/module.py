"""The forward pass, per module."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torchlens_perf import torch_private
from torchlens_perf.errors import guard
from torchlens_perf.recorder import ModuleCall
from torchlens_perf.ring import Flag

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
    from torch.optim import Optimizer

    from torchlens_perf.config import Config
    from torchlens_perf.session import Session

MOST_MODULES = 128  # with modules="auto": 128 calls cost about 30 us a step
_AUTO_LEVELS = 2
# What wrappers call the module that they wrap: no part of the name that the user knows. DDP's "module" is one only
# around the whole model; inside it may be the user's own.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclasses.dataclass(frozen=True)
class WatchedModule:
    """A module to time, under the name that the user knows it by; the root's is its class."""

    name: str
    module: Module
    is_root: bool


class Observers(Protocol):
    """Sees the arguments and results of module calls: hooks/backward.py, which hangs its tensor hooks on them."""

    def of_root(self, watched: WatchedModule, session: Session) -> Callable[[Any], None]:
        """What sees each result of the root."""
        ...

    def of_module(
        self, watched: WatchedModule, session: Session
    ) -> tuple[Callable[..., None], Callable[[Any], None]] | None:
        """What sees a module's arguments and results, in probed steps."""
        ...


def models_of(optimizer: Optimizer) -> list[Module]:
    """The outermost modules that hold parameters of this optimizer, found among all living objects.

    Looks at every object once, 0.1 s for a million: for the end of the first step, not for every step.
    """
    from torch.nn import Module

    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # By type, not isinstance: asking a lazy proxy object for its class may run the user's code.
    modules = [each for each in gc.get_objects() if issubclass(type(each), Module)]
    children = {id(child) for module in modules for child in module.children()}
    return [
        module
        for module in modules
        if id(module) not in children and any(id(parameter) in trained for parameter in module.parameters())
    ]


def select(root: Module, config: Config) -> list[WatchedModule]:
    """The modules of `root` that config.modules asks for, the root first. Shared modules count once."""
    prefix, inner = _unwrap(root)
    chosen = [WatchedModule(type(inner).__name__, root, is_root=True)]
    if config.modules == "none":
        return chosen
    levels = _levels(inner)
    candidates: dict[str, WatchedModule] = {}
    for name, module in root.named_modules():
        shown = _user_name(name.removeprefix(prefix).removeprefix("."))
        # A wrapper inside the model and what it wraps have the same name for the user: the wrapper is timed.
        if shown and not isinstance(module, _containers()) and shown not in candidates:
            candidates[shown] = WatchedModule(shown, module, is_root=False)
    every = [each for each in candidates.values() if each.module is not root]

    def down_to(level: int) -> list[WatchedModule]:
        return [each for each in every if levels.get(id(each.module), 1) <= level]

    if isinstance(config.modules, tuple):
        return chosen + [each for each in every if config.wants_module(each.name)]
    if config.modules == "all":
        return chosen + every
    if isinstance(config.modules, int):
        return chosen + down_to(config.modules)
    fitting = [down_to(level) for level in range(_AUTO_LEVELS, 0, -1) if len(down_to(level)) <= MOST_MODULES]
    return chosen + (fitting[0] if fitting else [])


def _containers() -> tuple[type[Module], ...]:
    """Modules that nobody calls."""
    from torch import nn

    return nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def _user_name(name: str) -> str:
    """A qualified name without the parts that wrappers inside the model put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED_NAMES)


def _unwrap(root: Module) -> tuple[str, Module]:
    """The model inside its wrappers (DDP, compile, FSDP), and its qualified name there."""
    path: list[str] = []
    while True:
        children = list(root.named_children())
        if len(children) != 1 or children[0][0] not in ("module", *_WRAPPED_NAMES):
            return ".".join(path), root
        if any(True for _ in root.parameters(recurse=False)):
            return ".".join(path), root
        path.append(children[0][0])
        root = children[0][1]


def _levels(model: Module) -> dict[int, int]:
    """How deep each module lies. Containers and wrappers, which nobody calls or sees, are no level of their own."""
    levels: dict[int, int] = {id(model): 0}

    def descend(module: Module, level: int) -> None:
        for name, child in module.named_children():
            if id(child) not in levels:
                deeper = not isinstance(child, _containers()) and name not in _WRAPPED_NAMES
                levels[id(child)] = level + deeper
                descend(child, level + deeper)

    descend(model, 0)
    return levels


class ModuleHook:
    """Times each selected module's calls through its `_compiled_call_impl` slot.

    Dynamo does not look at that slot, so compiled code keeps its graphs: a compiled module is timed where eager code
    calls it, and the modules inside its graph are not timed. Pickling and deep copies leave the slot out.
    """

    name = "module"

    def __init__(self, modules: Sequence[WatchedModule], observers: Observers) -> None:
        self._modules = modules
        self._observers = observers

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        by_slot = torch_private.works("torch.nn.Module._compiled_call_impl")
        if not by_slot:
            torch_private.require("torch._dynamo.decorators.skip_code")
            session.note("modules are timed by public hooks, at 20 times the usual cost: see torchlens-perf doctor")
        with ExitStack() as attached:
            for watched in self._modules:
                attached.enter_context(self._in_slot(watched, session) if by_slot else self._by_hooks(watched, session))
            yield

    @contextmanager
    def _in_slot(self, watched: WatchedModule, session: Session) -> Iterator[None]:
        slots = watched.module.__dict__
        earlier = slots.get("_compiled_call_impl")  # module.compile() puts its compiled call here
        before, after = self._observing(watched, session)
        call = ModuleCall(
            session.recorder,
            session.intern(_recorded_name(watched)),
            earlier if earlier is not None else type(watched.module)._call_impl,
            watched.module if earlier is None else None,
            before,
            after,
            watched.is_root,
        )
        slots["_compiled_call_impl"] = call
        try:
            yield
        finally:
            if slots.get("_compiled_call_impl") is not call:
                pass  # module.compile() was called meanwhile: the slot is the user's
            elif earlier is None:
                del slots["_compiled_call_impl"]
            else:
                slots["_compiled_call_impl"] = earlier

    @contextmanager
    def _by_hooks(self, watched: WatchedModule, session: Session) -> Iterator[None]:
        pre, post = _hook_pair(session, watched, *self._observing(watched, session))
        handles = [
            watched.module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True),
            watched.module.register_forward_hook(post, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _observing(
        self, watched: WatchedModule, session: Session
    ) -> tuple[Callable[..., None] | None, Callable[[Any], None] | None]:
        if watched.is_root:
            return None, guard("forward hook of the model")(self._observers.of_root(watched, session))
        pair = self._observers.of_module(watched, session)
        if pair is None:
            return None, None
        return guard("backward hook of a module")(pair[0]), guard("backward hook of a module")(pair[1])


def _recorded_name(watched: WatchedModule) -> str:
    return f"forward {watched.name}" if watched.is_root else watched.name


class _Hook:
    """A forward hook that copies of the module leave behind: deep copies share it, pickles hold nothing of it."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self.call(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> _Hook:
    return _Hook(lambda *args: None)


def _hook_pair(
    session: Session,
    watched: WatchedModule,
    before: Callable[..., None] | None,
    after: Callable[[Any], None] | None,
) -> tuple[_Hook, _Hook]:
    """The fallback without the slot: public hooks that Dynamo passes over."""
    recorder, name_id = session.recorder, session.intern(_recorded_name(watched))

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if before is not None and recorder.probe:
            before(*args, **kwargs)
        recorder.begin_module(name_id)

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        recorder.end_module(name_id, 0 if result is not None else int(Flag.EXCEPTION))
        if after is not None and result is not None and (watched.is_root or recorder.probe):
            after(result)

    for function in (enter, leave, _Hook.__call__):
        torch_private.skip_in_compiled_code(function)
    return _Hook(enter), _Hook(leave)
