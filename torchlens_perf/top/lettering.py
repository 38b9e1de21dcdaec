"""Text as a terminal gets it: which characters it can show, how wide they are, and that none of them drives it."""

from __future__ import annotations

import dataclasses
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from torchlens_perf.errors import printable

_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_LONGEST = 2000  # characters of one text: a name may have millions


@dataclasses.dataclass(frozen=True)
class Lettering:
    """Which characters there are."""

    ascii_only: bool = False

    @property
    def ellipsis(self) -> str:
        return "..." if self.ascii_only else "…"

    @property
    def rule(self) -> str:
        return "-" if self.ascii_only else "─"

    @property
    def bar(self) -> str:
        return "#" if self.ascii_only else "█"

    @property
    def blocks(self) -> str:
        """From low to high, for a curve of one line."""
        return _ASCII_BLOCKS if self.ascii_only else _BLOCKS

    def inert(self, text: str) -> str:
        """One line of what can be shown, whoever has written it; of a very long text the beginning."""
        clean = printable(text[: _LONGEST + 1])
        if self.ascii_only and not clean.isascii():
            clean = "".join(map(_ascii, clean))
        return clean if len(clean) <= _LONGEST else clean[:_LONGEST] + self.ellipsis

    def fitted(self, text: str, width: int) -> str:
        """Inert, and exactly so many cells wide: cut off with an ellipsis, or filled with spaces."""
        clean = self.inert(text)
        if cell_len(clean) > width:
            dots = self.ellipsis if width > len(self.ellipsis) else ""
            clean = set_cell_size(clean, width - len(dots)).rstrip() + dots
        return set_cell_size(clean, max(0, width))

    def wrapped(self, text: str, width: int, indent: int = 0) -> list[str]:
        """Inert, in lines of at most so many cells, broken between words; all but the first indented.

        Spaces that it begins with indent all lines.
        """
        clean = self.inert(text)
        begin = " " * min(len(clean) - len(clean.lstrip(" ")), max(0, width - 8))
        lines: list[str] = []
        line, lead = "", begin
        for word in clean.split():
            room = max(1, width - len(lead))
            if line and cell_len(f"{line} {word}") > room:
                lines.append(lead + line)
                line, lead = "", begin + " " * min(indent, max(0, width - len(begin) - 8))
                room = max(1, width - len(lead))
            line = f"{line} {word}" if line else word
            while cell_len(line) > room:  # a word that is longer than a line
                piece = chop_cells(line, room)[0] or line[0]  # a letter that is wider than there is room
                lines.append(lead + piece)
                line, lead = line[len(piece) :], begin + " " * min(indent, max(0, width - len(begin) - 8))
                room = max(1, width - len(lead))
        return [*lines, lead + line]


def of_locale() -> Lettering:
    """Unicode where the locale says so that this process was started in: Python may have put another in its place."""
    try:
        lines = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
        environ = dict(line.partition("=")[::2] for line in lines)
    except OSError:
        environ = dict(os.environ)
    locale = next(filter(None, (environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    return Lettering(ascii_only="utf8" not in locale.lower().replace("-", ""))


def _ascii(letter: str) -> str:
    """What stands for a letter that the terminal does not have: itself without its accent, or a question mark."""
    if letter.isascii():
        return letter
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return plain if len(plain) == 1 and plain.isprintable() else "?" * max(1, cell_len(letter))


def clipped(lines: Sequence[Text], width: int) -> list[Text]:
    """Lines that are no wider than the terminal, whatever was put into them."""
    for line in lines:
        line.no_wrap = True
        if line.cell_len > width:
            line.truncate(width)
    return list(lines)
