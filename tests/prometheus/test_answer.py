"""The content of /metrics: valid OpenMetrics, named like OTLP's metrics, and bounded in size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.collectives import US, Issued, joined
from tests.support.scrapes import Scrape, ScrapedSimulation, scrape
from torchlens_perf.exporters import node_semantics, semantics
from torchlens_perf.exporters.node_figures import read_node_points
from torchlens_perf.exporters.prometheus import exporter as exporter_module
from torchlens_perf.exporters.prometheus.endpoint import ListenAddress
from torchlens_perf.exporters.prometheus.exporter import PrometheusExporter
from torchlens_perf.exporters.prometheus.families import MAX_LABEL, MAX_POINTS, convert_to_families
from torchlens_perf.exporters.prometheus.names import prometheus_name, prometheus_unit_suffix
from torchlens_perf.exporters.series import ArrayMeter
from torchlens_perf.run.ring import Flag
from torchlens_perf.verdicts.node_state import NodeState

RANKS, SLOW = 4, 2
NAMES = (
    *vars(semantics).values(),
    *vars(node_semantics).values(),
    *(each.name for each in semantics.METRICS),
)
RANK = "torch_distributed_rank"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrape]:
    """Return /metrics of four ranks, one of which is slow."""
    with ScrapedSimulation(
        tmp_path_factory.mktemp("answer"), RANKS, f"constant:rank={SLOW},share=0.3"
    ) as run:
        run.add_blocks(20)
        yield run.scraped()


def test_metrics_are_valid_openmetrics_with_type_unit_and_help(answer: Scrape) -> None:
    """prometheus_client can parse the response."""
    assert answer.text.endswith("# EOF\n")
    own = answer.families["torch_train_step_own_time_seconds"]
    assert (own.type, own.unit) == ("histogram", "seconds")
    assert own.documentation == "step duration without comm wait and this tool"
    assert answer.families["torch_train_phase_duration_seconds"].type == "summary"
    assert answer.families["torch_collective_io_bytes"].type == "counter"
    assert all(family.documentation for family in answer.families.values())


def test_counts_sums_and_buckets_equal_those_of_the_steps(answer: Scrape) -> None:
    """Each metric that can show the slow rank shows it."""
    name = "torch_train_step_own_time_seconds"
    steps = {
        rank: answer.value("torch_train_steps_total", **{RANK: str(rank)}) for rank in range(RANKS)
    }
    assert len(set(steps.values())) == 1
    assert steps[0] > 500
    own = {rank: answer.value(f"{name}_sum", **{RANK: str(rank)}) for rank in range(RANKS)}
    assert max(own, key=lambda rank: own[rank]) == SLOW
    for rank in range(RANKS):
        buckets = answer.samples(f"{name}_bucket", **{RANK: str(rank)})
        values = [sample.value for sample in buckets]
        assert values == sorted(values)
        assert (buckets[-1].labels["le"], values[-1]) == ("+Inf", steps[rank])
        below = max(float(each.labels["le"]) for each in buckets if each.value == 0)
        assert below < own[rank] / steps[rank]
    last = {
        rank: answer.value("torch_collective_arrived_last_total", **{RANK: str(rank)})
        for rank in range(RANKS)
    }
    assert last[SLOW] > 3 * max(last[rank] for rank in range(RANKS) if rank != SLOW)
    assert sum(last.values()) == answer.value("torch_collective_compared_total", **{RANK: "0"})
    waits = {
        rank: answer.value("torch_collective_wait_seconds_total", **{RANK: str(rank)})
        for rank in range(RANKS)
    }
    assert min(waits, key=lambda rank: waits[rank]) == SLOW
    slowest = answer.value("torch_train_step_own_time_slowest_seconds")
    assert slowest > 1.2 * answer.value("torch_train_step_own_time_fastest_seconds")
    assert answer.value("torch_train_ranks") == RANKS


@pytest.mark.parametrize(
    ("flags", "waits"), [(Flag.COMPLETED, {0: 0.0, 1: 0.001}), (Flag.COMPLETED | Flag.ASYNC, {})]
)
def test_time_blocked_is_absent_if_no_operation_blocks(
    flags: Flag, waits: dict[int, float]
) -> None:
    """Ranks block later, on the results. The order of arrival is known for both."""
    issued = {
        rank: [
            Issued(
                "allreduce group=0 dtype=float32", 0, (1 + rank) * 1000 * US, 1 << 20, int(flags)
            )
        ]
        for rank in range(2)
    }
    points = read_node_points(NodeState("node-0", join=joined(issued))).points
    found = {
        labels[semantics.RANK]: value for value, labels in points[node_semantics.COLLECTIVE_WAIT]
    }
    assert found == pytest.approx(waits)
    assert [value for value, _ in points[node_semantics.COLLECTIVE_ARRIVED_LAST]] == [1, 0]


def test_open_alert_is_a_metric_with_rank_phase_host_class_and_cost(answer: Scrape) -> None:
    (alert,) = answer.samples("torch_train_alert")
    assert alert.value == 1
    assert alert.labels == {
        RANK: str(SLOW), "torch_train_alert_kind": "straggler", "torch_train_alert_host": "node-0000",
        "torch_train_phase": "compute", "torch_train_straggler_class": "slow_compute",
        "torch_train_straggler_scope": "rank", "torch_run_id": answer.samples("target_info")[0].labels["torch_run_id"],
    }  # fmt: skip
    cost_s = answer.value("torch_train_straggler_cost_seconds", **{RANK: str(SLOW)})
    assert 0.03 < cost_s < 0.1
    assert answer.value("torch_train_stragglers", torch_train_straggler_class="slow_compute") == 1


def test_target_info_has_the_resource_attributes(answer: Scrape) -> None:
    """Prometheus itself adds job and instance."""
    (info,) = answer.samples("target_info")
    assert info.labels["service_name"] == "simulation"
    assert info.labels["torch_distributed_world_size"] == str(RANKS)
    assert not {"job", "instance"} & {name for sample in answer.all() for name in sample.labels}


def test_every_metric_name_is_derived_from_otlp(answer: Scrape) -> None:
    """Other names belong to the process collector."""
    ours = {prometheus_name(name) for name in NAMES if isinstance(name, str)}
    for sample in answer.all():
        assert sample.name.startswith(("process_", "target_info", "torchlens_perf_scrape_")) or any(
            sample.name.startswith(name) for name in ours
        ), sample.name


@pytest.mark.parametrize(
    ("name", "unit", "kind", "series"),
    [
        ("torch.train.step.duration", "s", "histogram", "torch_train_step_duration_seconds"),
        ("torch.train.steps", "{step}", "counter", "torch_train_steps_total"),
        ("hw.gpu.io", "By", "counter", "hw_gpu_io_bytes_total"),
        ("hw.gpu.utilization", "1", "gauge", "hw_gpu_utilization_ratio"),
        ("hw.network.up", "1", "updown", "hw_network_up"),
        (
            "hw.network.bandwidth.limit",
            "By/s",
            "updown",
            "hw_network_bandwidth_limit_bytes_per_second",
        ),
        ("hw.temperature", "Cel", "gauge", "hw_temperature_celsius"),
        ("hw.gpu.throttle.duration", "s", "counter", "hw_gpu_throttle_duration_seconds_total"),
    ],
)
def test_metric_names_are_converted_by_the_opentelemetry_specification(
    name: str, unit: str, kind: str, series: str
) -> None:
    found = prometheus_name(name, prometheus_unit_suffix(unit, gauge=kind == "gauge"))
    assert found + "_total" * (kind == "counter") == series


def test_each_exemplar_is_in_the_bucket_of_its_duration() -> None:
    """Only traced steps are exemplars, in every scrape."""
    from torchlens_perf.exporters.series import ExemplarValue

    meter = ArrayMeter(explicit_bounds=True, keeps_examples=True)
    histogram = meter.create_histogram(semantics.STEP_DURATION)
    values_ns = np.array([12, 300, 310, 400]) * 10**6
    meter.move_start_back(10**18)
    histogram.record_ns(values_ns, {})
    histogram.add_exemplars(
        {}, [ExemplarValue(0.012, 10**18, 7, 8), ExemplarValue(0.31, 10**18 + 5 * 10**8, 9, 10)]
    )
    for _ in range(2):
        (family,) = [
            each for each in convert_to_families(meter.collect(), {}) if each.type == "histogram"
        ]
        found = {
            sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar
        }
        assert set(found) == {"0.025", "0.4"}
        assert found["0.4"].labels == {"trace_id": f"{9:032x}", "span_id": f"{10:016x}"}
        assert (found["0.4"].value, found["0.4"].timestamp) == (0.31, 10**9 + 0.5)


@pytest.mark.long
@pytest.mark.slow
def test_number_of_series_is_bounded_for_any_job_size(tmp_path: Path) -> None:
    """Above 64 ranks only slow ranks have their own series, so 80 ranks have fewer series than
    8.
    """
    with ScrapedSimulation(tmp_path, 80, "constant:rank=77,share=0.4") as run:
        run.add_blocks(12)
        found = run.scraped()
    named = {
        sample.labels[RANK]
        for sample in found.samples("torch_train_steps_total")
        if RANK in sample.labels
    }
    assert named <= {"77"}
    assert len({s.labels[RANK] for s in found.samples("torch_collective_arrived_last_total")}) == 8
    assert "77" in {s.labels[RANK] for s in found.samples("torch_collective_arrived_last_total")}
    assert sum(1 for _ in found.all()) < 400
    assert found.value("torchlens_perf_scrape_dropped_points") == 0


def test_number_of_points_and_length_of_labels_are_bounded() -> None:
    """Points of a metric above the limit are counted.

    Labels are cut and have no control characters.
    """
    meter = ArrayMeter(explicit_bounds=True)
    gauge = meter.create_number(semantics.STRAGGLERS)
    for index in range(MAX_POINTS + 5):
        gauge.set(index, {"name": f"{index}\x1b[31m" + "x" * 10_000})
    found = list(convert_to_families(meter.collect(), {"evil\nlabel{}": 'a"b\nc\u202e'}))
    (many,) = [each for each in found if each.name == "torch_train_stragglers"]
    assert len(many.samples) == MAX_POINTS
    assert found[-1].samples[0].value == 5
    assert {len(sample.labels["name"]) for sample in many.samples} == {MAX_LABEL}
    assert not any("\x1b" in sample.labels["name"] for sample in many.samples)
    assert found[0].samples[0].labels == {"evil_label_": 'a"b?c?'}


def test_memory_gauge_ends_with_its_process_and_counters_stay() -> None:
    meter = ArrayMeter(explicit_bounds=True)
    meter.create_number(semantics.MEMORY).set(5, {semantics.RANK: 1})
    meter.create_number(semantics.STEPS).add(3, {semantics.RANK: 1})

    def samples(gone: set[int]) -> set[str]:
        found = convert_to_families(meter.collect(), {}, gone)
        return {
            sample.name
            for family in found
            for sample in family.samples
            if sample.labels.get(RANK) == "1"
        }

    assert samples(set()) == {"torch_train_memory_usage_bytes", "torch_train_steps_total"}
    assert samples({1}) == {"torch_train_steps_total"}


def test_metrics_are_rendered_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of clients may ask."""
    made = []
    monkeypatch.setattr(
        exporter_module, "convert_to_families", lambda *args: made.append(args) or iter(())
    )
    now_s = [100.0]
    one = PrometheusExporter(ListenAddress("127.0.0.1", 0), clock=lambda: now_s[0])
    try:
        one._identity = _identity(tmp_path)
        for _ in range(5):
            scrape(one.endpoint.address)
        now_s[0] += 1.5
        scrape(one.endpoint.address)
    finally:
        one.endpoint.close()
    assert len(made) == 2


def _identity(folder: Path):
    from tests.support.ranks import identity_of, make_run

    return identity_of(make_run(folder), 0)
