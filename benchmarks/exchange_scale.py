"""What node 0's sidecar pays for the exchange of a large job: 2048 nodes of 8 ranks with 1 KB each, over real stores.

Nodes are real connections that write what real sidecars write, 256 in each of 8 processes. All post at the same
instant, which is the worst case: windows of synchronous training end together.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.measure import Table
from torchlens_perf.sidecar.nodes import exchange
from torchlens_perf.sidecar.nodes.client import StoreServer
from torchlens_perf.sidecar.nodes.messages import MAX_PAYLOAD_BYTES, Inbox, Outbox
from torchlens_perf.sidecar.nodes.rendezvous import Rendezvous, exchange_key

NODES, RANKS, CLIENTS, ROUNDS = 2048, 8, 8, 12
TIMING = exchange.Timing(operation_s=20.0)
BAR_SHARE = 0.05  # of one core, with a window every 5 s


class Child:
    """A process that does one thing for each line that it is sent, and answers with a line of JSON."""

    def __init__(self, kind: str, port: int, number: int = 0) -> None:
        command = [sys.executable, "-m", "benchmarks.exchange_scale", kind, str(port), str(number)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)


def merge(meeting: Rendezvous) -> None:
    """Node 0: a look and a collect() for each line."""
    inbox, lock = Inbox("node-0", 0.0), threading.Lock()
    merger = exchange._Merger(meeting, TIMING, lock, inbox)
    merger.turn()
    empty_bytes = resident_bytes()
    print(json.dumps({}), flush=True)
    spent_s = time.process_time()
    for line in sys.stdin:
        began_s = time.monotonic()
        merger.turn()
        looked_s = time.monotonic()
        collected = inbox.collect(looked_s) if line == "collect\n" else None
        answer = {
            "look_ms": (looked_s - began_s) * 1e3,
            "collect_ms": (time.monotonic() - looked_s) * 1e3,
            "payloads": 0 if collected is None else sum(map(len, collected.payloads.values())),
            "nodes": 0 if collected is None else len(collected.nodes) - 1,
            "missed": 0 if collected is None else sum(node.missed for node in collected.nodes.values()),
        }
        del collected
        # Since the last answer: what the store's thread took to receive the posts is in it.
        now_s = time.process_time()
        answer["cpu_ms"], spent_s = (now_s - spent_s) * 1e3, now_s
        answer["grown_mb"] = (resident_bytes() - empty_bytes) / 1e6
        answer["peak_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - empty_bytes) / 1e6
        print(json.dumps(answer), flush=True)
    merger.leave()


def post(meeting: Rendezvous, number: int) -> None:
    """A share of the other nodes: one post of each for each line."""
    senders = []
    for node in range(number * NODES // CLIENTS, (number + 1) * NODES // CLIENTS):
        outbox = Outbox(f"{node:016x}", f"node-{node + 1}")
        senders.append((node, outbox, exchange._Sender(meeting, TIMING, threading.Lock(), outbox)))
    for line in sys.stdin:
        times_ms = []
        for node, outbox, sender in senders:
            if line == "post\n":
                outbox.post({node * RANKS + rank: os.urandom(MAX_PAYLOAD_BYTES) for rank in range(RANKS)}, 0.0)
            began_s = time.monotonic()
            sender.turn()
            times_ms.append((time.monotonic() - began_s) * 1e3)
        print(json.dumps({"turn_ms": statistics.median(times_ms)}), flush=True)
    for _, _, sender in senders:
        sender.leave()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Prints the table; returns how many bars were missed."""
    job_store = StoreServer("127.0.0.1")
    node_0 = Child("merge", job_store.port)
    node_0.answer()
    clients = [Child("post", job_store.port, number) for number in range(CLIENTS)]

    def all_clients(line: str) -> list[dict[str, Any]]:
        for client in clients:
            client.ask(line)
        return [client.answer() for client in clients]

    def node_0_does(line: str) -> dict[str, Any]:
        node_0.ask(line)
        return node_0.answer()

    began_s = time.monotonic()
    all_clients("beat")
    joined_s = time.monotonic() - began_s
    first = node_0_does("collect")
    beats, rounds, idle = [], [], []
    for _ in range(ROUNDS):
        all_clients("beat")
        beats.append(node_0_does("look"))
        idle.append(node_0_does("look"))
        posted = all_clients("post")
        rounds.append({**node_0_does("collect"), "turn_ms": statistics.median(each["turn_ms"] for each in posted)})
    for _ in range(7):  # a stall: node 0 does not look for 7 windows
        all_clients("post")
    stalled = node_0_does("collect")
    for child in (*clients, node_0):
        child.close()
    job_store.close()

    def median(of: list[dict[str, Any]], name: str) -> float:
        return statistics.median(float(each[name]) for each in of)

    table = Table(f"{NODES} nodes of {RANKS} ranks, {MAX_PAYLOAD_BYTES} bytes each", "median", "bar", "")
    table.row("nodes that node 0 knows", first["nodes"], "", table.bar(first["nodes"] == NODES))
    table.row("all joined after", f"{joined_s:.1f} s", "", "")
    payloads = [each["payloads"] for each in rounds]
    table.row("payloads per window", payloads[0], "", table.bar(set(payloads) == {NODES * RANKS}))
    cpu_ms = median(rounds, "cpu_ms")
    # In 5 s: a window, a beat less, for a post is one, and four more looks.
    share = (cpu_ms + 4 * median(idle, "cpu_ms")) / 5000
    table.row("node 0, one window: processor time", f"{cpu_ms:.0f} ms", "", "")
    table.row("of which a look, from begin to end", f"{median(rounds, 'look_ms'):.0f} ms", "", "")
    table.row(
        "of which collect(), which the sidecar's loop waits for", f"{median(rounds, 'collect_ms'):.0f} ms", "", ""
    )
    table.row("a look at nothing new: processor time", f"{median(idle, 'cpu_ms'):.1f} ms", "", "")
    table.row("a beat of all nodes, and a look: processor time", f"{median(beats, 'cpu_ms'):.0f} ms", "", "")
    bar = f"at most {BAR_SHARE:.0%}"
    table.row(
        "a window every 5 s, a look every second: share of one core", f"{share:.1%}", bar, table.bar(share <= BAR_SHARE)
    )
    table.row("node 0's memory beyond an exchange of no nodes", f"{rounds[-1]['grown_mb']:.0f} MB", "", "")
    table.row(
        "after a stall of 7 windows: payloads, missed",
        f"{stalled['payloads']}, {stalled['missed']}",
        "",
        table.bar(stalled["payloads"] == 7 * NODES * RANKS and stalled["missed"] == 0),
    )
    table.row(
        "after it: processor time; most memory", f"{stalled['cpu_ms']:.0f} ms; {stalled['peak_mb']:.0f} MB", "", ""
    )
    table.row("another node, one post: from begin to its arrival", f"{median(rounds, 'turn_ms'):.2f} ms", "", "")
    return table.missed


if __name__ == "__main__":
    where = Rendezvous(("127.0.0.1", int(sys.argv[2])), exchange_key("scale", 0), TIMING.operation_s)
    if sys.argv[1] == "merge":
        merge(where)
    else:
        post(where, int(sys.argv[3]))
