"""The recorder in use: the native one, or the one in Python where the package was installed without a C compiler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchlens_perf import _native as _implementation
else:
    try:
        from torchlens_perf import _native as _implementation
    except ImportError:
        from torchlens_perf.recorder import python as _implementation

NATIVE: bool = _implementation.__name__.endswith("._native")

ModuleCall = _implementation.ModuleCall
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
