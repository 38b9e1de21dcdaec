"""Tests that nodes find node 0 through the run directory, the job's store or a setting."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.sidecar.nodes.conftest import FAST, KEY, LONG_S, Nodes, wait_until
from torchlens_perf.sidecar.nodes import endpoints as endpoints_module
from torchlens_perf.sidecar.nodes.endpoints import (
    Endpoints,
    find_listen_addresses,
    find_own_hosts,
    split_address,
)
from torchlens_perf.sidecar.nodes.rendezvous import (
    ExchangeAddress,
    NotPublishedYet,
    Rendezvous,
    create_token,
)

ADDRESS = ExchangeAddress(1234, "ab" * 16, ("host-1.example", "fd00::1", "10.0.0.1"))
AT_ONCE = dataclasses.replace(FAST, store_after_s=0.0, store_child_s=30.0, store_again_s=1.0)


def until_found(meeting: Rendezvous) -> list[tuple[str, ExchangeAddress]]:
    """Wait until a rendezvous finds addresses, and return the addresses."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return meeting.find_addresses()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def job_store() -> TCPStore:
    """Return a store like the one of a job with several nodes."""
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def test_unpacked_address_equals_the_packed_one() -> None:
    """Invalid data raises an error that the thread of the exchange catches."""
    assert ExchangeAddress.decode(ADDRESS.encode()) == ADDRESS
    for data in (
        b"",
        b"2 99999 " + b"ab" * 16 + b" h",
        b"3 1 " + b"ab" * 16 + b" h",
        b"2 1 short h",
        b"\xff" * 9999,
    ):
        with pytest.raises(ConnectionError, match="address of node 0 is invalid"):
            ExchangeAddress.decode(data)


class TestFolder:
    def test_node_0_is_found_in_the_run_directory(self, tmp_path: Path) -> None:
        """The file is private and written atomically. At its end, node 0 removes only its file."""
        meeting, other = (Rendezvous(Endpoints(None, tmp_path), KEY) for _ in range(2))
        with pytest.raises(NotPublishedYet):
            other.find_addresses()
        assert meeting.publish_address(ADDRESS) == ""
        found = other.find_addresses()
        assert meeting.address_file is not None
        mode = meeting.address_file.stat().st_mode & 0o777
        meeting.close(unpublish=dataclasses.replace(ADDRESS, port=1))
        kept = list(tmp_path.iterdir())
        meeting.close(unpublish=ADDRESS)

        assert found == [("the run directory", ADDRESS)]
        assert mode == 0o600
        assert kept == [meeting.address_file]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("wrong", ["mode", "link", "fifo", "content", "owner"])
    def test_address_file_that_other_users_can_write_is_refused(
        self, tmp_path: Path, wrong: str
    ) -> None:
        """One such file is a FIFO, whose reading must not block."""
        meeting = Rendezvous(Endpoints(None, tmp_path), KEY)
        file = meeting.address_file
        assert file is not None
        if wrong == "fifo":
            os.mkfifo(file, 0o600)
        elif wrong == "link":
            (tmp_path / "real").write_bytes(ADDRESS.encode())
            (tmp_path / "real").chmod(0o600)
            file.symlink_to(tmp_path / "real")
        else:
            file.write_bytes(b"garbage" if wrong == "content" else ADDRESS.encode())
            file.chmod(0o644 if wrong == "mode" else 0o600)
        if wrong == "owner":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            os.chown(file, 12345, -1)
        with pytest.raises(OSError, match=r"\S") as error:
            meeting.find_addresses()
        assert not isinstance(error.value, NotPublishedYet)


class TestJobStore:
    def test_address_is_published_and_found_in_the_jobs_store(self, job_store: TCPStore) -> None:
        """A later node 0 replaces the address under the same key."""
        where = Endpoints(("127.0.0.1", job_store.port))
        merger, other = (Rendezvous(where, KEY, AT_ONCE) for _ in range(2))
        merger.publish_address(ADDRESS)
        found = until_found(other)
        other.stop_search()
        second = dataclasses.replace(ADDRESS, token="cd" * 16)
        wait_until(
            lambda: merger.publish_address(ADDRESS) == "" and merger._published_store is not None
        )
        wait_until(
            lambda: merger.publish_address(second) == "" and merger._published_store == second
        )
        wait_until(lambda: other.find_addresses()[0][1] == second)
        keys = [key for key in job_store.list_keys() if "torchlens_perf" in key]
        merger.close()
        other.close()

        assert found == [("the job's store", ADDRESS)]
        assert keys == [KEY]

    def test_child_is_killed_if_the_store_does_not_answer(self, open_at_end: ExitStack) -> None:
        """The main process never waits for the child."""
        silent = open_at_end.enter_context(socket.create_server(("127.0.0.1", 0), backlog=8))
        timing = dataclasses.replace(AT_ONCE, store_child_s=3.0)
        meeting = Rendezvous(Endpoints(("127.0.0.1", silent.getsockname()[1])), KEY, timing)
        open_at_end.callback(meeting.close)
        longest_s, pids, message = 0.0, set(), ""
        deadline = time.monotonic() + LONG_S
        while "did not answer" not in message:
            assert time.monotonic() < deadline, message
            began_s = time.monotonic()
            try:
                meeting.find_addresses()
            except OSError as error:
                message = str(error)
            longest_s = max(longest_s, time.monotonic() - began_s)
            if meeting._child is not None:
                pids.add(meeting._child.pid)
            time.sleep(0.02)

        assert len(pids) == 1
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert longest_s < 2.0  # Starting a process takes time on a busy machine.

    @pytest.mark.long
    def test_missing_store_is_noted_until_nodes_connect(self, nodes: Nodes) -> None:
        places = Endpoints(("127.0.0.1", 1))
        merger = nodes.start("n0", merges=True, places=places, timing=AT_ONCE)
        wait_until(lambda: any("other nodes may not reach" in note for note in merger.notes()))

    @pytest.mark.long
    def test_node_0_of_another_job_receives_no_token_and_no_payload(
        self, nodes: Nodes, job_store: TCPStore
    ) -> None:
        stranger = nodes.start("other job's n0", merges=True, key="another key")
        wrong = dataclasses.replace(nodes.address("another key"), token="ab" * 16)
        job_store.set(KEY, wrong.encode().decode())
        other = nodes.start("n1", places=Endpoints(("127.0.0.1", job_store.port)), timing=AT_ONCE)
        other.post({1: b"x"})
        wait_until(lambda: any("does not know the token" in note for note in other.notes()))

        assert stranger.collect_posts().nodes == {}
        assert stranger.notes() == []


