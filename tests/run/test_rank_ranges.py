"""Ranks as short text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.run.rank_ranges import parse_ranges, ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1, 2, 3], "0-3"),
        (range(3, 16384, 8), "3-16379/8"),
        ([0, 1, 2, 9], "0-2,9"),
        ([1, 9], "1,9"),
    ],
)
def test_regular_set_is_one_range(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_text_of_any_set_is_parsed_back(ranks: set[int]) -> None:
    assert sorted(parse_ranges(ranges(sorted(ranks)))) == sorted(ranks)


@pytest.mark.parametrize(
    "text", ["0-99999999999999999999", "0-9999999", "0-1000000,0-1000000", f"{10**30}"]
)
def test_too_many_ranks_are_refused(text: str) -> None:
    """Short text could otherwise use gigabytes of memory."""
    with pytest.raises(ValueError, match="more than 1048576 ranks"):
        parse_ranges(text)
