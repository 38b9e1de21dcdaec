"""Where one signal goes, and how: the OTEL_EXPORTER_OTLP_* variables, a signal's own before those of all signals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from opentelemetry.util.re import parse_env_headers

from torchlens_perf.exporters.delivery.endpoint_address import parsed

HTTP, GRPC = "http/protobuf", "grpc"
_DEFAULT_ENDPOINTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}
_DEFAULT_TIMEOUT_S = 10.0
COMPRESSIONS = ("none", "gzip", "deflate")


@dataclasses.dataclass(frozen=True)
class Destination:
    """An endpoint for one signal."""

    signal: str
    """traces, metrics or logs."""
    endpoint: str
    """Over HTTP the whole address; over gRPC the one that channels are made for: host:port, or unix:/path."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout_s: float = _DEFAULT_TIMEOUT_S
    compression: str = "none"
    certificate: str = ""
    """A file with the authorities to trust; "": those of the machine."""
    client_certificate: str = ""
    client_key: str = ""
    insecure: bool = False
    """gRPC without TLS."""
    credentials: str = ""
    """The name of a credential provider (entry point `opentelemetry_otlp_credential_provider`); "": none."""


def destination(signal: str, protocol: str, environ: Mapping[str, str]) -> Destination:
    """What the variables say of a signal. Raises ValueError, with the variable's name, for one that cannot be used."""

    def of(name: str) -> str:
        for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
            if value := environ.get(variable, "").strip():
                return value
        return ""

    compression = of("COMPRESSION").lower() or "none"
    if compression not in COMPRESSIONS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_COMPRESSION={compression!r}: must be {', '.join(COMPRESSIONS)}")
    provider = "OTEL_PYTHON_EXPORTER_OTLP_{}_{}CREDENTIAL_PROVIDER"
    transport = "GRPC" if protocol == GRPC else "HTTP"
    endpoint, insecure = _endpoint(signal, protocol, environ), of("INSECURE").lower() == "true"
    address = parsed(endpoint)
    if protocol == GRPC and not address.is_grpc_name:
        insecure = address.scheme == "http" or (not address.scheme and insecure)
        endpoint = address.host
        if not endpoint:
            raise ValueError(f"an OTLP endpoint over gRPC must be host:port, or begin with http://; not for {signal}")
    headers = parse_env_headers(of("HEADERS"), liberal=True)
    for name, value in headers.items():
        if not _can_be_sent(value, "ascii" if protocol == GRPC else "latin-1"):  # the value may be a secret
            raise ValueError(f"OTEL_EXPORTER_OTLP_HEADERS: {name} has a character that no header can have")
    return Destination(
        signal=signal,
        endpoint=endpoint,
        headers=headers,
        timeout_s=_seconds("OTEL_EXPORTER_OTLP_TIMEOUT", of("TIMEOUT")),
        compression=compression,
        certificate=of("CERTIFICATE"),
        client_certificate=of("CLIENT_CERTIFICATE"),
        client_key=of("CLIENT_KEY"),
        insecure=insecure,
        credentials=environ.get(provider.format(transport, f"{signal.upper()}_"), "")
        or environ.get(provider.format(transport, ""), ""),
    )


def _endpoint(signal: str, protocol: str, environ: Mapping[str, str]) -> str:
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    shared = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or _DEFAULT_ENDPOINTS[protocol]
    if protocol == GRPC:
        return own or shared
    endpoint = own or f"{shared.rstrip('/')}/v1/{signal}"
    address = parsed(endpoint)
    if address.scheme not in ("http", "https") or address.host.partition(":")[0] == "":
        raise ValueError(f"an OTLP endpoint must begin with http:// or https://; that for {signal} does not")
    return endpoint


def _can_be_sent(value: str, encoding: str) -> bool:
    """By RFC 9110, 5.5; over gRPC: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md, ASCII-Value."""
    try:
        return all(0x20 <= each != 0x7F for each in value.encode(encoding))
    except UnicodeEncodeError:
        return False


def _seconds(name: str, text: str) -> float:
    if not text:
        return _DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={text!r}: must be a number of seconds")
    return value
