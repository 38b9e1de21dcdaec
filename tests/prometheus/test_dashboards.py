"""The shipped dashboards equal the output of their script, and each query returns data.

The data are from a Prometheus that scraped a real job. `make test-prometheus` runs these tests.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.gpu_target import GpuTarget
from tests.support.live_ranks import LiveRanks
from tests.support.processes import ROOT, slowdown
from tests.support.prometheus_server import DEPLOY, IS_THERE, MISSING, Prometheus
from tests.support.servers import free_port
from torchlens_perf.exporters import node_semantics, semantics
from torchlens_perf.exporters.prometheus.names import prometheus_name

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
NAMES = (
    *vars(semantics).values(),
    *vars(node_semantics).values(),
    *(each.name for each in semantics.METRICS),
)
SDK = importlib.util.find_spec("grafana_foundation_sdk") is not None
# Queries without data for a healthy CPU job, with the reason. GPU panels use a target with
# simulated hardware.
NO_GPU = {
    "Device memory: highest rank", "Free device memory: lowest rank", "cudaMalloc retries", "Out-of-memory errors",
    "Device time of the chosen ranks", "SM utilization", "GPU utilization", "Tensor core utilization",
    "SM clock, share of the maximum", "Clock throttling", "Temperature", "Power", "GPU memory in use", "Errors",
    "GPU links", "Network utilization", "Network ports down",
}  # fmt: skip
NO_HANG = {"Hang"}
SCRIPT = str(ROOT / "examples" / "train_gpt.py")  # This script has a data loader.


def generator() -> ModuleType:
    """Import scripts/make_dashboards.py."""
    path = ROOT / "scripts" / "make_dashboards.py"
    found = importlib.util.spec_from_file_location("make_dashboards", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["make_dashboards"] = module
    found.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    not SDK, reason="grafana_foundation_sdk is not here: make test-prometheus installs it"
)
def test_shipped_dashboards_equal_the_output_of_their_script() -> None:
    """If this fails, a file was edited by hand or the script was not run."""
    made = generator().files()
    there = {str(path.relative_to(DEPLOY)): path.read_text() for path in DASHBOARDS}
    rule = "kubernetes/prometheus-rule.yaml"
    assert {**there, rule: (DEPLOY / rule).read_text()} == made


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield path.stem, panel


def queries() -> Iterator[tuple[str, str]]:
    """Return titles and expressions of all panels."""
    return (
        (panel["title"], target["expr"]) for _, panel in panels() for target in panel["targets"]
    )


def test_every_dashboard_query_uses_existing_metrics() -> None:
    names = {prometheus_name(name) for name in NAMES if isinstance(name, str)}
    others = {"target_info", "process_cpu_seconds_total"}
    for _, query in queries():
        for metric in re.findall(
            r"\b(?:torch_train|torch_coll|torchlens|hw_|process_|target_)\w+", query
        ):
            assert metric in others or any(metric.startswith(name) for name in names), metric


def test_no_dashboard_query_averages_over_ranks() -> None:
    """A mean over ranks would hide a slow rank."""
    assert [title for title, query in queries() if "avg" in query] == []
    assert len(list(panels())) > 40


def filled(expression: str, run_id: str) -> str:
    """Return the query with values for Grafana's variables."""
    for name, value in (
        ("job", ".*"),
        ("run", run_id),
        ("rank", ".*"),
        ("__rate_interval", "10s"),
        ("__range", "1m"),
    ):
        expression = re.sub(rf"\${name}\b", value, expression)
    return expression


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.skipif(not IS_THERE, reason=MISSING)
def test_every_dashboard_query_returns_data_of_the_selected_run(tmp_path: Path) -> None:
    """The data are from a real job or from the target with GPUs."""
    at, gpus = free_port(), GpuTarget(tmp_path)
    (tmp_path / "prometheus").mkdir()
    try:
        with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{at}", gpus.address) as prometheus:
            environment = {"TORCHLENS_PERF": "1", "SLOW_RANK": "1", "STEPS": "1000000"}
            with LiveRanks(
                tmp_path, 3, script=SCRIPT, TORCHLENS_PERF_PROMETHEUS=str(at), **environment
            ) as ranks:
                run_of = {
                    panel["title"]: gpus.run_id if panel["title"] in NO_GPU else ranks.run_id
                    for _, panel in panels()
                }
                asked = [(title, query) for title, query in queries() if title not in NO_HANG]
                deadline_s = time.monotonic() + 120 * slowdown()
                empty = {""}
                while empty and time.monotonic() < deadline_s:
                    gpus.add_step()
                    time.sleep(1)
                    empty = {
                        f"{title}: {query}"
                        for title, query in asked
                        if not prometheus.query(filled(query, run_of[title]))
                    }
                assert empty == set()
                (share,) = [query for title, query in asked if title == "Last to arrive"]
                found = prometheus.query(filled(share, ranks.run_id))
                last = {labels["torch_distributed_rank"]: value for labels, value in found}
                assert max(last, key=lambda rank: last[rank]) == "1"
                assert [
                    title
                    for title, query in asked
                    if prometheus.query(filled(query, "no-such-run"))
                ] == []
    finally:
        gpus.close()
