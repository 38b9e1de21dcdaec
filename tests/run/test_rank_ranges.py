"""Tests of sets of ranks as short text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.run.rank_ranges import format_ranges, parse_ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1, 2, 3], "0-3"),
        (range(3, 16384, 8), "3-16379/8"),
        ([0, 1, 2, 9], "0-2,9"),
        ([1, 9], "1,9"),
        ([3, 7, 11, 15], "3,7,11,15"),
    ],
)
def test_regularly_spaced_ranks_are_written_as_one_range(ranks: list[int], text: str) -> None:
    assert format_ranges(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_parsed_text_gives_the_same_ranks_for_any_set(ranks: set[int]) -> None:
    assert sorted(parse_ranges(format_ranges(sorted(ranks)))) == sorted(ranks)


@pytest.mark.parametrize(
    "text", ["0-99999999999999999999", "0-9999999", "0-1000000,0-1000000", f"{10**30}"]
)
def test_text_with_too_many_ranks_is_refused(text: str) -> None:
    """Without the limit, a short text could use gigabytes of memory."""
    with pytest.raises(ValueError, match="more than 1048576 ranks"):
        parse_ranges(text)
