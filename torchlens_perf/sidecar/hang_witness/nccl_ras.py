"""Ask NCCL's RAS service, which NCCL 2.24 and newer versions run in the processes of a job.

The service listens on the loopback interface and answers in text (src/ras/client_support.cc in
NCCL). The request changes nothing in the job.
"""

from __future__ import annotations

import contextlib
import socket
import time

# Time in which NCCL collects data from all processes, and time for the whole answer.
_COLLECT_S, _ANSWER_S = 3, 10.0
_REQUEST = f"timeout {_COLLECT_S}\nverbose status\n".encode()
_MAX_BYTES = 1 << 16


def ask_ras(port: int) -> str:
    """Return the status of the job; "" if nothing answers. Blocks for about _ANSWER_S at most."""
    answer, deadline_s = b"", time.monotonic() + _ANSWER_S
    # The answer ends when NCCL closes the connection. A late answer is incomplete.
    with (
        contextlib.suppress(OSError, OverflowError),
        socket.create_connection(("localhost", port), timeout=_ANSWER_S) as connection,
    ):
        connection.sendall(_REQUEST)
        while len(answer) < _MAX_BYTES and (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            received = connection.recv(1 << 16)
            if not received:
                break
            answer += received
    return answer.decode("utf-8", "replace")
