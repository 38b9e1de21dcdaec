"""Run a handler at each line or call of our code in turn, as a signal handler could.

The handler may raise an exception into our code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

Line = tuple[CodeType, int]
"""A line of a function."""


class Interruption(BaseException):
    """An exception that the handler raises, similar to KeyboardInterrupt."""


def lines_of(codes: set[CodeType], work: Callable[[], object]) -> int:
    """Return how many lines of the given functions run in `work`."""
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    _traced(codes, work, counted)
    return count


def interrupted_at_each_line(
    codes: set[CodeType], work: Callable[[], object], handler: Callable[[], object]
) -> Iterator[int]:
    """Run `work` repeatedly, with the handler before the first line of the given functions, then
    before the second one, and so on.

    Yield each line number. An Interruption raised by the handler ends that run of `work`.
    """
    for wanted in range(lines_of(codes, work)):
        left = wanted

        def at_line() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                handler()

        with contextlib.suppress(Interruption):
            _traced(codes, work, at_line)
        yield wanted


def _traced(
    codes: set[CodeType], work: Callable[[], object], at_line: Callable[[], object]
) -> None:
    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code in codes else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            at_line()
        return on_line

    _with_trace(on_call, work)


def functions_called(work: Callable[[], object], file_prefix: str) -> list[CodeType]:
    """Return the functions of the given files that run in `work`, in the order of their first
    calls.
    """
    found: dict[CodeType, None] = {}

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(file_prefix):
            found.setdefault(frame.f_code)

    _with_trace(on_call, work)
    return list(found)


@contextlib.contextmanager
def _tracing(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _with_trace(trace: Callable[[FrameType, str, Any], Any], work: Callable[[], object]) -> None:
    with _tracing(trace):
        work()


@contextlib.contextmanager
def failing(code: CodeType, error: BaseException) -> Iterator[list[None]]:
    """Make the function's first call raise the given error.

    Yield a list that is not empty once the function has failed.
    """
    raised: list[None] = []

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code and not raised:
            raised.append(None)
            raise error

    with _tracing(on_call):
        yield raised


class _Sender:
    """An object whose negation calls a C function.

    Unlike a call, an operator is not followed by a look for signals. The signal is therefore
    handled in the code that is traced, not in the trace function.
    """


def _sender(send: Callable[[], object]) -> Any:
    return type("Sender", (_Sender,), {"__neg__": send})()


def signal_sender(number: int) -> Any:
    """Return an object whose negation sends a signal to this thread."""
    return _sender(functools.partial(getattr(ctypes.PyDLL(None), "raise"), number))


def exception_sender(kind: type[BaseException]) -> Any:
    """Return an object whose negation puts an exception into this thread."""
    identity, exception = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(kind)
    return _sender(
        functools.partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, identity, exception)
    )


def lines_run(work: Callable[[], object], file_prefix: str) -> list[Line]:
    """Return the lines of the given files that run in `work`, in the order of their first runs."""
    found: dict[Line, None] = {}

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(file_prefix) else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            found.setdefault((frame.f_code, frame.f_lineno))
        return on_line

    _with_trace(on_call, work)
    return list(found)


@contextlib.contextmanager
def sent_at(line: Line, sender: Any) -> Iterator[list[None]]:
    """Negate the sender when the line first runs.

    Yield a list that is not empty once this has happened.
    """
    code, number = line
    sent: list[None] = []

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code is code else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line" or frame.f_lineno != number:
            return on_line
        sys.settrace(None)
        sent.append(None)
        return -sender and None

    with _tracing(on_call):
        yield sent
