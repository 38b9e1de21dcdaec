"""The text of golden files: verdicts of a report and alerts, with their figures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import structs

from torchlens_perf.run.verdicts import Alert

_CLOCK_TIMES = re.compile(r"\d\d:\d\d:\d\d UTC")


def golden_text(title: str, report: dict[str, Any], alerts: Iterable[Alert] = ()) -> str:
    """Return all verdicts with their figures, and all alerts with their ids."""
    lines = [title, ""]
    for row in report["verdicts"]:
        held = {} if row.held is None else structs.asdict(row.held)
        figures = structs.asdict(row)
        lines += [row.sentence, f"  {_figures(held)}", f"  {_figures(figures)}", ""]
    for alert in alerts:
        lines += [
            f"alert {alert.id[:8]} {alert.change} {alert.kind} of {alert.about}: {alert.sentence}",
            "",
        ]
    return _CLOCK_TIMES.sub("TIME", "\n".join(lines))


def _figures(row: dict[str, Any]) -> str:
    """Return the other fields of a verdict, with three digits."""
    left_out = (
        "text", "action", "explanation", "cause", "held", "evidence", "where", "since", "until", "advice", "uses",
        "diagnosis", "notes", "is_undecided",
    )  # fmt: skip
    values = (
        (name, value)
        for name, value in row.items()
        if name not in left_out and value is not False and (name, value) != ("because", "")
    )
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values
    )


def expected_text(text: str, file: Path) -> str:
    """Return the text of the golden file.

    UPDATE_GOLDEN=1 first replaces the file's content with `text`.
    """
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return file.read_text()
