"""Which modules of a model are timed, under which names."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import site
import sys
import sysconfig
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torch.nn import Module

    from torchlens_perf.config import Config

MAX_MODULES = 128  # with modules="auto": 128 calls cost about 30 us a step
_AUTO_LEVELS = 2
# What wrappers call the module that they wrap: no part of the name that the user knows. DDP's "module" is one only
# around the whole model; inside it may be the user's own.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class NamedModel(NamedTuple):
    """A model, and what the user calls it; "" where it is the only one, and its modules' names suffice."""

    module: Module
    name: str = ""


@dataclasses.dataclass(frozen=True)
class WatchedModule:
    """A module to time, under the name that the user knows it by; a root's is the model's name, or its class."""

    name: str
    module: Module
    is_root: bool


class Selection(NamedTuple):
    """The modules of a model that are timed."""

    modules: list[WatchedModule]
    """The root first. Shared modules count once."""
    all_levels: bool
    """Whether no other module can be timed. Modules inside a compiled one cannot."""
    unopened: list[str]
    """Timed modules with others inside that can be timed and are not."""
    unmatched: dict[str, str]
    """Name patterns that match no module, each with an example of a name; "" where the model has no modules inside."""


def select(model: NamedModel, config: Config, most: int = MAX_MODULES) -> Selection:
    """What config.modules asks for. most: how many with "auto"."""
    root = model.module
    prefix, inner = _unwrap(root)
    shown_root = WatchedModule(model.name or class_name(root), root, is_root=True)
    levels = _levels(inner)
    candidates: dict[str, WatchedModule] = {}
    for name, module in root.named_modules():
        if prefix.startswith(f"{name}."):
            continue  # a wrapper around the model
        shown = _user_name(name.removeprefix(prefix).removeprefix("."))
        # A wrapper inside the model and what it wraps have the same name for the user: the wrapper is timed.
        if shown and not isinstance(module, _containers()) and shown not in candidates:
            full = f"{model.name}.{shown}" if model.name else shown
            candidates[shown] = WatchedModule(full, module, is_root=False)
    every = {name: each for name, each in candidates.items() if each.module is not root}
    compiled = _inside_compiled(root)

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
    timed = {each.name for each in chosen}
    untimed = [each for each in every.values() if each.name not in timed and id(each.module) not in compiled]
    patterns = config.modules if isinstance(config.modules, tuple) else ()
    names = {pattern: [(name, each.name) for name, each in every.items()] for pattern in patterns}
    return Selection(
        [shown_root, *chosen],
        all_levels=not untimed,
        unopened=sorted(timed & _enclosing(each.name for each in untimed)),
        unmatched={
            pattern: next((full for _, full in found), "")
            for pattern, found in names.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for both in found for name in both)
        },
    )


def unmatched_patterns(selections: Iterable[Selection]) -> list[str]:
    """What is wrong with each name pattern that matches no module in any of the models."""
    each = [selection.unmatched for selection in selections]
    messages = []
    for pattern in each[0] if each else ():
        if all(pattern in unmatched for unmatched in each):
            example = next((unmatched[pattern] for unmatched in each if unmatched[pattern]), "")
            names = f', for example "{example}"' if example else ", and the model has no modules inside"
            messages.append(
                f'modules="{pattern}" matches no module. Names are matched against model.named_modules(){names}'
            )
    return messages


def _enclosing(names: Iterable[str]) -> set[str]:
    """The names of all modules around those of these names."""
    return {name[:place] for name in names for place, sign in enumerate(name) if sign == "."}


def _inside_compiled(root: Module) -> set[int]:
    """Return the ids of the modules that are parts of a compiled module's graph."""
    compiled = [each for each in root.modules() if torch_private.is_compiled(each)]
    return {id(inner) for each in compiled for inner in each.modules() if inner is not each}


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
    """Whether a framework has put its own module around the user's.

    The outer one's package is installed. The outer one stands in for the inner one (it passes attributes on, as PEFT's
    and Fabric's do), or the inner one is of another package. A model of an installed package whose layers are torch's
    is no wrapper: they are its own layers. Nor is what holds a list of layers, which nobody calls.
    """
    from torch import nn

    if isinstance(wrapper, nn.Sequential) or isinstance(inner, _containers()):
        return False
    outer, inside = (type(each).__module__.partition(".")[0] for each in (wrapper, inner))
    file = getattr(sys.modules.get(outer), "__file__", None) or ""
    if outer == "__main__" or not file.startswith(_installed_packages()):
        return False
    passes_on = type(wrapper).__getattr__ is not nn.Module.__getattr__
    return passes_on or inside not in (outer, "torch")


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


def device_of(model: Module) -> str:
    """The kind of device that a model's first parameter is on; "" where it has none yet."""
    with torch_private.out_of_sight()():
        kinds = {parameter.device.type for parameter in itertools.islice(model.parameters(), 1)} - {"meta"}
    return next(iter(kinds), "")
