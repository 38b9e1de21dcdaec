"""A transport that writes requests to files, for clusters without a network.

Each line is one OTLP request in JSON
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding). A line can be sent to any OTLP
endpoint that accepts JSON.
"""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from torchlens_perf.exporters.delivery.answer import SendOutcome, SendResult, retry_result
from torchlens_perf.run import ownership

if TYPE_CHECKING:
    from torchlens_perf.exporters.delivery.sender import Item

_ENCODERS = {
    "traces": ("trace_encoder", "encode_spans"),
    "metrics": ("metrics_encoder", "encode_metrics"),
    "logs": ("_log_encoder", "encode_logs"),
}
_IDS = frozenset(("traceId", "spanId", "parentSpanId"))


def build_message(signal: str, items: Sequence[Item]) -> Any:
    """Build the protobuf message of a request with the encoders of the SDK's exporters."""
    module, name = _ENCODERS[signal]
    encode = getattr(
        importlib.import_module(f"opentelemetry.exporter.otlp.proto.common.{module}"), name
    )
    return encode(items[0] if signal == "metrics" else items)


def _convert_ids_to_hex(value: Any) -> Any:
    """Convert ids from the base64 of protobuf's JSON to the hexadecimal digits of OTLP."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(each).hex() if key in _IDS else _convert_ids_to_hex(each)
            for key, each in value.items()
        }
    return [_convert_ids_to_hex(each) for each in value] if isinstance(value, list) else value


class FileTransport:
    """Appends one line per request to a file, as requested by OTEL_*_EXPORTER=otlp_json_file."""

    def __init__(self, signal: str, path: Path) -> None:
        self._signal, self._path = signal, path

    def send(self, items: Sequence[Item]) -> SendResult:
        value = _convert_ids_to_hex(
            MessageToDict(build_message(self._signal, items), use_integers_for_enums=True)
        )
        line = (json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0, opener=ownership.open_to_append) as file:
                end = file.tell()
                try:
                    ownership.write_all(file, line)
                except OSError:
                    # A partial line would corrupt the next line.
                    file.truncate(end)
                    raise
        except OSError as error:
            return retry_result(f"{self._path}: {error.strerror}")
        return SendResult(SendOutcome.DELIVERED)

    def close(self) -> None:
        pass
