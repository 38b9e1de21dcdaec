"""The verdict on slow links, from the statistics of a job's collectives. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torchlens_perf.run.sketch import merge_sketches

if TYPE_CHECKING:
    from torchlens_perf.analysis.collectives.slow_link import LinkFindings
    from torchlens_perf.analysis.statistics.rank import RankStatistics
    from torchlens_perf.verdicts.verdict import Verdict


def build_slow_link_verdict(
    found: LinkFindings, ranks: Collection[RankStatistics]
) -> Verdict | None:
    """Return the verdict on slow links; None if no link is slow.

    ranks: statistics of the ranks. The verdict's cost is a share of the steps of `ranks`.
    """
    if not found.links:
        return None
    # Importing this module takes time, and a sidecar rarely needs it.
    from torchlens_perf.verdicts.words import verdict

    steps = merge_sketches(each.step for each in ranks)
    counted = max((each.counted_steps for each in ranks), default=0)
    return verdict.build_link_verdict(
        counted, steps.mean_ns() / 1e9 if steps.count else None, found
    )
