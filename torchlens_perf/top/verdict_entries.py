"""The report's verdicts as a screen lists them: what holds, then what is over, each with its time. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Any

from torchlens_perf.run.verdicts import sentence_and_action
from torchlens_perf.verdicts.words.evidence import PastEvidence
from torchlens_perf.verdicts.words.hang import HangEvidence

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Report, VerdictRow


@dataclasses.dataclass(frozen=True)
class Entry:
    """One verdict. Times are seconds of UTC."""

    kind: str
    text: str
    """Without the next action."""
    action: str
    """What to do; "" where there is nothing."""
    details: tuple[str, ...] = ()
    """Lines of evidence, such as Python stacks."""
    ranks: tuple[int, ...] = ()
    """The ranks it is about; () for the job as a whole."""
    since_step: int | None = None
    began_s: float | None = None
    """None: not known."""
    ended_s: float | None = None
    holds: bool = True


def verdict_entries(report: Report | None) -> list[Entry]:
    """Return an entry for each verdict, in the report's order; none without a report."""
    return [] if report is None else [_entry(row) for row in report["verdicts"]]


def _entry(row: VerdictRow) -> Entry:
    text, action = sentence_and_action(row["text"])
    evidence = row["evidence"]
    details: list[str] = []
    if isinstance(evidence, HangEvidence | PastEvidence):
        for rank, stack in evidence.stacks.items():
            details += [f"Python stack of rank {rank}, innermost first:", *(f"  {line}" for line in stack.lines)]
            if not stack.lines:
                details.append(f"  none: {stack.reason}")
    held = row["held"]
    if held is not None and held["windows_held"] is not None and held["windows_judged"] is not None:
        details.insert(0, f"It held in {held['windows_held']} of {held['windows_judged']} windows of the run.")
    return Entry(
        row["kind"], text, action, tuple(details), _ranks(row), row["since_step"], _seconds(held and held["since"]),
        ended_s=_seconds(held and held["until"]), holds=not row["is_over"],
    )  # fmt: skip


def _ranks(row: VerdictRow) -> tuple[int, ...]:
    evidence: Any = row["evidence"]
    ranks = evidence.get("ranks") if isinstance(evidence, dict) else getattr(evidence, "ranks", None)
    if ranks:
        return tuple(ranks)
    return () if row["rank"] is None else (row["rank"],)


def _seconds(time: str | None) -> float | None:
    return None if time is None else datetime.datetime.fromisoformat(time).timestamp()
