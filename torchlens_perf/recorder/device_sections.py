"""Time sections by the device's own clock, also in a captured graph: `with device_section(name)`.

Every script imports this module, so it contains only the interface. The implementation,
cuda/section_stamper.py, is loaded if torch has an NVIDIA device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class Stamper(Protocol):
    """Enqueues stamps of the device's clock on the current stream. Methods never raise."""

    def open_section(self, name: str) -> None:
        """Enqueue the begin of a section."""

    def close_section(self, name: str) -> None:
        """Enqueue the end of a section."""


_stamper: Stamper | None = None
_wanted = False


def set_stamper(stamper: Stamper | None) -> None:
    """Set the stamper that sections call. None means that no device is timed."""
    global _stamper
    _stamper = stamper


def has_section() -> bool:
    """Return True if device_section() has been called, for example by a decorator."""
    return _wanted


class DeviceSection:
    """Result of device_section(): a context manager and decorator.

    A section must not be nested in itself.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> DeviceSection:
        if _stamper is not None:
            _stamper.open_section(self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if _stamper is not None:
            _stamper.close_section(self.name)

    def __call__(self, function: _F) -> _F:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with device_section(self.name):
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"device_section({self.name!r})"


def device_section(name: str) -> DeviceSection:
    """Return a named part of the step that the GPU times on the current stream; also a decorator.

        with torch.cuda.graph(graph):
            with perf.device_section("decode"):
                logits = model(tokens)

    Inside a graph capture the section becomes part of the graph, and each replay adds a time.
    Memory for the times is allocated when the watch begins, if a section and a model on the device
    exist by then, or else at the end of the first step that enters a section. Sections that were
    entered or captured earlier are not timed, but counted in the report's notes.

    The cost is two launches of a kernel with one thread. At most 64 names are timed. Without a
    watch, an NVIDIA GPU or CuPy it does nothing, and the report states what is missing. Any thread
    may use it. Raise TypeError if the name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"device_section() takes a name, got {type(name).__name__}")
    global _wanted
    _wanted = True
    return DeviceSection(name)
