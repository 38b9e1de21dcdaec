"""Tests of a run's traces in Arize Phoenix, read through its REST interface."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends import shots
from tests.backends.recorded import SLOW_RANK, TRACES, Recorded, as_tuple, by_id, in_microseconds
from tests.backends.server import environment, get, is_up, status_of
from tests.support.otlp_receiver import ReceivedSpan
from tests.support.servers import Server, free_port, wait_for
from torchlens_perf.exporters import semantics

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(600)]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


class Phoenix:
    """A running server."""

    def __init__(self, folder: Path) -> None:
        program = environment("phoenix") / "bin" / "phoenix"
        port, grpc_port = free_port(), free_port()
        self.address, self.grpc = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{grpc_port}"
        told = {
            "PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port),
            "PHOENIX_GRPC_PORT": str(grpc_port), "PHOENIX_TELEMETRY_ENABLED": "false",
        }  # fmt: skip
        self.server = Server(
            [str(program), "serve"], folder, lambda: is_up(f"{self.address}/healthz"), told
        )

    def exporter_variables(self, protocol: str) -> dict[str, str]:
        """Return the variables that docs/guides/backends.md documents."""
        if protocol == "grpc":
            return {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.grpc,
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            }
        return {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{self.address}/v1/traces"}

    def ask(self) -> list[dict[str, Any]]:
        """Return all stored spans."""
        found, cursor = [], ""
        while cursor is not None:
            more = f"&cursor={cursor}" if cursor else ""
            answer = get(f"{self.address}/v1/projects/default/spans?limit=500{more}")
            found += answer["data"]
            cursor = answer["next_cursor"]
        return found


def span_of(found: dict[str, Any]) -> ReceivedSpan:
    """Convert a span of the REST interface, whose times are in microseconds."""
    return ReceivedSpan(
        trace_id=int(found["context"]["trace_id"], 16),
        span_id=int(found["context"]["span_id"], 16),
        parent_id=int(found["parent_id"], 16) if found["parent_id"] else None,
        name=found["name"],
        start_ns=_ns(found["start_time"]),
        end_ns=_ns(found["end_time"]),
        attributes=found["attributes"],
        resource={},
        scope="",
        status={"UNSET": "", "OK": "ok"}.get(found["status_code"], found["status_code"]),
        links=(),
    )


def _ns(text: str) -> int:
    since = datetime.datetime.fromisoformat(text) - _EPOCH
    return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory, recorded: Recorded) -> Iterator[Phoenix]:
    """Return a server that received the run over HTTP and again over gRPC."""
    started = Phoenix(tmp_path_factory.mktemp("phoenix"))
    for protocol in ("http/protobuf", "grpc"):
        recorded.send(**started.exporter_variables(protocol))
        # Phoenix stores spans some time after it has accepted them.
        wait_for(lambda: len(started.ask()) >= len(recorded.spans()), 60)
    yield started
    started.server.close()


@pytest.fixture(scope="module")
def found(phoenix: Phoenix) -> list[dict[str, Any]]:
    return phoenix.ask()


def test_all_spans_are_stored_once_with_their_parents(
    found: list[dict[str, Any]], recorded: Recorded
) -> None:
    """The run was sent twice.

    Compared are ids, parent, name, attributes, error, and times to the microsecond.
    """
    expected = by_id(as_tuple(span, in_microseconds) for span in recorded.spans())
    assert len({in_trace for in_trace, _ in expected}) == TRACES
    assert by_id(as_tuple(span_of(each), in_microseconds) for each in found) == expected


def test_links_and_resources_are_not_stored(phoenix: Phoenix, found: list[dict[str, Any]]) -> None:
    """docs/guides/backends.md documents this.

    The rank is an attribute of the span.
    """
    assert not any("link" in key or "resource" in key for each in found for key in each)
    answer = get(f"{phoenix.address}/v1/projects/default/spans/otlpv1?limit=1000")
    assert {json.dumps(each["links"]) for each in answer["data"]} == {"null"}
    assert not any("resource" in key for each in answer["data"] for key in each)
    assert all(semantics.RANK in each["attributes"] for each in found)


def test_metrics_and_alerts_are_not_accepted(phoenix: Phoenix) -> None:
    """docs/guides/backends.md documents this."""
    assert [status_of(f"{phoenix.address}/v1/{signal}") for signal in ("metrics", "logs")] == [
        405,
        405,
    ]


@shots.shots
def test_screenshot_of_a_trace_is_taken(phoenix: Phoenix, recorded: Recorded) -> None:
    trace = max(recorded.spans(), key=lambda span: int(span.attributes[semantics.STEP])).trace_id
    (project,) = get(f"{phoenix.address}/v1/projects")["data"]
    with shots.page(height=1230) as shown:
        shown.add_init_script("localStorage.setItem('arize-phoenix-theme', 'light')")
        shown.goto(f"{phoenix.address}/projects/{project['id']}/traces/{trace:032x}")
        shown.get_by_text(f"rank {SLOW_RANK}", exact=True).first.click()
        border = shown.locator("[aria-controls=trace-tree]").bounding_box()
        shots.drag(
            shown, border["x"], border["y"] + 300, border["x"] + 260
        )  # A narrow pane shows no tree.
        shots.save(shown, "phoenix")
