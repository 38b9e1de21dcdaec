"""The order of verdicts on all screens: by the seconds of job time that each has cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from torchlens_perf.verdicts.words.evidence import (
    OVER,
    DeviceStepEvidence,
    JudgedVerdict,
    PastEvidence,
    RunPartEvidence,
    TypicalStepEvidence,
)

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Period

WORTH_A_LINE = 0.05
"""An ended hang is still listed with current verdicts if it took at least this share of all step
time."""
_URGENT = ("out_of_memory", "failed", "hang", "died")
_OF_THE_RUN = (TypicalStepEvidence, DeviceStepEvidence, RunPartEvidence)
Row = tuple[JudgedVerdict, "Period | None", "float | None"]
"""A verdict, its period, and the seconds of job time that it has cost."""


def is_fatal_hang(evidence: Any) -> bool:
    """Return True for evidence on a hang from which the run did not recover."""
    return isinstance(evidence, PastEvidence) and evidence.went_on is False


class PeriodEnd(TypedDict):
    """The end of a period: the first step after it, or None while it lasts."""

    until_step: int | None


def has_ended(period: PeriodEnd | None) -> bool:
    """Return True if the period is known to have ended."""
    return period is not None and period["until_step"] is not None


def ranks_in_row(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of a row of the report's `verdicts`; () for a verdict on the whole job."""
    evidence = row["evidence"]
    ranks = (
        evidence.get("ranks") if isinstance(evidence, dict) else getattr(evidence, "ranks", None)
    )
    if ranks:
        return tuple(ranks)
    return () if row["rank"] is None else (row["rank"],)


def is_over(verdict: JudgedVerdict, held: Period | None) -> bool:
    """Return True if a verdict is only about an earlier part of the run.

    An ended hang is like a long step: if it took at least the share WORTH_A_LINE of all step time,
    return False.
    """
    kind, evidence = verdict.kind, verdict.evidence
    if is_fatal_hang(evidence):
        return False
    if kind == f"hang{OVER}":
        return (verdict.cost_share or 0.0) < WORTH_A_LINE
    if isinstance(evidence, _OF_THE_RUN) and has_ended(held):
        return True
    return kind.endswith(OVER) or kind == "straggler_transient"


def sort_key(row: Row) -> tuple[int, float]:
    """Return the sort key of a verdict.

    Verdicts on what stops the job are first, then current verdicts, then past verdicts. Within each
    group, the costliest verdict is first.
    """
    verdict, held, lost_s = row
    if verdict.kind in _URGENT or is_fatal_hang(verdict.evidence):
        # Hangs are listed before deaths. Processes of a job that hangs are often killed, and the
        # verdict on a hang names ranks that died before it.
        return 0, 1.0 if verdict.kind == "died" else 0.0
    return 2 if is_over(verdict, held) else 1, -(lost_s or 0.0)


def compute_lost_s(
    verdict: JudgedVerdict, held: Period | None, *, steps: int, alike: int, last_step: int | None
) -> float | None:
    """Return the seconds of job time that a verdict's cause has cost so far; None if not known.

    held: the verdict's period. steps: number of steps of the run. alike: number of typical steps.
    """
    cost_s, evidence = verdict.cost_s_per_step, verdict.evidence
    if cost_s is None:
        return None
    if isinstance(evidence, dict) and "total_s" in evidence:
        return evidence["total_s"]
    if isinstance(evidence, dict | PastEvidence):
        return cost_s * steps
    if isinstance(evidence, TypicalStepEvidence):
        return cost_s * alike
    if isinstance(evidence, DeviceStepEvidence) or verdict.since_step is None or held is None:
        return cost_s * steps
    until = held["until_step"]
    if until is None:
        until = verdict.since_step + 1 if last_step is None else last_step + 1
    return cost_s * max(0, min(until - (held["since_step"] or 0), steps))
