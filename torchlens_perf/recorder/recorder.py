"""The recorder in use: the native one, or the one in Python where the package was installed without a C compiler.

Both rely on the GIL, which is the only lock of marks. So in a Python that runs without it nothing is recorded: a native
extension that does not say that it can do without would switch the GIL on again, for the whole process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torchlens_perf.output import logger

LOADING_PROBLEM = ""  # why the native recorder, which is there, is not the one in use

if TYPE_CHECKING:
    from torchlens_perf import _native as _implementation
else:
    try:
        import torchlens_perf._native as _implementation
    except ImportError as error:
        from torchlens_perf.recorder import python as _implementation

        if not isinstance(error, ModuleNotFoundError):  # it was not built
            LOADING_PROBLEM = f"the native recorder cannot be loaded, marks cost about ten times more: {error}"
            logger.warning("torchlens_perf: %s", LOADING_PROBLEM)

NATIVE: bool = _implementation.__name__.endswith("._native")

ModuleCall = _implementation.ModuleCall
route_calls = _implementation.route_calls
set_module_call = _implementation.set_module_call
unroute_calls = _implementation.unroute_calls
Recorder = _implementation.Recorder
Section = _implementation.Section
timed_wait = _implementation.timed_wait
section = _implementation.section


class End(IntEnum):
    """How the end of a collective is known; the same as in native/collective.h."""

    BY_CALLBACK = 0
    BY_WAIT = 1
    UNKNOWN = 2
    BY_RETURN = 3


def refusal() -> str | None:
    """Why nothing can be recorded in this process; None: it can."""
    has_gil = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    if has_gil is None or has_gil():
        return None
    return "Python runs without the GIL, which the recorder relies on: PYTHON_GIL=1 switches it on"


def collective_marks() -> Any:
    """What the native tap records with. Only where NATIVE."""
    return _implementation.collective_marks()


def _timed(timer: Section, function: Callable[..., Any]) -> Callable[..., Any]:
    """`section(name)(function)`: each call of the function is the section."""
    if not callable(function):
        raise TypeError(f"a section decorates a function, got {type(function).__name__}")
    if (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        # Their body runs between other work; one span around it would time that work too.
        raise TypeError(f"{function.__qualname__} is a generator or coroutine: use `with section(...)` inside it")
    name = timer.name

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with section(name):  # by its name: torch.compile knows section(), see hooks/section.py
            return function(*args, **kwargs)

    return timed


_implementation.set_section_decorator(_timed)
