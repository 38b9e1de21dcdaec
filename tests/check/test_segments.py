"""Segments that TCP sends again are those of the process, not of its node."""

from __future__ import annotations

import socket
import subprocess
import sys

from torchlens_perf.check.communication import _read_segments

_SEND = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
        for _ in range(20):
            sender.sendall(bytes(1000))
            receiver.recv(1000, socket.MSG_WAITALL)
        before_close()
"""


def test_segments_of_this_process_are_counted() -> None:
    counts = [_read_segments()]
    exec(_SEND, {"before_close": lambda: counts.append(_read_segments())})
    before, after = counts

    assert after[0] - before[0] >= 20
    assert after[1] == before[1] == 0


def test_segments_of_other_processes_are_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        before = _read_segments()
        subprocess.run([sys.executable, "-c", _SEND.replace("before_close()", "pass")], check=True)

        assert _read_segments() == before
