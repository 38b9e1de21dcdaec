"""Build the OTLP exporter from OTEL_* variables (docs/guides/opentelemetry.md). Sidecar only.

The sidecar uses no provider of the SDK, so this module reads the variables of providers and
processors. The SDK's exporters read OTEL_EXPORTER_OTLP_* themselves. If no endpoint is set, there
is no exporter and no network access.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.config import Config, from_environment
from torchlens_perf.errors import guard
from torchlens_perf.exporters.redaction import add_redaction_to_log_handlers

if TYPE_CHECKING:
    from torchlens_perf.analysis.statistics.hardware import HardwareSamples
    from torchlens_perf.exporters import Assessment, ExportBatch, Exporter, NodeRole
    from torchlens_perf.exporters.delivery.sender import Transport
    from torchlens_perf.exporters.otlp import OtlpExporter, SignalDelivery
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.identity import Identity

logger = logging.getLogger("torchlens_perf.sidecar")

_SIGNALS = ("traces", "metrics", "logs")
HTTP, GRPC = _PROTOCOLS = ("http/protobuf", "grpc")
_LOCAL = ("console", "otlp_json_file")
_DISK_BYTES_DIVISOR = 8
_EXPONENTIAL, _EXPLICIT = "base2_exponential_bucket_histogram", "explicit_bucket_histogram"
_TEMPORALITIES = ("cumulative", "delta", "lowmemory")
# For each signal, the prefix of the batch processor's variables and OpenTelemetry's default delay
# in ms.
_BATCHES = {"traces": ("OTEL_BSP", 5000), "logs": ("OTEL_BLRP", 1000)}
_BATCH_ITEMS, _EXPORT_INTERVAL_MS = 512, ("OTEL_METRIC_EXPORT_INTERVAL", 60_000)


def read_enabled_signals(environ: Mapping[str, str]) -> dict[str, str]:
    """Return for each enabled signal its protocol, "console" or "otlp_json_file".

    The signals are "traces", "metrics" and "logs". A signal is enabled by an endpoint, or by
    OTEL_*_EXPORTER. A signal is disabled by OTEL_SDK_DISABLED, by OTEL_*_EXPORTER=none, or by an
    unknown exporter or protocol, which is logged.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    signals = {}
    for signal in _SIGNALS:
        upper = signal.upper()
        exporter = environ.get(f"OTEL_{upper}_EXPORTER", "").strip()
        endpoint = environ.get(f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT") or environ.get(
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        )
        if exporter in ("", "otlp"):
            if endpoint or exporter:
                protocol = _read_protocol(environ, upper)
                if protocol:
                    signals[signal] = protocol
        elif exporter in _LOCAL:
            signals[signal] = exporter
        elif exporter != "none":
            logger.warning(
                "OTEL_%s_EXPORTER=%s is not supported (otlp, console, otlp_json_file, none): %s"
                " are off",
                upper,
                exporter,
                signal,
            )
    return signals


def _read_protocol(environ: Mapping[str, str], upper: str) -> str:
    name = f"OTEL_EXPORTER_OTLP_{upper}_PROTOCOL"
    protocol = (
        environ.get(name) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOLS[0]
    ).strip()
    if protocol not in _PROTOCOLS:
        logger.warning(
            "OTLP protocol %r is not supported (%s): %s are off",
            protocol,
            ", ".join(_PROTOCOLS),
            upper.lower(),
        )
        return ""
    return protocol


def create_exporter_from_environment(
    run: RunDirectory | None = None, owner: str = ""
) -> Exporter | None:
    """Build the exporter that the environment configures; None if no signal is enabled.

    - run: directory for undelivered requests and for otlp_json_file; None to keep requests in
      memory.
    - owner: name of the node; "" in a replay, which sends the undelivered requests of all nodes.
    """
    environ = os.environ
    signals = read_enabled_signals(environ)
    if not signals:
        return None
    add_redaction_to_log_handlers(environ)
    folder = None if run is None else run.path
    made = {}
    for name, way in signals.items():
        # An invalid variable only disables this signal.
        with guard(f"exporting {name} over OTLP"):
            made[name] = _make_signal(name, way, environ, folder, owner)
    if not made:
        return None
    with guard("exporting over OTLP"):
        return _make_exporter(made, environ)
    return None


