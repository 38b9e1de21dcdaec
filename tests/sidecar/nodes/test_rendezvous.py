"""How nodes find node 0: the address, and how the job's store is looked at."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from torchlens_perf.sidecar.nodes.client import _sockets_to
from torchlens_perf.sidecar.nodes.rendezvous import (
    LOOK_AGAIN_S,
    MAX_CONNECTED_S,
    Address,
    NotYet,
    Rendezvous,
    exchange_key,
    own_hosts,
)

KEY = exchange_key("run", 0)


def connections(to: tuple[str, int]) -> int:
    """How many connections this process has to there."""
    found = _sockets_to(*to)
    for each in found.values():
        each.close()
    return len(found)


def test_address_round_trip() -> None:
    """An address is read back; anything else is an error that the exchange's thread catches."""
    address = Address(1234, "ab" * 16, ("host-1.example", "fd00::1", "10.0.0.1"))

    assert Address.decode(address.encode()) == address
    for data in (
        b"",
        b"1 99999 " + b"ab" * 16 + b" h",
        b"2 1 " + b"ab" * 16 + b" h",
        b"1 1 short h",
        b"\xff" * 9999,
    ):
        with pytest.raises(ConnectionError, match="not an address"):
            Address.decode(data)


def test_hosts_by_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's host comes first where that is this node; loopback is told to nobody, unless the job is there."""
    named = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ("127.0.1.1", "10.0.0.5")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **keywords: named)

    assert own_hosts("head", "10.0.0.1", "10.0.0.1") == ("head", "10.0.0.1", "10.0.0.5")
    assert own_hosts("head", "127.0.1.1", "127.0.1.1") == ("head", "10.0.0.5")
    assert own_hosts("service", "10.0.0.1", "10.96.0.7") == ("10.0.0.1", "10.0.0.5", "service")
    assert own_hosts("127.0.0.1", "127.0.0.1", "127.0.0.1") == ("127.0.0.1", "10.0.0.5")


def test_looking_for_node_0_spares_the_jobs_store(open_at_end: ExitStack, job_store: tuple[str, int]) -> None:
    """One connection at first, however often one looks; after a minute one look in two minutes; none when found."""
    now = [1000.0]
    meeting, before = Rendezvous(job_store, KEY, clock=lambda: now[0]), connections(job_store)
    open_at_end.callback(meeting.close)

    def looks_not_yet() -> int:
        with pytest.raises(NotYet):
            meeting.look_up(None)
        return connections(job_store) - before

    often = [looks_not_yet() for _ in range(5)]
    now[0] += MAX_CONNECTED_S + 1
    then = [looks_not_yet(), looks_not_yet()]
    now[0] += LOOK_AGAIN_S + 1
    rarely = [looks_not_yet(), looks_not_yet()]
    Rendezvous(job_store, KEY).publish(1234, "ab" * 16)
    now[0] += LOOK_AGAIN_S - 1
    rarely.append(looks_not_yet())
    now[0] += 2
    address = meeting.look_up(None)
    found = connections(job_store) - before
    with pytest.raises(NotYet):
        meeting.look_up(address)  # node 0 is gone, and no other has come

    assert (often, then, rarely) == ([1] * 5, [0, 0], [0, 0, 0])
    assert (address.port, found) == (1234, 0)
    assert connections(job_store) - before == 1
