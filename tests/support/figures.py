"""Write the counts of long tests into docs/internals/reliability.md.

`make test-long` sets the variable FIGURES. Nothing is written unless FIGURES is set.

The variable SHARE, from 0 to 1, makes the long tests shorter. The table shows the number of runs
next to the full number.
"""

from __future__ import annotations

import datetime
import fcntl
import os

from tests.support.processes import ROOT

FIGURES = ROOT / "docs/internals/reliability.md"
BEGIN, END = "<!-- figures: written by make test-long -->", "<!-- end of the figures -->"
HEAD = [
    "| long form | run | of | seed | counted | minutes | date |",
    "|---|---|---|---|---|---|---|",
]


def share(full: int) -> int:
    """Return the number of runs for a full number, reduced according to SHARE."""
    return max(1, round(full * float(os.environ.get("SHARE", "1"))))


def note(
    form: str, run: int, full: int, counted: str, took_s: float, seed: int | None = None
) -> None:
    """Replace the table row of a test.

    `form` is the test's name and the file's name in the table. `run` is the number of actual runs.
    """
    if not os.environ.get("FIGURES"):
        return
    today = datetime.date.today().isoformat()
    row = (
        f"| {form} | {run:,} | {full:,} | {'' if seed is None else seed} | {counted} |"
        f" {took_s / 60:.1f} | {today} |"
    )
    with open(FIGURES, "r+") as file:
        # Parallel tests write the same file.
        fcntl.flock(file, fcntl.LOCK_EX)
        before, _, rest = file.read().partition(BEGIN)
        block, _, after = rest.partition(END)
        rows = [line for line in block.splitlines() if line.startswith("| ") and line not in HEAD]
        rows = sorted([row, *(each for each in rows if not each.startswith(f"| {form} |"))])
        file.seek(0)
        file.write("\n".join([before + BEGIN, *HEAD, *rows, END]) + after)
        file.truncate()
