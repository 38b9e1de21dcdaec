"""Select and name the modules of a model that are timed."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import site
import sys
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens_perf.hooks import module_tree
from torchlens_perf.recorder import torch_private

if TYPE_CHECKING:
    from torch.nn import Module

    from torchlens_perf.config import Config

# Maximum number of modules with modules="auto". Timing 128 calls costs about 30 us per step.
MAX_MODULES = 128
_AUTO_LEVELS = 2
_LEVELS: dict[Any, Any] = {"none": 0, "all": sys.maxsize}
"""Levels of modules that are timed, by setting. A number stands for itself."""
# Attributes in which wrappers store the wrapped module. Names shown to the user leave them out.
# DDP's "module" is only left out around the whole model, because users' own modules have attributes
# of this name.
_WRAPPED_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class NamedModel(NamedTuple):
    """A model and the user's name for the model. The name of a single model is ""."""

    module: Module
    name: str = ""


def name_models(
    models: Sequence[Module], given: Sequence[str] = (), taken: Collection[str] = ()
) -> list[NamedModel]:
    """Give each model a distinct name that is not in `taken`: its given name, or its class.

    given: names of all models, or nothing.
    """
    names = [*taken]
    for each in given or map(unwrapped_class_name, models):
        numbered = (f"{each}_{number}" for number in itertools.count(2))
        names.append(next(name for name in itertools.chain([each], numbered) if name not in names))
    return [NamedModel(*each) for each in zip(models, names[len(taken) :], strict=True)]


class WatchedModule(NamedTuple):
    """A module to time and the name shown to the user.

    A root's name is the name of the model or of its class.
    """

    name: str
    module: Module
    is_root: bool


class ModuleSelection(NamedTuple):
    """Result of select_modules(): the modules of a model that are timed."""

    modules: list[WatchedModule]
    """Modules to time, the root first. Shared modules count once."""
    all_levels: bool
    """True if all modules are timed that can be timed.

    Modules inside a compiled module cannot be timed.
    """
    unopened: list[str]
    """Timed modules that contain modules which can be timed but are not."""
    unmatched: dict[str, str]
    """Examples of valid names, by name pattern that matches no module.

    The example is "" for a model without submodules.
    """


def select_modules(model: NamedModel, config: Config, most: int = MAX_MODULES) -> ModuleSelection:
    """Select the modules that config.modules requests. most: the maximum with modules="auto"."""
    root, containers = model.module, _container_classes()
    prefix, inner = unwrap_model(root)
    shown_root = WatchedModule(model.name or type(inner).__name__, root, is_root=True)
    candidates: dict[str, WatchedModule] = {}
    inside = list(module_tree.named_modules(root))
    for name, module in inside:
        if prefix.startswith(f"{name}."):
            continue  # This module is a wrapper around the model.
        shown = _remove_wrapper_names(name.removeprefix(prefix).removeprefix("."))
        # A wrapper inside the model and its wrapped module are shown under the same name. Only the
        # wrapper is timed.
        if shown and not isinstance(module, containers) and shown not in candidates:
            full = f"{model.name}.{shown}" if model.name else shown
            candidates[shown] = WatchedModule(full, module, is_root=False)
    every = {name: each for name, each in candidates.items() if each.module is not root}
    wrappers = [module for _, module in inside if torch_private.is_module_compiled(module)]
    compiled = {
        id(each)
        for wrapper in wrappers
        for each in module_tree.modules(wrapper)
        if each is not wrapper
    }
    has_level_limit = config.modules == "auto" or isinstance(config.modules, int)
    levels = _compute_levels(inner) if has_level_limit else {}

    def modules_down_to(level: int) -> list[WatchedModule]:
        return [each for each in every.values() if levels.get(id(each.module), 1) <= level]

    if isinstance(config.modules, tuple):
        chosen = [
            each
            for name, each in every.items()
            if config.matches_module_pattern(name) or config.matches_module_pattern(each.name)
        ]
    elif config.modules == "auto":
        choices = (modules_down_to(level) for level in range(_AUTO_LEVELS, 0, -1))
        chosen = next((choice for choice in choices if len(choice) <= most), [])
    else:
        chosen = modules_down_to(_LEVELS.get(config.modules, config.modules))
    timed = {each.name for each in chosen}
    untimed = [
        each
        for each in every.values()
        if each.name not in timed and id(each.module) not in compiled
    ]
    patterns = config.modules if isinstance(config.modules, tuple) else ()
    names = {pattern: [(name, each.name) for name, each in every.items()] for pattern in patterns}
    return ModuleSelection(
        [shown_root, *chosen],
        all_levels=not untimed,
        unopened=sorted(
            timed
            & {
                each.name[:place]
                for each in untimed
                for place, sign in enumerate(each.name)
                if sign == "."
            }
        ),
        unmatched={
            pattern: next((full for _, full in found), "")
            for pattern, found in names.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for both in found for name in both)
        },
    )


