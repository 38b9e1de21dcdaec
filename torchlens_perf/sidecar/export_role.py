"""Choose the ranks that this node's exported metrics describe.

The metrics describe all ranks or this node's ranks. Node 0 can add up the metrics of all nodes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchlens_perf.exporters import MAX_SLOW_RANKS, CoveredRanks, NodeRole, keep_newest_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchlens_perf.exporters.rank_times import RecentRankTimes
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.verdicts.stragglers.episodes import Episode

# After this time, a node with an unknown part in the job exports metrics of its own ranks only.
_UNKNOWN_TIMEOUT_S = 15.0


class ExportRole:
    """This node's part in exporting the job's metrics, over all restarts of the job."""

    def __init__(self) -> None:
        self.part: CoveredRanks | None = None
        """This node's part, or None until it is known."""
        self.slow_ranks: tuple[int, ...] = ()
        """Ranks that have been slow, newest last. Each has metric series of its own."""
        self.slow_elsewhere: frozenset[int] = frozenset()
        """Slow ranks of the job, as reported by node 0."""
        self.left_out = 0
        """Number of steps that were not sent as traces because the span budget was exhausted."""
        self._unknown_since_s: float | None = None

    def add_slow_ranks(self, episodes: Iterable[Episode]) -> None:
        """Give the ranks of these slow episodes metric series of their own.

        If there are too many ranks, the costliest and the newest ones have priority.
        """
        costliest = sorted(episodes, key=lambda each: each.cost_ns)[-MAX_SLOW_RANKS:]
        self.slow_ranks = keep_newest_ranks([*self.slow_ranks, *(each.rank for each in costliest)])

    def update_part(
        self,
        part: CoveredRanks | None,
        rows: RecentRankTimes,
        tallies: Sequence[tuple[str, bytes]],
        sources: RingSources,
        now_s: float,
    ) -> NodeRole | None:
        """Return the part of the job that this node exports, or None while it is not known.

        part: this node's part, or None if it is not known yet. tallies: metric sums from other
        nodes, see NodeRole.
        """
        world_size = max((each.state.identity.world_size for each in sources), default=1)
        here = len({each.state.identity.rank for each in sources.newest_rings()})
        # Keep the last known part until the part of new processes is known.
        self.part = part or self.part
        if self.part is None:
            self._unknown_since_s = (
                now_s if self._unknown_since_s is None else self._unknown_since_s
            )
            if now_s - self._unknown_since_s < _UNKNOWN_TIMEOUT_S and sources.unfinished_rings():
                return None
            self.part = CoveredRanks.WHOLE if here >= world_size else CoveredRanks.ALONE
        standing = {
            CoveredRanks.WHOLE: frozenset(self.slow_ranks),
            CoveredRanks.FORWARDER: self.slow_elsewhere,
        }
        return NodeRole(
            part=self.part,
            share=min(1.0, max(1, here) / world_size),
            max_series=sources.settings.export_limit or sys.maxsize,
            standing=standing.get(self.part),
            spread_s=rows.rank_quantiles_s() if self.part is CoveredRanks.WHOLE else {},
            tallies=tallies,
            left_out=self.left_out,
        )
