"""The order of verdicts: by the seconds of job time that each has cost.

All screens show them in this order. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from torchlens_perf.verdicts.words.evidence import (
    OVER,
    DeviceStepEvidence,
    JudgedVerdict,
    PastEvidence,
    StretchEvidence,
    TypicalStepEvidence,
)

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Period

WORTH_A_LINE = 0.05
"""A hang that is over stays among the verdicts that hold if it took at least this share of all
steps' time."""
_URGENT = ("out_of_memory", "hang", "died")
_OF_THE_RUN = (TypicalStepEvidence, DeviceStepEvidence, StretchEvidence)
Row = tuple[JudgedVerdict, "Period | None", "float | None"]
"""A verdict, its period, and the seconds of job time that it has cost."""


def ended_in_it(evidence: Any) -> bool:
    """Return True for a hang from which the run did not recover."""
    return isinstance(evidence, PastEvidence) and evidence.went_on is False


class Lasting(TypedDict):
    """A condition that has held since a step."""

    until_step: int | None


def has_ended(period: Lasting | None) -> bool:
    """Return True if the condition is known to have ended."""
    return period is not None and period["until_step"] is not None


def ranks_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of a row of the report's `verdicts`, or of its JSON; () for the job as a
    whole."""
    evidence = row["evidence"]
    ranks = (
        evidence.get("ranks") if isinstance(evidence, dict) else getattr(evidence, "ranks", None)
    )
    if ranks:
        return tuple(ranks)
    return () if row["rank"] is None else (row["rank"],)


def is_over(verdict: JudgedVerdict, held: Period | None) -> bool:
    """Return True if a verdict is about an earlier part of the run only.

    A hang that ended counts like a long step: it is not over if its share of the time is at least
    WORTH_A_LINE.
    """
    kind, evidence = verdict.kind, verdict.evidence
    if ended_in_it(evidence):
        return False
    if kind == f"hang{OVER}":
        return (verdict.cost_share or 0.0) < WORTH_A_LINE
    if isinstance(evidence, _OF_THE_RUN) and has_ended(held):
        return True
    return kind.endswith(OVER) or kind == "straggler_transient"


def key(row: Row) -> tuple[int, float]:
    """Return the sort key of a verdict: first those that stop the job, then those that hold, then
    those that are over.

    Within these groups, the costliest is first.
    """
    verdict, held, lost_s = row
    if verdict.kind in _URGENT or ended_in_it(verdict.evidence):
        # A hang comes before deaths: processes of a job that hangs are killed, and a hang after a
        # death names the rank.
        return 0, 1.0 if verdict.kind == "died" else 0.0
    return 2 if is_over(verdict, held) else 1, -(lost_s or 0.0)


def lost_s(
    verdict: JudgedVerdict, held: Period | None, *, steps: int, alike: int, last_step: int | None
) -> float | None:
    """Return the seconds of job time that a verdict has cost so far; None if its cost is not known.

    steps: number of steps of the run. alike: number of typical steps. last_step: the newest step.
    """
    cost_s, evidence = verdict.cost_s_per_step, verdict.evidence
    if cost_s is None:
        return None
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
