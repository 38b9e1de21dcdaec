"""Planted faults that were not found, each with the reason where that is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.run.rank_ranges import rank_list
from torchlens_perf.simulate.faults import Link

if TYPE_CHECKING:
    from torchlens_perf.analysis.collectives.slow_link import LinkFindings
    from torchlens_perf.simulate.simulation import Fault, Simulation, Topology
    from torchlens_perf.verdicts.stragglers.episodes import Episode


def missed_faults(
    texts: Sequence[str], simulation: Simulation, steps: int, episodes: Iterable[Episode], links: LinkFindings | None
) -> list[str]:
    """Return a line for each planted fault that was not found, or was found on some of its ranks only.

    texts: the faults as the user wrote them. links: None where the simulation has no transfer times.
    """
    found, lines = list(episodes), list[str]()
    for text, fault in zip(texts, simulation.faults, strict=True):
        if isinstance(fault, Link):
            why = _why_not_link(fault, simulation.topology, steps, links)
        else:
            why = _why_not_ranks(fault, simulation.topology, steps, found)
        if why is not None:
            lines.append(f"planted and not found: {text}{why}")
    return lines


def _why_not_link(fault: Link, topology: Topology, steps: int, links: LinkFindings | None) -> str | None:
    members = set(topology.group(fault.dimension, fault.rank))
    if not any(map(fault.holds, range(steps))):
        return f" ({_NEVER} {steps} steps)"
    if links is None:
        return " (--rows holds no transfer times: simulate at most 64 ranks with --out)"
    if any(members.intersection(link.ranks) for link in links.links):
        return None
    return f" ({links.undecided.removesuffix('.')})" if links.undecided else ""


def _why_not_ranks(fault: Fault, topology: Topology, steps: int, found: list[Episode]) -> str | None:
    """None for what is no fault of any rank too."""
    slow = [fault.slow_ranks(step, topology) for step in range(steps)]
    planted = frozenset[int]().union(*slow)
    if not planted:
        lasts = fault.slow_ranks(getattr(fault, "since", 0), topology)
        return f" ({_NEVER} {steps} steps)" if lasts else None
    named = {
        episode.rank
        for episode in found
        if any(episode.rank in ranks for ranks in slow[episode.since_step : episode.until_step])
    }
    missed = sorted(planted - named)
    if not missed:
        return None
    return f" (on {rank_list(missed)})" if len(missed) < len(planted) else ""


_NEVER = "it does not begin within the"