class TestPlaces:
    def test_token_is_random_unless_the_address_is_configured(self, tmp_path: Path) -> None:
        """With a configured address, nodes derive the token from the secret and the key."""
        secret = tmp_path / "secret"
        secret.write_bytes(b"s")
        secret.chmod(0o600)
        free, fixed = Endpoints(("h", 1)), Endpoints(None, None, "h:1", str(secret))

        assert create_token(free, KEY) != create_token(free, KEY)
        assert create_token(fixed, KEY) == create_token(fixed, KEY)
        assert (
            len(
                {
                    create_token(fixed, KEY),
                    create_token(fixed, "k"),
                    create_token(Endpoints(None, None, "h:1"), KEY),
                }
            )
            == 3
        )
        assert create_token(Endpoints(None, None, "h:1", token="s"), KEY) == create_token(
            fixed, KEY
        )
        secret.chmod(0o640)
        with pytest.raises(PermissionError, match="this user alone"):
            create_token(fixed, KEY)

    def test_coordinator_setting_is_split_into_host_and_port(self) -> None:
        assert split_address("head:1") == ("head", 1)
        assert split_address("[fd00::1]:65535") == ("fd00::1", 65535)
        for text in ("head", "head:", ":1", "head:0", "head:65536", "a b:1", "head:x"):
            with pytest.raises(ValueError, match="is not host:port"):
                split_address(text)

    def test_node_0_listens_on_the_interface_that_leads_to_the_store(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Node 0 listens on loopback only if the store's address is loopback.

        If the name resolves to loopback only on this node, node 0 listens on all interfaces.
        """
        names = {"head": ["10.0.0.9"], "here": ["10.0.0.1"], "debian": ["127.0.1.1"]}
        monkeypatch.setattr(endpoints_module, "_resolve_host", lambda host: names.get(host, [host]))
        routes = {
            "10.0.0.9": "10.0.0.1",
            "10.0.0.1": "10.0.0.1",
            "127.0.1.1": "127.0.0.1",
            "192.0.2.1": "10.0.0.1",
        }
        monkeypatch.setattr(endpoints_module, "_find_own_address_towards", routes.get)
        monkeypatch.setattr(socket, "gethostname", lambda: "here")
        found = {
            host: (
                find_listen_addresses(Endpoints((host, 1)))[0],
                find_own_hosts(
                    Endpoints((host, 1)), find_listen_addresses(Endpoints((host, 1)))[0][0]
                ),
            )
            for host in ("head", "here", "debian", "localhost", "127.0.0.3")
        }

        assert found == {
            "head": (["10.0.0.1"], ("10.0.0.1", "head")),
            "here": (["10.0.0.1"], ("here", "10.0.0.1")),
            "debian": (["::"], ("10.0.0.1", "debian")),
            "localhost": (["127.0.0.1"], ("127.0.0.1",)),
            "127.0.0.3": (["127.0.0.3"], ("127.0.0.3",)),
        }
        assert find_listen_addresses(Endpoints(None, None, "head:7")) == (["10.0.0.9", "::"], 7)

    def test_endpoints_come_from_the_store_or_the_setting(self, tmp_path: Path) -> None:
        """With `exchange` off, there are no endpoints either."""
        assert Endpoints.from_setting(None, "auto", tmp_path) is None
        assert Endpoints.from_setting(None, "grpcs://?certs=/tls", tmp_path) is None
        assert Endpoints.from_setting(("h", 1), "off", tmp_path) is None
        assert Endpoints.from_setting(("h", 1), "auto", tmp_path) == Endpoints(("h", 1), tmp_path)
        assert Endpoints.from_setting(("h", 1), "grpcs://?certs=/tls", tmp_path) == Endpoints(
            ("h", 1), tmp_path, tls_folder="/tls"
        )
        assert Endpoints.from_setting(None, "grpc://h:1", tmp_path) == Endpoints(
            None, tmp_path, "h:1"
        )
        whole = Endpoints.from_setting(
            None, "grpcs://h:1?token_file=/t&certs=/tls&name=n0", tmp_path, "secret"
        )
        assert whole == Endpoints(None, tmp_path, "h:1", "/t", "/tls", "n0", "secret")
        assert "secret" not in repr(whole)
