"""Tell exceptions of the program, which interrupt code of this package, from this package's faults.

A signal handler of the program (a time limit, a preemption notice) and `PyThreadState_SetAsyncExc`
raise exceptions in whatever code is running. Such an exception is an interruption. Every place of
the training process that handles exceptions lets interruptions through:

- `except ours(OSError):` instead of `except OSError:`, because `TimeoutError` is an `OSError`;
- `with suppress(OSError):` with the class of this module.

An exception is an interruption if one of these statements is true.

- Its type does not derive from Exception: KeyboardInterrupt, SystemExit.
- A frame of its traceback belongs to a signal handler. Python calls a handler with the interrupted
  frame as an argument, so the frame's caller is one of its own arguments. Where the handler has
  rebound the argument, the code of the installed handlers is compared.
- No statement has raised it and it looks like an exception of `PyThreadState_SetAsyncExc`: it was
  created without arguments, in code that is not the program's.
- It is a debugger's request to quit.

Exceptions of the program's code that this package calls, such as a property or a callback, are no
interruptions. A handler that is written in C and raises an Exception is not recognized.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TypeVar

    _E = TypeVar("_E", bound=BaseException)

_PACKAGE = os.path.dirname(__file__) + os.sep
# Exceptions that C code raises without arguments.
_BARE_IN_C = frozenset({
    "AssertionError", "Empty", "EOFError", "Full", "MemoryError", "NotImplementedError",
    "RecursionError", "StopAsyncIteration", "StopIteration",
})  # fmt: skip
_MAX_WRAPPERS = 10
_TRACE_EVENTS = frozenset({
    "call", "line", "return", "exception", "opcode", "c_call", "c_return", "c_exception",
})  # fmt: skip


def ours(*types: type[_E]) -> tuple[type[_E], ...]:
    """Return `types` in an except clause; no types if the exception is an interruption."""
    error = sys.exc_info()[1]
    return () if error is not None and is_interruption(error) else types


class suppress(contextlib.suppress):
    """contextlib.suppress() that lets interruptions through."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return (
            error is not None
            and bool(super().__exit__(kind, error, traceback))
            and not is_interruption(error)
        )


def is_interruption(error: BaseException) -> bool:
    """Return True if the program raised this exception to interrupt whatever code was running."""
    if not isinstance(error, Exception):
        return True
    entries = list(_entries(error.__traceback__))
    # Frames of this package are no signal handlers.
    every = [each.tb_frame for each in entries]
    frames = [each for each in every if not each.f_code.co_filename.startswith(_PACKAGE)]
    bdb = sys.modules.get("bdb")
    is_debugger_exit = bdb is not None and isinstance(error, bdb.BdbQuit)
    if is_debugger_exit or any(map(_is_signal_handler, frames)):
        return True
    if frames and not _installed_handlers().isdisjoint(each.f_code for each in frames):
        return True
    return bool(entries) and _is_asynchronous(error, entries[-1])


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_signal_handler(frame: FrameType) -> bool:
    """Return True if this is a call of a signal handler: (signal number, interrupted frame)."""
    if frame.f_back is None:
        return False
    arguments = _positional_arguments(frame)
    for position in range(1, len(arguments)):
        if arguments[position] is frame.f_back:
            # A trace function has the name of the event behind the frame.
            after = arguments[position + 1 : position + 2]
            return not any(isinstance(each, str) and each in _TRACE_EVENTS for each in after)
    return False


def _positional_arguments(frame: FrameType) -> list[Any]:
    """Return the values of the positional parameters; None for one that was deleted."""
    code, values = frame.f_code, frame.f_locals
    names, count = code.co_varnames, code.co_argcount
    arguments = [values.get(name) for name in names[:count]]
    if code.co_flags & 0x04:  # inspect.CO_VARARGS
        more = values.get(names[count + code.co_kwonlyargcount])
        arguments += more if isinstance(more, tuple) else ()
    return arguments


def _installed_handlers() -> set[CodeType]:
    """Return the code of the program's signal handlers."""
    # The functions of `signal` itself need several frames more, near the recursion limit.
    import _signal  # type: ignore[import-not-found]

    handlers = map(_signal.getsignal, _signal.valid_signals())
    return {code for each in handlers if callable(each) for code in _codes_of(each)}


def _codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, and of what decorators and partial() have wrapped."""
    for _ in range(_MAX_WRAPPERS):
        if isinstance(function, FunctionType):
            yield function.__code__
            function = function.__dict__.get("__wrapped__")
        elif isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, functools.partial):
            function = function.func
        else:
            function = vars(type(function)).get("__call__")


def _is_asynchronous(error: Exception, innermost: TracebackType) -> bool:
    """Return True if the exception looks like one of PyThreadState_SetAsyncExc."""
    import opcode

    code = innermost.tb_frame.f_code
    raised_by_statement = code.co_code[innermost.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
    if raised_by_statement or not _is_known(innermost.tb_frame.f_globals.get("__name__")):
        return False
    # A class of the program may add arguments, such as a default message.
    return not _is_known(type(error).__module__) or (
        not error.args and type(error).__name__ not in _BARE_IN_C
    )


def _is_known(module: object) -> bool:
    """Return True for a module of Python, torch, or this package."""
    root = module.partition(".")[0] if isinstance(module, str) else ""
    # namedtuple() puts the constructors that it generates into modules of their own.
    is_generated = root.startswith("namedtuple_")
    return is_generated or root in sys.stdlib_module_names or root in ("torch", "torchlens_perf")
