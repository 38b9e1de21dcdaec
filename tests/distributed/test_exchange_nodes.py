"""Tests of the exchange between several nodes that are real processes.

Links and processes are cut, killed, stopped or restarted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.processes import SCRIPTS, run_warm, torchrun
from torchlens_perf.sidecar.nodes.rendezvous import ExchangeAddress, store_key_of_watch
from torchlens_perf.sidecar.nodes.timing import ExchangeTiming

pytestmark = pytest.mark.distributed

TIMING = ExchangeTiming(
    operation_s=2.0, connect_s=2.0, beat_s=0.5, look_s=0.1, first_retry_s=0.1, last_retry_s=1.0,
    store_after_s=0.0, store_child_s=30.0, store_again_s=2.0,
)  # fmt: skip
KEY = store_key_of_watch(0)
SCRIPT = SCRIPTS / "exchange_node.py"
CLOSE_S = 30.0
# A call that waited for the network would take longer than this limit.
BLOCKED_S = 0.6 * TIMING.operation_s
# Only a failing test waits this long.
LONG_S = 60.0
_HOST_A_STORE = """if True:
    import sys, time
    from torch.distributed import TCPStore
    store = TCPStore(sys.argv[1], 0, None, True, wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(300)
"""


def node_settings(job_store: tuple[str, int], rank: int) -> dict[str, Any]:
    """Return the settings of tests/scripts/exchange_node.py.

    Each node has one rank with the node's number, and node 0 collects the messages.
    """
    timing = dataclasses.asdict(TIMING)
    return {
        "job_store": job_store, "key": KEY, "node": f"n{rank}", "rank": rank, "merges": rank == 0, "timing": timing,
        "close_s": CLOSE_S,
    }  # fmt: skip


class Process:
    """A child process that prints lines of JSON and ends with the test."""

    def __init__(self, command: list[str], stack: ExitStack) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines: list[Any] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        stack.callback(self.kill)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def finish(self, timeout_s: float = LONG_S) -> Any:
        """Close the child, and return its last line."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self._process.returncode == 0
        return self.lines[-1]


class Node(Process):
    """The sidecar of a node with one rank."""

    def __init__(
        self, stack: ExitStack, job_store: tuple[str, int], rank: int, prefix: list[str]
    ) -> None:
        super().__init__(
            [*prefix, sys.executable, str(SCRIPT), json.dumps(node_settings(job_store, rank))],
            stack,
        )

    def numbers(self, rank: int) -> list[int]:
        """Return the message numbers that this node has collected from a rank."""
        return [
            number for line in list(self.lines) for number in line["payloads"].get(str(rank), [])
        ]

    def contact(self, rank: int) -> dict[str, Any]:
        """Return this node's contact information about the node of a rank."""
        return dict(self.lines[-1]["nodes"].get(f"n{rank}", {})) if self.lines else {}

    def wait(self, condition: Callable[[Node], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not (self.lines and condition(self)):
            assert time.monotonic() < deadline, self.lines[-1:]
            assert self._process.poll() is None, "it has ended"
            time.sleep(0.02)

    def wait_for_next(self, rank: int, more: int = 5) -> None:
        """Wait until this node has collected `more` further messages of a rank."""
        so_far = len(self.numbers(rank))
        self.wait(lambda node: len(node.numbers(rank)) >= so_far + more)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def host_a_store(
    stack: ExitStack, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
) -> tuple[Process, int]:
    """Run a job's store in a separate process, and return its port."""
    process = Process([*prefix, sys.executable, "-c", _HOST_A_STORE, host], stack)
    deadline = time.monotonic() + LONG_S
    while not process.lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, process.lines[0]


class TestLinks:
    """Tests with nodes in separate network namespaces, connected by a bridge."""

    @pytest.fixture
    def nodes(self, stack: ExitStack) -> list[list[str]]:
        """Return the commands that run programs on three nodes, 10.83.0.1 to .3.

        Link n is `link<n>` on the bridge.
        """
        if shutil.which("ip") is None:
            pytest.skip("no `ip` command: nodes cannot get networks of their own")
        self._hub = f"tlp-{os.getpid()}-hub"
        made = subprocess.run(["ip", "netns", "add", self._hub], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
        stack.callback(ip, "netns", "del", self._hub)
        self._in_hub("link", "add", "bridge", "type", "bridge")
        self._in_hub("link", "set", "bridge", "up")
        prefixes = []
        for number in range(3):
            name = f"tlp-{os.getpid()}-{number}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip(
                "-n",
                self._hub,
                "link",
                "add",
                f"link{number}",
                "type",
                "veth",
                "peer",
                "eth0",
                "netns",
                name,
            )
            self._in_hub("link", "set", f"link{number}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.83.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            prefixes.append(["ip", "netns", "exec", name])
        return prefixes

    def _in_hub(self, *arguments: str) -> None:
        ip("-n", self._hub, *arguments)

    def _link(self, number: int, state: str) -> None:
        self._in_hub("link", "set", f"link{number}", state)

    @pytest.mark.long
    def test_node_is_silent_while_cut_off_and_returns_afterwards(
        self, stack: ExitStack, nodes: list[list[str]]
    ) -> None:
        """While a node's link is down, other nodes continue and report how long it is silent."""
        _, port = host_a_store(stack, "10.83.0.1", tuple(nodes[0]))
        n0, n1, n2 = (Node(stack, ("10.83.0.1", port), rank, nodes[rank]) for rank in range(3))
        for rank in (1, 2):
            n0.wait_for_next(rank)
        # Number of messages that were missed before the nodes had found node 0.
        missed = {rank: n0.contact(rank)["missed"] for rank in (1, 2)}
        posted = len(n2.lines)
        self._link(2, "down")
        n2.wait(
            lambda node: any(
                "node 0's sidecar is not reached" in note for note in node.lines[-1]["notes"]
            )
        )
        noticed = len(n2.lines) - posted
        n0.wait(lambda node: node.contact(2)["silent_s"] > 4.0)
        cut = len(n0.numbers(2))
        n0.wait_for_next(1, more=10)
        silent = n0.contact(1)["silent_s"]
        away = len(n0.numbers(2)) - cut
        self._link(2, "up")
        n0.wait_for_next(2, more=20)
        back, other = n0.contact(2), n0.contact(1)
        oldest_s = max(age for line in n0.lines for age in line["ages"])
        ends = [n.finish() for n in (n1, n2, n0)]
        numbers = {rank: n0.numbers(rank) for rank in (1, 2)}

        assert (away, silent < 2 * TIMING.beat_s) == (0, True)
        assert back["silent_s"] < 2 * TIMING.beat_s
        # Numbers are tenths of a second, because a node posts ten times a second. TCP alone would
        # take minutes to notice the loss.
        assert noticed < 100
        assert other["missed"] == missed[1]
        for rank in (1, 2):
            assert numbers[rank] == sorted(set(numbers[rank]))
        # The node posted ten times a second. The last eight posts were kept and arrive after the
        # cut. Dropped posts are counted.
        gap = max(b - a for a, b in zip(numbers[2], numbers[2][1:], strict=False)) - 1
        # Posts that arrived just before the cut are sent again if the reply was lost.
        assert gap > 20
        assert gap <= back["missed"] - missed[2] <= gap + 8
        # Packets sent before the cut may still arrive after it, with their original age.
        assert 6 * 0.1 <= oldest_s < LONG_S / 2
        assert all(end["in_time"] and end["longest_s"] < BLOCKED_S for end in ends)

    @pytest.mark.long
    def test_node_that_stays_cut_off_closes_in_bounded_time(
        self, stack: ExitStack, nodes: list[list[str]]
    ) -> None:
        """Node 0 does not count the node as having left."""
        _, port = host_a_store(stack, "10.83.0.1", tuple(nodes[0]))
        n0, n1 = (Node(stack, ("10.83.0.1", port), rank, nodes[rank]) for rank in range(2))
        n0.wait_for_next(1)
        self._link(1, "down")
        end = n1.finish()
        n0.wait(lambda node: node.contact(1)["silent_s"] > 1.0)

        assert not n0.contact(1)["left"]
        assert end["longest_s"] < BLOCKED_S

    @pytest.mark.long
    def test_node_0_is_found_by_its_own_address_if_the_store_is_elsewhere(
        self, stack: ExitStack, nodes: list[list[str]]
    ) -> None:
        """In this test, the job's store is on another node than node 0."""
        _, port = host_a_store(stack, "10.83.0.3", tuple(nodes[2]))
        n0, _ = (Node(stack, ("10.83.0.3", port), rank, nodes[rank]) for rank in range(2))
        n0.wait_for_next(1)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class TestProcesses:
    """Tests with nodes on loopback."""

    @pytest.mark.long
    def test_nodes_find_the_successor_of_a_killed_node_0(self, stack: ExitStack) -> None:
        """The new node 0 has another port and token."""
        _, port = host_a_store(stack)
        job_store = ("127.0.0.1", port)
        first, other = Node(stack, job_store, 0, []), Node(stack, job_store, 1, [])
        first.wait_for_next(1)
        before = address(job_store)
        first.kill()
        last = first.numbers(1)[-1]
        other.wait(
            lambda node: any(
                "node 0's sidecar is not reached" in note for note in node.lines[-1]["notes"]
            )
        )
        second = Node(stack, job_store, 0, [])
        second.wait_for_next(1, more=12)
        after = address(job_store)
        ends = [other.finish(), second.finish()]

        assert second.numbers(1) == sorted(set(second.numbers(1)))
        assert second.numbers(1)[-1] > last
        assert (before.token, before.port) != (after.token, after.port)
        assert all(end["in_time"] and end["longest_s"] < BLOCKED_S for end in ends)

    @pytest.mark.long
    def test_successor_of_a_killed_sidecar_is_not_a_second_node(self, stack: ExitStack) -> None:
        """A killed sidecar is silent but has not left.

        A new sidecar of the node continues under the same name.
        """
        _, port = host_a_store(stack)
        n0, n1 = (Node(stack, ("127.0.0.1", port), rank, []) for rank in range(2))
        n0.wait_for_next(1)
        n1.kill()
        n0.wait(lambda node: node.contact(1)["silent_s"] > 1.5)
        silent = n0.contact(1)
        Node(stack, ("127.0.0.1", port), 1, [])
        n0.wait_for_next(1)

        assert not silent["left"]
        assert n0.contact(1)["silent_s"] < 1.5
        assert n0.lines[-1]["notes"] == []

    @pytest.mark.long
    def test_nodes_continue_without_the_store_and_close_without_node_0(
        self, stack: ExitStack
    ) -> None:
        """The job's store ended with the job."""
        store, port = host_a_store(stack)
        n0, n1 = (Node(stack, ("127.0.0.1", port), rank, []) for rank in range(2))
        n0.wait_for_next(1)
        store.kill()
        n0.wait_for_next(1, more=10)
        notes = n0.lines[-1]["notes"]
        n0.kill()
        n1.wait(
            lambda node: any(
                "node 0's sidecar is not reached" in note for note in node.lines[-1]["notes"]
            )
        )
        end = n1.finish()

        assert notes == []
        assert end["in_time"]
        assert end["longest_s"] < BLOCKED_S

    @pytest.mark.long
    def test_stopped_node_0_does_not_block_other_nodes(self, stack: ExitStack) -> None:
        """Calls of the exchange on other nodes, and their end, do not wait for a stopped node 0."""
        _, port = host_a_store(stack)
        n0, n1, _ = (Node(stack, ("127.0.0.1", port), rank, []) for rank in range(3))
        n0.wait_for_next(1)
        n0.wait_for_next(2)
        n0.send(signal.SIGSTOP)
        n1.wait(
            lambda node: any(
                "node 0's sidecar is not reached" in note for note in node.lines[-1]["notes"]
            )
        )
        end = n1.finish()
        n0.send(signal.SIGCONT)
        n0.wait_for_next(2, more=20)

        assert end["longest_s"] < BLOCKED_S
        assert n0.numbers(2) == sorted(set(n0.numbers(2)))


def address(job_store: tuple[str, int]) -> ExchangeAddress:
    store = TCPStore(*job_store, None, False, timedelta(seconds=20), wait_for_workers=False)
    return ExchangeAddress.decode(bytes(store.get(KEY)))


class TestJob:
    """Tests that the exchange has no effect on the job."""

    @pytest.mark.long
    def test_store_does_not_count_our_connections_as_workers(self, stack: ExitStack) -> None:
        """A store that waits for two workers still waits after many connections by the exchange."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        entered: list[float] = []

        def rank(number: int) -> None:
            store = TCPStore(
                "127.0.0.1", port, 2, number == 0, timedelta(seconds=60), wait_for_workers=True
            )
            entered.append(time.monotonic())
            stack.callback(lambda: store)

        ranks = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
        ranks[0].start()
        n0, n1 = (Node(stack, ("127.0.0.1", port), number, []) for number in range(2))
        n0.wait_for_next(1)
        waited = not entered
        ranks[1].start()
        for each in ranks:
            each.join(LONG_S)
        store = TCPStore(
            "127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False
        )

        assert waited
        assert len(entered) == 2
        assert [key for key in store.list_keys() if "torchlens_perf" in key] == [KEY]
        n1.finish()
        n0.finish()

    @pytest.mark.long
    def test_torchrun_job_is_unchanged_by_the_exchange(self, tmp_path: Path) -> None:
        """Barriers, collectives, keys, output and exit code do not change with three nodes in the
        exchange.
        """
        script = tmp_path / "job.py"
        script.write_text(_JOB)
        with_us, without = (
            run_warm(
                torchrun(str(script), str(tmp_path / name)),
                tmp_path,
                NODES=nodes,
                PYTHONPATH=os.pathsep.join(sys.path),
            )
            for name, nodes in (
                ("with", json.dumps([node_settings(("", 0), rank) for rank in range(3)])),
                ("without", ""),
            )
        )
        assert (with_us.returncode, without.returncode) == (0, 0), with_us.stderr
        keys = {name: set((tmp_path / name).read_text().split()) for name in ("with", "without")}

        assert with_us.stdout == without.stdout == "sum 3.0\n"
        assert with_us.stderr == without.stderr
        assert keys["with"] - keys["without"] == {KEY}
        assert keys["without"] - keys["with"] == set()


_JOB = f"""if True:
    import os, sys, subprocess, json, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job_store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    nodes = []
    if os.environ["NODES"] and rank == 0:
        for number in range(3):
            settings = {{**json.loads(os.environ["NODES"])[number], "job_store": job_store}}
            nodes.append(subprocess.Popen([sys.executable, {str(SCRIPT)!r}, json.dumps(settings)],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        heard = set()
        while heard != {{"1", "2"}}:
            heard |= set(json.loads(nodes[0].stdout.readline())["payloads"])
    for _ in range(300):
        total = torch.ones(1) + rank
        dist.all_reduce(total)
        dist.barrier()
    if rank == 0:
        store = dist.TCPStore(*job_store, None, False, wait_for_workers=False)
        with open(sys.argv[1], "w") as file:
            file.write(" ".join(store.list_keys()))
        print("sum", total.item())
    for node in nodes:
        node.communicate(timeout=30)
        assert node.returncode == 0
    dist.destroy_process_group()
"""
