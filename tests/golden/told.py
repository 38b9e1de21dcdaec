"""What a report and its alerts say, as text that golden files keep."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchlens_perf.run.verdicts import Alert

_CLOCK_TIMES = re.compile(r"\d\d:\d\d:\d\d UTC")


def told(title: str, report: dict[str, Any], alerts: Iterable[Alert] = ()) -> str:
    """Return each verdict with its figures, and each alert with its ids."""
    lines = [title, ""]
    for row in report["verdicts"]:
        held = {name: value for name, value in (row["held"] or {}).items() if name not in ("since", "until")}
        lines += [row["text"], f"  {_figures(held)}", f"  {_figures(row)}", ""]
    for alert in alerts:
        lines += [f"alert {alert.id[:8]} {alert.change} {alert.kind} of {alert.about}: {alert.sentence}", ""]
    return _CLOCK_TIMES.sub("TIME", "\n".join(lines))


def _figures(row: dict[str, Any]) -> str:
    """Return what else a verdict has, with three digits."""
    left_out = ("text", "explanation", "cause", "held", "evidence", "where")
    values = ((name, value) for name, value in row.items() if name not in left_out and value is not False)
    return ", ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values)


def kept(text: str, file: Path) -> str:
    """Return the golden file's text. UPDATE_GOLDEN=1 replaces the file by `text` first."""
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return file.read_text()
