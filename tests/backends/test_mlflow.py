"""Tests of a run's traces in MLflow, read through its own client."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends import shots
from tests.backends.recorded import CALLER, SLOW_RANK, TRACES, Recorded, as_tuple, by_id
from tests.backends.server import environment, is_up, status_of
from tests.support.otlp_receiver import ReceivedSpan
from tests.support.servers import Server, free_port
from torchlens_perf.exporters import semantics

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

READER = Path(__file__).with_name("mlflow_spans.py")
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


class Mlflow:
    """A running server and its client."""

    def __init__(self, folder: Path) -> None:
        self._bin, self._folder = environment("mlflow") / "bin", folder
        self.address = f"http://127.0.0.1:{free_port()}"
        command = [
            str(self._bin / "mlflow"), "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination", str(folder), "--host", "127.0.0.1", "--port", self.address.rpartition(":")[2],
            "--workers", "1",
        ]  # fmt: skip
        told = {**QUIET, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        self.server = Server(command, folder, lambda: is_up(f"{self.address}/health"), told)

    def exporter_variables(self) -> dict[str, str]:
        """Return the variables that docs/guides/backends.md documents."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{self.address}/v1/traces",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-mlflow-experiment-id=0",
        }

    def ask(self) -> list[dict[str, Any]]:
        """Return all spans that the client finds."""
        command = [str(self._bin / "python"), str(READER), self.address]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OTEL_", "PYTHON"))
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**inherited, **QUIET}
        )
        assert done.returncode == 0, done.stderr
        answer: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return answer


def span_of(found: dict[str, Any]) -> ReceivedSpan:
    """Convert a span of the client, without MLflow's own attributes."""
    return ReceivedSpan(
        trace_id=int(found["trace_id"], 16),
        span_id=int(found["span_id"], 16),
        parent_id=int(found["parent_id"], 16) if found["parent_id"] else None,
        name=found["name"],
        start_ns=found["start_ns"],
        end_ns=found["end_ns"],
        attributes={
            key: value
            for key, value in found["attributes"].items()
            if not key.startswith("mlflow.")
        },
        resource=found["tags"],
        scope="",
        status={"STATUS_CODE_UNSET": "", "STATUS_CODE_OK": "ok"}.get(
            found["status"], found["status"]
        ),
        links=tuple((int(trace, 16), int(span, 16)) for trace, span in found["links"]),
    )


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory, recorded: Recorded) -> Iterator[Mlflow]:
    """Return a server that received the run twice."""
    started = Mlflow(tmp_path_factory.mktemp("mlflow"))
    for _ in range(2):
        recorded.send(**started.exporter_variables())
    yield started
    started.server.close()


@pytest.fixture(scope="module")
def found(mlflow: Mlflow) -> list[dict[str, Any]]:
    return mlflow.ask()


def test_all_spans_are_stored_once_with_their_parents(
    found: list[dict[str, Any]], recorded: Recorded
) -> None:
    """The run was sent twice.

    Compared are ids, parent, name, attributes, error, and times to the nanosecond.
    """
    expected = by_id(as_tuple(span) for span in recorded.spans())
    assert len({in_trace for in_trace, _ in expected}) == TRACES
    assert by_id(as_tuple(span_of(each)) for each in found) == expected


def test_only_root_spans_link_to_the_callers_span(found: list[dict[str, Any]]) -> None:
    spans = [span_of(each) for each in found]
    assert [span.links for span in spans if span.parent_id is None] == [(CALLER,)] * TRACES
    assert {span.links for span in spans if span.parent_id is not None} == {()}


def test_each_trace_is_complete_for_mlflow(found: list[dict[str, Any]]) -> None:
    """A trace is complete if its root is stored."""
    assert {each["state"] for each in found} == {"OK"}


def test_trace_tags_have_the_resource_of_a_rank(
    found: list[dict[str, Any]], recorded: Recorded
) -> None:
    """Attributes that all ranks share have the right values on all traces."""
    one_rank_only = {"service.instance.id", "process.pid", semantics.RANK, semantics.LOCAL_RANK}
    resources = recorded.resources()
    for each in found:
        tags = {key: each["tags"].get(key) for key in resources[0]}
        assert tags in [
            {key: str(value) for key, value in resource.items()} for resource in resources.values()
        ]
        shared = {
            key: str(value) for key, value in resources[0].items() if key not in one_rank_only
        }
        assert shared.items() <= tags.items()


def test_request_without_an_experiment_header_is_rejected(mlflow: Mlflow) -> None:
    assert status_of(f"{mlflow.address}/v1/traces") == 422


def test_metrics_and_alerts_are_not_accepted(mlflow: Mlflow) -> None:
    """docs/guides/backends.md documents this."""
    assert [status_of(f"{mlflow.address}/v1/{signal}") for signal in ("metrics", "logs")] == [
        404,
        404,
    ]


@shots.shots
def test_screenshot_of_a_trace_is_taken(mlflow: Mlflow, recorded: Recorded) -> None:
    trace = max(recorded.spans(), key=lambda span: int(span.attributes[semantics.STEP])).trace_id
    with shots.page(height=1130) as shown:
        shown.goto(f"{mlflow.address}/#/experiments/0/traces?selectedEvaluationId=tr-{trace:032x}")
        shown.get_by_label("Full screen").click()
        shown.get_by_label("Show execution timeline").click()
        shown.get_by_text(f"rank {SLOW_RANK}", exact=True).first.click()
        shots.drag(shown, 321, 500, 820)
        shots.save(shown, "mlflow")
