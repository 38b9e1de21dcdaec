"""Columns of tables as text: one unit, three digits, and no measured value shown as zero."""

from __future__ import annotations

from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table


def test_column_of_durations_has_one_unit() -> None:
    column = Column("forward", [0.0401, 0.0164, 0.0002])

    assert column.heading == "forward ms"
    assert column.texts() == ["40.1", "16.4", "0.2"]


def test_column_of_long_durations_is_in_hours() -> None:
    column = Column("rank time", [12_288.0, 2.83])

    assert column.heading == "rank time h"
    assert column.texts() == ["3.41", "<0.01"]


def test_measured_value_below_the_last_digit_is_not_shown_as_zero() -> None:
    assert Column("data", [0.248, 0.0002, 0.0]).texts() == ["248", "<1", "0"]


def test_missing_value_differs_from_one_that_does_not_apply() -> None:
    column = Column("backward", [0.01, NOT_MEASURED, None])

    assert column.texts() == ["10.0", "not measured", "-"]


def test_quantities_other_than_durations_have_their_units() -> None:
    assert Column("memory", [1.5e9], Quantity.BYTES).texts() == ["1.5 GB"]
    assert Column("bandwidth", [2e9], Quantity.RATE).texts() == ["2.0 GB/s"]
    assert Column("last to arrive", [0.99, 0.012], Quantity.SHARE).texts() == ["99%", "1.2%"]
    assert Column("excess", [0.25, -0.03], Quantity.CHANGE).texts() == ["+25%", "-3.0%"]
    assert Column("calls", [1576], Quantity.NUMBER).texts() == ["1,576"]
    assert Column("memory", [1.5e9], Quantity.BYTES).heading == "memory"


def test_name_that_controls_a_terminal_is_made_printable() -> None:
    assert "\x1b" not in Column("host", ["a\x1b[2J"], Quantity.TEXT).texts()[0]


def test_shortened_table_keeps_its_slow_rows() -> None:
    table = Table(
        "ranks", "Ranks", [Column("rank", [3, 0, 1], Quantity.NUMBER)], slow=frozenset({0, 2})
    )

    assert table.rows == 3
    assert table.first_rows(2).slow == {0}
    assert table.first_rows(2).rows == 2


def test_column_uses_the_unit_of_a_given_duration() -> None:
    column = Column("data", [0.0002, 0.0], unit_of=0.03)

    assert column.heading == "data ms"
    assert column.texts() == ["0.20", "0.00"]


def test_value_that_is_a_bound_is_marked() -> None:
    assert Column("comm wait", [0.02, 0.01], marks=[">= ", ""]).texts() == [">= 20.0", "10.0"]


def test_rank_number_is_formatted_without_a_thousands_separator() -> None:
    column = Column("rank", [1023], Quantity.TEXT)

    assert column.texts() == ["1023"]
    assert not column.is_text
    assert Column("host", ["a", None], Quantity.TEXT).is_text


def test_hidden_rows_are_counted_with_their_range() -> None:
    ranks = Column("rank", [3, 0, 1, 2], Quantity.TEXT)
    table = Table(
        "ranks",
        "Ranks",
        [ranks, Column("compute", [0.3, 0.245, 0.251, 0.25])],
        noun="rank",
        ranged="compute",
    )

    assert table.describe_hidden_rows(1) == "3 ranks not shown: compute 245 to 251 ms"
    assert table.describe_hidden_rows(3) == "1 rank not shown: compute 250 ms"
    assert table.describe_hidden_rows(4) == ""


def test_range_of_hidden_rows_has_a_suitable_unit() -> None:
    compute = Column("compute", [2.0, 0.005, 0.006])
    table = Table("ranks", "Ranks", [compute], noun="rank", ranged="compute")
    assert compute.unit == "s"
    assert table.describe_hidden_rows(1) == "2 ranks not shown: compute 5.00 to 6.00 ms"


def test_large_numbers_are_formatted_without_an_exponent() -> None:
    assert Column("signal", [4540.2, 0.0123, 1576], Quantity.NUMBER).texts() == [
        "4,540",
        "0.0123",
        "1,576",
    ]
