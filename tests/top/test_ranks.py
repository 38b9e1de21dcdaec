"""The table of ranks in top has the report's numbers, with slow ranks first."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from tests.top.reports import changed, report_of, verdict, view_of
from torchlens_perf.run.failure import ProcessActivity
from torchlens_perf.top.ranks import build_rank_list, draw_blocks
from torchlens_perf.top.reading import View
from torchlens_perf.verdicts.words.hang import HangEvidence
from torchlens_perf.view.headline import build_headlines
from torchlens_perf.view.rank_tables import build_rank_table
from torchlens_perf.view.specs import Column, Table

HANG = HangEvidence("missing", 12.0, 40, (0, 2), {}, "", "", ranks=(1,))


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Return the view of four ranks, in which rank 3 is slow."""
    folder = tmp_path_factory.mktemp("ranks")
    return view_of(folder / "run", 4, "constant:rank=3,share=0.3", blocks=3, node_size=2)


def with_report(view: View, **parts: Any) -> View:
    report = changed(report_of(view), **parts)
    return dataclasses.replace(view, report=report, headlines=tuple(build_headlines(report)))


def column(table: Table, title: str) -> Column:
    return next(each for each in table.columns if each.title.strip() == title)


def test_slow_rank_is_the_first_row_and_marked(view: View) -> None:
    table, ranks = build_rank_list(view)

    assert ranks[0] == 3
    assert table.slow == {0}
    assert sorted(ranks) == [0, 1, 2, 3]


def test_ranks_can_be_sorted_by_number(view: View) -> None:
    table, ranks = build_rank_list(view, by_number=True)

    assert ranks == [0, 1, 2, 3]
    assert table.slow == {3}
    assert column(table, "rank").values == [0, 1, 2, 3]


def test_numbers_of_ranks_equal_those_of_the_report(view: View) -> None:
    report, (table, _) = build_rank_table(report_of(view)), build_rank_list(view)
    assert report is not None

    assert column(table, "compute").texts() == column(report, "compute").texts()


def test_difference_of_a_rank_is_to_the_median_of_the_other_ranks(view: View) -> None:
    """The slow rank is compared with the median of the three others."""
    table, _ = build_rank_list(view)
    compute: Any = column(table, "compute").values
    excess: Any = column(table, "vs others").values

    assert excess[0] == pytest.approx(compute[0] - sorted(compute[1:])[1])
    assert excess[0] > 0.03


def test_two_ranks_have_opposite_differences(tmp_path: Path) -> None:
    table, ranks = build_rank_list(view_of(tmp_path / "run", 2, "constant:rank=1,share=0.3"))
    excess: Any = column(table, "vs others").values

    assert ranks == [1, 0]
    assert excess[0] == -excess[1] > 0


def test_rank_without_others_in_its_pipeline_stage_has_no_difference(tmp_path: Path) -> None:
    """Each stage of the pipeline has a single rank."""
    table, _ = build_rank_list(view_of(tmp_path / "run", 2, blocks=2, stages=2))

    assert column(table, "vs others").texts() == ["-", "-"]


def test_rank_that_others_wait_for_in_a_hang_is_first(view: View) -> None:
    """The table also has the open spans of each rank."""
    hang = verdict("hang", "No step for 12 s.", rank=1, evidence=HANG)
    ranks: Any = [
        {**rank, "now": ProcessActivity(40, 12.0, inside, 1.0)}
        for rank, inside in zip(
            report_of(view)["ranks"], (("backward", "wait"), (), ("x",), ("x",)), strict=True
        )
    ]
    table, order = build_rank_list(with_report(view, verdicts=[hang], ranks=ranks))

    assert order[0] == 1
    assert column(table, "inside").values[:2] == ["not timed", "x"]


def test_ranks_that_hang_in_their_first_step_are_listed(view: View) -> None:
    ranks: Any = [{**rank, "typical": None} for rank in report_of(view)["ranks"]]
    table, order = build_rank_list(with_report(view, ranks=ranks))

    assert order == [3, 0, 1, 2]
    assert [each.title for each in table.columns[:1]] == ["rank"]


