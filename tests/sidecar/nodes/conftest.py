"""What tests between nodes share: a store, and the end of what was opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from torchlens_perf.sidecar.nodes.client import StoreServer


@pytest.fixture
def open_at_end() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def job_store(open_at_end: ExitStack) -> tuple[str, int]:
    """A store as a job of several nodes has."""
    server = StoreServer("127.0.0.1")
    open_at_end.callback(server.close)
    return "127.0.0.1", server.port
