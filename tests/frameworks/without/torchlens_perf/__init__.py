"""Stands in for the package where a job runs without it: same names, nothing behind them."""

from __future__ import annotations

import contextlib
from typing import Any


class Watch:
    """Records nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        return None


def watch(*arguments: Any, **settings: Any) -> Watch:
    """Of the same form."""
    return Watch()


def section(name: str) -> Any:
    """Times nothing."""
    return contextlib.nullcontext()
