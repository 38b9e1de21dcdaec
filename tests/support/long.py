"""Markers for cases that run only in `make test-long`, because they are rare, slow or
repetitive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Mark the given cases of a parametrized test for `make test-long`.

    A tuple contains the values of several parameters.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for case in cases
    ]


def long_except(names: Collection[str], cases: Iterable[str]) -> list[Any]:
    """Mark all cases except `names` for `make test-long`. Return all cases."""
    assert set(names) <= set(cases)
    return [case if case in names else pytest.param(case, marks=pytest.mark.long) for case in cases]