def _make_signal(
    name: str, way: str, environ: Mapping[str, str], folder: Path | None, owner: str
) -> SignalDelivery:
    from torchlens_perf.exporters.delivery.outbox import Outbox, OutboxLimits, outbox_folder
    from torchlens_perf.exporters.otlp import SignalDelivery

    transport = _make_transport(name, way, folder, owner)
    disk_bytes = from_environment(environ).get("disk_bytes", Config.disk_bytes)
    waits_in = outbox_folder(folder) if folder is not None and way in _PROTOCOLS else None
    room = OutboxLimits(disk_bytes=disk_bytes // _DISK_BYTES_DIVISOR)
    if name not in _BATCHES:
        interval_s = _read_positive_integer(environ, *_EXPORT_INTERVAL_MS) / 1e3
        return SignalDelivery(
            Outbox(waits_in, owner, name, batch_items=1, room=room), transport, interval_s
        )
    prefix, delay_ms = _BATCHES[name]
    items = _read_positive_integer(environ, f"{prefix}_MAX_EXPORT_BATCH_SIZE", _BATCH_ITEMS)
    delay_s = _read_positive_integer(environ, f"{prefix}_SCHEDULE_DELAY", delay_ms) / 1e3
    return SignalDelivery(Outbox(waits_in, owner, name, items, delay_s, room), transport)


def _make_transport(name: str, way: str, folder: Path | None, owner: str) -> Transport:
    if way == "otlp_json_file":
        from torchlens_perf.exporters.delivery.local import FileTransport

        return FileTransport(
            name, (folder or Path()) / "otlp" / f"{owner or 'replay'}-{name}.jsonl"
        )
    from torchlens_perf.exporters.delivery import sdk_exporters

    if way == "console":
        return sdk_exporters.create_console_transport(name)
    return (
        sdk_exporters.create_grpc_transport(name)
        if way == GRPC
        else sdk_exporters.create_http_transport(name)
    )


def _make_exporter(made: Mapping[str, SignalDelivery], environ: Mapping[str, str]) -> OtlpExporter:
    from torchlens_perf.exporters.otlp import OtlpExporter
    from torchlens_perf.exporters.series import ArrayMeter

    aggregation = (
        environ.get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "").strip().lower()
    )
    if aggregation not in ("", _EXPONENTIAL, _EXPLICIT):
        logger.warning(
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION=%s is unknown, using %s",
            aggregation,
            _EXPONENTIAL,
        )
    temporality = (
        environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().lower()
    )
    if temporality not in ("", *_TEMPORALITIES):
        logger.warning(
            "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=%s is unknown, using cumulative",
            temporality,
        )
    exemplars = environ.get("OTEL_METRICS_EXEMPLAR_FILTER", "").strip().lower() != "always_off"
    meter = ArrayMeter(
        explicit_bounds=aggregation == _EXPLICIT,
        delta=temporality in ("delta", "lowmemory"),
        exemplars=exemplars,
    )
    return OtlpExporter(made, meter, environ)


def _read_positive_integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and int(text) > 0:
        return int(text)
    logger.warning("%s=%s is no positive whole number: %d is used", name, text, default)
    return default


class DeferredExporter:
    """Creates an exporter when there is data to export, and forwards all calls to this exporter.

    Importing the SDK may take longer than a short run. If `make` returns None, all data is dropped.
    """

    def __init__(self, make: Callable[[], Exporter | None]) -> None:
        self._make: Callable[[], Exporter | None] | None = make
        self._made: Exporter | None = None
        self._part: NodeRole | None = None

    def export(self, batch: ExportBatch) -> None:
        exporter = self._get_or_create_exporter()
        if exporter is not None:
            exporter.export(batch)

    def on_assessment(self, assessment: Assessment) -> None:
        exporter = self._get_or_create_exporter()
        if exporter is not None:
            exporter.on_assessment(assessment)

    def record_hardware(self, identity: Identity, hardware: HardwareSamples) -> None:
        exporter = self._get_or_create_exporter()
        if exporter is not None:
            exporter.record_hardware(identity, hardware)

    def update_role(self, part: NodeRole) -> bytes:
        self._part = part
        return b"" if self._made is None else self._made.update_role(part)

    def spans_sent(self) -> Mapping[int, tuple[int, int]]:
        """Return OtlpExporter.spans_sent, or an empty dict if the exporter sends no spans."""
        return getattr(self._made, "spans_sent", {})

    def wait_for_room(self, timeout_s: float) -> bool:
        return self._made is None or self._made.wait_for_room(timeout_s)

    def shutdown(self, timeout_s: float) -> list[str]:
        return [] if self._made is None else self._made.shutdown(timeout_s)

    def _get_or_create_exporter(self) -> Exporter | None:
        if self._make is not None:
            make, self._make = self._make, None
            self._made = make()
            if self._made is not None and self._part is not None:
                self._made.update_role(self._part)
        return self._made
