"""Text for any terminal: no wider than there is room, nothing in it that drives a terminal, ASCII where that is all."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from tests.support.processes import ROOT
from torchlens_perf.top.lettering import Lettering, clipped

texts = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        ["\x1b[2Jred", "a\nb\tc", "\u202egpj", "\u4e00" * 60, "x" * 10_000, "e\u0301" * 30, "  indented  text"]
    ),
)
letterings = st.builds(Lettering, st.booleans())


@given(text=texts, width=st.integers(0, 60), lettering=letterings)
def test_fitted(text: str, width: int, lettering: Lettering) -> None:
    """Exactly as wide as there is room."""
    fitted = lettering.fitted(text, width)

    assert cell_len(fitted) == width
    assert not any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in fitted)
    assert fitted.isascii() or not lettering.ascii_only


@given(text=texts, width=st.integers(1, 60), indent=st.integers(0, 6), lettering=letterings)
def test_wrapped(text: str, width: int, indent: int, lettering: Lettering) -> None:
    """No line is wider, and no letter is lost but spaces."""
    lines = lettering.wrapped(text, width, indent)

    assert all(cell_len(line) <= max(width, 2) for line in lines)  # a letter may be two cells wide
    assert "".join("".join(lines).split()) == "".join(lettering.inert(text).split())
    assert lines


def test_lines_go_on_indented() -> None:
    assert Lettering().wrapped("  Next: look at the loader", 16, 2) == ["  Next: look at", "    the loader"]


def test_long_text_is_cut() -> None:
    """A name of ten thousand letters is not wrapped into a hundred lines."""
    assert len(Lettering().inert("x" * 10_000)) == 2001


@pytest.mark.parametrize(("text", "shown"), [("Größe", "Gro?e"), ("naïve", "naive"), ("日本", "????"), ("a…b", "a?b")])
def test_ascii(text: str, shown: str) -> None:
    """Without Unicode, a letter is shown without its accent, or as a question mark for each cell that it had."""
    assert Lettering(ascii_only=True).inert(text) == shown


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
def test_locale(environment: dict[str, str], is_ascii: bool) -> None:
    """Only where the locale says that there is Unicode: Python takes UTF-8 for itself in the C locale, too."""
    program = "from torchlens_perf.top.lettering import of_locale; print(of_locale().ascii_only)"
    environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True)

    assert done.stdout == f"{is_ascii}\n"


def test_clipped() -> None:
    """What was put together from parts is cut off, too."""
    assert [line.plain for line in clipped([Text("abcdef"), Text("ab")], 4)] == ["abcd", "ab"]
