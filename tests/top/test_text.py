"""Lines of top fit the terminal's width and character set, and bars are exact."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tests.support.processes import ROOT
from torchlens_perf.top.text import (
    Terminal,
    build_difference_column,
    draw_bar,
    draw_rule,
    join_fitting,
    lines_around_cursor,
    select_rows,
    unwrapped_line,
)
from torchlens_perf.view.specs import Column, Quantity, Table

texts = st.one_of(
    st.text(max_size=80),
    st.sampled_from(["\u4e00" * 60, "x" * 500, "e\u0301" * 30, "  indented  text"]),
)


@given(
    text=texts,
    width=st.integers(1, 60),
    terminal=st.builds(Terminal, st.booleans()),
    no_wrap=st.booleans(),
)
def test_no_wrapped_line_is_wider_than_the_terminal(
    text: str, width: int, terminal: Terminal, no_wrap: bool
) -> None:
    lines = terminal.lines([Text(text.replace("\n", " "), no_wrap=no_wrap)], width)

    assert all(cell_len(each.plain) <= width for each in lines)
    assert all(each.plain.isascii() for each in lines) or not terminal.ascii_only
    assert len(lines) == 1 or not no_wrap


def test_wrapped_text_keeps_all_words() -> None:
    words = "one two three four five six"

    assert " ".join(each.plain.strip() for each in Terminal().lines([Text(words)], 9)) == words


def test_wrapped_lines_are_indented_like_the_first() -> None:
    assert [each.plain.rstrip() for each in Terminal().lines([Text("  one two three")], 10)] == [
        "  one two",
        "  three",
    ]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(0, ""), (0.01, "▏"), (0.13, "▏"), (0.52, "▌"), (1, "█"), (2.7, "██▊"), (-3, "")],
)
def test_length_of_a_bar_is_exact_to_an_eighth(columns: float, expected: str) -> None:
    """A value above 0 never has an empty bar."""
    assert draw_bar(columns) == expected


def test_small_shares_have_bars_of_different_length() -> None:
    """The shares are 1.3 %, 5.2 % and 27 % of twelve columns, the width of bars in the table of
    ranks.
    """
    assert len({draw_bar(share / 0.3 * 12) for share in (0.003, 0.013, 0.052, 0.27)}) == 4


def test_differences_are_shown_with_a_sign() -> None:
    column = build_difference_column("vs others", [0.05, -0.02, 0.00001, None], 0.1)

    assert column.texts() == ["+50.0", "-20.0", "<0.1", "-"]


def table(rows: int) -> Table:
    numbers, durations = list(range(rows)), [0.01 * row for row in range(rows)]
    columns = [Column("rank", numbers, Quantity.TEXT), Column("compute", durations)]
    return Table("ranks", "Ranks", columns, frozenset({2}))


def test_selected_row_keeps_its_slow_mark_and_units() -> None:
    found = select_rows(table(200), [3, 2])

    assert (list(found.columns[0].values), found.slow) == ([3, 2], frozenset({1}))
    assert found.columns[1].unit == table(200).columns[1].unit == "s"


@pytest.mark.parametrize(("at", "first"), [(0, 0), (50, 48), (199, 195)])
def test_selected_row_of_a_long_table_is_visible(at: int, first: int) -> None:
    """With 200 rows and room for five, the selected row is marked, and the title has its number."""
    lines = [each.plain for each in lines_around_cursor(table(200), 40, 7, at)]

    assert lines[0].split(",")[1] == f" {at + 1} of 200"
    assert [each.split()[-2] for each in lines[2:]] == [str(first + row) for row in range(5)]
    assert [each.split()[1] for each in lines if each.startswith("▶")] == [str(at)]


@pytest.mark.parametrize("at", [0, 5, 19])
def test_selected_row_is_marked_if_names_are_wrapped(at: int) -> None:
    """On 40 columns a name takes two lines.

    Only complete rows are shown, and no more lines than fit.
    """
    names = [f"run-{row:02d}-{'x' * 25}" for row in range(20)]
    columns = [Column("state", ["ended"] * 20, Quantity.TEXT), Column("run", names, Quantity.TEXT)]
    lines = [each.plain for each in lines_around_cursor(Table("runs", "Runs", columns), 40, 9, at)]

    assert lines[0] == f"  Runs, {at + 1} of 20"
    assert [each.split()[2] for each in lines if each.startswith("▶")] == [names[at][:7]]
    assert len(lines) == 8
    assert max(map(cell_len, lines)) <= 40


def test_parts_that_do_not_fit_in_a_line_are_left_out() -> None:
    assert join_fitting(["first", "", "a long second part", "third"], 16) == "first   third"
    assert join_fitting(["a long first part"], 3) == "a long first part"


def test_horizontal_rule_is_as_wide_as_the_terminal() -> None:
    assert [draw_rule("step\x1b[2J", width).cell_len for width in (20, 40)] == [20, 40]
    assert "\x1b" not in draw_rule("step\x1b[2J", 40).plain


def test_ascii_bars_and_charts_have_distinct_characters() -> None:
    """Lengths remain comparable."""
    (found,) = Terminal(ascii_only=True).lines([unwrapped_line("▶ ██▌ ▁▄█ Größe …")], 40)

    assert found.plain == "> ##- _~# Gr??e ~"


@pytest.mark.parametrize(
    ("environment", "is_ascii"),
    [
        ({"LC_ALL": "C"}, True),
        ({"LC_ALL": "en_US.ISO-8859-1"}, True),
        ({"LANG": "C.UTF-8"}, False),
        ({"LC_ALL": "", "LANG": "de_DE.utf8"}, False),
        ({"LC_CTYPE": "POSIX", "LANG": "C.UTF-8"}, True),
        ({}, True),
    ],
    ids=str,
)
def test_unicode_is_used_only_if_the_locale_supports_it(
    environment: dict[str, str], is_ascii: bool
) -> None:
    """Python may replace the C locale by UTF-8, so the environment at process start counts."""
    program = "from torchlens_perf.top.text import detect_terminal; print(detect_terminal())"
    environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True
    )

    assert done.stdout == f"Terminal(ascii_only={is_ascii}, color=True)\n"
