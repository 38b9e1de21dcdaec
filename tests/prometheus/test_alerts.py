"""The shipped alert rules in a real Prometheus that scrapes real jobs with planted faults.

`make test-prometheus` runs these tests. promtool's own tests of the same rules are in
alerts_test.yaml.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import why_no_nodes
from tests.support.live_ranks import LiveRanks
from tests.support.processes import ROOT, SCRIPTS, run, slowdown
from tests.support.prometheus_server import IS_THERE, MISSING, RULES, Prometheus
from tests.support.scrapes import scrape
from tests.support.servers import free_port, wait_for

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.long,
    pytest.mark.skipif(not IS_THERE, reason=MISSING),
]
RANKS = 3
FIRES_S = 90.0


@contextlib.contextmanager
def job(folder: Path, **environment: str) -> Iterator[tuple[LiveRanks, Prometheus]]:
    """Run ranks that train, and a Prometheus that scrapes their sidecar."""
    at = free_port()
    (folder / "prometheus").mkdir()
    with Prometheus(folder / "prometheus", f"127.0.0.1:{at}") as prometheus:
        with LiveRanks(folder, RANKS, TORCHLENS_PERF_PROMETHEUS=str(at), **environment) as ranks:
            yield ranks, prometheus


def test_alert_rules_pass_the_tests_of_promtool() -> None:
    for command in (
        ["check", "rules", str(RULES)],
        ["test", "rules", "tests/prometheus/alerts_test.yaml"],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


def test_straggler_alert_fires_and_resolves_when_the_job_ends(tmp_path: Path) -> None:
    """The alert has the slow rank's host and phase.

    When the job ends, its series become stale.
    """
    with job(tmp_path, SLOW_RANK="1", SLOW_FROM="100") as (ranks, prometheus):
        alert = prometheus.wait_for(
            lambda: prometheus.firing().get("TorchlensStraggler"), FIRES_S * slowdown()
        )
        assert alert["labels"]["torch_distributed_rank"] == "1"
        assert alert["labels"]["torch_run_id"] == ranks.run_id
        assert alert["annotations"]["summary"].startswith("Rank 1 on ")
        assert (
            "shorter without it. Next: torchlens-perf report RUN_DIR."
            in alert["annotations"]["description"]
        )
        for pid in ranks.rank_pids().values():
            os.kill(pid, signal.SIGTERM)
        prometheus.wait_for(lambda: "TorchlensStraggler" not in prometheus.firing(), 60)
        prometheus.wait_for(lambda: not prometheus.query("torch_train_steps_total"), 90)
        assert prometheus.query("last_over_time(torch_train_steps_total[5m])")


def test_hang_alert_fires_while_a_rank_is_stopped(tmp_path: Path) -> None:
    """The rank continues afterwards, and the alert resolves."""
    with job(tmp_path) as (ranks, prometheus):
        prometheus.wait_for(
            lambda: prometheus.query("torch_train_step_last > 40"), FIRES_S * slowdown()
        )
        pid = ranks.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        alert = prometheus.wait_for(
            lambda: prometheus.firing().get("TorchlensHang"), FIRES_S * slowdown()
        )
        os.kill(pid, signal.SIGCONT)
        assert alert["labels"]["severity"] == "critical"
        assert alert["labels"]["torch_train_hang_kind"] == "stopped"
        assert "The others wait for rank 1 on " in alert["annotations"]["description"]
        prometheus.wait_for(
            lambda: "TorchlensHang" not in prometheus.firing(), FIRES_S * slowdown()
        )


def test_healthy_job_raises_no_alert(tmp_path: Path) -> None:
    """All rules are evaluated without errors."""
    with job(tmp_path) as (_, prometheus):
        prometheus.wait_for(
            lambda: prometheus.query("torch_train_step_last > 600"), FIRES_S * slowdown()
        )
        assert prometheus.firing() == {}
        (group,) = prometheus.api("rules")["groups"]
        assert [rule["name"] for rule in group["rules"] if rule["health"] != "ok"] == []
        assert prometheus.query('up{job="training"}')[0][1] == 1


@pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes())
def test_only_node_0_shows_the_verdict_on_a_rank_of_another_node(tmp_path: Path) -> None:
    """The slow rank runs on node 1.

    Node 1's sidecar shows only its own ranks, and no verdict.
    """
    names = ("node-a", "node-b")
    environment = {"SLOW_RANK": "3", "SLOW_FROM": "60", "TORCHLENS_PERF_PROMETHEUS": "0"}
    with LiveRanks(tmp_path, 4, names, **environment) as ranks:

        def ports() -> dict[str, str]:
            """Return the ports in the sidecars' logs."""
            logs = {name: list(ranks.run_directory(name).nodes.glob("*.log")) for name in names}
            said = {name: "".join(log.read_text() for log in found) for name, found in logs.items()}
            return {
                name: at[0]
                for name, text in said.items()
                if (at := re.findall(r"/metrics at http://(\S+)/", text))
            }

        at = wait_for(lambda: len(found := ports()) == 2 and found, FIRES_S * slowdown())
        assert at
        alert = wait_for(
            lambda: scrape(at["node-a"]).samples("torch_train_alert"), FIRES_S * slowdown()
        )[0]
        second = scrape(at["node-b"])
    assert (alert.labels["torch_distributed_rank"], alert.labels["torch_train_alert_host"]) == (
        "3",
        "node-b",
    )
    assert not second.samples("torch_train_alert")
    assert {
        each.labels["torch_distributed_rank"] for each in second.samples("torch_train_steps_total")
    } == {"2", "3"}
    assert second.value("torch_train_ranks") == 2


