"""Sentences on what held for a part of the run only. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import duration, percent
from torchlens_perf.analysis.words.evidence import OVER, PastEvidence, StretchEvidence, Verdict

if TYPE_CHECKING:
    from torchlens_perf.analysis.words.bottleneck import Use


def stretch(use: Use, step_s: float, rest_s: float, since_step: int, until_step: int | None) -> Verdict:
    """What took the time of the steps from one to before another; None: to the end. rest_s: what it takes a step in the
    rest of the run."""
    share = use.seconds / step_s
    takes = f"{percent(share)} ({duration(use.seconds)}) of a step of {duration(step_s)}"
    rest = duration(rest_s)
    if until_step is None:
        what = use.what[0].lower() + use.what[1:]
        text = f"Since step {since_step}, {what} takes {takes}; before, {rest}. Next: {use.action}"
    else:
        text = f"{use.what} took {takes} from step {since_step} to {until_step - 1}; in the rest of the run, {rest}."
    kind = use.kind if until_step is None else f"{use.kind}{OVER}"
    evidence = StretchEvidence(step_s, use.seconds, rest_s)
    return Verdict(kind, None, use.phase, use.seconds, share, since_step, 0.8, text, evidence)


def hang_over(step: int, text: str, ranks: Sequence[int], duration_s: float | None, *, went_on: bool | None) -> Verdict:
    """A hang that is over. text: OpenHang's as it stood last. went_on: whether steps were made afterwards; None: that
    is not known."""
    lasted = f" for {duration(duration_s)}" if duration_s is not None else ""
    then = {True: ", and went on", False: ", and ended in it", None: ""}[went_on]
    finding, _, action = text.partition(". ")[2].partition(" Next: ")
    text = f"The job hung in step {step}{lasted}{then}. {finding}"
    if went_on is False and action:  # somebody starts it again
        text += f" Next: {action}"
    rank = ranks[0] if ranks else None
    evidence = PastEvidence(tuple(ranks), duration_s, went_on)
    return Verdict(f"hang{OVER}", rank, None, 0.0, 0.0, step, 0.9, text, evidence)


def no_longer(kind: str, text: str, ranks: Sequence[int], since_step: int | None) -> Verdict:
    """What was found while the run went on, and is not found by its end. text: the verdict's as it stood last."""
    before = text.partition(" Next: ")[0]
    evidence = PastEvidence(tuple(ranks), None, None)
    return Verdict(f"{kind}{OVER}", None, None, None, None, since_step, 0.5, f"No longer: {before}", evidence)
