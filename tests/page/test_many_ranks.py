"""The page of a job of many nodes: small and fast, with slow ranks and notes on omitted data."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, cast

import pytest

from benchmarks.page_scale import write_run
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.document.html import build_document, contents_as_json
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.page.gather.thinning import trim_report, widen_grid
from torchlens_perf.report import report_json
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.simulate.simulation import Topology

RANKS, STEPS, SLOW_RANK, BUDGET_BYTES = 128, 64, 77, 400_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> PageContents:
    run = RunDirectory(tmp_path_factory.mktemp("many") / "run")
    fault = f"constant:rank={SLOW_RANK},share=0.4,phase=forward,since=8"
    write_run(run, Topology(16, 8, node_size=8), STEPS, segments=2, fault=fault)
    return gather_contents(run, BUDGET_BYTES)


def test_page_of_many_ranks_is_within_its_size_budget(many: PageContents) -> None:
    """The page has all verdicts, and its matrices have all ranks."""
    assert len(contents_as_json(many)) <= BUDGET_BYTES
    assert many["steps"] is not None
    assert len(many["steps"]["places"]) == RANKS
    assert many["report"]["verdicts"][0].rank == SLOW_RANK


def test_page_data_have_the_slow_rank_and_ranks_of_whole_steps(many: PageContents) -> None:
    """The matrices, tables and figures have all ranks."""
    rows = {rank["rank"] for rank in many["thinned_report"]["ranks"]}
    shown = {trace["rank"] for trace in many["traces"]["steps"][0]["ranks"]}

    assert SLOW_RANK in shown <= rows
    assert len(rows) < RANKS
    assert any(
        line.startswith(f"Charts can select only {len(rows)} of {RANKS} ranks: ")
        for line in many["thinned"]["sentences"]
    )
    assert all(
        set(module["by_rank"]) <= set(map(str, rows))
        for module in many["thinned_report"]["modules"]
    )
    assert len(many["report"]["ranks"]) == RANKS


def test_whole_steps_of_several_nodes_are_on_one_clock(many: PageContents) -> None:
    """The steps contain the slow rank, ranks that wait for it, and usual ones.

    The last of all 128 ranks is known.
    """
    step = many["traces"]["steps"][0]
    (row,) = step["collectives"]

    assert len(step["ranks"]) + step["ranks_left_out"] == RANKS
    assert len(step["ranks"]) <= 16
    assert row["last_rank"] == SLOW_RANK
    assert set(row["wait_us"]) == {str(trace["rank"]) for trace in step["ranks"]}
    assert step["clock"].startswith("The clocks of ")
    assert all(trace["offset_us"] is not None for trace in step["ranks"])


def test_size_of_the_document_does_not_grow_with_ranks(many: PageContents) -> None:
    text = re.sub(
        r"<script(?! type=\"application/json\").*?</script>", "", build_document(many), flags=re.S
    )
    data = text.partition('<script type="application/json"')[2].partition("</script>")[0]

    assert len(text) - len(data) < 300_000
    assert f'rank">{SLOW_RANK}' in text or f">{SLOW_RANK}</th>" in text


def test_row_of_a_collective_keeps_its_last_rank(many: PageContents) -> None:
    """Sentences quote the numbers of this rank, even if no table shows it."""
    report = report_json.to_json_types(many["report"])
    (row,) = report["collectives"]
    shown = {rank["rank"] for rank in trim_report(report, {SLOW_RANK}, 0, [])["ranks"]}
    last = max(rank for rank in map(int, row["by_rank"]) if rank not in shown)
    thinned = trim_report(
        {**report, "collectives": [{**row, "slowest_rank": last}]}, {SLOW_RANK}, 0, []
    )

    assert str(last) in thinned["collectives"][0]["by_rank"]


@dataclasses.dataclass
class _Grid:
    width: int

    @property
    def flags(self) -> range:
        return range(1000 // self.width)

    def widened(self) -> _Grid:
        return _Grid(2 * self.width)


@pytest.mark.parametrize("budget_bytes", [10_000, 1000, 600, 100, 3, 0])
def test_column_widths_that_cannot_fit_are_not_tried(budget_bytes: int) -> None:
    """The narrowest columns that fit are found."""
    made = []

    def made_of(grid: Any) -> str:
        made.append(grid.width)
        return "x" * len(grid.flags)

    grid, text = widen_grid(cast("Any", _Grid(1)), made_of, budget_bytes, [])
    widths = [1 << power for power in range(10)]
    fitting = [width for width in widths if 1000 // width + 2 <= budget_bytes]

    assert grid.width == min(fitting, default=widths[-1])
    assert len(text) == 1000 // grid.width
    assert len(made) <= 3
