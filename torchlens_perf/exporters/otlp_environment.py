"""Build the OTLP exporter from OTEL_* variables (docs/guides/opentelemetry.md). Sidecar only.

The sidecar uses no provider of the SDK, so this module reads the variables of providers and
processors. The SDK's exporters read OTEL_EXPORTER_OTLP_* themselves. If no endpoint is set, there
is no exporter and no network access.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.errors import guard
from torchlens_perf.exporters.redaction import add_redaction_to_log_handlers
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.verdicts import node_state

if TYPE_CHECKING:
    from torchlens_perf.exporters import Exporter
    from torchlens_perf.exporters.delivery.sender import Transport
    from torchlens_perf.exporters.otlp import OtlpExporter, SignalDelivery
    from torchlens_perf.run.directory import RunDirectory


SIGNALS = ("traces", "metrics", "logs")
HTTP, GRPC = _PROTOCOLS = ("http/protobuf", "grpc")
_LOCAL = ("console", "otlp_json_file")
_AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
_TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
_EXPLICIT = "explicit_bucket_histogram"
_DELTA = ("delta", "lowmemory")
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
    if _read_word(environ, "OTEL_SDK_DISABLED") == "true":
        return {}
    signals = {}
    for signal in SIGNALS:
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
    run: RunDirectory | None = None, owner: str = "", only: Collection[str] = SIGNALS
) -> Exporter | None:
    """Build the exporter that the environment configures; None if no signal is enabled.

    - run: directory of the records, from which undelivered data is built again, and of
      otlp_json_file; None without a run directory.
    - owner: name of the node; "" in a replay of all nodes.
    - only: the signals to send, if they are enabled.
    """
    environ = os.environ
    signals = {name: way for name, way in read_enabled_signals(environ).items() if name in only}
    if not signals:
        return None
    add_redaction_to_log_handlers(environ)
    made = {}
    for name, way in signals.items():
        # An invalid variable only disables this signal.
        with guard(f"exporting {name} over OTLP"):
            made[name] = _make_signal(name, way, environ, run, owner)
    if made:
        with guard("exporting over OTLP"):
            return _make_exporter(made, environ, run, owner)
    return None


def _make_signal(
    name: str, way: str, environ: Mapping[str, str], run: RunDirectory | None, owner: str
) -> SignalDelivery:
    from torchlens_perf.exporters.delivery.sender import QueueLimits
    from torchlens_perf.exporters.otlp import SignalDelivery

    transport = _make_transport(name, way, None if run is None else run.path, owner)
    if name not in _BATCHES:
        interval_s = _read_positive_integer(environ, *_EXPORT_INTERVAL_MS) / 1e3
        replaces = _read_word(environ, _TEMPORALITY) not in _DELTA
        return SignalDelivery(transport, QueueLimits(batch_items=1, replaces=replaces), interval_s)
    prefix, delay_ms = _BATCHES[name]
    items = _read_positive_integer(environ, f"{prefix}_MAX_EXPORT_BATCH_SIZE", _BATCH_ITEMS)
    delay_s = _read_positive_integer(environ, f"{prefix}_SCHEDULE_DELAY", delay_ms) / 1e3
    most = _read_positive_integer(environ, f"{prefix}_MAX_QUEUE_SIZE", QueueLimits.max_items)
    return SignalDelivery(transport, QueueLimits(min(items, most), delay_s, most))


def _make_transport(name: str, way: str, folder: Path | None, owner: str) -> Transport:
    if way == "otlp_json_file":
        from torchlens_perf.exporters.delivery.local import FileTransport

        return FileTransport(
            name, (folder or Path()) / "otlp" / f"{owner or 'replay'}-{name}.jsonl"
        )
    from torchlens_perf.exporters.delivery.sdk_exporters import create_transport

    return create_transport(name, way)


def _make_exporter(
    made: Mapping[str, SignalDelivery],
    environ: Mapping[str, str],
    run: RunDirectory | None,
    owner: str,
) -> OtlpExporter:
    from torchlens_perf.exporters.otlp import OtlpExporter
    from torchlens_perf.exporters.otlp_catch_up import StepReader
    from torchlens_perf.exporters.series import ArrayMeter

    aggregation = _read_word(environ, _AGGREGATION)
    temporality = _read_word(environ, _TEMPORALITY)
    for name, word, known in (
        (_AGGREGATION, aggregation, ("base2_exponential_bucket_histogram", _EXPLICIT)),
        (_TEMPORALITY, temporality, ("cumulative", *_DELTA)),
    ):
        if word not in ("", *known):
            logger.warning("%s=%s is unknown, using %s", name, word, known[0])
    exemplars = _read_word(environ, "OTEL_METRICS_EXEMPLAR_FILTER") != "always_off"
    meter = ArrayMeter(
        explicit_bounds=aggregation == _EXPLICIT,
        delta=temporality in _DELTA,
        exemplars=exemplars,
    )
    if run is None or not owner:
        return OtlpExporter(made, meter, environ, keeps_sources=run is not None)
    return OtlpExporter(
        made,
        meter,
        environ,
        reader=StepReader(run, owner, environ),
        undelivered=node_state.load_or_new(run, owner).undelivered,
        keeps_sources=True,
    )


def _read_word(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip().lower()


def _read_positive_integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if text.isdecimal() and int(text) > 0:
        return int(text)
    logger.warning("%s=%s is no positive whole number: %d is used", name, text, default)
    return default
