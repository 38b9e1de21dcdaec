"""Tests that the user's Authorization header is sent unchanged to the configured endpoint only."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.support.endpoints import serving
from tests.support.otlp_environment import sent
from torchlens_perf.exporters.delivery.answer import SendOutcome

_HEADER = "Bearer the-users"


class _Endpoint:
    """An OTLP endpoint on loopback that records requests, with a configurable response."""

    def __init__(self, leaving: ExitStack, location: str = "") -> None:
        received: list[str | None] = []
        self.received = received

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                received.append(self.headers.get("Authorization"))
                self.send_response(307 if location else 200)
                if location:
                    self.send_header("Location", location)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self.address = leaving.enter_context(serving(Handler))


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Set up a ~/.netrc with a password for 127.0.0.1.

    Return a stack that closes the test's servers.
    """
    netrc = tmp_path / ".netrc"
    netrc.write_text(
        "machine 127.0.0.1 login somebody password secret\ndefault login somebody password secret\n"
    )
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(netrc))
    with ExitStack() as stack:
        yield stack


def _export(address: str, header: str = _HEADER) -> SendOutcome:
    """Send one request as the sidecar does. Return its result."""
    told = {"HEADERS": f"Authorization={header.replace(' ', '%20')}"} if header else {}
    return sent("http/protobuf", [], ENDPOINT=address, TIMEOUT="2", **told).outcome


def test_users_header_has_priority_over_netrc(leaving: ExitStack) -> None:
    """The header arrives as the user has set it."""
    endpoint = _Endpoint(leaving)
    assert _export(endpoint.address) is SendOutcome.DELIVERED
    assert endpoint.received == [_HEADER]


def test_netrc_password_is_not_sent_without_a_header(leaving: ExitStack) -> None:
    """A password for a machine is not meant for every server on that machine."""
    endpoint = _Endpoint(leaving)
    assert _export(endpoint.address, header="") is SendOutcome.DELIVERED
    assert endpoint.received == [None]


def test_credentials_in_the_address_are_sent_without_a_header(leaving: ExitStack) -> None:
    endpoint = _Endpoint(leaving)
    address = endpoint.address.replace("http://", "http://me:word@")
    _export(address, header="")
    _export(address)

    assert endpoint.received == [f"Basic {base64.b64encode(b'me:word').decode()}", _HEADER]


def test_redirects_are_not_followed(leaving: ExitStack) -> None:
    """The target of a redirect receives no request, even on the same machine."""
    elsewhere = _Endpoint(leaving)
    endpoint = _Endpoint(leaving, location=f"{elsewhere.address}/v1/traces")

    assert _export(endpoint.address) is SendOutcome.LATER
    assert set(endpoint.received) == {_HEADER}
    assert elsewhere.received == []
