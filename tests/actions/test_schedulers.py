"""Reports on nodes to Kubernetes, NVSentinel and Slurm, each against a server that keeps them."""

from __future__ import annotations

import http.server
import importlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from tests.actions.test_rules import NODE
from tests.support.launched import why_no_nodes
from tests.support.slurm import cluster
from torchlens_perf.actions.kubernetes import Kubernetes
from torchlens_perf.actions.nvsentinel import NVSentinel
from torchlens_perf.actions.targets import NotSentError, Slurm

IN_KUBERNETES = msgspec.structs.replace(NODE, scheduler_names={"k8s.node.name": "worker-1"})
READY = {"type": "Ready", "status": "True"}


class ApiServer:
    """A part of Kubernetes' API: the status of one node, and events."""

    def __init__(self) -> None:
        self.conditions, self.events, self.status = [READY], list[Any](), 200
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                assert self.path.split("?")[0] == "/api/v1/nodes/worker-1/status"
                assert self.headers["Content-Type"] == "application/strategic-merge-patch+json"
                new = {each["type"]: each for each in self.read()["status"]["conditions"]}
                # Kubernetes merges this list by type (patchMergeKey of core/v1 NodeStatus).
                kept = [each for each in owner.conditions if each["type"] not in new]
                owner.conditions = [*kept, *new.values()]
                self.answer({"kind": "Node", "metadata": {"name": "worker-1"}})

            def do_POST(self) -> None:
                assert self.path.split("?")[0] == "/api/v1/namespaces/default/events"
                owner.events.append(self.read())
                self.answer(owner.events[-1])

            def read(self) -> Any:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, body: Any) -> None:
                self.send_response(owner.status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    found = ApiServer()
    address = f"http://127.0.0.1:{found.server.server_port}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": address}}],
        "users": [{"name": "test", "user": {"token": "t"}}],
    }
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(json.dumps(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    importlib.import_module("kubernetes.client")  # Takes a second, which no test should be charged.
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_kubernetes_gets_a_condition_beside_the_others_and_an_event(api: ApiServer) -> None:
    assert Kubernetes().send(IN_KUBERNETES) == "condition set, event added"
    ready, slow = api.conditions
    assert ready == READY
    assert (slow["type"], slow["status"]) == ("TorchlensSlowNode", "True")
    (event,) = api.events
    assert event["involvedObject"]["name"] == "worker-1"
    assert (event["type"], event["message"]) == ("Warning", "torchlens_perf run r: slow")


def test_kubernetes_names_no_node_by_the_name_of_a_pod(api: ApiServer) -> None:
    with pytest.raises(NotSentError, match="K8S_NODE_NAME"):
        Kubernetes().send(NODE)
    assert api.events == []


def test_refusal_of_kubernetes_is_the_reason(api: ApiServer) -> None:
    api.status = 403
    with pytest.raises(NotSentError, match="HTTP status 403"):
        Kubernetes().send(IN_KUBERNETES)


def read_fields(message: bytes) -> dict[int, Any]:
    """Return the last value of each field of a protobuf message, by number, without its schema."""
    found: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            found[key >> 3] = varint()
        else:
            assert key & 7 == 2
            size = varint()
            found[key >> 3] = message[at : at + size]
            at += size
    return found


@pytest.mark.parametrize(("drains", "fatal", "strategy"), [(False, None, 2), (True, 1, 1)])
def test_nvsentinel_gets_an_event_by_the_numbers_of_its_schema(
    tmp_path: Path, drains: bool, fatal: int | None, strategy: int
) -> None:
    received: list[bytes] = []
    server = grpc.server(futures.ThreadPoolExecutor(1))
    method = grpc.unary_unary_rpc_method_handler(lambda request, _: received.append(request) or b"")
    service = {"HealthEventOccurredV1": method}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("datamodels.PlatformConnector", service)]
    )
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    assert NVSentinel(f"{tmp_path}/socket", drains=drains).send(IN_KUBERNETES) == "accepted"
    server.stop(None)
    outer = read_fields(received[0])
    event = read_fields(outer[2])
    assert outer[1] == event[1] == 1
    assert (event[2], event[4], event[13]) == (b"torchlens-perf", b"TorchlensSlowNode", b"worker-1")
    assert event[7] == b"torchlens_perf run r: slow"
    assert (event.get(5), event[16]) == (fatal, strategy)
    assert read_fields(event[12])[1] > 1_700_000_000


def test_absent_nvsentinel_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NotSentError, match="UNAVAILABLE"):
        NVSentinel(f"{tmp_path}/socket", drains=False).send(NODE)


@pytest.mark.long
@pytest.mark.skipif(
    bool(why_no_nodes()) or not shutil.which("slurmctld"),
    reason="Slurm is not installed, or no namespaces",
)
def test_slurm_keeps_a_comment_and_drains_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path / "slurm") as environ:
        monkeypatch.setenv("SLURM_CONF", environ["SLURM_CONF"])
        name = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N"], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        node = msgspec.structs.replace(NODE, scheduler_names={"slurm.node.name": name})
        Slurm(drains=False).send(node)
        shown = show_node(name)
        assert "Comment=torchlens_perf run r: slow" in shown
        assert "DRAIN" not in shown
        Slurm(drains=True).send(node)
        assert "Reason=torchlens_perf run r: slow" in (shown := show_node(name))
        assert "DRAIN" in shown
        with pytest.raises(NotSentError, match="Invalid node name"):
            Slurm(drains=True).send(msgspec.structs.replace(NODE, host="nowhere"))


def show_node(name: str) -> str:
    return subprocess.run(
        ["scontrol", "show", "node", name],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    ).stdout
