"""A node's view of its job without rings: an epoch that tests feed, and the exchange with other nodes."""

from __future__ import annotations

from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.run.identity import Identity
from torchlens_perf.sidecar.cluster import Cluster, OpenExchange
from torchlens_perf.sidecar.epoch import Epoch
from torchlens_perf.verdicts.stragglers.findings import NOTHING, Findings


class NodeView:
    """As JobMonitor has it."""

    def __init__(self, node: str, open_exchange: OpenExchange | None = None) -> None:
        """open_exchange: in place of the network."""
        self.cluster = Cluster(node, open_exchange=open_exchange)
        self.epoch = Epoch(UNRELATED)

    def begin(self, generation: int, identity: Identity | None = None) -> None:
        """Other processes have started; identity: of one of them."""
        if identity is not None:
            self.cluster.begin(identity, generation)
        self.cluster.leave(self.epoch)
        self.epoch = Epoch(generation)

    def update(self, now_s: float, *, final: bool = False) -> Findings:
        """A round of the sidecar."""
        self.cluster.update(self.epoch, now_s, final=final)
        return self.epoch.judge(final=final) or NOTHING
