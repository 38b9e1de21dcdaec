"""What the help says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from torchlens_perf.top.lettering import Lettering

_KEYS = (
    ("arrows, PgUp, PgDn, Home, End", "choose a rank, or a node"),
    ("Enter", "look into it: a node's ranks, a rank's step, modules, waits, memory and place"),
    ("Esc", "back"),
    ("w", "the next rank or node that stands out"),
    ("v", "what the grid shows: more work than the others, or waiting for them"),
    ("g", "one cell a node, or one a rank"),
    ("Tab", "to the verdicts, which then scroll; Enter there: all of them, with their evidence"),
    ("n", "data quality: what is not measured, or lost, and why"),
    ("r", "the other runs in this folder"),
    ("q, Ctrl-C", "quit; the job never notices"),
)
_TEXTS = (
    "What is shown comes from the run directory alone. A sidecar writes there every few seconds, of many ranks more "
    "rarely; the time in the first line says when it last did.",
    "A verdict has the time since which it holds, where that is known, or when it was first seen here. What is over "
    "stays listed, with for how long. Verdicts without a time are older than this screen, or about the run as a whole.",
    "How long is left is shown where the run says how many steps there will be, as the callbacks for Lightning and the "
    "Hugging Face Trainer do. It is never guessed: a loader's length is that of one epoch, which may end early, and "
    "how many there will be the loop alone knows. It is the steps that are left, times the mean step of the run; where "
    "the newest steps take another time, it is said by that too.",
    "Steps of the verdicts are counted from 0. 'others' are ranks that do the same work.",
)


def help_lines(legends: Sequence[str], width: int, lettering: Lettering) -> list[Text]:
    """legends: what the letters of the grid mean, by view."""
    lines = []
    column = max(len(key) for key, _ in _KEYS) + 2
    if column > width // 2:
        column = 12
    for key, does in _KEYS:
        first, *rest = lettering.wrapped(does, max(8, width - column))
        lines.append(Text.assemble((f"{key:<{column}}", "bold"), first))
        lines += [Text(" " * column + line) for line in rest]
    for text in (*(f"Letters: {each}." for each in legends), *_TEXTS):
        lines += [Text(), *(Text(line) for line in lettering.wrapped(text, width))]
    return lines
