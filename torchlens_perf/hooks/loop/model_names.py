"""What the user calls a model, where there are several: the variable or attribute that holds it.

Names come from where reading them changes nothing: dictionaries of modules and objects, the text of the call of
watch(), and from Python 3.12 on the local variables of running functions. Up to Python 3.11, looking at the locals of a
running function makes Python write them into a dictionary that the function may hold: a model that is known only there
has the name of its class.
"""

from __future__ import annotations

import ast
import gc
import itertools
import linecache
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torchlens_perf.hooks.loop.selection import class_name

if TYPE_CHECKING:
    from torch.nn import Module

_PACKAGE = __name__.partition(".")[0]
_MAX_FRAMES = 64
# Where a name comes from, the best first; what is an element of a list comes after all of them.
_MAIN, _LOCAL, _GLOBAL, _ATTRIBUTE, _ELEMENT = range(5)


def names_of(models: Sequence[Module], given: Sequence[str | None] = (), taken: Collection[str] = ()) -> list[str]:
    """A name for each model, all different, and none of those that are taken.

    given: names that are known already, by position; None: not known. Looks at every object once where one is missing.
    """
    known = [*given, *[None] * (len(models) - len(given))]
    unnamed = [model for model, name in zip(models, known, strict=True) if name is None]
    held = _held_names(unnamed) if unnamed else {}
    names: list[str] = []
    for model, name in zip(models, known, strict=True):
        wanted = name or held.get(id(model)) or class_name(model)
        numbered = (f"{wanted}_{number}" for number in itertools.count(2))
        names.append(
            next(each for each in itertools.chain([wanted], numbered) if each not in taken and each not in names)
        )
    return names


def names_in_call(frame: types.FrameType | None, function: str) -> list[str | None]:
    """The names of the models in the call of `function` that this frame is at: ["generator", "critic"].

    [] where they cannot be read: no source, or something else than a list of names.
    """
    if frame is None:
        return []
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    line, arguments = frame.f_lineno, list[ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == function:
                arguments = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "model")]
    if not arguments or not isinstance(arguments[0], (ast.List, ast.Tuple)):
        return []
    return [_last_name(element) for element in arguments[0].elts]


def _last_name(expression: ast.expr) -> str | None:
    """`generator` and `self.generator` are "generator"."""
    if isinstance(expression, ast.Name):
        return expression.id
    return expression.attr if isinstance(expression, ast.Attribute) else None


def _held_names(models: Sequence[Module]) -> dict[int, str]:
    """By id of a model, the best name that something holds it by."""
    held: dict[int, list[tuple[int, int, str]]] = {}
    containers: list[Any] = []
    ours = {id(models)}
    for holder in gc.get_referrers(*models):
        if id(holder) in ours:
            continue
        if isinstance(holder, (list, tuple)):
            containers.append(holder)
            continue
        for rank, name, value in _named_values(holder):
            held.setdefault(id(value), []).append((rank, len(name), name))
    for depth, (rank, name, value) in enumerate(_local_values(sys._getframe())):
        # The outermost first: a helper calls each of them `model`, its caller does not.
        held.setdefault(id(value), []).append((rank, -depth, name))
    for holder in gc.get_referrers(*containers) if containers else ():
        for rank, name, value in _named_values(holder):
            if any(value is container for container in containers):
                for position, element in enumerate(value):
                    held.setdefault(id(element), []).append((_ELEMENT + rank, len(name), f"{name}.{position}"))
    wanted = {id(model) for model in models}
    return {identity: min(candidates)[2] for identity, candidates in held.items() if identity in wanted}


def _named_values(holder: Any) -> Iterator[tuple[int, str, Any]]:
    """The names in a dictionary of a module or an object; private ones are a framework's, not the user's."""
    if isinstance(holder, (types.FrameType, types.CellType, types.ModuleType)):
        return
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    if not isinstance(values, dict):
        return
    rank = _ATTRIBUTE
    if "__builtins__" in values and "__name__" in values:
        rank = _MAIN if values["__name__"] == "__main__" else _GLOBAL
    for name, value in list(values.items()):
        if isinstance(name, str) and name.isidentifier() and not name.startswith("_"):
            yield rank, name, value


def _local_values(frame: types.FrameType | None) -> Iterator[tuple[int, str, Any]]:
    """The local variables of the functions that are running on this thread, where Python can tell them untouched."""
    if sys.version_info < (3, 12):
        return
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE and code.co_flags & _OPTIMIZED:
            for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
                if not name.startswith("_"):
                    yield _LOCAL, name, _local_value(frame, name)
        frame = frame.f_back


_OPTIMIZED = 1  # inspect.CO_OPTIMIZED: a function, whose locals are in no dictionary

if sys.version_info >= (3, 13):

    def _local_value(frame: types.FrameType, name: str) -> Any:
        return frame.f_locals.get(name)  # a view: nothing is copied (PEP 667)

else:

    def _local_value(frame: types.FrameType, name: str) -> Any:
        # Reads the one variable; frame.f_locals would write all of them into a dictionary of the function's.
        import ctypes

        get = ctypes.pythonapi.PyFrame_GetVarString
        get.restype, get.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.c_char_p)
        try:
            return get(frame, name.encode())
        except NameError:  # not bound yet
            return None
