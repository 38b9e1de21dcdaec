"""Servers of tests are ready when they are returned, and leave no process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.servers import Server, accepts, free_port


def test_server_and_its_children_end_with_the_context(tmp_path: Path) -> None:
    port = free_port()
    serve = f"{sys.executable} -m http.server {port} --bind 127.0.0.1"
    with Server(["sh", "-c", f"{serve}; true"], tmp_path, lambda: accepts(port)):
        accepts(port)

    with pytest.raises(ConnectionRefusedError):
        accepts(port)


def test_server_that_ends_at_once_fails_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such licence"):
        Server(["sh", "-c", "echo no such licence; exit 1"], tmp_path, lambda: False)
