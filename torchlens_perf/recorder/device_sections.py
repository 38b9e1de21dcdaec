"""Sections that the device times by its own clock, also in a captured graph: `with device_section(name)`.

Here is only what a script needs at every import: what they do lies in hooks/on_device/stamps.py, which is
loaded where torch has an NVIDIA device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class Stamper(Protocol):
    """Enqueues stamps of the device's clock on the current stream. Never raises."""

    def open(self, name: str) -> None:
        """A section begins."""

    def close(self, name: str) -> None:
        """It ends."""


_stamper: Stamper | None = None
_wanted = False


def set_stamper(stamper: Stamper | None) -> None:
    """Whom sections tell from now on; None: nobody."""
    global _stamper
    _stamper = stamper


def wanted() -> bool:
    """Whether this process has made a section: one that decorates a function, before a watch begins."""
    return _wanted


class DeviceSection:
    """What device_section() returns: a context manager and a decorator. Not re-entrant on one name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> DeviceSection:
        if _stamper is not None:
            _stamper.open(self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _stamper is not None:
            _stamper.close(self.name)

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with device_section(self.name):
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"device_section({self.name!r})"


def device_section(name: str) -> DeviceSection:
    """A part of the step that the GPU times by its own clock, on the current stream; also a decorator.

    ::

        with torch.cuda.graph(graph):
            with perf.device_section("decode"):
                logits = model(tokens)

    Inside a capture it becomes part of the graph, and each replay adds a time. The memory for the times is made when
    the watch begins, if there is a section by then and a model on the device; else at the end of the first step that
    enters one. What is entered or captured before that is not timed, and counted in the report's notes. Costs two
    launches of a kernel of one thread. At most 64 names. Without a watch, an NVIDIA GPU or CuPy it does nothing; the
    report says what is missing. Any thread that holds the GIL. Raises TypeError for a name that is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"device_section() takes a name, got {type(name).__name__}")
    global _wanted
    _wanted = True
    return DeviceSection(name)
