"""Tests of the limits on the size of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.count_statements import (
    GRANTS,
    SLACK,
    count_file,
    count_package,
    find_excess,
    find_raised,
)

PYTHON = '''"""A docstring."""
from __future__ import annotations
import os

def leave(code: int) -> None:
    """Leave."""
    os._exit(code); raise SystemExit(
        code,
    )
'''


def test_docstrings_imports_and_layout_do_not_count(tmp_path: Path) -> None:
    """A function with two statements on one and a half lines has three."""
    (tmp_path / "leave.py").write_text(PYTHON)
    (tmp_path / "leave.c").write_text("int x;\n\n  \nint y;\n")

    assert count_file(tmp_path / "leave.py") == 3
    assert count_file(tmp_path / "leave.c") == 2


def test_package_is_counted_whole() -> None:
    counts = count_package()

    assert counts["Python"]["entry points"] > 500
    assert counts["C and JS"]["native"] > 3000
    assert "deploy" not in counts["Python"]


@pytest.mark.parametrize(
    ("count", "limit", "says"),
    [
        (100, 100, []),
        (101, 100, ["run has 1 more than its limit"]),
        (100, 100 + SLACK, []),
        (100, 101 + SLACK, ["the limits (Python) are too high"]),
    ],
)
def test_limit_holds_and_follows_what_was_deleted(count: int, limit: int, says: list[str]) -> None:
    found = [*find_excess({"Python": {"run": count}}, {"Python": {"run": limit}})]

    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True))


def test_new_folder_has_no_limit_of_its_own() -> None:
    found = [*find_excess({"Python": {"run": 5, "new": 1}}, {"Python": {"run": 5}})]

    assert found == ["new has 1 more than its limit (Python): delete as many."]


def test_sum_only_falls_and_code_may_move() -> None:
    """The lowest sum of earlier commits counts, whichever folder has it."""
    earlier = [{"Python": {"run": 10, "store": 5}}, {"Python": {"run": 12}}]

    assert not [*find_raised({"Python": {"run": 2, "store": 10}}, earlier)]
    assert [*find_raised({"Python": {"run": 13}}, earlier)] == [
        "the sum of the limits (Python) has risen by 1: it only falls."
    ]
    assert not [*find_raised({"Python": {"run": 13}}, [])]


def test_granted_folder_has_a_limit_outside_the_sum() -> None:
    """The folder may grow up to its grant, and does not pay for growth elsewhere."""
    limits = {"Python": {"run": 5, **GRANTS}}
    size = GRANTS["roles"]

    assert not [*find_excess({"Python": {"run": 5, "roles": 1}}, limits)]
    assert not [*find_raised(limits, [{"Python": {"run": 5}}])]
    assert [*find_excess({"Python": {"run": 5, "roles": size + 2}}, limits)] == [
        "roles has 2 more than its limit (Python): delete as many."
    ]
    assert [*find_raised({"Python": {"run": 6}}, [{"Python": {"run": 5, "roles": size}}])]
