"""Select the native recorder, or the Python recorder if the package has no compiled extension.

Both recorders use the GIL as their only lock, so nothing is recorded in a Python that runs without
the GIL. Importing a native extension that needs the GIL would switch it on for the whole process.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from torchlens_perf.interruption import ours
from torchlens_perf.output import logger

# Reason why an installed native recorder cannot be used, or "".
LOADING_PROBLEM = ""

if TYPE_CHECKING:
    from torchlens_perf.recorder import python as _implementation

    class Recorder(_implementation.Recorder):
        """Either recorder. Only the native one has the methods below."""

        lost_ends: int

        def set_device_clock(
            self, clock: Any, began: Any = None, ended: Any = None, step_ended: Any = None, /
        ) -> None: ...
        def queue_device_span(self, kind: int, name_id: int, begin: int, end: int, /) -> None: ...
        def read_last_device_times(self) -> None: ...
        def claim(self) -> int: ...
        def part_over(self, ticket: int, start_ns: int = 0, end_ns: int = 0, /) -> bool: ...

else:
    try:
        import torchlens_perf._native as _implementation
    except ours(ImportError) as error:
        from torchlens_perf.recorder import python as _implementation

        # A ModuleNotFoundError means that the extension was not built.
        if not isinstance(error, ModuleNotFoundError):
            LOADING_PROBLEM = (
                f"the native recorder cannot be loaded, marks cost about ten times more: {error}"
            )
            logger.warning("torchlens_perf: %s", LOADING_PROBLEM)
    Recorder = _implementation.Recorder

NATIVE: bool = _implementation.__name__.endswith("._native")
# The clock of a device, which only the native recorder has.
DeviceClock: Any = getattr(_implementation, "DeviceClock", None)

ModuleCall = _implementation.ModuleCall
native_hook = _implementation.native_hook
observe_calls = _implementation.observe_calls
route_calls = _implementation.route_calls
set_module_call = _implementation.set_module_call
unroute_calls = _implementation.unroute_calls
Section = _implementation.Section
timed_wait = _implementation.timed_wait
section = _implementation.section


class EndDetection(IntEnum):
    """Ways to detect the end of a collective, in the order of native/collective.h."""

    BY_CALLBACK = 0
    BY_WAIT = 1
    UNKNOWN = 2
    BY_RETURN = 3


def find_recording_obstacle() -> str | None:
    """Return why nothing can be recorded in this process, or None."""
    # The function exists from Python 3.13 on.
    has_gil = getattr(sys, "_is_gil_enabled", None)
    if has_gil is None or has_gil():
        return None
    return "Python runs without the GIL, which the recorder relies on: PYTHON_GIL=1 switches it on"


def collective_marks() -> Any:
    """Return a capsule of C functions with which the native tap records. Only valid if NATIVE."""
    return _implementation.collective_marks()  # type: ignore[attr-defined]


def _time_calls(timer: Section, function: Callable[..., Any]) -> Callable[..., Any]:
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


_implementation.set_section_decorator(_time_calls)
