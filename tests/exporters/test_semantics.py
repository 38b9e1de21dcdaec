"""exporters/semantics.py and its page list exactly what is sent, with the right units and types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import opentelemetry.semconv
import pytest

from scripts import write_semantics
from scripts.write_semantics import PAGE, page
from tests.exporters.test_exporters import assessment_of, batch_of, identity
from tests.support.findings import episode, findings, hang
from tests.support.otlp_collector import Collector, exporter_to
from tests.support.otlp_receiver import ReceivedEvent, ReceivedPoint, ReceivedSpan, Receiver
from tests.support.processes import ROOT
from tests.support.recorded_run import TRACEPARENT, Sidecar
from torchlens_perf.analysis.statistics.memory import MemoryReading
from torchlens_perf.diagnosis.utilization import StepFlops
from torchlens_perf.exporters import CoveredRanks, NodeRole, node_semantics, semantics
from torchlens_perf.exporters.otlp_metrics import NodeMetrics
from torchlens_perf.exporters.series import ArrayMeter
from torchlens_perf.roles import traces
from torchlens_perf.run import identity as run_identity
from torchlens_perf.run.hardware_samples import GPUS, LINKS, QUANTITIES, HardwareSamples, Sample
from torchlens_perf.run.records import Span, StepTrace, TracedStep
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.verdicts.finding_log import FindingLog

METRICS = {each.name: each for each in semantics.METRICS}
ATTRIBUTES = {each.name: each for each in write_semantics.ATTRIBUTES}
SPANS = {each.name: each for each in write_semantics.SPANS}
KINDS = {str: "string", int: "int", float: "double", bool: "boolean"}
EVENTS = {
    semantics.name_of_alert_event(kind, change)
    for kind, changes in write_semantics.EVENTS.items()
    for change in changes
}
FORMS = {"counter": ("sum", True), "up-down counter": ("sum", False), "gauge": ("gauge", False)}


@dataclasses.dataclass
class Sent:
    """The data that a receiver got."""

    spans: list[ReceivedSpan]
    points: list[ReceivedPoint]
    events: list[ReceivedEvent]

    def holders(self) -> Iterator[Mapping[str, Any]]:
        for each in (*self.spans, *self.points, *self.events):
            yield each.attributes
            yield each.resource


def everything() -> Sent:
    """Send everything that exporters can send, for a small and a large job."""
    small, large = of_two_ranks(), of_many_ranks()
    return Sent(small.spans + large.spans, small.points + large.points, small.events + large.events)


def of_two_ranks() -> Sent:
    collectors = {name: Collector(name) for name in ("traces", "metrics", "logs")}
    exporter = exporter_to(collectors)
    spans = (
        Span("forward", "", 0, 0, 1000, 1, 0, 0, 0),
        Span("collective", "allreduce", 0, 0, 10, 2, int(Flag.DEVICE), 8, 1),
        Span("device", "layer", 0, 0, 10, 2, 0, int(Kind.FORWARD), 0),
    )
    for rank in range(2):
        plain = batch_of(identity(rank, traceparent=TRACEPARENT), [100, 110])
        traces = (
            StepTrace(100, 0, 6_000_000, int(Flag.WITHOUT_MODULES), spans),
            StepTrace(110, 0, 6_000_000, int(Flag.INFERENCE), ()),
        )
        device = {"forward": np.array([5], np.int64)}
        memory = MemoryReading(0, 5, 9, 1, 7, 80, 3, 1)
        chosen = {100: TracedStep(0, 100, "slow", left_out=1)}
        exporter.export(
            dataclasses.replace(
                plain,
                traces=traces,
                device_ns=device,
                memory=memory,
                chosen=chosen,
                flops=StepFlops(1e9, 0.001),
                has_tokens=True,
            ),
        )
    exporter.record_hardware(identity(), hardware())
    log, slow = FindingLog("run"), episode()
    for found, hung in ((findings(slow), None), (findings(slow), hang())):
        exporter.on_assessment(assessment_of(found, log, hung))
    over = dataclasses.replace(slow, until_step=180)
    exporter.on_assessment(
        dataclasses.replace(
            assessment_of(findings(over), log, hang()),
            ended=True,
            goodput_s={"productive": 1.0},
            critical_path_s={"forward": 0.1},
        )
    )
    assert exporter.shutdown(20) == []
    return Sent(
        collectors["traces"].spans(), collectors["metrics"].points(), collectors["logs"].events()
    )


def of_many_ranks() -> Sent:
    """Export a large job with a slow rank, and with one point for all GPUs of a node."""
    collectors = {name: Collector(name) for name in ("traces", "metrics", "logs")}
    exporter = exporter_to(collectors)
    plain, one = batch_of(identity(3, world_size=1000), [100, 110]), hardware()
    exporter.export(plain)
    spread_s = {(what, "0.5"): 1.0 for what in ("work", "wait")}
    exporter.update_role(
        NodeRole(CoveredRanks.WHOLE, 0.01, 2000, frozenset(), spread_s, left_out=2)
    )
    gpu, port = one.samples
    gpus = [dataclasses.replace(gpu, name=f"GPU-{number}") for number in range(8)]
    exporter.record_hardware(identity(), HardwareSamples((*gpus, port), one.names))
    exporter.on_assessment(assessment_of(findings(episode()), FindingLog("run"), None))
    assert exporter.shutdown(20) == []
    return Sent(
        collectors["traces"].spans(), collectors["metrics"].points(), collectors["logs"].events()
    )


def hardware() -> HardwareSamples:
    """Return samples of a GPU and a port with all values."""
    names = {GPUS: "GPU-1", LINKS: "mlx5_0/1"}
    samples = [
        Sample(
            kind,
            name,
            0,
            0,
            dict.fromkeys(QUANTITIES[kind], 1),
            dict.fromkeys(QUANTITIES[kind], 1.0),
        )
        for kind, name in names.items()
    ]
    return HardwareSamples(tuple(samples), {"GPU-1": "H200"})


@pytest.fixture(scope="module")
def made() -> Sent:
    return everything()


def wrong(sent: Sent) -> list[str]:
    """Return the sent names that are missing in the list or differ from it."""
    found = set()
    for point in sent.points:
        metric = METRICS.get(point.metric)
        if metric is None:
            found.add(f"metric {point.metric}")
            continue
        form = (
            ("exponential_histogram", False)
            if metric.instrument == "histogram"
            else FORMS[metric.instrument]
        )
        if (point.unit, point.form, point.monotonic) != (metric.unit, *form):
            found.add(f"metric {point.metric}: {point.unit}, {point.form}")
        allowed = {*metric.attributes, semantics.OVER_COMPONENTS}
        found |= {f"{name} on {point.metric}" for name in point.attributes if name not in allowed}
    found |= {f"event {event.name}" for event in sent.events if event.name not in EVENTS}
    # Only the root spans of steps and the span of the run have no kind.
    named = (span.name for span in sent.spans if semantics.SPAN_KIND not in span.attributes)
    found |= {f"span {name}" for name in named if name not in SPANS}
    for holder in sent.holders():
        for name, value in holder.items():
            if name not in ATTRIBUTES or KINDS[type(value)] != ATTRIBUTES[name].kind:
                found.add(f"attribute {name}: {type(value).__name__}")
    return sorted(found)


def test_every_sent_name_is_listed_in_semantics(made: Sent) -> None:
    """If this fails, describe the name in semantics.py or write_semantics.py, and run scripts/write_semantics.py."""
    assert wrong(made) == []


@pytest.mark.distributed
def test_recorded_run_sends_every_unconditional_name_and_only_listed_ones(
    sidecar: Callable[..., Sidecar], receiver: Receiver
) -> None:
    """The run has two ranks."""
    sidecar(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint("http/protobuf"))
    sent = Sent(receiver.spans(), receiver.points(), receiver.events())
    assert wrong(sent) == []
    assert {each.name for each in semantics.METRICS if not each.when} == {
        point.metric for point in sent.points if not METRICS[point.metric].when
    }
    of_events = {each.name for each in write_semantics.ATTRIBUTES if each.on.strip() == "events"}
    unconditional = {
        each.name
        for each in write_semantics.ATTRIBUTES
        if not each.when and "events" not in each.on
    }
    came = {name for holder in sent.holders() for name in holder}
    assert unconditional - came == set()
    assert of_events & came == set(), "no rank was slow"


def test_every_listed_name_can_be_sent(made: Sent) -> None:
    """Excluded names belong to launchers, schedulers or clouds that are missing here."""
    assert {point.metric for point in made.points} == set(METRICS)
    for metric in semantics.METRICS:
        seen = {
            name
            for point in made.points
            if point.metric == metric.name
            for name in point.attributes
        }
        assert seen - {semantics.OVER_COMPONENTS} == set(metric.attributes), metric.name
    names = {span.name for span in made.spans if semantics.SPAN_KIND not in span.attributes}
    # tests/roles/test_surfaces.py checks the names of jobs with roles.
    assert names == set(SPANS) - {traces.SPAN_ITERATION}
    came = {name for holder in made.holders() for name in holder}
    elsewhere = set(ATTRIBUTES) - came
    # tests/run checks the names that come from the launcher's variables and files.
    from_environment = set(run_identity._ATTRIBUTES) | {
        "network.switch", "host.rack", "host.id", "host.type", "cloud.provider", "cloud.availability_zone",
        "container.id", "service.name",
    }  # fmt: skip
    # tests/exporters/test_otlp_caller.py checks the names of a failed run.
    assert elsewhere - from_environment == {
        semantics.STRAGGLER_CAUSES, semantics.EXCEPTION_TYPE, semantics.EXCEPTION_MESSAGE,
        traces.BATCH, traces.PROCESS, traces.OUTPUT_TOKENS,
    }  # fmt: skip
    assert set(run_identity._ATTRIBUTES) <= set(ATTRIBUTES)


def test_every_instrument_is_listed_in_semantics() -> None:
    """Instruments without a point in these tests are listed too."""
    meter = ArrayMeter()
    NodeMetrics(meter)
    assert {each.definition.name for each in meter._instruments} == set(METRICS)


def test_every_name_defined_as_a_constant_is_listed_in_semantics() -> None:
    listed = set(METRICS) | set(ATTRIBUTES) | set(SPANS) | {semantics.SCOPE}
    listed |= {
        semantics.OPENTELEMETRY,
        semantics.NEMO_LENS,
        semantics.OURS,
        semantics.SPAN_RANK,
        semantics.STEP_KIND,
    }
    constants = {
        name: value for name, value in vars(semantics).items() if name.isupper() and name[0] != "_"
    }
    assert {
        name: value
        for name, value in constants.items()
        if isinstance(value, str) and value not in listed
    } == {}


def conventions() -> tuple[set[str], dict[str, tuple[str, str]]]:
    """Return OpenTelemetry's attributes, and its instruments and units by metric, from its
    package.
    """
    attributes: set[str] = set()
    metrics: dict[str, tuple[str, str]] = {}
    (folder,) = opentelemetry.semconv.__path__
    for path in Path(folder).rglob("*_attributes.py"):
        attributes |= set(re.findall(r'Final = \(?\s*"([a-z0-9_.]+)"', path.read_text()))
    pattern = (
        r'Final = \(?\s*"([a-z0-9_.]+)"\s*\)?\n"""(?:(?!""").)*?Instrument: (\w+)\nUnit: (\S+)'
    )
    for path in Path(folder).rglob("*_metrics.py"):
        metrics |= {
            name: (kind, unit)
            for name, kind, unit in re.findall(pattern, path.read_text(), re.DOTALL)
        }
    return attributes, metrics


def test_names_listed_as_opentelemetrys_are_in_its_package() -> None:
    """Unit and instrument are the same as in OpenTelemetry's package."""
    attributes, metrics = conventions()
    assert len(attributes) > 300
    assert len(metrics) > 100
    for metric in semantics.METRICS:
        standard = metrics.get(metric.name)
        assert (standard is not None) == (metric.source == semantics.OPENTELEMETRY), metric.name
        if standard is not None:
            assert standard == (
                metric.instrument.replace("-", "").replace(" ", ""),
                metric.unit,
            ), metric.name
    for attribute in write_semantics.ATTRIBUTES:
        assert (attribute.name in attributes) == (attribute.source == semantics.OPENTELEMETRY), (
            attribute.name
        )


def test_semantics_page_equals_the_output_of_its_script() -> None:
    """If this fails, run python scripts/write_semantics.py."""
    assert PAGE.read_text() == page()


def test_names_only_in_prometheus_metrics_are_not_sent_over_otlp() -> None:
    """The page of /metrics lists these names."""
    values = ((name, value) for name, value in vars(node_semantics).items() if name.isupper())
    names = [value for _, value in values if isinstance(value, str)]
    assert len(names) > 10
    text = (ROOT / "docs/guides/prometheus.md").read_text()
    assert [name for name in names if f"`{name.replace('.', '_')}" not in text] == []
    assert set(names) & (set(METRICS) | set(ATTRIBUTES)) == set()
