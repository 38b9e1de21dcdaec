"""Between nodes: each node's sidecar sends small payloads to node 0's, which merges them. The job takes no part in it.

::

    job's store            torchlens_perf/<run id>/<attempt>/exchange    set by node 0, looked for by the others
    node 0's own TCPStore  <token>/members, <token>/<sender>/head, ...   written by the others, read by node 0

Node 0's sidecar hosts a TCPStore of its own and leaves its address in the job's store, where the others look for it.
All of this happens on one daemon thread; post(), collect() and notes() only exchange values with it.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import threading
import time
from collections.abc import Mapping

from torchlens_perf.sidecar.nodes.client import BoundedStore, StoreServer, connect
from torchlens_perf.sidecar.nodes.messages import Collected, Inbox, Outbox, check_payloads, head_key, slot_key
from torchlens_perf.sidecar.nodes.rendezvous import Address, NotYet, Rendezvous

_READ_AT_ONCE = 256  # posts: bounds what one message of the store takes


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long the exchange waits, in seconds."""

    operation_s: float = 2.0
    """For any answer of a store."""
    connect_s: float = 6.0
    """To connect. torch looks up the name of the other end, and where the resolver's query is lost, that takes 5 s."""
    beat_s: float = 5.0
    """Between signs of life of a node that has nothing to send."""
    look_s: float = 1.0
    """Between node 0's looks."""
    first_retry_s: float = 0.25
    """After an error; doubled after each further one."""
    last_retry_s: float = 10.0


class _Part:
    """What the exchange's thread does on this node."""

    def __init__(self, meeting: Rendezvous, timing: Timing, lock: threading.Lock) -> None:
        """lock: of what this thread and the sidecar's exchange values in."""
        self._meeting = meeting
        self._timing = timing
        self._lock = lock
        self._store: BoundedStore | None = None

    def turn(self) -> float:
        """Does what is due. Returns after how many seconds to come again. Raises OSError."""
        raise NotImplementedError

    def leave(self) -> None:
        """Says good-bye and closes everything. Raises OSError."""
        raise NotImplementedError

    def abort(self) -> None:
        """Ends what turn() or leave() waits for. Any thread."""
        store = self._store
        if store is not None:
            store.abort()

    def _drop(self) -> None:
        if self._store is not None:
            self._store.close(discard=True)
            self._store = None


