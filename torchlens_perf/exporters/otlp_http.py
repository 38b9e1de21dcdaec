"""What an OTLP/HTTP endpoint's answer means. The SDK takes every answer below 400 for success."""

from __future__ import annotations

from typing import Any

import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

_PROTOBUF = "application/x-protobuf"


class ResponseChecker:
    """Checks the answers to one signal's requests, and counts what was rejected in those that are a success."""

    def __init__(self) -> None:
        self.rejected = 0

    def session(self) -> requests.Session:
        session = requests.Session()
        session.hooks["response"].append(self._check)
        return session

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
