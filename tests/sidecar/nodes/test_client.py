"""Connections to stores that are stopped, silent or nowhere: every operation ends, and nobody is kept waiting."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from torchlens_perf.sidecar.nodes.client import StoreServer, connect

LONG_S = 60.0  # torch waits for the resolver, which takes 5 s where a query is lost


def test_operations_on_a_stopped_store_end() -> None:
    """A store that is stopped, as a hung process or a cut link, fails an operation instead of keeping it."""
    code = "import time; from torchlens_perf.sidecar.nodes.client import StoreServer\n"
    code += "s = StoreServer('127.0.0.1'); print(s.port, flush=True); time.sleep(60)"
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        store = connect("127.0.0.1", port, 0.5)
        store.set_all({"a": b"1"})
        assert store.has("a")
        host.send_signal(signal.SIGSTOP)
        os.waitpid(host.pid, os.WUNTRACED)
        failed: list[str] = []

        def wait_for_it() -> None:
            for operation in (lambda: store.has("a"), lambda: connect("127.0.0.1", port, 0.5, 0.5)):
                try:
                    operation()
                except ConnectionError as error:
                    failed.append(str(error))

        # On a thread: nothing could end a test that waits inside torch.
        waiting = threading.Thread(target=wait_for_it, daemon=True)
        waiting.start()
        waiting.join(LONG_S / 2)

        assert len(failed) == 2
        assert "Timeout" in failed[0]
        store.close(discard=True)
    finally:
        host.kill()
        host.communicate()


def test_abort_ends_an_operation() -> None:
    """abort() from another thread ends an operation long before its timeout."""
    server = StoreServer("127.0.0.1")
    store = connect("127.0.0.1", server.port, 60.0)
    threading.Timer(0.2, store.abort).start()
    started = time.monotonic()
    with pytest.raises(ConnectionError):
        store.get_all(["missing"])

    assert time.monotonic() - started < 30
    store.close()
    server.close()


def test_names_that_lead_nowhere() -> None:
    """Hosts that no resolver knows, or accepts, are connection errors."""
    for host in ("no.such.host.invalid", "a" * 300, "x..y"):
        with pytest.raises((socket.gaierror, ConnectionError)):
            connect(host, 1, 0.5, 0.5)
