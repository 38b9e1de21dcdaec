"""A node's view of its job without rings: an epoch filled by tests, and the exchange with other
nodes.
"""

from __future__ import annotations

from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.run.identity import Identity
from torchlens_perf.sidecar.cluster import ClusterLink, OpenExchange
from torchlens_perf.sidecar.job_generation import JobGeneration
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings


class NodeView:
    """The cluster link and the epoch of a node, combined as in JobMonitor."""

    def __init__(self, node: str, open_exchange: OpenExchange | None = None) -> None:
        """Create the view. `open_exchange` opens a replacement of the network."""
        self.cluster = ClusterLink(node, open_exchange=open_exchange)
        self.job = JobGeneration(UNRELATED)

    def begin(self, generation: int, identity: Identity | None = None) -> None:
        """Start a new generation of processes that contains this identity."""
        if identity is not None:
            self.cluster.add_generation(identity, generation)
        self.cluster.finish_generation(self.job)
        self.job = JobGeneration(generation)

    def update(self, now_s: float, *, final: bool = False) -> Findings:
        """Run one round of the sidecar."""
        self.cluster.exchange_data(self.job, now_s, final=final)
        return self.job.judge_ranks(final=final) or NOTHING
