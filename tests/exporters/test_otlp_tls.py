"""OTLP endpoints without a valid certificate receive no spans, no headers and no plain text."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import requests

from tests.exporters.test_otlp_environment import one_step
from tests.support.certificates import Certificate, certificate
from tests.support.endpoints import Spans, add_spans
from tests.support.recorded_run import Sidecar, spans_of
from torchlens_perf.exporters.otlp_environment import create_exporter_from_environment

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="no `openssl` command makes certificates"
    ),
]
SECRET = "canary-of-tls"
HTTP, GRPC = "http/protobuf", "grpc"
WITHIN_S = 3.0  # A delivery takes only milliseconds.
UNDELIVERED = "2 of 2 spans were not delivered"


class Endpoint(http.server.BaseHTTPRequestHandler):
    """An endpoint that accepts everything and records the headers."""

    seen: list[str] = []  # noqa: RUF012 - of one test

    def do_POST(self) -> None:
        Endpoint.seen.append(str(self.headers))
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def over_http(shown: Certificate, clients: Certificate | None = None) -> Iterator[str]:
    """Run an HTTP endpoint with the given certificate and return its address.

    The endpoint may require client certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*shown)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    server.daemon_threads = True
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    Endpoint.seen.clear()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def over_grpc(shown: Certificate, clients: Certificate | None = None) -> Iterator[str]:
    """Run a gRPC endpoint for spans with the given certificate and return its address."""
    pair = [(shown.key.read_bytes(), shown.path.read_bytes())]
    asked = None if clients is None else clients.path.read_bytes()
    server = grpc.server(ThreadPoolExecutor(2))
    spans = Spans(grpc.StatusCode.OK)
    add_spans(spans, server)
    credentials = grpc.ssl_server_credentials(pair, asked, require_client_auth=clients is not None)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    Endpoint.seen.clear()
    spans.seen = Endpoint.seen
    try:
        yield f"https://127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)


SERVING = {HTTP: over_http, GRPC: over_grpc}


@pytest.mark.parametrize("trusted", [False, True])
def test_self_signed_certificate_is_accepted_only_if_the_user_trusts_it(
    trusted: bool, sidecar: Callable[..., Sidecar], tmp_path: Path
) -> None:
    """Certificates that the machine trusts make no difference. Undelivered spans are counted."""
    shown = certificate(tmp_path / "tls")
    told = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(shown.path)} if trusted else {}
    bundle = requests.certs.where()
    with over_http(shown) as address:
        ended = sidecar(
            REQUESTS_CA_BUNDLE=bundle, OTEL_EXPORTER_OTLP_ENDPOINT=address, OTEL_EXPORTER_OTLP_TIMEOUT="2",
            OTEL_EXPORTER_OTLP_HEADERS=f"authorization={SECRET}", **told,
        )  # fmt: skip
    count = spans_of(ended.run, 1)

    assert any(SECRET in each for each in Endpoint.seen) == trusted
    assert (f"OTLP: {count} of {count} spans were not delivered" in ended.report) != trusted
    assert SECRET not in ended.log + ended.report


def exported(told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Send the spans of a step with the given variables. Return the exporter's notes."""
    told = {
        **told,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET}",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    exporter = create_exporter_from_environment()
    assert exporter is not None
    exporter.export(one_step())
    return "; ".join(exporter.shutdown(WITHIN_S))


FAULTS = {
    "none": {},
    "expired": {"expired": True},
    "wrong host": {"names": "DNS:elsewhere.example,IP:192.0.2.1"},
}


@pytest.mark.parametrize("protocol", SERVING)
@pytest.mark.parametrize("fault", FAULTS)
def test_endpoint_with_an_expired_or_foreign_certificate_receives_no_span(
    fault: str, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign certificate is one for another host."""
    shown = certificate(tmp_path / "tls", **FAULTS[fault])
    with SERVING[protocol](shown) as address:
        notes = exported(
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": address + ("/v1/traces" if protocol == HTTP else ""),
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(shown.path),
            },
            monkeypatch,
        )  # fmt: skip
        seen = list(Endpoint.seen)

    assert any(SECRET in each for each in seen) == (fault == "none")
    assert (UNDELIVERED in notes) == (fault != "none")


@pytest.mark.parametrize("protocol", SERVING)
@pytest.mark.parametrize("has_key", [False, True])
def test_spans_are_delivered_only_with_the_required_client_certificate(
    has_key: bool, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a client certificate, the undelivered spans are counted."""
    shown, own = certificate(tmp_path / "tls"), certificate(tmp_path / "own", "DNS:client")
    told = {
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(own.path),
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(own.key),
    }
    with SERVING[protocol](shown, own) as address:
        notes = exported(
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": address + ("/v1/traces" if protocol == HTTP else ""),
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(shown.path),
                **(told if has_key else {}),
            },
            monkeypatch,
        )  # fmt: skip
        seen = list(Endpoint.seen)

    assert bool(seen) == has_key
    assert (UNDELIVERED in notes) != has_key
