"""What an OTLP/HTTP endpoint's answer means. The SDK takes every answer below 400 for success."""

from __future__ import annotations

from typing import Any

import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.auth import HTTPBasicAuth
from requests.utils import get_auth_from_url

_PROTOBUF = "application/x-protobuf"


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


class ResponseChecker:
    """Checks the answers to one signal's requests, and counts what was rejected in those that are a success."""

    def __init__(self) -> None:
        self.rejected = 0

    def session(self) -> requests.Session:
        http = _Session()
        http.hooks["response"].append(self._check)
        http.auth = _authorize
        return http

    def _check(self, response: requests.Response, **options: Any) -> None:
        """Raises where the endpoint has not taken the request, which the SDK then counts as failed."""
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if 300 <= response.status_code < 400:
            # Not followed: a POST with credentials must not go where a proxy points.
            raise requests.RequestException(f"redirected ({response.status_code}); set the endpoint's final address")
        if response.ok and kind == "text/html":
            raise requests.RequestException("the answer is a web page: this is not an OTLP endpoint")
        if response.ok and kind == _PROTOBUF:
            # Metrics' answer is laid out the same: partial_success holds a number and a message.
            self.rejected += ExportTraceServiceResponse.FromString(response.content).partial_success.rejected_spans
