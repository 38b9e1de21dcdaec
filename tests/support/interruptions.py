"""An exception, or other work, in the middle of our code, at each line or call in turn: as a signal's handler does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Interruption(BaseException):
    """What the handler raises, as Ctrl-C does."""


def lines_of(codes: set[CodeType], work: Callable[[], object]) -> int:
    """How many lines of these functions run in `work`."""
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    _traced(codes, work, counted)
    return count


def interrupted_at_each_line(
    codes: set[CodeType], work: Callable[[], object], handler: Callable[[], object]
) -> Iterator[int]:
    """Runs `work` again and again, the handler before its first line in these functions, before its second one, ...

    Yields the line's number each time. An Interruption that the handler raises ends that work.
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


def _traced(codes: set[CodeType], work: Callable[[], object], at_line: Callable[[], object]) -> None:
    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code in codes else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            at_line()
        return on_line

    _with_trace(on_call, work)


def functions_called(work: Callable[[], object], file_prefix: str) -> list[CodeType]:
    """The functions of these files that run in `work`, in the order of their first calls."""
    found: dict[CodeType, None] = {}

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(file_prefix):
            found.setdefault(frame.f_code)

    _with_trace(on_call, work)
    return list(found)


def _with_trace(trace: Callable[[FrameType, str, Any], Any], work: Callable[[], object]) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def failing(code: CodeType, error: BaseException) -> Iterator[list[None]]:
    """The function's first call raises this error at once. Yields a list that is not empty once it has."""
    raised: list[None] = []

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code and not raised:
            raised.append(None)
            raise error

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield raised
    finally:
        sys.settrace(before)
