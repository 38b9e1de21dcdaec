"""An HTTP session for exporters of the SDK that classifies responses.

The SDK counts redirects and web pages as success, and does not report rejected items.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import Any

import requests
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from requests.auth import HTTPBasicAuth
from requests.utils import get_auth_from_url

from torchlens_perf.errors import printable
from torchlens_perf.exporters.delivery.answer import (
    MAX_REASON,
    NotDeliveredError,
    SendOutcome,
    SendResult,
    count_rejected_items,
    parse_retry_after,
    retry_result,
)

_PROTOBUF = "application/x-protobuf"
_PROVIDERS = "opentelemetry_otlp_credential_provider"
# The endpoint is busy or unreachable. OTLP's specification does not list 500, but proxies send it.
_BUSY = (408, 429, 500, 502, 503, 504)
# The address or the credentials are wrong. The user may fix them while the job runs.
_MISCONFIGURED = (401, 403, 404, 405, 407)
_CHUNK_BYTES, _MAX_RESPONSE_BYTES = 256, 1 << 16


class ClassifyingSession(requests.Session):
    """The HTTP session of one exporter. Not thread-safe."""

    def __init__(self, provider: str = "") -> None:
        """Prepare the session. Raises RuntimeError if the credential provider is missing.

        provider: name of the credential provider whose session sends the requests; "" for none.
        """
        super().__init__()
        self.answer: SendResult | None = None
        """Result of the last request; None before the first request."""
        self._provider_session = _load_provider_session(provider) if provider else None
        if not provider:
            self.auth = _add_credentials

    def request(
        self, method: str | bytes, url: str | bytes, *arguments: Any, **named: Any
    ) -> requests.Response:
        """Send a request once. Raises NotDeliveredError if the request was not delivered."""
        # Do not follow redirects, because credentials must not be sent to another server.
        named.update(allow_redirects=False, stream=True)
        try:
            with self._send_with_session(method, url, *arguments, **named) as response:
                self.answer = _classify_response(response, _read_body(response))
        except Exception as error:
            # A session of a user's provider may raise any exception.
            self.answer = retry_result(f"{type(error).__name__}: {error}")
        if self.answer.outcome is not SendOutcome.DELIVERED:
            raise NotDeliveredError(self.answer.reason)
        return response

    def _send_with_session(self, *arguments: Any, **named: Any) -> requests.Response:
        provided = self._provider_session
        if provided is None:
            return super().request(*arguments, **named)
        provided.verify, provided.cert = self.verify, self.cert
        return provided.request(*arguments, **named)

    def merge_environment_settings(
        self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
    ) -> Any:
        """Use the exporter's own certificate instead of REQUESTS_CA_BUNDLE from the environment."""
        own = self.verify if isinstance(self.verify, str) and verify is None else verify
        return super().merge_environment_settings(url, proxies, stream, own, cert)


def _read_body(response: requests.Response) -> bytes:
    """Read the start of the response body. A wrong server may send any amount of data."""
    content = b""
    for piece in response.iter_content(_CHUNK_BYTES):
        content += piece
        if len(content) >= _MAX_RESPONSE_BYTES:
            break
    return content


def _classify_response(response: requests.Response, content: bytes) -> SendResult:
    status = response.status_code
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if response.ok and not 300 <= status < 400:
        if kind == "text/html":
            return retry_result("the answer is a web page: this is not an OTLP endpoint")
        return SendResult(
            SendOutcome.DELIVERED,
            rejected=count_rejected_items(content) if kind == _PROTOBUF else 0,
        )
    if 300 <= status < 400:
        return retry_result(f"redirected ({status}); set the endpoint's final address")
    reason = f"HTTP {status} {_error_message(content, kind)}".strip()
    if status in _BUSY:
        return retry_result(reason, parse_retry_after(response.headers.get("Retry-After", "")))
    if status in _MISCONFIGURED:
        return retry_result(reason)
    return SendResult(SendOutcome.REFUSED, reason)


def _error_message(content: bytes, kind: str) -> str:
    text = ""
    if kind == _PROTOBUF:
        with suppress(DecodeError):
            text = Status.FromString(content).message
    elif kind != "text/html":
        text = content[:MAX_REASON].decode(errors="replace")
    return printable(text)[:MAX_REASON]


def _add_credentials(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Add the credentials in the endpoint's address to a request that has no Authorization header.

    The default authorization of requests would overwrite the user's header by ~/.netrc. Proxies and
    certificates are still read from the environment.
    """
    user, password = get_auth_from_url(request.url or "")
    if user and "Authorization" not in request.headers:
        request = HTTPBasicAuth(user, password)(request)
    return request


def _load_provider_session(provider: str) -> requests.Session:
    """Create a session with the user's credential provider."""
    for entry in importlib.metadata.entry_points(group=_PROVIDERS, name=provider):
        session = entry.load()()
        if isinstance(session, requests.Session):
            return session
        raise RuntimeError(
            f"the credential provider {provider!r} does not return a requests.Session"
        )
    raise RuntimeError(f"there is no credential provider {provider!r}")