class Exchange:
    """One node's end of the exchange of one attempt of a run. Its methods return at once and belong to one thread."""

    def __init__(
        self, job_store: tuple[str, int], key: str, node: str, merges: bool, *, timing: Timing | None = None
    ) -> None:
        """Starts the thread.

        job_store: host and port of the job's TCPStore, as its training processes have them in MASTER_ADDR and
            MASTER_PORT.
        key: exchange_key(run_id, attempt), the same on all nodes of the attempt.
        node: what to call this node; no two nodes of the job share it.
        merges: whether this is node 0, which collects.

        Raises ValueError for a port that is none.
        """
        if not 0 <= job_store[1] < 1 << 16:
            raise ValueError(f"port {job_store[1]} is none")
        self._timing = timing or Timing()
        self._merges = merges
        self._lock = threading.Lock()
        self._inbox = Inbox(node, time.monotonic())
        self._outbox = Outbox(secrets.token_hex(8), node)
        self._errors = 0
        self._last_error = ""
        self._failing_since_s: float | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        meeting = Rendezvous(job_store, key, self._timing.operation_s, self._timing.connect_s)
        self._part: _Part
        if merges:
            self._part = _Merger(meeting, self._timing, self._lock, self._inbox)
        else:
            self._part = _Sender(meeting, self._timing, self._lock, self._outbox)
        self._thread = threading.Thread(target=self._run, name="torchlens_perf exchange", daemon=True)
        self._thread.start()

    def post(self, payloads: Mapping[int, bytes]) -> None:
        """Sends payloads, by rank. Only the last 8 posts are kept for a node 0 that cannot be reached.

        Raises ValueError for a payload over 1024 bytes or a rank that is none.
        """
        check_payloads(payloads)
        with self._lock:
            if self._merges:
                self._inbox.post_own(payloads, time.monotonic())
            else:
                self._outbox.post(payloads, time.monotonic())
        self._wake.set()

    def collect(self) -> Collected:
        """What has come to node 0 since the last call, its own posts included. On other nodes nothing comes.

        After a restart of node 0's sidecar, the last 8 posts of each node come again: this process has not seen them.
        """
        if not self._merges:
            return Collected({}, {})
        with self._lock:
            return self._inbox.collect(time.monotonic())

    def notes(self) -> list[str]:
        """What a person should know about the exchange, now; a line each."""
        notes = []
        with self._lock:
            failing_s = 0.0 if self._failing_since_s is None else time.monotonic() - self._failing_since_s
            if failing_s > self._timing.beat_s:
                what = "other nodes may not reach this sidecar" if self._merges else "node 0's sidecar is not reached"
                notes.append(f"{what}, since {failing_s:.0f} s: {self._last_error}")
            elif self._errors:
                notes.append(f"errors in the exchange between nodes: {self._errors}; the last: {self._last_error}")
            if self._outbox.dropped:
                notes.append(f"{self._outbox.dropped} windows could not be sent to node 0's sidecar")
            if self._inbox.unreadable:
                notes.append(f"{self._inbox.unreadable} values that other nodes sent could not be read")
            notes += [f"several sidecars call their node {node!r}" for node in self._inbox.namesakes()]
        if not self._thread.is_alive() and not self._closing.is_set():
            notes.append("the exchange between nodes has ended by an error of its own: see the sidecar's log")
        return notes

    def close(self, timeout_s: float = 5.0) -> bool:
        """Sends what is waiting, if node 0 can be reached, and closes everything.

        Returns whether that took less than `timeout_s`; if not, connections are cut off.
        """
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        in_time = not self._thread.is_alive()
        if not in_time:
            self._part.abort()
            self._thread.join(0.5)
        return in_time

    def _run(self) -> None:
        part = self._part
        retry_s = self._timing.first_retry_s
        while not self._closing.is_set():
            self._wake.clear()
            try:
                wait_s = part.turn()
                with self._lock:
                    self._failing_since_s = None
                retry_s = self._timing.first_retry_s
                self._wake.wait(wait_s)
            except OSError as error:
                self._count(error)
                # Not all nodes at the same instant; and no post shortens it.
                self._closing.wait(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, self._timing.last_retry_s)
        try:
            part.leave()
        except OSError as error:
            self._count(error)

    def _count(self, error: OSError) -> None:
        with self._lock:
            self._errors += not isinstance(error, NotYet)
            self._last_error = str(error)
            if self._failing_since_s is None:
                self._failing_since_s = time.monotonic()


