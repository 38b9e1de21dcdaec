"""Tests of a run's metrics in VictoriaMetrics, read with PromQL."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.recorded import RANKS, SLOW_RANK, Recorded
from tests.backends.server import environment, get, is_up, status_of
from tests.support.servers import Server, free_port, wait_for
from torchlens_perf.exporters import semantics

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

_RANK = "torch_distributed_rank"
_BUCKET = 2 ** (1 / 32)
"""Relative width of a bucket, which limits the precision of quantiles."""


class VictoriaMetrics:
    """A running server that uses Prometheus's names."""

    def __init__(self, folder: Path) -> None:
        program = environment("victoria-metrics") / "usr" / "bin" / "victoria-metrics"
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = [
            str(program), f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={folder}/data",
            "-opentelemetry.usePrometheusNaming", "-retentionPeriod=10y", "-search.latencyOffset=0s",
        ]  # fmt: skip
        self.server = Server(command, folder, lambda: is_up(f"{self.address}/health"))

    def exporter_variables(self) -> dict[str, str]:
        """Return the variables that docs/guides/backends.md documents."""
        return {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{self.address}/opentelemetry/v1/metrics"}

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the samples that a query finds now."""
        answer = get(f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, query: str) -> float:
        """Return the value of the only sample that a query finds."""
        (found,) = self.ask(query)
        return float(found["value"][1])


@pytest.fixture(scope="module")
def victoria(
    tmp_path_factory: pytest.TempPathFactory, recorded: Recorded
) -> Iterator[VictoriaMetrics]:
    """Return a server that received the run twice."""
    started = VictoriaMetrics(tmp_path_factory.mktemp("victoria-metrics"))
    for times in (1, 2):
        recorded.send(**started.exporter_variables())
        # Queries find samples some time after they were accepted.
        wait_for(
            lambda times=times: [
                of for of in _samples(started, "torch_train_steps_total") if len(of) == times
            ],
            60,
        )
    yield started
    started.server.close()


def _samples(victoria: VictoriaMetrics, metric: str) -> list[list[Any]]:
    """Return all samples by series."""
    return [series["values"] for series in victoria.ask(f"{metric}[1h]")]


def test_counter_and_gauge_have_their_values(victoria: VictoriaMetrics, recorded: Recorded) -> None:
    """The counter has each rank's number of steps, and the gauge its memory after the last step."""
    memory_bytes = recorded.memory_bytes()
    for rank in RANKS:
        of_rank = f'{{{_RANK}="{rank}"}}'
        steps = len(recorded.durations_s()[semantics.STEP_DURATION, rank, ""])
        assert victoria.value(f"torch_train_steps_total{of_rank}") == steps
        assert victoria.value(f"torch_train_memory_usage_bytes{of_rank}") == memory_bytes[rank]


def test_histograms_have_exact_sums_and_close_quantiles(
    victoria: VictoriaMetrics, recorded: Recorded
) -> None:
    """The count is exact too, and quantiles are right within the width of a bucket."""
    names = {
        semantics.STEP_DURATION: "torch_train_step_duration_seconds",
        semantics.STEP_OWN_TIME: "torch_train_step_own_time_seconds",
        semantics.PHASE_DURATION: "torch_train_phase_duration_seconds",
    }
    for (metric, rank, phase), values in recorded.durations_s().items():
        of = f'{_RANK}="{rank}"' + (f',torch_train_phase="{phase}"' if phase else "")
        assert victoria.value(f"{names[metric]}_count{{{of}}}") == len(values)
        assert victoria.value(f"{names[metric]}_sum{{{of}}}") == pytest.approx(
            sum(values), rel=1e-9
        )
        for share in (0.5, 0.95):
            quantile = victoria.value(
                f"histogram_quantile({share}, {names[metric]}_bucket{{{of}}})"
            )
            below, above = (
                np.quantile(values, share, method="lower"),
                np.quantile(values, share, method="higher"),
            )
            assert below / _BUCKET <= quantile <= above * _BUCKET


def test_gauge_of_the_alert_rule_names_slow_rank_and_phase(
    victoria: VictoriaMetrics, recorded: Recorded
) -> None:
    """The gauges of own time also show which rank is slow."""
    (slow,) = victoria.ask("topk(1, torch_train_straggler_cost_seconds > 0.005)")
    assert (slow["metric"][_RANK], slow["metric"]["torch_train_phase"]) == (
        str(SLOW_RANK),
        "forward",
    )
    assert victoria.value('torch_train_stragglers{torch_train_straggler_class="slow_compute"}') >= 1
    own = "torch_train_step_own_time_seconds"
    (most,) = victoria.ask(f"topk(1, {own}_sum / {own}_count)")
    assert most["metric"][_RANK] == str(SLOW_RANK)


def test_replay_does_not_increase_counters(victoria: VictoriaMetrics) -> None:
    """A replay adds samples with the same values."""
    for metric in ("torch_train_steps_total", "torch_train_step_duration_seconds_sum"):
        found = _samples(victoria, metric)
        assert len(found) == len(RANKS)
        for samples in found:
            assert len(samples) == 2
            assert len({value for _, value in samples}) == 1


def test_resource_of_the_node_becomes_labels(victoria: VictoriaMetrics, recorded: Recorded) -> None:
    resource, *_ = recorded.resources().values()
    for found in victoria.ask("torch_train_steps_total"):
        labels = found["metric"]
        assert labels["torch_run_id"] == recorded.run.run_id
        assert (labels["service_name"], labels["host_name"]) == (
            resource["service.name"],
            resource["host.name"],
        )
        assert labels["service_instance_id"].endswith("/node")


def test_spans_and_alerts_are_not_accepted(victoria: VictoriaMetrics) -> None:
    """docs/guides/backends.md documents this."""
    for signal in ("traces", "logs"):
        assert status_of(f"{victoria.address}/opentelemetry/v1/{signal}") == 400


def test_exemplars_are_not_stored(victoria: VictoriaMetrics) -> None:
    """docs/guides/backends.md documents this."""
    query = urllib.parse.urlencode(
        {"query": "torch_train_step_duration_seconds_bucket", "start": 0}
    )
    assert get(f"{victoria.address}/api/v1/query_exemplars?{query}")["data"] == []
