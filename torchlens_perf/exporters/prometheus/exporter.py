"""What a node's sidecar measures, at a port for Prometheus: the same metrics as over OTLP, and figures of the node.

The sidecar's thread only hands values over. They are made into text when somebody asks, on the endpoint's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from torchlens_perf.errors import guard
from torchlens_perf.exporters import node_semantics
from torchlens_perf.exporters.node_figures import (
    NodeFigures,
    OwnTimes,
    Points,
    create_instruments,
    node_figures,
    open_alerts,
)
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.otlp_resource import node_resource
from torchlens_perf.exporters.prometheus.endpoint import Address, Answer, Endpoint
from torchlens_perf.exporters.prometheus.families import families
from torchlens_perf.exporters.series import Meter

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import Hardware
    from torchlens_perf.exporters import Assessment, ExportBatch
    from torchlens_perf.exporters.otlp_metrics import Sampled
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.verdicts.node_state import NodeState

SAME_S = 1.0  # for which an answer is given again: however many ask, it is made once in so long
_LOOK_EVERY_S = 2.0
_MIN_REST = 100.0  # times what a look has taken


class PrometheusExporter:
    """An Exporter. Called on the sidecar's thread, but for _answer()."""

    def __init__(self, address: Address, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins to listen. clock: seconds. Raises OSError where it cannot."""
        self._clock = clock
        self._meter = Meter(explicit_bounds=True, keeps_examples=True)
        self._metrics = NodeMetrics(self._meter, clock)
        self._figures = NodeFigures({}, frozenset())
        self._own = OwnTimes()
        create_instruments(self._meter, self._points)
        self._process = prometheus_client.ProcessCollector(registry=None)
        self._identity: Identity | None = None
        self._state: NodeState | None = None  # as last looked at
        self._judges = False  # all ranks of the job: else another node's sidecar does, and says it
        self._look_due_s = float("-inf")
        self._last_looks = 0  # those after which an earlier answer is not good enough
        self._answers: dict[tuple[str, int], tuple[float, Answer]] = {}  # by content type and _last_looks: when made
        self._endpoint = Endpoint(address, self._answer)

    @property
    def address(self) -> Address:
        """Where it listens, with the port that it got."""
        return self._endpoint.address

    @property
    def scrapes(self) -> list[float]:
        """See Endpoint.scrapes."""
        return self._endpoint.scrapes

    # -- from the sidecar

    def export(self, batch: ExportBatch) -> None:
        self.export_with(batch, {})

    def export_with(self, batch: ExportBatch, spans: Sampled) -> None:
        """spans: of steps of the batch that are sent as traces, for exemplars."""
        with guard("counting steps for /metrics"):
            self._identity = batch.identity
            self._metrics.export(batch, spans)
            if not batch.again:
                self._own.add(batch)

    def on_assessment(self, assessment: Assessment) -> None:
        with guard("taking the judgement over for /metrics"):
            self._identity = assessment.identity
            self._judges = assessment.whole_job
            # At once and first: whoever sees that the job hangs finds the rank that it waits for.
            self._figures = NodeFigures({**self._figures.points, **self._open_alerts()}, self._figures.gone)
            self._metrics.on_assessment(assessment)

    def measured(self, identity: Identity, hardware: Hardware) -> None:
        with guard("taking the hardware's telemetry over for /metrics"):
            self._metrics.measured(hardware)

    def look(self, state: NodeState, *, final: bool = False) -> None:
        """Takes over what the node's state says, now and then: of many collectives that takes a while."""
        began_s = self._clock()
        if began_s < self._look_due_s and not final:
            return
        with guard("looking at the node's state for /metrics"):
            found = node_figures(state)
            self._state = state
            more = {**self._own.points(found.gone), **self._open_alerts()}
            self._figures = NodeFigures({**found.points, **more}, found.gone)
        self._last_looks += final
        took_s = self._clock() - began_s
        self._look_due_s = self._clock() + max(_LOOK_EVERY_S, _MIN_REST * took_s)

    def _open_alerts(self) -> dict[str, Points]:
        if self._state is None or not self._judges or self._identity is None:
            return {node_semantics.OPEN_ALERT: ()}
        return open_alerts(self._state, self._identity.run_id)

    def wait_for_room(self, timeout_s: float) -> bool:
        return True

    def shutdown(self, timeout_s: float) -> list[str]:
        self._endpoint.close()
        return []

    # -- on the endpoint's thread

    def _points(self, metric: str) -> Points:
        return self._figures.points.get(metric, ())

    def _answer(self, accept: str) -> Answer:
        encode, content_type = choose_encoder(accept)
        what = content_type, self._last_looks
        made_s, answer = self._answers.get(what, (float("-inf"), None))
        now_s = self._clock()
        if answer is None or now_s - made_s >= SAME_S:
            answer = Answer(content_type, encode(_Families(self._families)))
            self._answers = {what: (now_s, answer)}  # whoever asks, no more than one is kept
        return answer

    def _families(self) -> Iterator[Metric]:
        identity = self._identity
        if identity is not None:
            yield from families(self._meter.collect(), node_resource(identity).attributes, self._figures.gone)
        yield from self._process.collect()


class _Families(Collector):
    """What prometheus_client's encoders take."""

    def __init__(self, found: Callable[[], Iterator[Metric]]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        return self._found()
