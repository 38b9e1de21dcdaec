"""An OTLP endpoint whose certificate nobody has vouched for gets nothing: no span, no header, no plain text."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from tests.support.recorded_run import Sidecar, spans_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no `openssl` command makes certificates"),
]
SECRET = "canary-of-tls"


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Takes everything, and remembers the headers."""

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


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its address, and its own certificate."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    Endpoint.seen.clear()
    yield f"https://127.0.0.1:{server.server_port}", certificate
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("trusted", [False, True])
def test_certificate_of_nobody(trusted: bool, sidecar: Callable[..., Sidecar], endpoint: tuple[str, Path]) -> None:
    """Unless the user trusts it, whomever the machine trusts else; what was not delivered is counted."""
    address, certificate = endpoint
    told = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificate)} if trusted else {}
    bundle = requests.certs.where()
    ended = sidecar(
        REQUESTS_CA_BUNDLE=bundle, OTEL_EXPORTER_OTLP_ENDPOINT=address, OTEL_EXPORTER_OTLP_TIMEOUT="2",
        OTEL_EXPORTER_OTLP_HEADERS=f"authorization={SECRET}", **told,
    )  # fmt: skip
    count = spans_of(ended.run, 1)

    assert any(SECRET in each for each in Endpoint.seen) == trusted
    assert (f"OTLP: {count} of {count} spans were not delivered" in ended.report) != trusted
    assert SECRET not in ended.log + ended.report
