"""Requests to /metrics, parsed with prometheus_client's OpenMetrics parser."""

from __future__ import annotations

import dataclasses
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.live_simulation import LiveSimulation
from torchlens_perf.sidecar.metrics_port import MetricsPort

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@dataclasses.dataclass(frozen=True)
class Scrape:
    """One response of /metrics."""

    text: str
    families: dict[str, Metric]

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples with the given name and labels."""
        return [
            each
            for each in self.all()
            if each.name == name and labels.items() <= each.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only sample with the given name and labels."""
        (sample,) = self.samples(name, **labels)
        return sample.value

    def all(self) -> Iterator[Sample]:
        return (sample for family in self.families.values() for sample in family.samples)


def scrape(address: object, accept: str = OPEN_METRICS) -> Scrape:
    """Send one request and parse the response. Raises the parser's errors."""
    asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        text = answer.read().decode()
    return Scrape(text, {family.name: family for family in text_string_to_metric_families(text)})


class ScrapedSimulation:
    """A simulated run that continues, with its sidecar's metrics port open."""

    def __init__(self, folder: Path, ranks: int, *faults: str, **simulated: Any) -> None:
        self.simulation = LiveSimulation(
            folder / f"scraped-{folder.name}", ranks, *faults, **simulated
        )
        self.port = MetricsPort()

    def add_blocks(self, blocks: int = 1) -> None:
        """Add blocks of 32 steps and export them."""
        for _ in range(blocks):
            self.simulation.add_blocks()
            self.opened()
            self.simulation.sidecar.export_results()
        self.port.show_final_values(self.simulation.sidecar)

    def opened(self) -> None:
        sidecar = self.simulation.sidecar
        for source in sidecar.sources:
            facts = source.state.facts
            facts.settings = dataclasses.replace(facts.settings, prometheus="0")
        self.port.open_or_update(sidecar)

    def scraped(self) -> Scrape:
        """Return the current metrics."""
        assert self.port.address is not None
        return scrape(self.port.address)

    def __enter__(self) -> ScrapedSimulation:
        self.simulation.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.port.close(lingers=False)
        self.simulation.end_run()