def describe_unmatched_patterns(selections: Iterable[ModuleSelection]) -> list[str]:
    """Return an error message for each name pattern that matches no module of any model."""
    each = [selection.unmatched for selection in selections]
    messages = []
    for pattern in each[0] if each else ():
        if all(pattern in unmatched for unmatched in each):
            example = next((unmatched[pattern] for unmatched in each if unmatched[pattern]), "")
            names = (
                f', for example "{example}"' if example else ", and the model has no modules inside"
            )
            messages.append(
                f'modules="{pattern}" matches no module. Names are matched against'
                f" model.named_modules(){names}"
            )
    return messages


def _container_classes() -> tuple[type[Module], ...]:
    """Return the container classes of torch, whose instances are never called."""
    from torch import nn

    return nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict


def _remove_wrapper_names(name: str) -> str:
    """Return a qualified name without the parts that wrappers inside the model add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED_NAMES)


def unwrap_model(root: Module) -> tuple[str, Module]:
    """Return (qualified name, model) of the model inside wrappers (DDP, torch.compile)."""
    path: list[str] = []
    while True:
        only = _find_only_child(root)
        if only is None or not (
            only[0] in ("module", *_WRAPPED_NAMES) or _is_framework_wrapper(root, only[1])
        ):
            return ".".join(path), root
        path.append(only[0])
        root = only[1]


def unwrapped_class_name(model: Module) -> str:
    """Return the class name of the model inside its wrappers."""
    return type(unwrap_model(model)[1]).__name__


def _find_only_child(module: Module) -> tuple[str, Module] | None:
    """Return (name, child) of the child that contains all parameters of the module, or None.

    Other children with parameters must be parts of that child.
    """
    if any(each is not None for each in module._parameters.values()):
        return None
    holding = [
        (name, child) for name, child in module_tree.named_children(module) if has_parameters(child)
    ]
    for name, child in holding:
        inside = {id(each) for each in module_tree.modules(child)}
        if all(id(other) in inside for _, other in holding):
            return name, child
    return None


def has_parameters(module: Module) -> bool:
    """Return whether the module or a module inside it has parameters.

    module.parameters() takes twice as long to find none, and models may have 10,000 such modules.
    """
    return any(
        parameter is not None
        for each in module_tree.modules(module)
        for parameter in each._parameters.values()
    )


def _is_framework_wrapper(wrapper: Module, inner: Module) -> bool:
    """Return True if `wrapper` is a framework's module around the user's module.

    The wrapper's class must be from an installed package. In addition, the wrapper must forward
    attributes to the inner module, as PEFT and Fabric do, or the inner module must be from another
    package. A model from an installed package with layers of torch is not a wrapper. A module
    around a list of layers is not a wrapper either.
    """
    from torch import nn

    if isinstance(wrapper, nn.Sequential) or isinstance(inner, _container_classes()):
        return False
    outer, inside = (type(each).__module__.partition(".")[0] for each in (wrapper, inner))
    file = getattr(sys.modules.get(outer), "__file__", None) or ""
    if outer == "__main__" or not file.startswith(installed_package_folders()):
        return False
    passes_on = type(wrapper).__getattr__ is not nn.Module.__getattr__
    return passes_on or inside not in (outer, "torch")


@functools.cache
def installed_package_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return tuple(
        f"{path}/" for path in [*paths, *site.getsitepackages(), site.getusersitepackages()]
    )


def _compute_levels(model: Module) -> dict[int, int]:
    """Return the depth of each module by id.

    Some modules do not count as a separate level:

    - containers and wrappers;
    - a module with a single child, such as a Transformer's encoder around its list of layers;
    - the model inside a class that contains the model and its loss.
    """
    only = _find_only_child(model)
    levels: dict[int, int] = {id(model): 0}

    def has_no_level(name: str, child: Module) -> bool:
        only_holds = (
            len(module_tree.named_children(child)) == 1 and _find_only_child(child) is not None
        )
        is_the_model = only is not None and child is only[1]
        return (
            only_holds
            or is_the_model
            or name in _WRAPPED_NAMES
            or isinstance(child, _container_classes())
        )

    def assign_levels(module: Module, level: int) -> None:
        for name, child in module_tree.named_children(module):
            if id(child) not in levels:
                levels[id(child)] = level if has_no_level(name, child) else level + 1
                assign_levels(child, levels[id(child)])

    assign_levels(model, 0)
    return levels


def device_type_of(model: Module) -> str:
    """Return the device type of a model's first parameter, or "" for torch's meta device."""
    with torch_private.get_no_torch_function_context()():
        kinds = {
            parameter.device.type
            for parameter in itertools.islice(module_tree.parameters(model), 1)
        } - {"meta"}
    return next(iter(kinds), "")
