"""Addresses of endpoints without their secrets, as printed and as logged."""

from __future__ import annotations

import logging

import pytest

from torchlens_perf.exporters.delivery.endpoint_address import (
    parse_endpoint_address,
    remove_credentials,
)
from torchlens_perf.exporters.redaction import RedactionFilter

SHOWN = [
    ("http://h:4318", "http://h:4318"),
    ("https://h/v1/traces", "https://h/v1/traces"),
    ("https://user:s3cret@h:4318/x", "https://h:4318/x"),
    ("https://s3cret@h", "https://h"),
    ("https://h/x?tok=s3cret", "https://h/x"),
    ("https://h/x#s3cret", "https://h/x"),
    ("https://h?tok=s3cret@h", "https://h"),
    ("https://user:s3cret@x@h/x", "https://h/x"),
    ("https://user:s3cret?more@h:4318/x", "https://h:4318/x"),
    ("https://user:s3cret#more@h", "https://h"),
    ("https://user:s3cret/more@h/x", "https://h/x"),
    ("HTTPS://user:s3cret@h", "https://h"),
    ("user:s3cret@h:4317", "h:4317"),
    ("h:4317", "h:4317"),
    ("h:4317?tok=s3cret", "h:4317"),
    ("user:s3cret@[::1]:4317", "[::1]:4317"),
    ("http://[::1]:4318/x", "http://[::1]:4318/x"),
    ("http://[::1", "http://[::1"),
    ("unix:/run/otel.sock", "unix:/run/otel.sock"),
    ("unix:///run/otel.sock", "unix:///run/otel.sock"),
    ("unix-abstract:a@b", "unix-abstract:a@b"),
    ("dns:///h:4317", "dns:///h:4317"),
    ("dns:///user:s3cret@h:4317", "dns:///h:4317"),
    ("dns://8.8.8.8/user:s3cret@h:4317", "dns://8.8.8.8/h:4317"),
    ("dns:s3cret@h:4317", "h:4317"),
    ("ipv6:[::1]:4317", "ipv6:[::1]:4317"),
    ("http://h/@tenant", "http://h/@tenant"),
    ("http://h\x1b[31m/", "http://h?[31m/"),
    ("", ""),
]


@pytest.mark.parametrize(("address", "expected"), SHOWN)
def test_shown_address_has_no_credentials(address: str, expected: str) -> None:
    assert remove_credentials(address) == expected


@pytest.mark.parametrize("address", [address for address, _ in SHOWN if "s3cret" in address])
def test_log_omits_the_credentials_of_an_address(address: str) -> None:
    """The log filter removes the same parts as shown()."""
    record = logging.LogRecord("x", logging.ERROR, "", 0, "cannot reach %s", (address,), None)
    assert RedactionFilter({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": address}).filter(record)
    assert "s3cret" not in record.getMessage()
    assert parse_endpoint_address(address).host in record.getMessage()
