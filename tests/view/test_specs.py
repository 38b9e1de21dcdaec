"""Columns as text: one unit, three digits, and no measured value shown as zero."""

from __future__ import annotations

from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table


def test_column_of_durations_has_one_unit() -> None:
    column = Column("forward", [0.0401, 0.0164, 0.0002])

    assert column.heading == "forward ms"
    assert column.texts() == ["40.1", "16.4", "0.2"]


def test_measured_value_below_the_last_digit_is_not_shown_as_zero() -> None:
    assert Column("data", [0.248, 0.0002, 0.0]).texts() == ["248", "<1", "0"]


def test_missing_value_is_told_from_one_that_does_not_apply() -> None:
    column = Column("backward", [0.01, NOT_MEASURED, None])

    assert column.texts() == ["10.0", "not measured", "-"]


def test_other_quantities_carry_their_units() -> None:
    assert Column("memory", [1.5e9], Quantity.BYTES).texts() == ["1.5 GB"]
    assert Column("bandwidth", [2e9], Quantity.RATE).texts() == ["2.0 GB/s"]
    assert Column("last to arrive", [0.99, 0.012], Quantity.SHARE).texts() == ["99%", "1.2%"]
    assert Column("excess", [0.25, -0.03], Quantity.CHANGE).texts() == ["+25%", "-3.0%"]
    assert Column("calls", [1576], Quantity.NUMBER).texts() == ["1,576"]
    assert Column("memory", [1.5e9], Quantity.BYTES).heading == "memory"


def test_name_that_drives_a_terminal_is_made_printable() -> None:
    assert "\x1b" not in Column("host", ["a\x1b[2J"], Quantity.TEXT).texts()[0]


def test_head_keeps_the_slow_rows_that_it_contains() -> None:
    table = Table("ranks", "Ranks", [Column("rank", [3, 0, 1], Quantity.NUMBER)], slow=frozenset({0, 2}))

    assert table.rows == 3
    assert table.head(2).slow == {0}
    assert table.head(2).rows == 2
