"""What this node's metrics stand for: the whole job, a share of it that node 0 adds up, or this node alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchlens_perf.exporters import MAX_STANDING, JobPart, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchlens_perf.exporters.choice.rank_rows import RankRows
    from torchlens_perf.sidecar.rings.sources import RingSources
    from torchlens_perf.verdicts.stragglers.episodes import Episode

_UNKNOWN_S = 15.0  # after which a node whose part in the job is not known is taken to be alone


class ExportRole:
    """Belongs to the sidecar's thread. Stays over restarts of the job."""

    def __init__(self) -> None:
        self.part: Part | None = None
        """None until it is known."""
        self.slow_ranks: dict[int, None] = {}
        """Ranks that were named and have series of their own; the newest last."""
        self.slow_elsewhere: frozenset[int] = frozenset()
        """Those that node 0 has named."""
        self.left_out = 0
        """Steps that were to be sent as traces, and for which there was no room."""
        self._unknown_since_s: float | None = None

    def add_slow(self, episodes: Iterable[Episode]) -> None:
        """Give the ranks of these episodes series of their own, the costliest ones and those that are named last."""
        for each in sorted(episodes, key=lambda each: each.cost_ns)[-MAX_STANDING:]:
            self.slow_ranks.pop(each.rank, None)
            self.slow_ranks[each.rank] = None
        while len(self.slow_ranks) > MAX_STANDING:
            del self.slow_ranks[next(iter(self.slow_ranks))]

    def update(
        self,
        part: Part | None,
        rows: RankRows,
        tallies: Sequence[tuple[str, bytes]],
        sources: RingSources,
        now_s: float,
    ) -> JobPart | None:
        """Return what this node's metrics stand for; None while that is not known.

        part: None while nothing in the job tells it. tallies: those that other nodes have sent, see JobPart.
        """
        world_size = max((each.state.identity.world_size for each in sources), default=1)
        here = len({each.state.identity.rank for each in sources.newest()})
        self.part = part or self.part
        if self.part is None:
            self._unknown_since_s = now_s if self._unknown_since_s is None else self._unknown_since_s
            if now_s - self._unknown_since_s < _UNKNOWN_S and sources.live():
                return None
            self.part = Part.WHOLE if here >= world_size else Part.ALONE
        standing: frozenset[int] | None = None
        if self.part is Part.WHOLE:
            standing = frozenset(self.slow_ranks)
        elif self.part is Part.HANDS_ON:
            standing = self.slow_elsewhere
        return JobPart(
            part=self.part,
            share=min(1.0, max(1, here) / world_size),
            max_series=sources.setting("export_limit") or sys.maxsize,
            standing=standing,
            spread_s=rows.spread_s() if self.part is Part.WHOLE else {},
            tallies=tallies,
            left_out=self.left_out,
        )
