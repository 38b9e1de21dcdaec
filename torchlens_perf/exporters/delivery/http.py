"""Requests over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import importlib.metadata
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import requests
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.auth import HTTPBasicAuth
from requests.utils import get_auth_from_url

from torchlens_perf.errors import printable
from torchlens_perf.exporters.delivery.answer import Answer, Outcome, later, wait_of
from torchlens_perf.exporters.delivery.deadline import bounded, within
from torchlens_perf.exporters.delivery.settings import Destination
from torchlens_perf.version import VERSION

_PROTOBUF = "application/x-protobuf"
_COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "none": lambda body: body,
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": lambda body: zlib.compress(body, 1),
}
_PROVIDERS = "opentelemetry_otlp_credential_provider"
# The endpoint is busy or away; 500 is not on the specification's list, but proxies answer it when what is behind them
# is.
_BUSY = (408, 429, 500, 502, 503, 504)
# This is no endpoint, or not with these credentials: somebody has to mend that.
_NOT_IT = (401, 403, 404, 405, 407)
_MAX_REASON = 200
_PIECE, _MAX_ANSWER = 256, 1 << 16  # bytes


class HttpTransport:
    """One signal's requests to one endpoint. One thread."""

    def __init__(self, to: Destination) -> None:
        """Raises RuntimeError for a credential provider that is not there."""
        self._to = to
        self._http = bounded(_Session() if not to.credentials else _session_of(to.credentials))
        if not to.credentials:
            self._http.auth = _authorize
        if to.certificate:
            self._http.verify = to.certificate
        if to.client_certificate:
            self._http.cert = (to.client_certificate, to.client_key) if to.client_key else to.client_certificate
        self._headers = {"Content-Type": _PROTOBUF, "User-Agent": f"torchlens_perf/{VERSION}", **to.headers}
        if to.compression != "none":
            self._headers["Content-Encoding"] = to.compression

    def send(self, body: bytes) -> Answer:
        """One try, within the timeout, whatever the server does."""
        packed = _COMPRESS[self._to.compression](body)
        try:
            return within(self._to.timeout_s, lambda: self._post(packed))
        except (requests.RequestException, OSError) as error:
            return later(f"{type(error).__name__}: {error}")

    def _post(self, packed: bytes) -> Answer:
        # Redirects are not followed: a POST with credentials must not go where a proxy points.
        with self._http.post(
            self._to.endpoint,
            packed,
            headers=self._headers,
            timeout=self._to.timeout_s,
            allow_redirects=False,
            stream=True,
        ) as response:
            return _answer(response, _content(response))

    def close(self) -> None:
        self._http.close()


def _content(response: requests.Response) -> bytes:
    """The answer, or its begin where it is long: anything may stand at a wrong address."""
    content = b""
    for piece in response.iter_content(_PIECE):
        content += piece
        if len(content) >= _MAX_ANSWER:
            break
    return content


def _answer(response: requests.Response, content: bytes) -> Answer:
    status = response.status_code
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if response.ok and not 300 <= status < 400:
        if kind == "text/html":
            return later("the answer is a web page: this is not an OTLP endpoint")
        return Answer(Outcome.DELIVERED, rejected=_rejected(content) if kind == _PROTOBUF else 0)
    if 300 <= status < 400:
        return later(f"redirected ({status}); set the endpoint's final address")
    reason = f"HTTP {status} {_message(content, kind)}".strip()
    if status in _BUSY:
        return later(reason, wait_of(response.headers.get("Retry-After", "")))
    if status in _NOT_IT:
        return later(reason)
    return Answer(Outcome.TOO_LARGE if status == 413 else Outcome.REFUSED, reason)


def _rejected(content: bytes) -> int:
    """How many items a partial success leaves out. The three signals' answers are laid out alike."""
    try:
        return max(0, int(ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans))
    except DecodeError:
        return 0


def _message(content: bytes, kind: str) -> str:
    text = ""
    if kind == _PROTOBUF:
        try:
            text = Status.FromString(content).message
        except DecodeError:
            text = ""
    elif kind != "text/html":
        text = content[:_MAX_REASON].decode(errors="replace")
    return printable(text)[:_MAX_REASON]


def _authorize(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """With it, requests does not look into ~/.netrc, which would replace the header that the user has set.

    Credentials in the endpoint's address are sent as without it, where there is no header. Proxies and certificates
    stay the environment's.
    """
    user, password = get_auth_from_url(request.url or "")
    if user and "Authorization" not in request.headers:
        request = HTTPBasicAuth(user, password)(request)
    return request


class _Session(requests.Session):
    """One whose own certificate, OTEL_EXPORTER_OTLP_CERTIFICATE, goes before a machine's REQUESTS_CA_BUNDLE."""

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        own = self.verify if isinstance(self.verify, str) and verify is None else verify
        return super().merge_environment_settings(url, proxies, stream, own, cert)


def _session_of(provider: str) -> requests.Session:
    """The session that the user's credential provider makes."""
    for entry in importlib.metadata.entry_points(group=_PROVIDERS, name=provider):
        session = entry.load()()
        if isinstance(session, requests.Session):
            return session
        raise RuntimeError(f"the credential provider {provider!r} makes no requests.Session")
    raise RuntimeError(f"there is no credential provider {provider!r}")
