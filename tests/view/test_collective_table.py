"""The table of collectives has the rank that arrives last, even if it is rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.view.test_headline import simulated
from torchlens_perf.view.collective_table import build_collective_table


@pytest.mark.parametrize("rank", [0, 1])
def test_collective_table_shows_the_rank_that_arrives_last(rank: int, tmp_path: Path) -> None:
    report = simulated(tmp_path, f"constant:rank={rank},share=0.3")
    for row in report["collectives"]:
        row["slowest_rank"] = rank if row["slowest_rank"] is not None else None
    table = build_collective_table(report)

    assert table is not None
    (last,) = [column for column in table.columns if column.title == "last to arrive"]
    assert rank in last.values or str(rank) in last.values
