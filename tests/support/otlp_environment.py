"""Create exporters that depend only on the given environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torchlens_perf.exporters import Exporter
from torchlens_perf.exporters.delivery import sdk_exporters
from torchlens_perf.exporters.delivery.answer import SendResult
from torchlens_perf.exporters.delivery.sender import Item
from torchlens_perf.exporters.otlp_environment import create_exporter_from_environment
from torchlens_perf.run.directory import RunDirectory


@contextmanager
def variables(told: Mapping[str, str]) -> Iterator[None]:
    """Set these OpenTelemetry variables, and no others, in this process's environment."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(told)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def exporter_for(
    told: Mapping[str, str], run: RunDirectory | None = None, owner: str = ""
) -> Exporter:
    """Return the exporter that the given environment variables configure."""
    with variables(told):
        made = create_exporter_from_environment(run, owner)
    assert made is not None
    return made


def transport_for(protocol: str, signal: str = "traces", **told: str) -> sdk_exporters.SdkTransport:
    """Return the transport for the given variables, whose names lack OTEL_EXPORTER_OTLP_."""
    with variables({f"OTEL_EXPORTER_OTLP_{name}": value for name, value in told.items()}):
        return sdk_exporters.create_transport(signal, protocol)


def sent(protocol: str, items: Sequence[Item], signal: str = "traces", **told: str) -> SendResult:
    """Send one request without a retry, and return the answer."""
    transport = transport_for(protocol, signal, **told)
    try:
        return transport.send(items)
    finally:
        transport.close()
