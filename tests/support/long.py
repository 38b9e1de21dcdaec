"""Markers for cases that run only in `make test-long`: rare or slow cases, and repetitions of a
kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Mark these cases of a parametrized test for `make test-long`.

    A tuple contains several parameters' values.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


def long_but(names: Collection[str], cases: Iterable[str]) -> list[Any]:
    """Mark all cases except the named ones for `make test-long`. Return all cases."""
    assert set(names) <= set(cases)
    return [case if case in names else pytest.param(case, marks=pytest.mark.long) for case in cases]
