"""The exchange between nodes: the real thing over real stores, on loopback."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from torchlens_perf.sidecar.nodes.client import StoreServer, _sockets_to, connect
from torchlens_perf.sidecar.nodes.exchange import Exchange, Timing
from torchlens_perf.sidecar.nodes.messages import SLOTS, NodeContact, Outbox
from torchlens_perf.sidecar.nodes.rendezvous import Address, exchange_key

FAST = Timing(operation_s=1.0, beat_s=0.2, look_s=0.05, first_retry_s=0.05, last_retry_s=0.4)
LONG_S = 60.0  # torch waits for the resolver, which takes 5 s where a query is lost
KEY = exchange_key("run", 0)


class Nodes:
    """Starts ends of an exchange, and gathers what node 0 collects."""

    def __init__(self, job_store: tuple[str, int], stack: ExitStack) -> None:
        self._job_store = job_store
        self._stack = stack
        self.seen: dict[int, list[bytes]] = {}
        self.contacts: Mapping[str, NodeContact] = {}

    def start(self, node: str, merges: bool = False, key: str = KEY, timing: Timing = FAST) -> Exchange:
        exchange = Exchange(self._job_store, key, node, merges, timing=timing)
        self._stack.callback(exchange.close)
        return exchange

    def wait(self, exchange: Exchange, condition: Callable[[], bool]) -> None:
        """Collects until a condition holds."""
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, (self.seen, self.contacts, exchange.notes())
            self.collect(exchange)
            time.sleep(0.01)

    def collect(self, exchange: Exchange) -> None:
        collected = exchange.collect()
        self.contacts = collected.nodes
        for rank, received in collected.payloads.items():
            self.seen.setdefault(rank, []).extend(each.payload for each in received)


@pytest.fixture
def nodes(job_store: tuple[str, int], open_at_end: ExitStack) -> Nodes:
    return Nodes(job_store, open_at_end)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connections(to: tuple[str, int]) -> int:
    """How many connections this process has to there."""
    found = _sockets_to(*to)
    for each in found.values():
        each.close()
    return len(found)


def connected_sockets() -> int:
    """How many open files this process has."""
    return len(os.listdir("/proc/self/fd"))


class TestExchange:
    def test_payloads_of_all_nodes_arrive_in_order(self, nodes: Nodes) -> None:
        """Node 0 collects its own and two other nodes' payloads, whatever bytes they are, and whoever came first."""
        others = [nodes.start("n1"), nodes.start("n2/öffentlich")]
        merger = nodes.start("n0", merges=True)
        for number in range(SLOTS):
            merger.post({0: b"%d" % number})
            for at, other in enumerate(others):
                other.post({2 * at + 2: b"%d" % number, 2 * at + 3: b"\x00\xff\n" + bytes([number])})
        nodes.wait(merger, lambda: sum(map(len, nodes.seen.values())) == 5 * SLOTS)

        assert [nodes.seen[rank] for rank in (0, 2, 4)] == [[b"%d" % number for number in range(SLOTS)]] * 3
        assert nodes.seen[3] == nodes.seen[5] == [b"\x00\xff\n" + bytes([number]) for number in range(SLOTS)]
        assert {node: (c.posts, c.missed, c.restarts) for node, c in nodes.contacts.items()} == {
            "n0": (SLOTS, 0, 0), "n1": (SLOTS, 0, 0), "n2/öffentlich": (SLOTS, 0, 0),
        }  # fmt: skip
        assert [exchange.notes() for exchange in (merger, *others)] == [[], [], []]
        assert others[0].collect().nodes == {}

    def test_more_posts_than_slots(self, nodes: Nodes) -> None:
        """Hundreds of posts over a live connection: received once, in order, and what was missed is counted."""
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        for number in range(300):
            other.post({1: b"%d" % number})
            nodes.collect(merger)
            time.sleep(0.001)
        nodes.wait(merger, lambda: nodes.seen.get(1, [b""])[-1] == b"299")
        numbers = [int(payload) for payload in nodes.seen[1]]
        contact = nodes.contacts["n1"]

        assert numbers == sorted(set(numbers))
        assert (contact.posts, contact.posts + contact.missed) == (len(numbers), 300)

    def test_attempts_do_not_mix(self, nodes: Nodes) -> None:
        """The nodes of a second attempt meet among themselves, with another node 0, while the first still runs."""
        old, old_merger = nodes.start("n1"), nodes.start("n0", merges=True)
        second = exchange_key("run", 1)
        new, new_merger = nodes.start("n0", key=second), nodes.start("n1", merges=True, key=second)
        old.post({1: b"old"})
        new.post({1: b"new"})
        nodes.wait(new_merger, lambda: 1 in nodes.seen)
        of_new = nodes.seen.pop(1)
        nodes.wait(old_merger, lambda: 1 in nodes.seen)

        assert (of_new, nodes.seen[1]) == ([b"new"], [b"old"])

    def test_restarted_sidecar(self, nodes: Nodes) -> None:
        """A node whose sidecar is started again goes on, and it is seen; one that ends well has left."""
        first, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        first.post({1: b"first"})
        nodes.wait(merger, lambda: 1 in nodes.seen)
        assert first.close(LONG_S)
        nodes.wait(merger, lambda: nodes.contacts["n1"].left)
        second = nodes.start("n1")
        second.post({1: b"second"})
        nodes.wait(merger, lambda: len(nodes.seen[1]) == 2)
        contact = nodes.contacts["n1"]

        assert nodes.seen[1] == [b"first", b"second"]
        assert (contact.posts, contact.missed, contact.restarts, contact.left) == (2, 0, 1, False)

    def test_restarted_node_0(self, nodes: Nodes) -> None:
        """A new node 0 has a new store and token; the others find it by themselves, with their last posts."""
        other, first = nodes.start("n1"), nodes.start("n0", merges=True)
        other.post({1: b"first"})
        nodes.wait(first, lambda: 1 in nodes.seen)
        assert first.close(LONG_S)
        other.post({1: b"second"})
        second = nodes.start("n0", merges=True)
        nodes.wait(second, lambda: nodes.seen[1][-1] == b"second")
        contact = nodes.contacts["n1"]

        assert nodes.seen[1] == [b"first", b"first", b"second"]
        assert (contact.posts, contact.missed, contact.restarts) == (2, 0, 0)
        wait_until(lambda: any("errors in the exchange between nodes" in note for note in other.notes()))

    def test_strangers_are_not_read(self, nodes: Nodes, job_store: tuple[str, int]) -> None:
        """Who has not the token writes what he likes: nothing of it is read; and no garbage ends the store."""
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        other.post({1: b"ours"})
        nodes.wait(merger, lambda: 1 in nodes.seen)
        stranger, address = own_store(job_store)
        intruder = Outbox("deadbeef", "n9")
        keys, line = intruder.enter()
        intruder.post({9: b"theirs"}, 0.0)
        for prefix in ("", "0" * 32 + "/"):
            for key, value in {**keys, **intruder.due(0.0)[0]}.items():
                stranger.set(prefix + key, value)
            stranger.append(prefix + "members", line)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
            with socket.create_connection(("127.0.0.1", address.port)) as connection:
                connection.sendall(garbage)
        other.post({1: b"ours again"})
        nodes.wait(merger, lambda: nodes.seen[1][-1] == b"ours again")

        assert nodes.seen == {1: [b"ours", b"ours again"]}
        assert set(nodes.contacts) == {"n0", "n1"}
        assert merger.notes() == []

    def test_another_store_at_the_address(self, nodes: Nodes, job_store: tuple[str, int]) -> None:
        """An address that leads to a store of somebody else is not written to."""
        server = StoreServer("127.0.0.1")
        store = connect("127.0.0.1", server.port, 1.0)
        own_store(job_store)[0].set(KEY, Address(server.port, "ab" * 16, ("127.0.0.1",)).encode())
        other = nodes.start("n1")
        other.post({1: b"x"})
        wait_until(lambda: any("is another one" in note for note in other.notes()))

        assert not store.has("ab" * 16 + "/members")
        store.close()
        server.close()

    def test_one_machine_listens_on_loopback(self, nodes: Nodes, job_store: tuple[str, int]) -> None:
        """Where the job's store has a loopback address, node 0's store cannot be reached from elsewhere."""
        nodes.start("n0", merges=True)
        wait_until(lambda: own_store_address(job_store) is not None)
        _, address = own_store(job_store)

        assert address.hosts[0] == "127.0.0.1"
        socket.create_connection(("127.0.0.1", address.port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", address.port))

    def test_the_jobs_store_is_left_as_soon_as_the_address_is_known(
        self, nodes: Nodes, job_store: tuple[str, int]
    ) -> None:
        """While payloads are exchanged no connection of ours to the job's store is open, but its own to itself."""
        before = connections(job_store)
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        other.post({1: b"x"})
        nodes.wait(merger, lambda: 1 in nodes.seen)

        assert connections(job_store) == before

    def test_refuses_what_does_not_fit(self, nodes: Nodes) -> None:
        """A payload over 1024 bytes, a rank or a port that is none raise ValueError, and nothing is sent."""
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        for exchange in (other, merger):
            with pytest.raises(ValueError, match="1025 bytes, more than 1024"):
                exchange.post({1: b"x" * 1025})
            with pytest.raises(ValueError, match="rank -1 is none"):
                exchange.post({-1: b""})
        with pytest.raises(ValueError, match="port 65536 is none"):
            Exchange(("127.0.0.1", 65536), KEY, "n1", False)
        other.post({1: b"x" * 1024})
        nodes.wait(merger, lambda: bool(nodes.seen))

        assert nodes.seen == {1: [b"x" * 1024]}

    def test_nothing_is_left_behind(self, job_store: tuple[str, int]) -> None:
        """After close() there is no thread, no socket and no listener of the exchange."""
        connect(*job_store, 1.0).close()  # torch is loaded, with whatever it keeps open
        before = connected_sockets(), threading.active_count()
        with ExitStack() as stack:
            nodes = Nodes(job_store, stack)
            other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
            other.post({1: b"x"})
            nodes.wait(merger, lambda: 1 in nodes.seen)
            assert other.close(LONG_S)
            assert merger.close(LONG_S)
            assert merger.close()

        wait_until(lambda: connected_sockets() <= before[0])
        wait_until(lambda: threading.active_count() <= before[1])

    def test_a_last_post_is_sent_at_close(self, nodes: Nodes, job_store: tuple[str, int]) -> None:
        """What was posted before close() arrives, even from a node that has not found node 0 until then."""
        short = nodes.start("n1", timing=dataclasses.replace(FAST, first_retry_s=100.0, last_retry_s=100.0))
        short.post({1: b"last"})
        wait_until(lambda: any("has not published" in note for note in short.notes()))
        merger = nodes.start("n0", merges=True)
        wait_until(lambda: own_store_address(job_store) is not None)
        assert short.close(LONG_S)
        nodes.wait(merger, lambda: 1 in nodes.seen and nodes.contacts["n1"].left)


class TestFailures:
    def test_without_a_job_store(self) -> None:
        """No job's store at the address: calls return, the reason is a note, close() ends what is tried."""
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        for merges, note in ((False, "node 0's sidecar is not reached"), (True, "other nodes may not reach")):
            timing = dataclasses.replace(FAST, connect_s=0.5)
            exchange = Exchange(("127.0.0.1", port), KEY, "n", merges, timing=timing)
            exchange.post({0: b"x"})
            wait_until(lambda exchange=exchange, note=note: any(note in each for each in exchange.notes()))
            assert exchange.close(LONG_S)

    def test_windows_that_could_not_be_sent_are_told(self, job_store: tuple[str, int]) -> None:
        """A node that never finds node 0 keeps 8 windows, and says how many it lost."""
        exchange = Exchange(job_store, KEY, "n1", False, timing=FAST)
        for _ in range(SLOTS + 3):
            exchange.post({0: b"x"})

        assert "3 windows could not be sent to node 0's sidecar" in exchange.notes()
        wait_until(lambda: any("has not published its address" in note for note in exchange.notes()))
        assert exchange.close(LONG_S)

    @pytest.mark.parametrize("merges", [False, True])
    def test_a_job_store_that_never_answers(self, merges: bool) -> None:
        """Something accepts connections and says nothing: each try ends, without a leak, and close() is bounded."""
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            before = connected_sockets()
            timing = dataclasses.replace(FAST, connect_s=1.0)
            exchange = Exchange(("127.0.0.1", silent.getsockname()[1]), KEY, "n1", merges, timing=timing)
            wait_until(lambda: exchange._errors >= 3)
            assert exchange.close(LONG_S)
            wait_until(lambda: connected_sockets() <= before)

    def test_one_node_imports_no_torch(self) -> None:
        """A job of one node opens nothing: no torch, no thread, no socket; its sidecar judges alone."""
        code = """if True:
            import sys, threading
            import numpy as np
            from torchlens_perf.analysis.statistics.steps import assemble_steps
            from torchlens_perf.analysis.stragglers.placement import Placement
            from torchlens_perf.run.identity import Identity
            from torchlens_perf.run.ring import record_dtype
            from torchlens_perf.sidecar.job import JobView
            who = Identity("run", 0, 0, 1, 1, 0, "n0", 1, 1, 1, False, "", "", {})
            job = JobView("n0")
            job.add_steps(who, Placement(), assemble_steps(np.zeros(0, record_dtype())), ("127.0.0.1", 1))
            job.update(1.0)
            job.close()
            assert job.judges_alone and job.notes() == []
            assert "torch" not in sys.modules and threading.active_count() == 1
        """
        subprocess.run([sys.executable, "-c", code], check=True)


def own_store_address(job_store: tuple[str, int]) -> Address | None:
    """What node 0 has left in the job's store."""
    store = TCPStore(*job_store, None, False, timedelta(seconds=5), wait_for_workers=False)
    return Address.decode(store.get(KEY)) if store.check([KEY]) else None


def own_store(job_store: tuple[str, int]) -> tuple[TCPStore, Address | None]:
    """A stranger's connection to node 0's store, or to the job's where there is none yet."""
    address = own_store_address(job_store)
    host, port = job_store if address is None else (address.hosts[0], address.port)
    return TCPStore(host, port, None, False, timedelta(seconds=5), wait_for_workers=False), address
