"""Name several models after the variables or attributes that refer to them.

Names are read where this is quick and has no side effects: from the global variables of the running
functions, since Python 3.13 from their local variables (PEP 667), and from attributes of objects in
these variables. Other models are named after their classes.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.hooks.loop.selection import unwrapped_class_name
from torchlens_perf.interruption import ours

if TYPE_CHECKING:
    from torch.nn import Module

_NOT_SEARCHED = {__name__.partition(".")[0], "torch", "contextlib"}
_MAX_FRAMES, _MAX_VARIABLES = 64, 4096
# inspect.CO_OPTIMIZED is set for functions, whose local variables are not in a dictionary.
_OPTIMIZED = 1


def name_models(
    models: Sequence[Module], given: Sequence[str] = (), taken: Collection[str] = ()
) -> list[str]:
    """Return a distinct name for each model that is not in `taken`.

    given: known names of all models, or nothing.
    """
    known = {} if given else _find_names({id(model) for model in models})
    wanted = given or [known.get(id(each)) or unwrapped_class_name(each) for each in models]
    names = [*taken]
    for each in wanted:
        numbered = (f"{each}_{number}" for number in itertools.count(2))
        names.append(next(name for name in itertools.chain([each], numbered) if name not in names))
    return names[len(taken) :]


def _find_names(models: set[int]) -> dict[int, str]:
    """Return names of models by id.

    Variables come before attributes, and variables of the outermost function before those of the
    functions that it calls, which often name every model `model`.
    """
    variables = list(_iterate_variables(sys._getframe()))
    attributes = [pair for _, holder in variables for pair in _iterate_attributes(holder)]
    return {
        id(value): name
        for name, value in [*attributes, *variables]
        if id(value) in models and type(name) is str and not name.startswith("_")
    }


def _iterate_variables(frame: types.FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield local variables from the innermost to the outermost function, and global ones."""
    seen: set[int] = set()
    frames = itertools.islice(_iterate_frames(frame), _MAX_FRAMES)
    for each in frames:
        if each.f_globals.get("__name__", "").partition(".")[0] in _NOT_SEARCHED:
            continue
        if id(each.f_globals) not in seen:
            seen.add(id(each.f_globals))
            yield from itertools.islice(list(each.f_globals.items()), _MAX_VARIABLES)
        # Before Python 3.13, reading local variables changes what locals() has returned earlier.
        if sys.version_info >= (3, 13) and each.f_code.co_flags & _OPTIMIZED:
            yield from list(each.f_locals.items())


def _iterate_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _iterate_attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object's dictionary has. No property is evaluated."""
    if issubclass(type(holder), (type, types.ModuleType, types.FunctionType)):
        return
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except ours(AttributeError):
        return
    if type(attributes) is dict:
        yield from list(attributes.items())
