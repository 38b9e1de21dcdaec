"""rotel, a collector written in Rust, on loopback: it decodes OTLP and forwards the data to one
exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.backends.server import environment
from tests.support.servers import Server, accepts, free_port


class Rotel:
    """A running collector."""

    def __init__(self, folder: Path, exporter: Mapping[str, str]) -> None:
        """Start the collector. exporter: variables that configure rotel's exporter."""
        (program,) = environment("rotel").glob("lib/python*/site-packages/rotel/rotel-agent")
        self._http, self._grpc = free_port(), free_port()
        command = [
            str(program), "start", "--otlp-http-endpoint", f"127.0.0.1:{self._http}",
            "--otlp-grpc-endpoint", f"127.0.0.1:{self._grpc}", "--batch-timeout", "100ms",
        ]  # fmt: skip
        self.server = Server(command, folder, self._is_up, exporter)

    def exporter_variables(self, protocol: str) -> dict[str, str]:
        """Return the variables that docs/guides/backends.md documents."""
        port = self._grpc if protocol == "grpc" else self._http
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }

    def _is_up(self) -> bool:
        return all(accepts(port) for port in (self._http, self._grpc))
