"""The native recorder, and what stands in for it where the package came without it.

Without the native recorder nothing is recorded: watch() logs the obstacle, and sections do nothing.
The other names are missing then, so modules that record are imported after the obstacle is checked.

The recorder uses the GIL as its only lock. It is not built for a free-threaded Python, where its
import would switch the GIL on for the whole process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from torchlens_perf.interruption import ours

# Why the native recorder could not be imported, or None.
_import_error: ImportError | None = None

try:
    from torchlens_perf._native import DeviceClock as DeviceClock
    from torchlens_perf._native import ModuleCall as ModuleCall
    from torchlens_perf._native import Recorder as Recorder
    from torchlens_perf._native import Section as Section
    from torchlens_perf._native import collective_marks as collective_marks
    from torchlens_perf._native import native_hook as native_hook
    from torchlens_perf._native import observe_calls as observe_calls
    from torchlens_perf._native import route_calls as route_calls
    from torchlens_perf._native import section as section
    from torchlens_perf._native import set_module_call as set_module_call
    from torchlens_perf._native import set_section_decorator
    from torchlens_perf._native import timed_wait as timed_wait
    from torchlens_perf._native import unroute_calls as unroute_calls
except ours(ImportError) as error:
    _import_error = error


class EndDetection(IntEnum):
    """Ways to detect the end of a collective, in the order of native/collective.h."""

    BY_CALLBACK = 0
    BY_WAIT = 1
    UNKNOWN = 2
    BY_RETURN = 3


class Obstacle(NamedTuple):
    """Why nothing can be recorded in this process, and what to do."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


def find_recording_obstacle() -> Obstacle | None:
    """Return why nothing can be recorded in this process, or None."""
    if _import_error is None:
        return None
    import sysconfig

    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return Obstacle(
            "the recorder relies on the GIL, and this Python is free-threaded",
            f"use python{sys.version_info.major}.{sys.version_info.minor} with the GIL",
        )
    from torchlens_perf.run.installation import build_install_command

    # A ModuleNotFoundError means that the extension was not built.
    is_missing = isinstance(_import_error, ModuleNotFoundError)
    return Obstacle(
        "the native recorder is missing"
        if is_missing
        else f"the native recorder cannot be loaded ({_import_error})",
        "reinstall the wheel (Linux, CPython 3.10 to 3.13), or build with a C compiler and Python's"
        f" headers: {build_install_command(options='--force-reinstall --no-deps')}",
    )


def _time_calls(timer: Section | IdleSection, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `section(name)(function)`, which times each call of the function as the section."""
    if not callable(function):
        raise TypeError(f"a section decorates a function, got {type(function).__name__}")
    if (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        # The body of a coroutine or generator runs interleaved with other code.
        raise TypeError(
            f"{function.__qualname__} is a generator or coroutine: use `with section(...)`"
            " inside it"
        )
    name = timer.name

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with section(name):  # torch.compile knows section(), see hooks/section.py.
            return function(*args, **kwargs)

    return timed


class IdleSection:
    """A section where the native recorder is missing: it checks its arguments and does nothing."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"section() takes a name, got {type(name).__name__}")
        self.name = name

    def __enter__(self) -> IdleSection:
        return self

    def __exit__(self, *raised: object) -> None:
        """Let an exception through."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _time_calls(self, function)

    def __repr__(self) -> str:
        return f"section({self.name!r})"


if _import_error is None:
    set_section_decorator(_time_calls)
else:
    Section = section = IdleSection  # type: ignore[misc,assignment]
