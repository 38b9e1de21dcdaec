"""Cost of a large job's exchange for node 0's sidecar: 2048 nodes of 8 ranks with 1 KB each, over
real gRPC.

The nodes are real connections that send the same messages as real sidecars, 512 in each of 4
processes. All nodes post at the same instant. Simultaneous posts are the worst case, but usual:
windows of synchronous training end together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Table
from torchlens_perf.sidecar.nodes.client import ReportSender
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.exchange import Exchange
from torchlens_perf.sidecar.nodes.messages import MAX_PAYLOAD_BYTES, Outbox
from torchlens_perf.sidecar.nodes.rendezvous import Rendezvous, store_key_of_watch
from torchlens_perf.sidecar.nodes.timing import ExchangeTiming

NODES, RANKS, CLIENTS, ROUNDS = int(os.environ.get("NODES", "2048")), 8, 4, 12
TIMING = ExchangeTiming(operation_s=20.0, connect_s=20.0)
KEY = store_key_of_watch(0)
# Windows per message, as sent by nodes that post once a second in a job of this size.
PER_MESSAGE = 3
# Share of one core.
BAR_SHARE = 0.25
JOIN_S = 10.0
# Memory that a TCPStore used in this project for 2048 nodes.
BAR_MB = 166


class Child:
    """A child process that executes one command per line of stdin and answers with a line of
    JSON.
    """

    def __init__(self, kind: str, folder: str, number: int = 0) -> None:
        command = [sys.executable, "-m", "benchmarks.exchange_scale", kind, folder, str(number)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def merge(places: Endpoints) -> None:
    """Run node 0, which calls collect() once per line of stdin."""
    exchange = Exchange(places, KEY, "node-0", True, timing=TIMING)
    rendezvous = Rendezvous(places, KEY)
    while rendezvous.address_file is not None and not rendezvous.address_file.exists():
        time.sleep(0.01)
    empty_bytes = resident_bytes()
    print(json.dumps({}), flush=True)
    spent_s = time.process_time()
    for line in sys.stdin:
        began_s = time.monotonic()
        collected = exchange.collect_posts() if line == "collect\n" else None
        answer = {
            "collect_ms": (time.monotonic() - began_s) * 1e3,
            "payloads": (
                0 if collected is None else sum(len(post.payloads) for post in collected.posts)
            ),
            "nodes": 0 if collected is None else len(collected.nodes),
            "missed": (
                0 if collected is None else sum(node.missed for node in collected.nodes.values())
            ),
            "notes": exchange.notes(),
        }
        del collected
        # CPU time since the last answer, including the threads of the exchange and of grpc.
        now_s = time.process_time()
        answer["cpu_ms"], spent_s = (now_s - spent_s) * 1e3, now_s
        answer["grown_mb"] = (resident_bytes() - empty_bytes) / 1e6
        answer["peak_mb"] = (most_resident_bytes() - empty_bytes) / 1e6
        print(json.dumps(answer), flush=True)
    exchange.close()


class Node:
    """The sending part of a node other than node 0, without the sending thread."""

    def __init__(self, places: Endpoints, number: int) -> None:
        self._number = number
        self.outbox, self._lock = Outbox(), threading.Lock()
        name = f"{number:016x}", f"node-{number + 1}"
        self.sender = ReportSender(Rendezvous(places, KEY, TIMING), self._lock, self.outbox, name)

    def post(self) -> None:
        ranks = range(self._number * RANKS, (self._number + 1) * RANKS)
        with self._lock:
            self.outbox.add_post(
                {rank: os.urandom(MAX_PAYLOAD_BYTES) for rank in ranks}, time.monotonic()
            )

    async def turn(self) -> float:
        """Send until the outbox is empty, as fast as node 0 allows.

        Return the seconds of the last turn.
        """
        retry_s = TIMING.first_retry_s
        while True:
            began_s = time.monotonic()
            try:
                wait_s = await self.sender.work_once()
                if not self.outbox.has_unsent:
                    return time.monotonic() - began_s
                await asyncio.sleep(wait_s)
            except OSError:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, TIMING.last_retry_s)


async def post(places: Endpoints, number: int) -> None:
    """Run some nodes other than node 0. Each line of stdin is the number of posts that each node
    sends."""
    nodes = [
        Node(places, node)
        for node in range(number * NODES // CLIENTS, (number + 1) * NODES // CLIENTS)
    ]
    lines = asyncio.get_running_loop()
    while line := await lines.run_in_executor(None, sys.stdin.readline):
        for _ in range(int(line)):
            for node in nodes:
                node.post()
        times_s = await asyncio.gather(*(node.turn() for node in nodes))
        dropped = sum(node.outbox.dropped for node in nodes)
        print(
            json.dumps({"turn_ms": statistics.median(times_s) * 1e3, "dropped": dropped}),
            flush=True,
        )


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_resident_bytes() -> int:
    """Return this process's peak memory. The value comes from /proc, because getrusage() would
    include the parent's memory at the fork.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> int:
    """Print the table. Return the number of missed bars."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(folder)


def _measure(folder: str) -> int:
    node_0 = Child("merge", folder)
    node_0.answer()
    clients = [Child("post", folder, number) for number in range(CLIENTS)]

    def all_clients(posts: int) -> list[dict[str, Any]]:
        for client in clients:
            client.ask(str(posts))
        return [client.answer() for client in clients]

    def node_0_does(line: str) -> dict[str, Any]:
        node_0.ask(line)
        return node_0.answer()

    began_s = time.monotonic()
    all_clients(0)
    joined_s = time.monotonic() - began_s
    first = node_0_does("collect")
    rounds, several = [], []
    for _ in range(ROUNDS):
        posted = all_clients(1)
        # Wait until messages without an answer have arrived too.
        time.sleep(0.3)
        rounds.append(
            {
                **node_0_does("collect"),
                "turn_ms": statistics.median(each["turn_ms"] for each in posted),
            }
        )
    for _ in range(ROUNDS // 2):
        all_clients(PER_MESSAGE)
        time.sleep(0.3)
        several.append(node_0_does("collect"))
    # Simulate a stall: node 0's sidecar does not collect for 7 windows.
    for _ in range(7):
        all_clients(1)
    time.sleep(1.0)
    stalled = node_0_does("collect")
    began_s = time.monotonic()
    node_0.kill()
    for client in clients:
        client.ask("4")
    node_0 = Child("merge", folder)
    node_0.answer()
    dropped = sum(client.answer()["dropped"] for client in clients)
    again_s = time.monotonic() - began_s
    time.sleep(0.5)
    restarted = node_0_does("collect")
    for child in (*clients, node_0):
        child.close()

    def median(of: list[dict[str, Any]], name: str) -> float:
        return statistics.median(float(each[name]) for each in of)

    def mean(of: list[dict[str, Any]], name: str) -> float:
        return statistics.fmean(float(each[name]) for each in of)

    table = Table(
        f"{NODES} nodes of {RANKS} ranks, {MAX_PAYLOAD_BYTES} bytes each", "median", "bar", ""
    )
    table.row("nodes that node 0 knows", first["nodes"], "", table.bar(first["nodes"] == NODES))
    table.row(
        "all joined after", f"{joined_s:.1f} s", f"{JOIN_S:.0f} s", table.bar(joined_s <= JOIN_S)
    )
    table.row("for which node 0's processor time was", f"{first['cpu_ms']:.0f} ms", "", "")
    payloads = [each["payloads"] for each in rounds]
    table.row(
        "payloads per window", payloads[0], "", table.bar(sum(payloads) == ROUNDS * NODES * RANKS)
    )
    # Only one window in four is answered, so use the mean instead of the median.
    cpu_ms = mean(rounds, "cpu_ms")
    table.row("node 0, one window: processor time", f"{cpu_ms:.0f} ms", "", "")
    table.row(
        f"the same where {PER_MESSAGE} windows are sent at a time",
        f"{mean(several, 'cpu_ms') / PER_MESSAGE:.0f} ms",
        "",
        "",
    )
    table.row(
        "of which collect(), which the sidecar's loop waits for",
        f"{median(rounds, 'collect_ms'):.0f} ms",
        "",
        "",
    )
    share = mean(several, "cpu_ms") / PER_MESSAGE / 1000
    bar = f"at most {BAR_SHARE:.0%}"
    text = f"a window every second, {PER_MESSAGE} in a message: share of one core"
    table.row(text, f"{share:.1%}", bar, table.bar(share <= BAR_SHARE))
    grown_mb = several[-1]["grown_mb"]
    bar = f"{BAR_MB * NODES / 2048:.0f} MB"
    text = "node 0's memory beyond an exchange of no nodes"
    table.row(text, f"{grown_mb:.0f} MB", bar, table.bar(grown_mb <= BAR_MB * NODES / 2048))
    table.row(
        "after a stall of 7 windows: payloads, missed",
        f"{stalled['payloads']}, {stalled['missed']}",
        "",
        table.bar(stalled["payloads"] == 7 * NODES * RANKS and stalled["missed"] == 0),
    )
    table.row(
        "after it: processor time; most memory",
        f"{stalled['cpu_ms']:.0f} ms; {stalled['peak_mb']:.0f} MB",
        "",
        "",
    )
    table.row(
        "another node, one post among all others': median",
        f"{median(rounds, 'turn_ms'):.0f} ms",
        "",
        "",
    )
    table.row(
        "node 0 killed and started again: all nodes are back after", f"{again_s:.1f} s", "", ""
    )
    good = restarted["payloads"] == 8 * NODES * RANKS and restarted["missed"] == dropped == 0
    text = f"{restarted['payloads']}, {restarted['missed'] + dropped}"
    table.row("payloads of the last 8 posts there, lost", text, "", table.bar(good))
    return table.missed


if __name__ == "__main__":
    where = Endpoints(("127.0.0.1", 1), Path(sys.argv[2]))
    if sys.argv[1] == "merge":
        merge(where)
    else:
        asyncio.run(post(dataclasses.replace(where, job_store=None), int(sys.argv[3])))
