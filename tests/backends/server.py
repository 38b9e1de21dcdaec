"""Environments of real backends, and requests to their servers."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

ENVIRONMENTS = ROOT / ".venv-backends"


def environment(name: str) -> Path:
    """Return the folder where a backend is installed. Skip the test if the folder is missing."""
    folder = ENVIRONMENTS / name
    if not (folder / "ready").exists():
        failed = folder / "failed"
        why = failed.read_text().strip() if failed.exists() else "make test-backends installs it"
        pytest.skip(f"{name} is not installed in {folder.relative_to(ROOT)}: {why}")
    return folder


def get(address: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request, and return the JSON of the response. body: posted as JSON."""
    request = urllib.request.Request(address)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def status_of(address: str, body: bytes = b"", **headers: str) -> int:
    """Return the status of the response to an OTLP request."""
    request = urllib.request.Request(
        address, body, {"Content-Type": "application/x-protobuf", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: int = answer.status
    except urllib.error.HTTPError as error:
        found = error.code
    return found


def is_up(address: str) -> bool:
    """Return True if the server responds at all."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(address, timeout=5).close()
    return True
