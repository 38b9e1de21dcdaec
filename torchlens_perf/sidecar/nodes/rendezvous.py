"""How the nodes of a job find node 0's store: it leaves its address in the job's store, and the others look for it.

A training process opens nothing for it. A sidecar connects as one more client of the job's store, which waits for no
such client and counts none; asks with `check`, never with a blocking `get`; and is gone as soon as it knows.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from collections.abc import Callable

from torchlens_perf.sidecar.nodes.client import BoundedStore, connect

_RECORD = re.compile(r"1 (\d{1,5}) ([0-9a-f]{32}) ([^\s]+(?: [^\s]+)*)")
_MAX_RECORD_BYTES = 4096
_NOT_YET = "it has not published its address in the job's store yet"
MAX_CONNECTED_S = 60.0
LOOK_AGAIN_S = 120.0
_ANY_TIME_S = float("-inf")


def exchange_key(run_id: str, attempt: int) -> str:
    """The key in the job's store under which the nodes of one attempt of a run meet."""
    return f"torchlens_perf/{run_id}/{attempt}/exchange"


@dataclasses.dataclass(frozen=True)
class Address:
    """Where node 0's store is, and the prefix of all keys in it."""

    port: int
    token: str
    hosts: tuple[str, ...]
    """The same node, by the names and addresses that others may know it by; the likeliest first."""

    def encode(self) -> bytes:
        return " ".join(["1", str(self.port), self.token, *self.hosts]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Raises ConnectionError for anything that is not an address."""
        found = _RECORD.fullmatch(data[:_MAX_RECORD_BYTES].decode("utf-8", "replace"))
        if found is None or not 0 < int(found[1]) < 1 << 16:
            raise ConnectionError("what the job's store holds for us is not an address")
        return cls(int(found[1]), found[2], tuple(found[3].split(" ")))


class NotYet(ConnectionError):
    """Node 0 has not published its address: at the start of a job that is no error."""


class Rendezvous:
    """Where node 0's address is published: a key in the job's store. All from one thread."""

    def __init__(
        self,
        job_store: tuple[str, int],
        key: str,
        operation_s: float = 2.0,
        connect_s: float = 6.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self._port = job_store
        self._key = key
        self._operation_s = operation_s
        self._connect_s = connect_s
        self._clock = clock
        self._store: BoundedStore | None = None
        self._connected_s = 0.0
        self._not_before_s = _ANY_TIME_S

    @property
    def on_one_machine(self) -> bool:
        """Whether all nodes of the job must be on one machine, for that is where they look for its store."""
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"

    def publish(self, port: int, token: str) -> None:
        """Says where node 0's store is. Raises OSError."""
        store = self._connect()
        try:
            hosts = own_hosts(self.host, store.local_host, store.remote_host)
            store.set_all({self._key: Address(port, token, hosts).encode()})
            store.has(self._key)
        finally:
            store.close()

    def look_up(self, known: Address | None) -> Address:
        """What node 0 has said, if that is another address than the known one. Raises NotYet if not, else OSError.

        While one looks often, one connection is kept, for each costs the job's store a look-up of our name. It is
        closed when the address is found, and after MAX_CONNECTED_S: then one looks again every LOOK_AGAIN_S.
        """
        if self._clock() < self._not_before_s:
            raise NotYet(_NOT_YET)
        if self._store is None:
            self._store = self._connect()
            self._connected_s = self._clock()
        try:
            address = Address.decode(self._store.get_all([self._key])[0]) if self._store.has(self._key) else None
        except OSError:
            self.close()
            raise
        if address is None or address == known:
            if self._clock() - self._connected_s > MAX_CONNECTED_S or self._not_before_s > _ANY_TIME_S:
                self.close()
                self._not_before_s = self._clock() + LOOK_AGAIN_S
            raise NotYet(_NOT_YET)
        self.close()
        self._not_before_s = _ANY_TIME_S
        return address

    def close(self) -> None:
        """Closes the connection to the job's store, if there is one."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _connect(self) -> BoundedStore:
        return connect(self.host, self._port, self._operation_s, self._connect_s, probe=False)


def own_hosts(job_host: str, local_host: str, remote_host: str) -> tuple[str, ...]:
    """By what others may reach this node, the likeliest first.

    job_host: the name that everybody knows the job's store by. local_host and remote_host: the two ends of a
    connection from here to it.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    named = [str(address[0]) for *_, address in found]
    # The other end may be a name that stands for this node: others resolve it to what they can reach.
    ours = local_host == remote_host
    hosts = [job_host, local_host, *named] if ours else [local_host, *named, job_host]
    loopback = ("127.", "::1", "fe80:")  # or only valid together with an interface
    return tuple(dict.fromkeys(host for host in hosts if host == job_host or not host.startswith(loopback)))