def test_exemplar_has_the_id_of_a_sent_trace(tmp_path: Path) -> None:
    """The trace was sent for a step with the duration of the exemplar."""
    with job(tmp_path, OTEL_TRACES_EXPORTER="otlp_json_file", TORCHLENS_PERF_TRACE_EVERY="20") as (
        ranks,
        prometheus,
    ):

        def found() -> list[dict[str, Any]]:
            query = 'torch_train_step_duration_seconds_bucket{torch_distributed_rank="1"}'
            answer = prometheus.api(
                "query_exemplars", query=query, start=str(time.time() - 300), end=str(time.time())
            )
            return [each for series in answer for each in series["exemplars"]]

        exemplars = prometheus.wait_for(
            lambda: len(got := found()) > 3 and got, FIRES_S * slowdown()
        )
        spans = wait_for(lambda: sent(ranks, {each["labels"]["span_id"] for each in exemplars}), 30)
    assert spans
    for exemplar in exemplars:
        span = spans[exemplar["labels"]["span_id"]]
        assert span["traceId"] == exemplar["labels"]["trace_id"]
        lasted_s = (int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9
        assert float(exemplar["value"]) == pytest.approx(lasted_s, abs=1e-6)


def sent(ranks: LiveRanks, wanted: set[str]) -> dict[str, Any]:
    """Return spans in the files of the tracing backend by id, once the given ones are there."""
    lines = [
        json.loads(line)
        for path in (ranks.run_directory().path / "otlp").glob("*-traces.jsonl")
        for line in path.read_text().splitlines()
    ]
    spans = {
        span["spanId"]: span
        for line in lines
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    return spans if wanted <= spans.keys() else {}


def test_job_out_of_memory_raises_two_alerts(tmp_path: Path) -> None:
    """The last values of the job are still scraped."""
    at = free_port()
    environment = {
        "TORCHLENS_PERF_PROMETHEUS": str(at), "TORCHLENS_PERF_MEMORY": "history", "SECONDS_UNTIL": "12",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    (tmp_path / "prometheus").mkdir()
    with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{at}") as prometheus:
        command = [sys.executable, str(SCRIPTS / "runs_out_of_memory.py")]
        training = threading.Thread(
            target=lambda: said.append(run(command, tmp_path, **environment))
        )
        said: list[subprocess.CompletedProcess[str]] = []
        training.start()
        prometheus.wait_for(
            lambda: prometheus.query("torch_train_steps_total > 0"), FIRES_S * slowdown()
        )
        assert prometheus.firing() == {}
        training.join(FIRES_S * slowdown())
        assert "OutOfMemoryError" in said[0].stderr
        alert = prometheus.wait_for(lambda: prometheus.firing().get("TorchlensOutOfMemory"), 60)
        assert (
            alert["annotations"]["summary"]
            == f"The device of 1 training processes of 127.0.0.1:{at} ran out of memory"
        )
        prometheus.wait_for(
            lambda: not prometheus.query("torch_train_processes_out_of_memory_total"), 60
        )
        assert "TorchlensOutOfMemory" in prometheus.firing(), "the alert must outlast the run"
