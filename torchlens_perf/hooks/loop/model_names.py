"""Name several models after the variables or attributes that refer to them.

Names are read only where this has no side effects: from dictionaries of modules and objects, from
the source line that calls watch(), and since Python 3.12 from local variables of running functions.
In Python 3.11, reading a running function's locals writes them into a dictionary that the function
may use. In this version, a model in a local variable is named after its class.
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

from torchlens_perf.hooks.loop.selection import unwrapped_class_name
from torchlens_perf.interruption import ours

if TYPE_CHECKING:
    from torch.nn import Module

_PACKAGE = __name__.partition(".")[0]
_MAX_FRAMES = 64
# Sources of names, best first. Names of list elements are the last choice.
_MAIN, _LOCAL, _GLOBAL, _ATTRIBUTE, _ELEMENT = range(5)


def name_models(
    models: Sequence[Module], given: Sequence[str | None] = (), taken: Collection[str] = ()
) -> list[str]:
    """Return a distinct name for each model that is not in `taken`.

    given: known names by position, or None where the name is unknown. If a name is unknown, all
    objects of the process are searched once.
    """
    known = [*given, *[None] * (len(models) - len(given))]
    unnamed = [model for model, name in zip(models, known, strict=True) if name is None]
    held = _find_referring_names(unnamed) if unnamed else {}
    names: list[str] = []
    for model, name in zip(models, known, strict=True):
        wanted = name or held.get(id(model)) or unwrapped_class_name(model)
        numbered = (f"{wanted}_{number}" for number in itertools.count(2))
        names.append(
            next(
                each
                for each in itertools.chain([wanted], numbered)
                if each not in taken and each not in names
            )
        )
    return names


def read_names_in_call(frame: types.FrameType | None, function: str) -> list[str | None]:
    """Read the models' names from the source of a call, such as ["generator", "critic"].

    The result is empty without source code, or if the argument is not a list.

    function: the name of the called function.
    """
    if frame is None:
        return []
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except ours(SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    line, arguments = frame.f_lineno, list[ast.expr]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called == function:
                arguments = [
                    *node.args[:1],
                    *(each.value for each in node.keywords if each.arg == "model"),
                ]
    if not arguments or not isinstance(arguments[0], (ast.List, ast.Tuple)):
        return []
    return [_name_of_expression(element) for element in arguments[0].elts]


def _name_of_expression(expression: ast.expr) -> str | None:
    """Return "generator" for `generator` and for `self.generator`."""
    if isinstance(expression, ast.Name):
        return expression.id
    return expression.attr if isinstance(expression, ast.Attribute) else None


def _find_referring_names(models: Sequence[Module]) -> dict[int, str]:
    """Return the best name under which any object refers to each model, by the model's id."""
    held: dict[int, list[tuple[int, int, str]]] = {}
    containers: list[Any] = []
    ours = {id(models)}
    for holder in gc.get_referrers(*models):
        if id(holder) in ours:
            continue
        if isinstance(holder, (list, tuple)):
            containers.append(holder)
            continue
        for rank, name, value in _iterate_named_values(holder):
            held.setdefault(id(value), []).append((rank, len(name), name))
    for depth, (rank, name, value) in enumerate(_iterate_local_variables(sys._getframe())):
        # Prefer the outermost function, because helper functions often call every model `model`.
        held.setdefault(id(value), []).append((rank, -depth, name))
    for holder in gc.get_referrers(*containers) if containers else ():
        for rank, name, value in _iterate_named_values(holder):
            if any(value is container for container in containers):
                for position, element in enumerate(value):
                    held.setdefault(id(element), []).append(
                        (_ELEMENT + rank, len(name), f"{name}.{position}")
                    )
    wanted = {id(model) for model in models}
    return {
        identity: min(candidates)[2] for identity, candidates in held.items() if identity in wanted
    }


def _iterate_named_values(holder: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield the public names in the dictionary of a module or object.

    Private names are skipped, because they usually belong to a framework.
    """
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


def _iterate_local_variables(frame: types.FrameType | None) -> Iterator[tuple[int, str, Any]]:
    """Yield the local variables of all functions running on this thread, from Python 3.12 on.

    Older versions of Python cannot read local variables without side effects.
    """
    if sys.version_info < (3, 12):
        return
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        if (
            frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE
            and code.co_flags & _OPTIMIZED
        ):
            for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
                if not name.startswith("_"):
                    yield _LOCAL, name, _read_local_variable(frame, name)
        frame = frame.f_back


# inspect.CO_OPTIMIZED is set for functions, whose local variables are not in a dictionary.
_OPTIMIZED = 1

if sys.version_info >= (3, 13):

    def _read_local_variable(frame: types.FrameType, name: str) -> Any:
        return frame.f_locals.get(name)  # f_locals is a view since Python 3.13 (PEP 667).

else:

    def _read_local_variable(frame: types.FrameType, name: str) -> Any:
        # Read one variable. frame.f_locals would write all variables into a dictionary that the
        # function may use.
        import ctypes

        get = ctypes.pythonapi.PyFrame_GetVarString
        get.restype, get.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.c_char_p)
        try:
            return get(frame, name.encode())
        except ours(NameError):  # The variable has no value yet.
            return None
