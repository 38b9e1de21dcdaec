"""Since when each verdict has held, on the run's line of time. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchlens_perf.page.contents import Columns, HeldVerdict

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import VerdictRow


def held(verdict: VerdictRow, columns: Columns | None, begin_unix_ns: int) -> HeldVerdict | None:
    """None where nothing says since when. columns: to lay steps on the line of time."""
    row = cast("Mapping[str, Any]", verdict)
    known: Mapping[str, Any] = row.get("held") or {}
    since_s = _seconds(known.get("since"), begin_unix_ns)
    until_s = _seconds(known.get("until"), begin_unix_ns)
    if columns is not None:
        since_s = since_s if since_s is not None else _at(columns, known.get("since_step", row["since_step"]))
        until_s = until_s if until_s is not None else _at(columns, known.get("until_step"))
    if since_s is None and known.get("windows_judged") is None:
        return None
    return {
        "since_s": since_s,
        "until_s": until_s,
        "windows_held": known.get("windows_held"),
        "windows_judged": known.get("windows_judged"),
    }


def _seconds(utc: str | None, begin_unix_ns: int) -> float | None:
    return None if utc is None else round(datetime.datetime.fromisoformat(utc).timestamp() - begin_unix_ns / 1e9, 3)


def _at(columns: Columns, step: int | None) -> float | None:
    """When the column of a step began."""
    if step is None:
        return None
    started = np.array([np.nan if each is None else each for each in columns["started_s"]])
    known = np.isfinite(started)
    if not known.any():
        return None
    return round(float(np.interp(step, np.array(columns["first_steps"])[known], started[known])), 3)
