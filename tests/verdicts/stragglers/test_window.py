"""The sliding window of comparable step bins, some of which are late, missing, or of other
width.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planted import Job, part_of, wider
from torchlens_perf.analysis.statistics.step_bins import BinBatch
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.stragglers.excess import excess_over_others
from torchlens_perf.verdicts.stragglers.population import Population
from torchlens_perf.verdicts.stragglers.window import (
    LATE_ROWS,
    SlidingWindow,
    max_judged_rows,
)

FIELDS = [
    field.name for field in dataclasses.fields(BinBatch) if field.name not in ("width", "ranks")
]


def filled(job: Job, width: int = 1) -> SlidingWindow:
    window = SlidingWindow(np.arange(job.ranks), width)
    window.add_rows(job.block())
    return window


def excess_of(job: Job, keys: np.ndarray, ranks: Any = slice(None)) -> np.ndarray:
    """Return the expected excess, computed from the job itself."""
    return excess_over_others(job.parts_ns[ranks].sum(axis=2)[:, keys])


def test_batch_from_one_rank_has_the_numbers_and_values_of_its_bins() -> None:
    job = Job.of(3, 10)
    block = wider(job.rows_of(1), 2)

    assert (block.width, block.ranks.tolist(), block.key.tolist()) == (2, [1], [[0, 1, 2, 3, 4]])
    assert block.parts_ns[0, 0].tolist() == job.parts_ns[1, :2].mean(axis=0).tolist()
    assert all(getattr(block, name).shape[:2] == (1, 5) for name in FIELDS)


def test_bins_outside_a_range_are_marked_as_missing() -> None:
    """If a bin begins inside the range, the bin is kept."""
    block = wider(Job.of(1, 20).rows_of(0), 4)

    assert block.select_steps(4, 13).key.tolist() == [[-1, 1, 2, 3, -1]]
    assert block.select_steps(0, 4).select_steps(4, 8).key.max() == -1


def test_comparable_bins_have_the_expected_excess() -> None:
    job = Job.of(4, 40)
    window = filled(job)
    keys, present = window.comparable_rows(0, 40)

    assert (keys.tolist(), present.tolist()) == (list(range(40)), [0, 1, 2, 3])
    np.testing.assert_allclose(window.excess_ns[:, keys], excess_of(job, keys), atol=20)
    assert window.comparable_rows(10, 30)[0].tolist() == list(range(10, 30))


def test_window_keeps_the_newest_bins() -> None:
    job = Job.of(2, 1000)
    once, pieces = filled(job), SlidingWindow(np.arange(2), 1)
    for first in range(0, 1000, 170):
        pieces.add_rows(job.block(rows=slice(first, first + 170)))
    for window in (once, pieces):
        keys, _ = window.comparable_rows(0, 1000)
        assert keys.tolist() == list(range(1000 - max_judged_rows(2), 1000))
        np.testing.assert_allclose(
            window.excess_ns[:, keys % window.columns], excess_of(job, keys), atol=20
        )


def test_bin_missing_on_one_rank_is_not_comparable() -> None:
    """A bin with other work on one rank is not comparable either. Bins around it are."""
    job = Job.of(3, 20)
    job.flags[1, 5] = Flag.CHECKPOINT
    job.flags[2, 6] = Flag.COLLECTED
    window = SlidingWindow(np.arange(3), 1)
    block = job.block()
    window.add_rows(
        dataclasses.replace(
            block, key=np.where((block.key == 9) & (block.ranks[:, None] == 2), -1, block.key)
        )
    )

    assert set(range(20)) - set(window.comparable_rows(0, 20)[0].tolist()) == {5, 9}


def test_comparable_bins_end_at_the_newest_bin_of_the_slowest_rank() -> None:
    """Ranks that are far behind or have ended do not count."""
    window = SlidingWindow(np.arange(3), 1)
    job = Job.of(3, 200)
    window.add_rows(job.block([0], slice(0, 100)))
    # The window no longer waits for ranks without bins.
    assert window.newest_complete_row(()) == 99
    window.add_rows(job.block([1], slice(0, 60)))
    window.add_rows(job.block([2], slice(0, 100 - LATE_ROWS)))
    assert window.newest_complete_row(()) == 99 - LATE_ROWS
    window.add_rows(job.block([0], slice(100, 101)))
    assert window.newest_complete_row(()) == 59
    assert window.newest_complete_row({1}) == 100
    assert window.newest_complete_row({0, 1, 2}) == 100
    assert window.oldest_row() == 0


def test_window_waits_for_ranks_without_bins_at_first() -> None:
    window = SlidingWindow(np.arange(2), 1)
    window.add_rows(Job.of(2, 30).block([0]))

    assert window.newest_complete_row(()) == -1


def test_added_ranks_do_not_change_bins_of_others() -> None:
    job = Job.of(4, 30)
    window = SlidingWindow(np.array([1, 3]), 1)
    window.add_rows(job.block([1, 3]))
    before = window.comparable_rows(0, 30)[0]
    window = window.with_more_ranks(np.arange(4))
    window.add_rows(job.block([0, 2]))
    keys, present = window.comparable_rows(0, 30)

    assert keys.tolist() == before.tolist()
    assert present.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(window.excess_ns[:, keys], excess_of(job, keys), atol=20)


def test_window_of_more_than_4096_ranks_starts_empty_with_fewer_bins() -> None:
    assert (max_judged_rows(4096), max_judged_rows(4097)) == (256, 128)
    window = filled(Job.of(2, 30)).with_more_ranks(np.arange(4097))

    assert (window.rows, window.newest.max()) == (128, -1)


class TestLateBins:
    def test_newest_bin_is_compared_again_after_a_late_part(self) -> None:
        job = Job.of(3, 100)
        window = SlidingWindow(np.arange(3), 1)
        window.add_rows(job.block([0, 1]))
        keys, present = window.comparable_rows(0, 100)
        assert present.tolist() == [0, 1]
        np.testing.assert_allclose(
            window.excess_ns[:2, keys], excess_of(job, keys, [0, 1]), atol=20
        )
        window.add_rows(job.block([2]))
        keys, present = window.comparable_rows(0, 100)

        assert (len(keys), present.tolist()) == (100, [0, 1, 2])
        np.testing.assert_allclose(window.excess_ns[:, keys], excess_of(job, keys), atol=20)

    def test_older_bin_is_compared_again_after_a_late_part(self) -> None:
        """The rank already has newer bins."""
        job = Job.of(2, 50)
        window = SlidingWindow(np.arange(2), 1)
        window.add_rows(job.block([0]))
        window.add_rows(job.block([1], slice(40, 50)))
        assert window.comparable_rows(0, 50)[0].tolist() == list(range(40, 50))
        window.add_rows(job.block([1], slice(0, 40)))
        keys, _ = window.comparable_rows(0, 50)

        np.testing.assert_allclose(
            window.excess_ns[:, keys], excess_of(job, np.arange(50)), atol=20
        )

    def test_bins_missing_on_a_returned_rank_are_not_comparable(self) -> None:
        job = Job.of(3, 200)
        window = SlidingWindow(np.arange(3), 1)
        window.add_rows(job.block([0, 1], slice(0, 150)))
        window.add_rows(job.block([2], slice(0, 50)))
        assert len(window.comparable_rows(0, 150)[0]) == 150
        window.add_rows(job.block(rows=slice(150, 200)))
        keys, present = window.comparable_rows(0, 200)

        assert present.tolist() == [0, 1, 2]
        assert keys.tolist() == [*range(50), *range(150, 200)]

    def test_bins_are_comparable_once_the_rank_that_lacks_them_has_ended(self) -> None:
        job = Job.of(3, 100)
        job.flags[2, 30] = Flag.SAMPLED
        window = SlidingWindow(np.arange(3), 1)
        window.add_rows(job.block(rows=slice(0, 50)))
        assert 30 not in window.comparable_rows(0, 50)[0]
        window.add_rows(job.block([0, 1], slice(50, 100)))
        keys, present = window.comparable_rows(0, 100)

        assert (len(keys), present.tolist()) == (100, [0, 1])
        np.testing.assert_allclose(
            window.excess_ns[:2, keys], excess_of(job, keys, [0, 1]), atol=20
        )


class TestBinsOfDifferentWidths:
    @given(cuts=st.lists(st.integers(1, 31), max_size=6), order=st.booleans())
    def test_bins_of_one_step_make_bins_of_four(self, cuts: list[int], order: bool) -> None:
        """The bins arrive in random pieces, of one rank or several."""
        job = Job.of(2, 32)
        job.flags[0, 9], job.flags[1, 11] = Flag.MANUAL, Flag.COLLECTED
        window = SlidingWindow(np.arange(2), 4)
        edges = sorted({0, *cuts, 32})
        for first, end in itertools.pairwise(edges):
            ranks = [[0], [1]] if order else [[0, 1]]
            for each in ranks:
                window.add_rows(job.block(each, slice(first, end)))
        keys, present = window.comparable_rows(0, 8)

        assert (keys.tolist(), present.tolist()) == (list(range(8)), [0, 1])
        for rank in (0, 1):
            expected = wider(job.rows_of(rank), 4)
            np.testing.assert_allclose(window.parts_ns[rank, keys], expected.parts_ns[0], rtol=1e-6)
            np.testing.assert_allclose(
                window.duration_ns[rank, keys], expected.duration_ns[0], rtol=1e-6
            )
            assert window.flags[rank, keys].tolist() == expected.flags[0].tolist()
            assert np.isnan(window.ready_ns[rank, keys]).all()

    def test_incomplete_bin_is_dropped_and_others_are_kept(self) -> None:
        job = Job.of(1, 1200)
        window = SlidingWindow(np.arange(1), 4)
        for first, end in ((0, 5), (6, 50), (50, 1200)):
            window.add_rows(part_of(job.rows_of(0), first, end))
        keys = window.key[0, :-1]

        assert set(range(40)) - set(keys[(keys >= 0) & (keys < 40)].tolist()) == {1}
        assert len(window._narrow[1]) == 0

    def test_incomplete_bins_of_two_widths_are_kept_at_the_same_time(self) -> None:
        job = Job.of(2, 16)
        window = SlidingWindow(np.arange(2), 4)
        for first in range(0, 16, 2):
            window.add_rows(job.block([0], slice(first, first + 2)))
            window.add_rows(part_of(wider(job.rows_of(1), 2), first // 2, first // 2 + 1))
        grown = window.with_more_ranks(np.arange(3))

        assert window.comparable_rows(0, 4)[0].tolist() == [0, 1, 2, 3]
        assert grown.newest.tolist() == [3, 3, -1]

    @pytest.mark.parametrize("width", [1, 4])
    def test_repeated_bins_change_nothing(self, width: int) -> None:
        """Bins are repeated at once, before they complete a wider bin, and long after."""
        job = Job.of(2, 64)
        once, twice = SlidingWindow(np.arange(2), width), SlidingWindow(np.arange(2), width)
        for first in range(0, 64, 6):
            for window in (once, twice):
                window.add_rows(job.block(rows=slice(first, first + 6)))
            for before in (first, max(0, first - 6), 0):
                twice.add_rows(job.block(rows=slice(before, before + 6)))

        for name in ("key", "flags", "duration_ns", "own_ns", "newest"):
            np.testing.assert_array_equal(getattr(twice, name), getattr(once, name), name)
        assert (
            twice.comparable_rows(0, 64 // width)[0].tolist()
            == once.comparable_rows(0, 64 // width)[0].tolist()
        )
        np.testing.assert_array_equal(twice.excess_ns, once.excess_ns)

    def test_narrow_bins_are_kept_when_ranks_are_added(self) -> None:
        job = Job.of(2, 8)
        window = SlidingWindow(np.arange(1), 4)
        window.add_rows(job.block([0], slice(0, 6)))
        window = window.with_more_ranks(np.arange(2))
        window.add_rows(job.block([0], slice(6, 8)))
        window.add_rows(job.block([1]))

        keys, present = window.comparable_rows(0, 2)
        assert (keys.tolist(), present.tolist()) == ([0, 1], [0, 1])


@pytest.mark.parametrize("ended", [(), (2,)])
def test_rank_without_the_last_bin_is_not_compared_in_it(ended: tuple[int, ...]) -> None:
    """The rank has ended or is late."""
    job = Job.of(3, 80)
    window = SlidingWindow(np.arange(3), 1)
    window.add_rows(job.block([0, 1]))
    window.add_rows(job.block([2], slice(0, 10)))

    assert window.newest_complete_row(ended) == 79
    assert window.comparable_rows(0, 80)[1].tolist() == [0, 1]


def test_gap_of_billions_of_steps_is_skipped() -> None:
    population, rows = Population(), Job.of(2, 20)
    for rank in range(2):
        block = rows.rows_of(rank)
        population.add_rows(block)
        population.add_rows(dataclasses.replace(block, key=block.key + (1 << 31)))
    assert len(population._pending_chunks()) == 2
