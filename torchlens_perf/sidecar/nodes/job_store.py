"""Publish node 0's address in the job's store, or wait for it there.

rendezvous.py runs this module as a child process of the sidecar. torch's TCPStore has timeouts for
`wait` and `connect` only. If the other side is stopped, `check` and the handshake of a new
connection block without a limit. The parent therefore kills this process after a timeout. If the
parent is gone, an alarm ends this process.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from datetime import timedelta

_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 0.25, 5.0
_GRACE_S = 5
# This includes 5 s in which torch resolves the host's name if the resolver's first query is lost.
_CONNECT_TIMEOUT_S = 10.0


def publish_or_wait_for_value(
    host: str, port: int, key: str, lives_s: float, known: str, publish: str
) -> str:
    """Publish a value under the key, or wait for a value other than `known`.

    Return the value in the store, or "". This client does not register as a worker of the store, so
    it does not affect counts or barriers. Raises RuntimeError for torch's errors.
    """
    from torch.distributed import TCPStore

    store = TCPStore(
        host,
        port,
        None,
        False,
        timedelta(seconds=min(_CONNECT_TIMEOUT_S, lives_s)),
        wait_for_workers=False,
    )
    if publish:
        store.set(key, publish)
        # `set` does not wait for a reply. `check` returns only after the value has arrived.
        return publish if store.check([key]) else ""
    until_s, interval_s = time.monotonic() + lives_s - _MAX_POLL_INTERVAL_S, _MIN_POLL_INTERVAL_S
    while True:
        if store.check([key]):
            found = bytes(store.get(key)).decode(errors="replace")
            if found != known:
                return found
        if time.monotonic() > until_s:
            return ""
        # The random factor spreads the polls of all nodes over time.
        time.sleep(interval_s * random.uniform(0.5, 1.0))
        interval_s = min(2 * interval_s, _MAX_POLL_INTERVAL_S)


def main() -> int:
    """Carry out the request from stdin, and write the answer to stdout. Return the exit code."""
    order = json.load(sys.stdin)
    signal.alarm(int(order["lives_s"]) + _GRACE_S)
    try:
        found = publish_or_wait_for_value(**order)
        answer = f"found {found}" if found else "nothing"
    except RuntimeError as error:
        # The error is a DistNetworkError or DistStoreError. All lines but its first are C++ frames.
        answer = "error " + str(error).partition("\n")[0]
    sys.stdout.write(answer)
    sys.stdout.flush()
    return 0
