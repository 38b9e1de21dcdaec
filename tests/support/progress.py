"""Synthetic progress of the ranks of a job that may hang, and the findings on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchlens_perf.analysis.collectives.device_progress import RankProgress
from torchlens_perf.analysis.collectives.hang import Hang, find_hang

WORLD = "0"
USUAL_S = 0.062
SINCE_S = 12.0
FORWARD = ("forward GPT", "blocks.3")


def rank(number: int, **changed: Any) -> RankProgress:
    """Return a rank that has waited in allreduce 57 of its backward pass.

    The rank's last step ended 12 s ago.
    """
    values: dict[str, Any] = {
        "rank": number, "host": f"node-{'abcdefgh'[number // 2 % 8]}", "step": 100, "since_step_s": SINCE_S,
        "report_age_s": 0.0, "usual_step_s": USUAL_S, "issued": {WORLD: 57},
        "inside": ("backward", "wait"), "state": "running",
        "operations": {WORLD: {57: "allreduce"}}, "since_mark_s": 11.9,
    }  # fmt: skip
    return RankProgress(**{**values, **changed})


def behind(number: int, **changed: Any) -> RankProgress:
    """Return a rank that is stuck in its forward pass and has not entered allreduce 57."""
    values: dict[str, Any] = {
        "issued": {WORLD: 56},
        "inside": FORWARD,
        "operations": {WORLD: {56: "allreduce"}},
    }
    return rank(number, **{**values, **changed})


def job(
    *ranks: RankProgress, count: int = 4, groups: Mapping[str, tuple[int, ...]] | None = None
) -> Hang | None:
    """Return the finding on a job of `count` waiting ranks, some of which `ranks` replaces."""
    progress = {number: rank(number) for number in range(count)} | {
        each.rank: each for each in ranks
    }
    return find_hang(progress, groups or {})


def found(
    *ranks: RankProgress, count: int = 4, groups: Mapping[str, tuple[int, ...]] | None = None
) -> Hang:
    hang = job(*ranks, count=count, groups=groups)
    assert hang is not None
    return hang


def named(hang: Hang) -> list[int]:
    return [each.progress.rank for each in hang.blocking]


def every(count: int, **changed: Any) -> list[RankProgress]:
    return [rank(number, **changed) for number in range(count)]


def on_silent_node(
    number: int, report_age_s: float, since_s: float = 0.05, **changed: Any
) -> RankProgress:
    """Return a rank of a node that has stopped reporting."""
    return rank(
        number, report_age_s=report_age_s, since_step_s=since_s, since_mark_s=0.0, **changed
    )