class _Sender(_Part):
    """The part of all nodes but node 0."""

    def __init__(self, meeting: Rendezvous, timing: Timing, lock: threading.Lock, outbox: Outbox) -> None:
        super().__init__(meeting, timing, lock)
        self._outbox = outbox
        self._address: Address | None = None
        self._entered = ""  # token of the last store that is known to have our keys

    def turn(self) -> float:
        if self._store is None:
            self._store = self._join()
        try:
            self._send(self._store, leaving=False)
        except OSError:
            self._drop()
            raise
        return self._timing.beat_s

    def leave(self) -> None:
        try:
            with self._lock:
                waiting = self._outbox.waiting
            if self._store is None and waiting:
                # No more looking for where it may have gone: the job's store has often ended by now.
                self._store = self._connect(self._address) if self._address else self._join()
            if self._store is not None:
                self._send(self._store, leaving=True)
        finally:
            self._drop()
            self._meeting.close()

    def _send(self, store: BoundedStore, leaving: bool) -> None:
        assert self._address is not None
        token = self._address.token
        with self._lock:
            if self._entered != token:
                keys, line = self._outbox.enter()
            values, newest = self._outbox.due(time.monotonic(), leaving=leaving)
        if self._entered != token:
            store.set_all({f"{token}/{key}": value for key, value in keys.items()})
            store.append(f"{token}/members", line)
        store.set_all({f"{token}/{key}": value for key, value in values.items()})
        if not store.has(*(f"{token}/{key}" for key in values)):
            raise ConnectionError("node 0's store has lost our keys")
        self._entered = token
        with self._lock:
            self._outbox.acknowledge(newest)

    def _join(self) -> BoundedStore:
        """A connection to node 0's store: where it was, else where the job's store says."""
        failed: OSError | None = None
        if self._address is not None:
            try:
                return self._connect(self._address)
            except OSError as error:
                failed = error  # it is gone, or elsewhere, or we are cut off: the job's store may tell
        try:
            self._address = self._meeting.look_up(self._address)
        except NotYet as error:
            raise failed or error from None
        return self._connect(self._address)

    def _connect(self, address: Address) -> BoundedStore:
        failed: OSError = ConnectionError("node 0's sidecar has no address")
        for host in address.hosts:
            try:
                store = connect(host, address.port, self._timing.operation_s, self._timing.connect_s)
            except OSError as error:
                failed = error
                continue
            try:
                if store.has(f"{address.token}/members"):
                    self._meeting.close()
                    return store
                failed = ConnectionError(f"the store at {host}:{address.port} is another one")
            except OSError as error:
                failed = error
            store.close()
        raise failed


class _Merger(_Part):
    """The part of node 0."""

    def __init__(self, meeting: Rendezvous, timing: Timing, lock: threading.Lock, inbox: Inbox) -> None:
        super().__init__(meeting, timing, lock)
        self._inbox = inbox
        self._token = secrets.token_hex(16)
        self._server: StoreServer | None = None
        self._published = False

    def turn(self) -> float:
        if self._server is None:
            self._server = StoreServer(self._listen_on(), timeout_s=self._timing.operation_s)
        if self._store is None:
            self._store = connect(
                self._server.local_host, self._server.port, self._timing.operation_s, self._timing.connect_s
            )
            # It exists from the start: reading a missing key would block, and others know our store by it.
            self._store.append(f"{self._token}/members", b"")
        try:
            self._receive(self._store)
        except OSError:
            self._drop()
            raise
        if not self._published:
            self._meeting.publish(self._server.port, self._token)
            self._published = True
        return self._timing.look_s

    def leave(self) -> None:
        self._drop()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _receive(self, store: BoundedStore) -> None:
        started_s = time.monotonic()
        with self._lock:
            known = self._inbox.polled
        members, *heads = self._read(store, ["members", *map(head_key, known)])
        with self._lock:
            new = self._inbox.register(members, time.monotonic())
        heads += self._read(store, [head_key(sender) for sender in new])
        with self._lock:
            wanted = self._inbox.update(dict(zip([*known, *new], heads, strict=True)), time.monotonic())
        for at in range(0, len(wanted), _READ_AT_ONCE):
            part = wanted[at : at + _READ_AT_ONCE]
            values = self._read(store, [slot_key(sender, sequence) for sender, sequence in part])
            with self._lock:
                for (sender, sequence), value in zip(part, values, strict=True):
                    self._inbox.receive(sender, sequence, value)
        with self._lock:
            self._inbox.looked(started_s)

    def _read(self, store: BoundedStore, keys: list[str]) -> list[bytes]:
        return store.get_all([f"{self._token}/{key}" for key in keys]) if keys else []

    def _listen_on(self) -> str:
        """Where the job's store is on this machine by its very address, nobody elsewhere can look for us."""
        if not self._meeting.on_one_machine:
            return ""
        return "127.0.0.1" if self._meeting.host == "localhost" else self._meeting.host
