"""Findings made by hand, as input for tests of code that uses findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from torchlens_perf.analysis.collectives.slow_link import LinkFindings, SlowLink
from torchlens_perf.verdicts.finding_log import FindingLog, FindingRecords
from torchlens_perf.verdicts.slow_links import SlowLinkEvidence
from torchlens_perf.verdicts.stragglers.episodes import Episode, SharedCost
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.hang import HangEvidence, RankStack

MS = 1e6
PLACES = {rank: Placement(f"node-{'ab'[rank // 4]}", "same") for rank in range(8)}
"""Two nodes of four ranks."""


def episode(rank: int = 3, since: int = 100, until: int | None = None, **changed: Any) -> Episode:
    """Return an episode in which backward takes one rank 20 ms longer than the 60 ms of other
    ranks.

    Steps last 100 ms.
    """
    values: dict[str, Any] = {
        "rank": rank, "phase": "backward", "judged_from_step": since, "from_start": False, "last_step": since + 50,
        "until_step": until, "named_step": since + 12, "excess_ns": 20 * MS, "phase_excess_ns": 18 * MS,
        "cost_ns": 15 * MS, "work_ns": 80 * MS, "others_work_ns": 60 * MS, "step_ns": 100 * MS, "z_score": 40.0,
        "slow_share": 1.0, "slow_excess_ns": 20 * MS, "more_workload": 0.0,
    }  # fmt: skip
    return Episode(**{**values, **changed})


def shared(cost_ns: float, gain_ns: float = 0.0, since: int = 100) -> SharedCost:
    """Return the cost of a rank that is slow together with others."""
    return SharedCost(cost_ns, gain_ns, cost_ns / 2, since)


def findings(*episodes: Episode, **changed: Any) -> Findings:
    """Return the findings of a job with eight ranks."""
    values = {
        "rows": 64,
        "step_ns": 100 * MS,
        "detectable_ns": 3 * MS,
        "compared": 8,
        "last_step": 200,
        **changed,
    }
    return dataclasses.replace(NOTHING, episodes=episodes, **values)


def slow_links(*groups: tuple[int, ...]) -> Verdict:
    """Return findings with slow links between the ranks of the given groups, the
    costliest first.
    """
    links = tuple(
        SlowLink(
            str(group),
            "",
            group,
            False,
            "allreduce",
            "float32",
            1e6,
            50,
            2e6,
            1e6,
            1e9,
            2e9,
            3,
            1e6,
            5e7,
            False,
        )
        for group in groups
    )
    return Verdict(
        kind="slow_link",
        phase="communication",
        cost_s_per_step=0.01,
        cost_share=0.1,
        confidence=0.8,
        action="see.",
        evidence=SlowLinkEvidence(
            LinkFindings(links, (), (), len(links), ""),
            ranks=links[0].ranks,
            cause="slow_communication",
        ),
    )


def hang(
    step: int = 57, kind: str = "missing", ranks: tuple[int, ...] = (2,), since_s: float = 12.0
) -> HangEvidence:
    """Return a hang in the form in which a node's state stores it."""
    opening, finding = f"No step for {since_s:.0f} s", "Rank 2 did not enter it."
    return HangEvidence(
        kind, since_s, step, (0, 1), {}, opening, finding, "look at it.", ranks=ranks, cause=kind
    )


def hung(
    lasted_s: float = 12.0,
    *,
    over: bool = False,
    attempt: int = 0,
    stacks: Mapping[int, RankStack] | None = None,
) -> FindingRecords:
    """Return the records of a run that hangs in step 57, from second 100 of 1970 on.

    over: the run continued after the hang.
    """
    log = FindingLog("run")
    for since_s in (12.0, lasted_s):
        now = structs.replace(hang(57, since_s=since_s), stacks=stacks or {})
        log.record_changes(attempt, NOTHING, now, PLACES, round((100 + since_s) * 1e9))
    if over:
        log.record_changes(attempt, NOTHING, None, PLACES, round((100 + lasted_s) * 1e9))
    return log.records
