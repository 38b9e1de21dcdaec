"""Tests of the exchange between nodes over gRPC, on loopback."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.sidecar.nodes.conftest import FAST, KEY, LONG_S, LOOPBACK, Nodes, wait_until
from tests.support.collected import ranks
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.exchange import Exchange
from torchlens_perf.sidecar.nodes.messages import KEPT_POSTS
from torchlens_perf.sidecar.nodes.rendezvous import store_key_of_watch


class TestExchange:
    def test_payloads_of_all_nodes_arrive_in_order(self, nodes: Nodes) -> None:
        """Payloads may contain any bytes. Nodes may start in any order."""
        others = [nodes.start("n1"), nodes.start("n2/öffentlich")]
        merger = nodes.start("n0", merges=True)
        for number in range(KEPT_POSTS):
            for at, other in enumerate(others):
                other.post(
                    {2 * at + 2: b"%d" % number, 2 * at + 3: b"\x00\xff\n" + bytes([number])}
                )
        nodes.wait(merger, lambda: sum(map(len, nodes.seen.values())) == 4 * KEPT_POSTS)

        assert [nodes.seen[rank] for rank in (2, 4)] == [
            [b"%d" % number for number in range(KEPT_POSTS)]
        ] * 2
        assert (
            nodes.seen[3]
            == nodes.seen[5]
            == [b"\x00\xff\n" + bytes([number]) for number in range(KEPT_POSTS)]
        )
        assert {node: c.missed for node, c in nodes.contacts.items()} == {
            "n1": 0,
            "n2/öffentlich": 0,
        }
        assert [exchange.notes() for exchange in (merger, *others)] == [[], [], []]
        assert others[0].collect_posts().nodes == {}

    def test_hundreds_of_posts_arrive_once_in_order_or_are_counted_as_dropped(
        self, nodes: Nodes
    ) -> None:
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        for number in range(300):
            other.post({1: b"%d" % number})
            nodes.collect(merger)
            time.sleep(0.001)
        nodes.wait(merger, lambda: nodes.seen.get(1, [b""])[-1] == b"299")
        numbers = [int(payload) for payload in nodes.seen[1]]

        assert numbers == sorted(set(numbers))
        assert len(numbers) + nodes.contacts["n1"].missed == 300

    def test_instructions_of_node_0_reach_all_nodes(self, nodes: Nodes) -> None:
        """Nodes also receive instructions that changed before the nodes joined."""
        merger = nodes.start("n0", merges=True)
        merger.set_instructions(b"first")
        early = nodes.start("n1")
        wait_until(lambda: early.instructions() == b"first")
        merger.set_instructions(b"second")
        late = nodes.start("n2")
        wait_until(lambda: early.instructions() == late.instructions() == b"second")

        assert merger.instructions() == b""
        with pytest.raises(ValueError, match="1025 bytes"):
            merger.set_instructions(b"x" * 1025)

    def test_newest_link_report_of_each_node_reaches_every_node_0(self, nodes: Nodes) -> None:
        """The report is sent again after a restart of node 0's sidecar."""
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        other.set_links(b"old")
        other.set_links(b"new")
        wait_until(lambda: merger.link_reports() == [b"new"])
        merger.close()
        restarted = nodes.start("n0", merges=True)
        wait_until(lambda: restarted.link_reports() == [b"new"])

        assert other.link_reports() == []

    def test_two_attempts_of_a_job_exchange_no_posts(self, nodes: Nodes) -> None:
        """The second attempt has another node 0 while the first one still runs."""
        old, old_merger = nodes.start("n1"), nodes.start("n0", merges=True)
        second = store_key_of_watch(1)
        new, new_merger = nodes.start("n0", key=second), nodes.start("n1", merges=True, key=second)
        old.post({1: b"old"})
        new.post({1: b"new"})
        nodes.wait(new_merger, lambda: 1 in nodes.seen)
        of_new = nodes.seen.pop(1)
        nodes.wait(old_merger, lambda: 1 in nodes.seen)

        assert (of_new, nodes.seen[1]) == ([b"new"], [b"old"])

    def test_restarted_sidecar_continues_to_send_posts(self, nodes: Nodes) -> None:
        """A sidecar that ends normally is listed as having left."""
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
        assert (contact.missed, contact.left, merger.notes()) == (0, False, [])

    def test_nodes_reconnect_to_a_restarted_node_0(self, nodes: Nodes) -> None:
        """The new node 0 has another port and token. Each node sends its last posts again."""
        other, first = nodes.start("n1"), nodes.start("n0", merges=True)
        other.post({1: b"first"})
        nodes.wait(first, lambda: 1 in nodes.seen)
        before = nodes.address()
        assert first.close(LONG_S)
        other.post({1: b"second"})
        second = nodes.start("n0", merges=True)
        nodes.wait(second, lambda: nodes.seen[1][-1] == b"second")
        contact = nodes.contacts["n1"]

        assert nodes.seen[1] == [b"first", b"first", b"second"]
        assert contact.missed == 0
        assert nodes.address().token != before.token
        wait_until(
            lambda: any("errors in the exchange between nodes" in note for note in other.notes())
        )

    def test_node_0_is_found_at_the_configured_address(self, nodes: Nodes, tmp_path: Path) -> None:
        """The nodes need neither a shared folder nor the job's store, even after a restart."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            where = f"127.0.0.1:{listener.getsockname()[1]}"
        secret = tmp_path / "secret"
        secret.write_bytes(b"of this job")
        secret.chmod(0o600)
        places = Endpoints(None, None, where, str(secret))
        other, first = (
            nodes.start("n1", places=places),
            nodes.start("n0", merges=True, places=places),
        )
        other.post({1: b"first"})
        nodes.wait(first, lambda: 1 in nodes.seen)
        assert first.close(LONG_S)
        other.post({1: b"second"})
        second = nodes.start("n0", merges=True, places=places)
        nodes.wait(second, lambda: nodes.seen[1][-1] == b"second")
        secret.write_bytes(b"of another job")
        stranger = nodes.start("n2", places=places)
        wait_until(lambda: any("not the token of this job" in note for note in stranger.notes()))

        assert nodes.seen[1] == [b"first", b"first", b"second"]
        assert "n2" not in second.collect_posts().nodes

    def test_node_0_listens_on_loopback_if_the_store_does(self, nodes: Nodes) -> None:
        """Other machines cannot connect to node 0."""
        nodes.start("n0", merges=True)
        address = nodes.address()

        assert address.hosts == ("127.0.0.1",)
        socket.create_connection(("127.0.0.1", address.port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", address.port))

    def test_invalid_posts_raise_value_error(self, nodes: Nodes) -> None:
        """A post is invalid if its payload exceeds 1024 bytes or its rank or port is invalid."""
        other, merger = nodes.start("n1"), nodes.start("n0", merges=True)
        with pytest.raises(ValueError, match="length <= 1024"):
            other.post({1: b"x" * 1025})
        with pytest.raises(ValueError, match=">= 0"):
            other.post({-1: b""})
        with pytest.raises(ValueError, match="invalid port 65536"):
            Exchange(Endpoints(("127.0.0.1", 65536)), KEY, "n1", False)
        other.post({1: b"x" * 1024})
        nodes.wait(merger, lambda: bool(nodes.seen))

        assert nodes.seen == {1: [b"x" * 1024]}

    def test_close_leaves_no_file_listener_or_connection(self, tmp_path: Path) -> None:
        """Opening an exchange again adds no thread."""
        counts = []
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            places = Endpoints(LOOPBACK, folder)
            other, merger = (
                Exchange(places, KEY, f"n{1 - n}", bool(n), timing=FAST) for n in range(2)
            )
            other.post({1: b"x"})
            wait_until(lambda merger=merger: 1 in ranks(merger.collect_posts()))
            assert other.close(LONG_S)
            assert merger.close(LONG_S)
            assert merger.close()
            assert list(folder.iterdir()) == []
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))

        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= counts[0][1])
        assert counts[1][0] <= counts[0][0]

    def test_waiting_post_is_sent_at_close(self, nodes: Nodes) -> None:
        """In one case, the node has not found node 0 before close() is called."""
        short = nodes.start(
            "n1", timing=dataclasses.replace(FAST, first_retry_s=100.0, last_retry_s=100.0)
        )
        short.post({1: b"last"})
        wait_until(lambda: any("has not published" in note for note in short.notes()))
        merger = nodes.start("n0", merges=True)
        nodes.address()
        assert short.close(LONG_S)
        nodes.wait(merger, lambda: 1 in nodes.seen and nodes.contacts["n1"].left)


class TestAlone:
    def test_windows_that_could_not_be_sent_are_counted(self, nodes: Nodes) -> None:
        """A node that never finds node 0 keeps 8 windows."""
        exchange = nodes.start("n1")
        for _ in range(KEPT_POSTS + 3):
            exchange.post({0: b"x"})

        assert "3 windows could not be sent to node 0's sidecar" in exchange.notes()
        wait_until(
            lambda: any("has not published its address" in note for note in exchange.notes())
        )
        assert exchange.close(LONG_S)

    def test_sidecar_of_a_one_node_job_does_not_import_grpc(self) -> None:
        """The sidecar starts no thread and opens no socket."""
        code = """if True:
            import sys, threading
            import numpy as np
            from torchlens_perf.analysis.statistics.steps import assemble_steps
            from torchlens_perf.verdicts.stragglers.placement import Placement
            from torchlens_perf.run.identity import Identity
            from torchlens_perf.run.ring import record_dtype
            from torchlens_perf.sidecar.cluster import ClusterLink
            from torchlens_perf.sidecar.job_generation import JobGeneration
            from torchlens_perf.sidecar.nodes.endpoints import Endpoints
            who = Identity("run", 0, 0, 1, 1, 0, "n0", 1, 1, 1, False, "", "", {})
            cluster, job = ClusterLink("n0"), JobGeneration(0)
            job.add_steps(who, Placement(), assemble_steps(np.zeros(0, record_dtype())), Endpoints(("127.0.0.1", 1)))
            cluster.exchange_data(job, 1.0)
            cluster.close(job)
            assert cluster.judges_alone and cluster.notes() == []
            assert not {"grpc", "torch"} & set(sys.modules) and threading.active_count() == 1
        """
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_sidecar_of_a_several_node_job_imports_grpc_but_not_torch(self, tmp_path: Path) -> None:
        """With grpc, the process prints nothing on stderr and can start programs."""
        code = f"""if True:
            import subprocess, sys, time
            from pathlib import Path
            from torchlens_perf.sidecar.nodes.exchange import Exchange
            from torchlens_perf.sidecar.nodes.endpoints import Endpoints
            places = Endpoints(("127.0.0.1", 1), Path({str(tmp_path)!r}))
            merger, other = (Exchange(places, "key", f"n{{n}}", n == 0) for n in range(2))
            other.post({{1: b"x"}})
            while not merger.collect_posts().posts:
                time.sleep(0.01)
            for number in range(20):
                other.post({{1: b"x"}})
                done = subprocess.run([sys.executable, "-S", "-c", "print(6 * 7)"], capture_output=True, timeout=60)
                assert done.stdout == b"42\\n" and done.stderr == b""
            assert other.close(30) and merger.close(30)
            assert "grpc" in sys.modules and "torch" not in sys.modules
        """
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
