"""A process that asks the job's store once: it publishes node 0's address there, or looks for it, and ends.

Run as a child of the sidecar, by rendezvous.py. torch's TCPStore bounds what `wait` and `connect` take, and nothing
else: a `check`, or the greeting of a new connection, waits without end where the other side is stopped. So this process
is killed where it takes too long, and the kernel ends it by an alarm where its parent has gone before.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from datetime import timedelta

_FIRST_LOOK_S, _LAST_LOOK_S = 0.25, 5.0  # between two looks: doubled, and at most
_GRACE_S = 5
_CONNECT_S = 10.0  # torch looks up the name of the other end, and where the resolver's query is lost, that takes 5 s


def ask(host: str, port: int, key: str, lives_s: float, known: str, publish: str) -> str:
    """Publishes under the key, or looks for something else than `known`. Returns what is there then; "" for nothing.

    It is no worker of the store's: it joins no count and no barrier. Raises RuntimeError, which torch's errors are.
    """
    from torch.distributed import TCPStore

    store = TCPStore(host, port, None, False, timedelta(seconds=min(_CONNECT_S, lives_s)), wait_for_workers=False)
    if publish:
        store.set(key, publish)
        return publish if store.check([key]) else ""  # `set` is sent and forgotten; this waits until it is there
    until_s, look_s = time.monotonic() + lives_s - _LAST_LOOK_S, _FIRST_LOOK_S
    while True:
        if store.check([key]):
            found = bytes(store.get(key)).decode(errors="replace")
            if found != known:
                return found
        if time.monotonic() > until_s:
            return ""
        time.sleep(look_s * random.uniform(0.5, 1.0))  # not all nodes at the same instant
        look_s = min(2 * look_s, _LAST_LOOK_S)


def main() -> int:
    """Answer the order on stdin. Return the exit code."""
    order = json.load(sys.stdin)
    signal.alarm(int(order["lives_s"]) + _GRACE_S)
    try:
        found = ask(**order)
        answer = f"found {found}" if found else "nothing"
    except RuntimeError as error:  # DistNetworkError and DistStoreError; lines after the first are C++ frames
        answer = "error " + str(error).partition("\n")[0]
    sys.stdout.write(answer)
    sys.stdout.flush()
    return 0
