"""The tables of reports on simulated runs: rows, order, and omitted data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from tests.report.test_held import node
from tests.verdicts.words.test_bottleneck import BASE
from tests.view.test_headline import simulated
from torchlens_perf.analysis.statistics.quantities import (
    format_change,
    format_duration,
    format_rounded,
)
from torchlens_perf.page.sections.phases import build_phases_section
from torchlens_perf.report.build import build_report
from torchlens_perf.simulate.rings import SimulatedDevice
from torchlens_perf.verdicts.words.report import LostTime, PathClass, Report
from torchlens_perf.verdicts.words.stragglers import StragglerEvidence
from torchlens_perf.view.lost_time_tables import build_critical_path_table
from torchlens_perf.view.markup import to_html
from torchlens_perf.view.specs import Column, Quantity, Table
from torchlens_perf.view.tables import build_tables

TITLES_OF_SEVERAL_RANKS = {"rank", "comm wait", "last to arrive"}


def found(report: Report, key: str) -> Table:
    return next(table for table in build_tables(report) if table.key == key)


def column(table: Table, title: str) -> Column:
    return next(each for each in table.columns if each.title == title)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return the tables of a run of 16 ranks, in which rank 3 is slow in forward."""
    return simulated(
        tmp_path_factory.mktemp("slow"), "constant:rank=3,share=0.25,phase=forward", ranks=16
    )


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return simulated(tmp_path_factory.mktemp("clean"), ranks=16)


def test_slow_rank_is_the_first_row_of_the_rank_table(slow: Report) -> None:
    table = found(slow, "ranks")

    assert column(table, "rank").values[0] == 3
    assert table.slow == {0}
    assert table.first == 8
    compute = column(table, "compute").values
    assert compute[0] > compute[1] >= compute[2]  # type: ignore[operator]


def test_tables_of_the_run_name_their_steps_if_the_rank_was_slow_later(slow: Report) -> None:
    """The verdict is then about fewer steps, so its times differ from those of the tables."""
    row = slow["verdicts"][0]
    assert row.held is not None
    later = structs.replace(row, held=structs.replace(row.held, since_step=40))

    assert found(slow, "ranks").title == "Typical step of each rank"
    late: Report = {**slow, "verdicts": [later]}
    assert found(late, "ranks").title == "Typical step of each rank, steps 0 to 119"
    assert found(late, "modules").title == "Modules, forward time per step, steps 0 to 119"
    for report, covered in ((slow, ""), (late, ", steps 0 to 119")):
        section = build_phases_section(cast("Any", {"report": report}))
        assert section is not None
        assert f"Typical step by part{covered} (host clock)" in to_html(section)


def test_shares_of_last_arrivals_name_their_whole(slow: Report) -> None:
    """Each of several groups has its own last rank."""
    last = column(found(slow, "ranks"), "last to arrive").values
    assert sum(last) == pytest.approx(1)  # type: ignore[arg-type]
    in_groups: Any = {
        **slow,
        "ranks": [
            {**rank, "arrived_last": {"count": 9, "joined": 10, "share": 0.9}}
            for rank in slow["ranks"]
        ],
    }

    assert column(found(in_groups, "ranks"), "last in own groups").values[0] == 0.9


def test_table_of_many_equal_ranks_shows_four_and_summarizes_the_rest(clean: Report) -> None:
    table = found(clean, "ranks")

    assert (table.rows, table.first, table.slow) == (16, 4, frozenset())
    assert table.describe_hidden_rows(4).startswith("12 ranks not shown: compute ")
    assert table.describe_hidden_rows(4).endswith(" ms")


def test_first_rows_include_healthy_ranks_even_if_many_are_slow(tmp_path: Path) -> None:
    table = found(simulated(tmp_path, "node:node=1,share=0.15", ranks=16), "ranks")

    assert table.first == 8
    assert {0, 1, 2, 3, 4} <= table.slow
    assert not {5, 6, 7} & table.slow
    assert len(table.slow) == 8


def test_columns_of_the_rank_table_have_one_unit(slow: Report) -> None:
    units = {each.unit for each in found(slow, "ranks").columns} - {""}

    assert units == {"ms"}


def test_modules_of_the_slow_rank_are_compared_with_those_of_other_ranks(slow: Report) -> None:
    table = found(slow, "modules")

    assert [each.title for each in table.columns] == [
        "module",
        "rank 3",
        "other ranks",
        "difference",
        "share of difference",
    ]
    differences = list(column(table, "difference").values)
    assert differences == sorted(differences, reverse=True)
    assert differences[0] > 0  # type: ignore[operator]
    assert sum(column(table, "share of difference").values) == pytest.approx(1)  # type: ignore[arg-type]


