"""What a user may have meant by a word that the command line does not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return the sentence that an error begins with. what: as in "unknown command"."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"unknown {what} {word!r}: did you mean {close[0]!r}?" if close else f"unknown {what} {word!r}."
