"""Whom to look at more closely once a rank is named: that one, and a healthy one that does the same. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torchlens_perf.culprits import Named
from torchlens_perf.straggler import Findings, Place


def suspect_and_healthy(
    named: Named, findings: Findings, places: Mapping[int, Place], within_reach: Collection[int]
) -> tuple[int, ...]:
    """The slowest rank of the costliest culprit that is within reach, and one that nobody suspects beside it.

    Of the same population, and of its node where there is one: then the node is not what they differ by. Only the
    suspect where there is no other; () where nobody is named.
    """
    suspect = next((each.lead.rank for each in named.culprits if each.lead.rank in within_reach), None)
    if suspect is None:
        return ()
    slow = {rank for each in named.culprits for rank in each.ranks}
    slow |= {episode.rank for episode in findings.episodes if episode.until_step is None}
    here = places.get(suspect, Place())
    healthy = [
        rank
        for rank, place in places.items()
        if rank not in slow and rank in within_reach and place.population == here.population
    ]
    best = min(healthy, key=lambda rank: (places[rank].host != here.host, abs(rank - suspect), rank), default=None)
    return (suspect,) if best is None else (suspect, best)