def test_module_that_takes_no_time_is_left_out(clean: Report) -> None:
    assert "Transformer" in [each["name"] for each in clean["modules"]]
    names = column(found(clean, "modules"), "module").values

    assert names
    assert not [name for name in names if str(name).startswith("Transformer")]


def test_small_collective_has_no_bandwidth(slow: Report) -> None:
    table = found(slow, "collectives")
    sizes = [row["bandwidth_at_bytes"] or 0 for row in slow["collectives"]]

    assert min(sizes) < 1000 < max(sizes)
    bandwidths = dict(
        zip(column(table, "bytes").texts(), column(table, "bus bandwidth").values, strict=True)
    )
    assert [value is None for value in bandwidths.values()] == [
        text.endswith(" KB") for text in bandwidths
    ]


def test_tables_of_one_process_have_no_columns_for_several_ranks(tmp_path: Path) -> None:
    made = build_tables(simulated(tmp_path, ranks=1))

    assert not TITLES_OF_SEVERAL_RANKS & {each.title for table in made for each in table.columns}
    assert "collectives" not in [table.key for table in made]


def test_stall_of_one_rank_is_shown_with_the_rank(tmp_path: Path) -> None:
    table = found(simulated(tmp_path, "stalls:rank=3,share=3,every=40"), "outlier_steps")

    assert 3 in column(table, "caused by rank").values


def test_table_keys_are_unique_and_each_column_has_all_rows(slow: Report) -> None:
    made = build_tables(slow)

    assert len({table.key for table in made}) == len(made)
    for table in made:
        assert {len(each.values) for each in table.columns} == {table.rows}, table.key
        assert table.first is None or table.first <= 8, table.key


def test_columns_of_a_rank_add_up_to_its_step() -> None:
    """CPU contention is a separate column and in no phase."""
    steps = [{**BASE, "forward": 24.0, "cpu": 20.0}] * 60
    table = found(build_report("r", [node([steps])]), "ranks")
    seconds = {
        each.title: each.values[0] for each in table.columns if each.quantity is Quantity.DURATION
    }
    step_s, compute_s = seconds.pop("step"), seconds.pop("compute")

    assert seconds["CPU contention"] == pytest.approx(0.020)
    assert seconds["forward"] == pytest.approx(0.004)
    assert sum(seconds.values()) == pytest.approx(step_s)  # type: ignore[arg-type]
    assert compute_s == pytest.approx(step_s - 0.020)  # type: ignore[operator]


def test_parts_in_the_device_table_add_up_to_its_step(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=1,share=0.25", ranks=2, device=SimulatedDevice())
    table = found(report, "device_times")
    seconds = [column(table, title).values[0] for title in ("step", "compute", "comm wait")]
    parts = report["ranks"][1]["device"]["parts"]  # type: ignore[index]
    total_s, wait_s = sum(parts.values()), parts["communication"]
    assert seconds == pytest.approx([total_s, total_s - wait_s, wait_s])


def test_slow_ranks_on_the_critical_path_do_not_look_like_one_number() -> None:
    classes = [PathClass("slow rank", 0.02, 1.0, ranks=[17, 700])]
    report: Any = {"lost_time": LostTime(0, 99, 100, 0.02, classes, [], 0.0)}
    table = build_critical_path_table(report)
    assert table is not None
    assert table.columns[0].values == ["slow ranks 17, 700"]


def test_rounded_numbers_have_three_digits() -> None:
    values = (4.003, 3.914, 12.0, 123.4, 999.7, 4540.2, 0.5)
    expected = ["4.00", "3.91", "12", "123", "1,000", "4,540", "0.500"]
    assert list(map(format_rounded, values)) == expected


def test_change_that_rounds_to_zero_has_no_minus() -> None:
    assert list(map(format_change, (-0.0004, 0.0, -0.0006))) == ["+0.0%", "+0.0%", "-0.1%"]


def test_table_notes_the_mean_work_of_a_rank_since_it_is_slow(tmp_path: Path) -> None:
    report = simulated(tmp_path, "constant:rank=3,share=0.25,since=60")
    row = report["verdicts"][0]

    assert isinstance(row.evidence, StragglerEvidence)
    assert row.held is not None
    expected = (
        f"Since step {row.held.since_step}, rank 3 computes"
        f" {format_duration(row.evidence.work_s)} per step on average."
    )
    assert expected in found(report, "ranks").note

    same = {"work_s": row.evidence.work_s}
    report["ranks"] = [{**rank, "typical": {**rank["typical"], **same}} for rank in report["ranks"]]  # type: ignore[typeddict-item]
    assert found(report, "ranks").note == ""
