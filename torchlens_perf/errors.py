"""Exceptions of this package, the guards that keep them out of the training loop, and safe text for
terminals.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torchlens_perf.interruption import is_interruption, ours
from torchlens_perf.output import logger, write_to_stderr

_P = ParamSpec("_P")
_R = TypeVar("_R")

LOGGED_PER_PLACE = 3
_NOT_PRINTED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
RAISE = "TORCHLENS_PERF_RAISE"
"""With this variable set to 1, internal errors are raised instead of logged. For tests only."""


DAMAGED_DATA = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that damaged data can cause while it is decoded. They concern only the file
that was read.
"""


class TorchlensPerfError(Exception):
    """Base class of the exceptions that this package raises."""


class ConfigError(TorchlensPerfError, ValueError):
    """An invalid setting. The message names the field and what to do."""


class RingError(TorchlensPerfError):
    """A file that is not a complete ring file."""


class RunStoreError(TorchlensPerfError):
    """A folder that is not a run directory, or cannot be read or written."""


class HookUnavailable(TorchlensPerfError):
    """This version of torch lacks an API that a hook needs.

    The hook is skipped, and the report notes that.
    """


class DeviceError(TorchlensPerfError):
    """A failed device call, or a missing library that is needed for device calls."""


def require(condition: bool, problem: str) -> None:
    """Raise ConfigError with the problem unless the condition holds."""
    if not condition:
        raise ConfigError(problem)


def unknown_word_text(what: str, word: str, known: Iterable[str]) -> str:
    """Return "unknown WHAT WORD" with the nearest known word as a suggestion. what: for example
    "command".
    """
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return (
        f"unknown {what} {word!r}: did you mean {close[0]!r}?"
        if close
        else f"unknown {what} {word!r}."
    )


def printable(text: str) -> str:
    """Return text as one line without control characters, which become "?".

    Names of modules, hosts and exceptions may contain terminal escape sequences, lone surrogates or
    line breaks.
    """
    if text.isascii() and text.isprintable():
        return text
    # Imported late: it is rarely needed, and a sidecar must start with few imports.
    import unicodedata

    return "".join("?" if unicodedata.category(c) in _NOT_PRINTED else c for c in text)


def print_off(reason: str, environ: Mapping[str, str]) -> None:
    """Print on stderr, once per node, why nothing is recorded."""
    if environ.get("LOCAL_RANK", "0") == "0":
        write_to_stderr(f"torchlens_perf is off: {printable(reason)}\n")


class LazyPrintable:
    """Lazy printable(): the text of a value is made only when str() is called."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable(str(self._value))


class ErrorCounts:
    """Counts of errors that guard() has caught, by place. One instance per process."""

    def __init__(self) -> None:
        self.by_place: Counter[str] = Counter()
        self.on_error: Callable[[], None] | None = None

    @property
    def strict(self) -> bool:
        """True if errors are raised instead of caught, for tests."""
        return os.environ.get(RAISE) == "1"

    def add(self, place: str, error: BaseException) -> None:
        """Count an error and log the first few of each place.

        A broken hook must not flood the job's log.
        """
        self.by_place[place] += 1
        if self.on_error is not None:
            self.on_error()
        if self.by_place[place] <= LOGGED_PER_PLACE:
            logger.warning(
                "torchlens_perf: %s failed and was skipped, training goes on: %s: %s",
                place,
                type(error).__name__,
                LazyPrintable(error),
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


swallowed = ErrorCounts()


class guard:
    """Context manager and decorator around this package's code in the user's process.

    Exceptions are caught, counted and logged by `place`. Exceptions of the kinds `passes` are not
    caught, nor are those with which the program interrupts this package (interruption.py).
    ConfigError is the user's mistake and must reach the user.
    """

    def __init__(
        self,
        place: str,
        passes: type[TorchlensPerfError] | tuple[type[TorchlensPerfError], ...] = ConfigError,
    ) -> None:
        self._place = place
        self._passes = passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return error is not None and not is_interruption(error) and self._swallow(error)

    def _swallow(self, error: BaseException) -> bool:
        if isinstance(error, self._passes) or swallowed.strict:
            return False
        swallowed.add(self._place, error)
        return True

    def run(self, functions: Iterable[Callable[[], object]]) -> list[Callable[[], object]]:
        """Call functions in order. Return those that failed."""
        failed = []
        for function in functions:
            try:
                function()
            except ours(Exception) as error:
                if not self._swallow(error):
                    raise
                failed.append(function)
        return failed

    def wrap_attribute(self, owner: object, name: str) -> Callable[..., Any]:
        """Return a guarded function that calls the attribute `owner.name` as it is at the time of
        each call, unless the attribute is None.
        """

        def call(*args: object, **kwargs: object) -> Any:
            function = getattr(owner, name)
            return None if function is None else function(*args, **kwargs)

        return self(call)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        # `with self` would add two calls, which cost as much as a short hook itself.
        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
            try:
                return function(*args, **kwargs)
            except ours(Exception) as error:
                if not self._swallow(error):
                    raise
            return None

        return guarded


class switch_off_on_error(guard):
    """A guard around the start of a watch: an exception switches recording off and becomes one log
    line.

    Failures of the environment, such as a full disk, are never raised. Internal errors are raised
    only in tests.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: function that logs or prints the line."""
        super().__init__("reporting why recording is off")
        self._say = say

    def _swallow(self, error: BaseException) -> bool:
        is_internal = not isinstance(error, (OSError, MemoryError, RunStoreError))
        if isinstance(error, self._passes) or (is_internal and swallowed.strict):
            return False
        reason = str(error)
        if not isinstance(error, RunStoreError):
            reason = f"{type(error).__name__}: {error}"
        if is_internal:
            reason += ". This is a bug in torchlens_perf; please report it"
        with guard(self._place):
            self._say(reason)
        return True


class guard_user_code(guard):
    """A guard around a function that the user has passed in.

    Its first exception is logged with the traceback.
    """

    def __init__(self, name: str, role: str) -> None:
        """role: description for the log, such as "a callback of on_verdict()"."""
        super().__init__(f"{name}, {role},")
        self._failed = False

    def _swallow(self, error: BaseException) -> bool:
        if not self._failed:
            self._failed = True
            logger.warning(
                "torchlens_perf: %s raised, and training goes on: %s: %s",
                LazyPrintable(self._place), type(error).__name__, LazyPrintable(error), exc_info=error,
            )  # fmt: skip
        return True