def test_rank_without_a_step_is_listed_below_the_others(view: View) -> None:
    """The other ranks keep their numbers."""
    ranks: Any = [
        {**rank, "typical": None} if rank["rank"] == 1 else rank
        for rank in report_of(view)["ranks"]
    ]
    table, order = build_rank_list(with_report(view, ranks=ranks, verdicts=[]))

    assert (order[0], order[-1]) == (3, 1)
    assert column(table, "compute").texts()[-1] == column(table, "vs others").texts()[-1] == "-"
    assert "-" not in column(table, "compute").texts()[:-1]


def test_rank_list_is_empty_without_a_report() -> None:
    assert build_rank_list(View("run"))[1] == []


def test_excess_over_the_run_is_drawn_as_blocks() -> None:
    """Blocks are full from 30 %, blank if not known, and means of neighbours if there is no
    room.
    """
    assert draw_blocks([0.0, 0.3, 0.9, None, -0.2], 8) == "▁██ ▁"
    assert draw_blocks([0.3] * 4 + [0.0] * 4, 2) == "█▁"
    assert draw_blocks([], 8) == ""


def test_recently_slow_rank_has_an_excess_in_the_latest_window(tmp_path: Path) -> None:
    """A typical step of the run hardly shows the excess. Ranks without excess have no value."""
    table, ranks = build_rank_list(
        view_of(tmp_path / "run", 4, "constant:rank=2,share=0.3,since=224", blocks=8)
    )
    latest: Any = column(table, "latest excess").values

    assert ranks[0] == 2
    assert latest[0] == pytest.approx(0.3, abs=0.05)
    assert all(each is None or 0 < each < 0.05 for each in latest[1:])
    assert [len(str(each)) > 9 for each in column(table, "").values] == [
        True,
        False,
        False,
        False,
    ]


def test_no_column_is_blank_in_a_hang_without_an_excess(view: View) -> None:
    """The bars of the latest excess have no heading, so they are left out."""
    heat: Any = report_of(view)["heat"]
    level = {**heat, "ranks": [{**row, "excess": [0.0] * 3} for row in heat["ranks"]]}
    hang = verdict("hang", "No step for 12 s.", rank=1, evidence=HANG)
    table, _ = build_rank_list(with_report(view, heat=level, verdicts=[hang]))

    assert all(any(each.texts()) for each in table.columns)


def test_latest_window_with_too_few_steps_is_left_out(view: View) -> None:
    heat: Any = report_of(view)["heat"]
    rows = [{**row, "excess": [0.1, 0.3, None]} for row in heat["ranks"]]
    old = [{**row, "excess": [0.3, None, None]} for row in heat["ranks"]]

    assert (
        column(
            build_rank_list(with_report(view, heat={**heat, "ranks": rows}))[0], "latest excess"
        ).values
        == [0.3] * 4
    )
    assert (
        column(
            build_rank_list(with_report(view, heat={**heat, "ranks": old}))[0], "latest excess"
        ).values
        == [None] * 4
    )


def test_4096_ranks_are_ordered_in_less_than_two_seconds(view: View) -> None:
    """The time limit allows for a busy machine."""
    first: Any = report_of(view)["ranks"][0]
    ranks: Any = [{**first, "rank": rank} for rank in range(4096)]
    many = dataclasses.replace(with_report(view, ranks=ranks, verdicts=[]), populations={})
    began_s = time.process_time()
    _, order = build_rank_list(many)

    assert len(order) == 4096
    assert time.process_time() - began_s < 2


def test_ranks_of_a_verdict_are_those_of_its_evidence() -> None:
    """Without evidence, the rank is that of the verdict. A verdict on the job has no rank."""
    assert verdict("hang", "No step.", rank=3, evidence=HANG).ranks == (1,)
    assert verdict("straggler", "Rank 3 is slow.", rank=3).ranks == (3,)
    assert verdict("none", "No rank is slow.").ranks == ()
