"""The errors of this package, the one place that keeps them out of the training loop, and what may be printed."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torchlens_perf.output import logger

_P = ParamSpec("_P")
_R = TypeVar("_R")

LOGGED_PER_PLACE = 3
_NOT_PRINTED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
RAISE = "TORCHLENS_PERF_RAISE"
"""Set to 1, this variable has our own errors raised: for tests, not for jobs."""


DAMAGED_DATA = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What our own code raises for data that was damaged. It belongs to the file it was read from, and to no other one."""


class TorchlensPerfError(Exception):
    """Root of the errors that this package raises."""


class ConfigError(TorchlensPerfError, ValueError):
    """A setting that cannot be used. The message names the field and says what to do."""


class RingError(TorchlensPerfError):
    """A file that is not a ring file, or not a whole one."""


class RunStoreError(TorchlensPerfError):
    """A folder that is not a run directory, or that cannot be read or written."""


class HookUnavailable(TorchlensPerfError):
    """This version of torch lacks what a hook needs. The hook is left out, and the report says so."""


class DeviceError(TorchlensPerfError):
    """A call to the device that failed, or a library that is needed to reach it and is missing."""


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known word. what: as in "unknown command"."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"unknown {what} {word!r}: did you mean {close[0]!r}?" if close else f"unknown {what} {word!r}."


def printable(text: str) -> str:
    """One line, in which nothing drives a terminal or turns letters round; such characters become "?".

    Names of modules, hosts and exceptions may hold anything: escape sequences, lone surrogates, ends of lines.
    """
    if text.isascii() and text.isprintable():
        return text
    import unicodedata  # rarely needed, and a sidecar begins with next to nothing imported

    return "".join("?" if unicodedata.category(c) in _NOT_PRINTED else c for c in text)


class Printable:
    """An object whose str() is that of another one, as printable() has it: made only if it is needed."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))


class Swallowed:
    """Counts the errors that guard() kept from the user, by place. One per process."""

    def __init__(self) -> None:
        self.by_place: Counter[str] = Counter()
        self.on_error: Callable[[], None] | None = None

    @property
    def strict(self) -> bool:
        """Whether to raise instead."""
        return os.environ.get(RAISE) == "1"

    def add(self, place: str, error: Exception) -> None:
        """Counts, and logs the first few of each place: a broken hook must not flood the job's log."""
        self.by_place[place] += 1
        if self.on_error is not None:
            self.on_error()
        if self.by_place[place] <= LOGGED_PER_PLACE:
            logger.warning(
                "torchlens_perf: %s failed and was skipped, training goes on: %s: %s",
                place,
                type(error).__name__,
                Printable(error),
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


swallowed = Swallowed()


class switches_off:
    """Context manager around the start of a watch: an exception leaves the job without recording, and is one line.

    What the environment does (no room, no permission, no process) is never raised. Our own mistakes are neither, but
    for the tests. Lets KeyboardInterrupt and SystemExit pass, and ConfigError, which is the user's.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: gets the line."""
        self._say = say

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ConfigError):
            return False
        if isinstance(error, RunStoreError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, (OSError, MemoryError)):
                if swallowed.strict:
                    return False
                reason += ". That is a mistake of torchlens_perf's; please report it"
        with guard("saying why recording is off"):
            self._say(reason)
        return True


class guard:
    """Context manager and decorator around our code in the user's process.

    Swallows Exception, counted and logged by `place`. Lets KeyboardInterrupt and SystemExit pass, and errors of the
    kind `passes`: ConfigError is the user's, and says what to do.
    """

    def __init__(
        self, place: str, passes: type[TorchlensPerfError] | tuple[type[TorchlensPerfError], ...] = ConfigError
    ) -> None:
        self._place = place
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and self._swallow(error)

    def _swallow(self, error: Exception) -> bool:
        if isinstance(error, self._passes) or swallowed.strict:
            return False
        swallowed.add(self._place, error)
        return True

    def run(self, functions: Iterable[Callable[[], object]]) -> list[Callable[[], object]]:
        """Calls them in order; returns those that failed."""
        failed = []
        for function in functions:
            try:
                function()
            except Exception as error:
                if not self._swallow(error):
                    raise
                failed.append(function)
        return failed

    def calling(self, owner: object, name: str) -> Callable[..., Any]:
        """A guarded function that calls what `owner.name` then is, if that is not None."""

        def call(*args: object, **kwargs: object) -> Any:
            function = getattr(owner, name)
            return None if function is None else function(*args, **kwargs)

        return self(call)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        # Not `with self`: its two calls cost as much as a short hook's work.
        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not self._swallow(error):
                    raise
            return None

        return guarded


class users_code(guard):
    """A guard around what the user has passed to us. Its error is the user's, and logged once, with the traceback."""

    def __init__(self, name: str, role: str) -> None:
        """role: what it is to us, such as "a callback of on_verdict()"."""
        super().__init__(f"{name}, {role},")
        self._failed = False

    def _swallow(self, error: Exception) -> bool:
        if not self._failed:
            self._failed = True
            logger.warning(
                "torchlens_perf: %s raised, and training goes on: %s: %s",
                Printable(self._place), type(error).__name__, Printable(error), exc_info=error,
            )  # fmt: skip
        return True
