"""The exporter for Prometheus, with all OTLP metrics and further metrics of the node.

The sidecar's thread only stores values. The server's thread renders these values when /metrics is
requested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from torchlens_perf.errors import guard
from torchlens_perf.exporters import Assessment, ExportBatch, Receiver, node_semantics
from torchlens_perf.exporters.node_figures import (
    NodePoints,
    Points,
    RecentOwnTimes,
    points_of_open_alerts,
    read_node_points,
)
from torchlens_perf.exporters.otlp_metrics import NodeMetrics, Sampled
from torchlens_perf.exporters.otlp_resource import build_node_resource
from torchlens_perf.exporters.prometheus.endpoint import (
    ListenAddress,
    MetricsResponse,
    MetricsServer,
)
from torchlens_perf.exporters.prometheus.families import convert_to_families
from torchlens_perf.exporters.series import ArrayMeter
from torchlens_perf.run.hardware_samples import HardwareSamples
from torchlens_perf.run.identity import Identity
from torchlens_perf.verdicts.node_state import NodeState

# Time for which a response is reused for all clients.
CACHE_S = 1.0
_UPDATE_INTERVAL_S = 2.0
# Updates take at most about 1% of the sidecar's time.
_MIN_IDLE_RATIO = 100.0


class PrometheusExporter(Collector, Receiver):
    """Serves /metrics. Methods are called on the sidecar's thread, except collect()."""

    def __init__(
        self,
        address: ListenAddress,
        spans_sent: Callable[[], Sampled] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the server. Raises OSError if it cannot listen.

        spans_sent: returns the ids of the newest batch's spans, for exemplars. clock: returns
        seconds.
        """
        self._spans_sent, self._clock = spans_sent, clock
        self._meter = ArrayMeter(explicit_bounds=True, keeps_examples=True)
        self._metrics = NodeMetrics(self._meter, clock)
        self._figures = NodePoints({}, frozenset())
        self._own = RecentOwnTimes()
        names = [each.name for each in node_semantics.METRICS]
        self._meter.add_observer(names, lambda: self._figures.points)
        self._process = prometheus_client.ProcessCollector(registry=None)
        self._identity: Identity | None = None
        self._state: NodeState | None = None
        # Only the sidecar that assesses the whole job shows open alerts.
        self._assesses_job = False
        self._update_due_s = float("-inf")
        self._final_updates = 0
        # The newest response, with its time.
        self._answers: dict[tuple[str, int], tuple[float, MetricsResponse]] = {}
        self.endpoint = MetricsServer(address, self._render)

    # -- from the sidecar

    def export(self, batch: ExportBatch) -> None:
        with guard("counting steps for /metrics"):
            self._identity = batch.identity
            self._metrics.export(batch, self._spans_sent())
            if not batch.again:
                self._own.add_batch(batch)

    def on_assessment(self, assessment: Assessment) -> None:
        with guard("taking the judgement over for /metrics"):
            self._identity = assessment.identity
            self._assesses_job = assessment.whole_job
            # Update the alerts first, because a scrape that shows a hang must also show the
            # suspected rank.
            self._figures = NodePoints(
                {**self._figures.points, **self._points_of_open_alerts()}, self._figures.gone
            )
            self._metrics.on_assessment(assessment)

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        with guard("taking the hardware's telemetry over for /metrics"):
            self._metrics.hardware.record_samples(hardware)

    def update_node_points(self, state: NodeState, *, final: bool = False) -> None:
        """Update the node's metrics, at a limited rate because collectives take long to read."""
        began_s = self._clock()
        if began_s < self._update_due_s and not final:
            return
        with guard("looking at the node's state for /metrics"):
            found = read_node_points(state)
            self._state = state
            own = self._own.slowest_and_fastest_points(found.gone)
            more = {**own, **self._points_of_open_alerts()}
            self._figures = NodePoints({**found.points, **more}, found.gone)
        self._final_updates += final
        took_s = self._clock() - began_s
        self._update_due_s = self._clock() + max(_UPDATE_INTERVAL_S, _MIN_IDLE_RATIO * took_s)

    def _points_of_open_alerts(self) -> dict[str, Points]:
        if self._state is None or not self._assesses_job or self._identity is None:
            return {node_semantics.OPEN_ALERT: ()}
        return points_of_open_alerts(self._state, self._identity.run_id)

    # -- on the endpoint's thread

    def _render(self, accept: str) -> MetricsResponse:
        encode, content_type = choose_encoder(accept)
        what = content_type, self._final_updates
        made_s, answer = self._answers.get(what, (float("-inf"), None))
        now_s = self._clock()
        if answer is None or now_s - made_s >= CACHE_S:
            answer = MetricsResponse(content_type, encode(self))
            self._answers = {what: (now_s, answer)}
        return answer

    def collect(self) -> Iterator[Metric]:
        """Yield the families of a response, for prometheus_client's encoders."""
        identity = self._identity
        if identity is not None:
            yield from convert_to_families(
                self._meter.collect(), build_node_resource(identity).attributes, self._figures.gone
            )
        yield from self._process.collect()
