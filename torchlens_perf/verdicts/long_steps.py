"""Classes of steps that are longer or shorter than the typical step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, final


@final
class LongSteps(TypedDict):
    """A class of steps that are longer or shorter than the typical step."""

    kinds: list[str]
    """Additional work of these steps, such as evaluation. For longer steps, only work that may be
    the cause."""
    ranks: list[int]
    """The ranks that do this work; [] if it is not known."""
    part: str
    """The part of the step with the largest difference; of the awaited rank if one was found by times."""
    count: int
    steps: list[int]
    waited_for: int | None
    """The rank for which all other ranks waited in each of these steps; None if it differs or is
    not known."""
    period: int | None
    mean_s: float
    """Mean duration of these steps."""
    more_s: float
    total_s: float
    share: float


def join_long_steps(classes: Sequence[LongSteps]) -> LongSteps:
    """Return several classes as one, with sums and weighted means."""
    count = sum(each["count"] for each in classes)
    return {
        **classes[0],
        "ranks": sorted({rank for each in classes for rank in each["ranks"]}),
        "count": count,
        "steps": sorted({step for each in classes for step in each["steps"]}),
        "mean_s": sum(each["count"] * each["mean_s"] for each in classes) / count,
        "more_s": sum(each["count"] * each["more_s"] for each in classes) / count,
        "total_s": sum(each["total_s"] for each in classes),
        "share": sum(each["share"] for each in classes),
    }
