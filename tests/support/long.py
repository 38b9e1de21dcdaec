"""Cases that `make test` leaves to `make test-long`: more of a kind of which it has one, and what is rare or slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """These cases of a parametrized test, left to make test-long. A tuple has the values of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]


def long_but(names: Collection[str], cases: Iterable[str]) -> list[Any]:
    """All of the cases; those that are not among the names are left to make test-long."""
    assert set(names) <= set(cases)
    return [case if case in names else pytest.param(case, marks=pytest.mark.long) for case in cases]
