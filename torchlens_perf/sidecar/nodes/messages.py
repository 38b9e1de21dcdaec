"""What sidecars exchange: how posts look on the wire, the sender's Outbox, and the Inbox of node 0 that counts them.

Pure: knows no store, no thread and no clock. Each sidecar process is a sender with a random id of its own, so that one
that was started again is never taken for its predecessor. A sender owns SLOTS keys, which its posts take turns at, and
a head, which says how far it is. A post that node 0 has not read by then is overwritten, and counted as missed.
"""

from __future__ import annotations

import dataclasses
import struct
import urllib.parse
from collections import deque
from collections.abc import Iterable, Mapping

SLOTS = 8
MAX_PAYLOAD_BYTES = 1024
RETIRED_AFTER_S = 30.0

_POST = struct.Struct("<QdH")  # sequence, seconds held back by the sender, number of ranks
_RANK = struct.Struct("<IH")  # rank, length of what follows
_HEAD = struct.Struct("<QQQ?")


@dataclasses.dataclass(frozen=True)
class Head:
    """How far a sender is."""

    first: int
    """Sequence number of its first post in this store: what came before was for an earlier node 0."""
    newest: int
    """Of its newest post; `first - 1` if there is none."""
    beat: int
    """Grows with every sign of life."""
    leaving: bool
    """It has ended in good order."""

    def encode(self) -> bytes:
        return _HEAD.pack(self.first, self.newest, self.beat, self.leaving)

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Raises ValueError for anything that is not a head."""
        if len(data) != _HEAD.size:
            raise ValueError(f"a head has {_HEAD.size} bytes, not {len(data)}")
        return cls(*_HEAD.unpack(data))


@dataclasses.dataclass(frozen=True)
class Post:
    """The payloads of a node's ranks, sent together."""

    sequence: int
    held_s: float
    """How long it had waited on its node when it was sent."""
    payloads: Mapping[int, bytes]

    def encode(self) -> bytes:
        parts = [_POST.pack(self.sequence, self.held_s, len(self.payloads))]
        for rank, payload in self.payloads.items():
            parts += [_RANK.pack(rank, len(payload)), payload]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Post:
        """Raises ValueError for anything that is not a post."""
        try:
            sequence, held_s, ranks = _POST.unpack_from(data)
            payloads, at = {}, _POST.size
            for _ in range(ranks):
                rank, length = _RANK.unpack_from(data, at)
                at += _RANK.size
                payloads[rank] = data[at : at + length]
                at += length
        except struct.error as error:
            raise ValueError(f"not a post: {error}") from error
        if at != len(data) or not 0 <= held_s < 1e9 or len(payloads) != ranks:
            raise ValueError("not a post")
        return cls(sequence, held_s, payloads)


def check_payloads(payloads: Mapping[int, bytes]) -> None:
    """Raises ValueError for payloads that do not fit."""
    for rank, payload in payloads.items():
        if not 0 <= rank < 1 << 32:
            raise ValueError(f"rank {rank} is none")
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"rank {rank}'s payload has {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    if len(payloads) >= 1 << 16:
        raise ValueError(f"{len(payloads)} ranks on a node")


def head_key(sender: str) -> str:
    return f"{sender}/head"


def slot_key(sender: str, sequence: int) -> str:
    return f"{sender}/{sequence % SLOTS}"


class Outbox:
    """A sender's posts: those not yet sent, and the last SLOTS in case that node 0 starts anew."""

    def __init__(self, sender: str, node: str) -> None:
        """sender: unique among the sidecar processes of the run. node: what to call the node."""
        self._sender = sender
        self._node = node
        self._posts: deque[tuple[int, float, Mapping[int, bytes]]] = deque(maxlen=SLOTS)
        self._newest = 0
        self._acknowledged = 0  # by any store
        self._in_this_store = 0
        self._first = 1
        self._beat = 0
        self.dropped = 0
        """Posts that were overwritten here, before they could be sent."""

    def post(self, payloads: Mapping[int, bytes], now_s: float) -> None:
        if len(self._posts) == SLOTS and self._posts[0][0] > self._acknowledged:
            self.dropped += 1
        self._newest += 1
        self._posts.append((self._newest, now_s, dict(payloads)))

    def enter(self) -> tuple[dict[str, bytes], bytes]:
        """To be written to a store that this sender is not in: its keys, and then its line for the members."""
        oldest = self._posts[0][0] if self._posts else self._newest + 1
        self._first = min(oldest, self._acknowledged + 1)
        self._in_this_store = self._first - 1
        # All slots exist from now on: a read of a missing key would block.
        empty = {slot_key(self._sender, slot): b"" for slot in range(SLOTS)}
        head = Head(self._first, self._first - 1, self._beat, False).encode()
        return {**empty, head_key(self._sender): head}, member_line(self._sender, self._node)

    def due(self, now_s: float, *, leaving: bool = False) -> tuple[dict[str, bytes], int]:
        """What to write now, and what to acknowledge() when it has arrived."""
        self._beat += 1
        values = {
            slot_key(self._sender, sequence): Post(sequence, max(0.0, now_s - posted_s), payloads).encode()
            for sequence, posted_s, payloads in self._posts
            if sequence > self._in_this_store
        }
        values[head_key(self._sender)] = Head(self._first, self._newest, self._beat, leaving).encode()
        return values, self._newest

    def acknowledge(self, sequence: int) -> None:
        """All posts up to this one are in the store."""
        self._in_this_store = sequence
        self._acknowledged = max(self._acknowledged, sequence)

    @property
    def waiting(self) -> bool:
        return self._newest > self._in_this_store


def member_line(sender: str, node: str) -> bytes:
    """A sender's entry in the list of members."""
    return f"{sender} {urllib.parse.quote(node, safe='')}\n".encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """One rank's payload of one post."""

    payload: bytes
    age_s: float
    """At most this old: since node 0 last looked and it was not there, and what its sender had held it back before."""
    node: str
    sequence: int
    """Number of the post, counted by its sender from 1."""


@dataclasses.dataclass(frozen=True)
class NodeContact:
    """What node 0 knows of a node that it has heard of."""

    node: str
    silent_s: float
    """Since its last sign of life, posts or not; 0 for node 0 itself."""
    posts: int
    """Received from it."""
    missed: int
    """Posts of it that were overwritten before node 0 could read them."""
    restarts: int
    """How many more sidecar processes it has had than one."""
    left: bool
    """Its sidecar has ended in good order."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """What has come since the last collect()."""

    payloads: Mapping[int, tuple[Received, ...]]
    """By rank, in the order that they were posted in."""
    nodes: Mapping[str, NodeContact]
    """All nodes heard of so far. Of others nothing is known, and nothing is here."""


@dataclasses.dataclass
class _Sender:
    """One sidecar process, as the Inbox sees it."""

    node: str
    joined_s: float
    heard_s: float
    head: Head | None = None
    read: int = 0
    posts: int = 0
    missed: int = 0
    unread: deque[tuple[Post, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=SLOTS))

    def take(self, post: Post, not_before_s: float) -> None:
        if len(self.unread) == SLOTS:  # collect() is not being called
            self.missed += 1
        else:
            self.posts += 1
        self.unread.append((post, not_before_s))


class Inbox:
    """Node 0's account of all senders. One round: register(), update(), receive() for what that asks for, looked()."""

    def __init__(self, own_node: str, now_s: float) -> None:
        self._own = _Sender(own_node, now_s, now_s)
        self._senders: dict[str, _Sender] = {}
        self._polled: dict[str, _Sender] = {}
        self._parsed = 0
        self._looked_s = now_s
        self.unreadable = 0
        """Values that were no post, no head or no member."""

    @property
    def polled(self) -> list[str]:
        """The senders whose heads are wanted."""
        return list(self._polled)

    def post_own(self, payloads: Mapping[int, bytes], now_s: float) -> None:
        self._own.read += 1
        self._own.take(Post(self._own.read, 0.0, dict(payloads)), now_s)

    def register(self, members: bytes, now_s: float) -> list[str]:
        """Reads the list of members on from where it ended last time. Returns the new ones."""
        new = []
        for line in members[self._parsed :].splitlines():
            sender, _, node = line.decode("ascii", "replace").partition(" ")
            if not (sender.isalnum() and node):
                self.unreadable += 1
            elif sender not in self._senders:  # else it came back before it knew that it was in already
                self._senders[sender] = self._polled[sender] = _Sender(urllib.parse.unquote(node), now_s, now_s)
                new.append(sender)
        self._parsed = max(self._parsed, len(members))
        return new

    def update(self, heads: Mapping[str, bytes], now_s: float) -> list[tuple[str, int]]:
        """Takes the heads that were read. Returns which posts to read: sender and sequence number, in order."""
        wanted = []
        for name, data in heads.items():
            sender = self._polled[name]
            try:
                head = Head.decode(data)
            except ValueError:
                self.unreadable += 1
                continue
            if sender.head is None:
                sender.read = head.first - 1
            if head != sender.head:
                sender.heard_s = now_s
                sender.head = head
            oldest = max(sender.read, head.newest - SLOTS) + 1
            wanted += [(name, sequence) for sequence in range(oldest, head.newest + 1)]
        self._retire(now_s)
        return wanted

    def receive(self, name: str, sequence: int, data: bytes) -> None:
        """Takes the value of the slot that this post of this sender should be in."""
        sender = self._senders[name]  # the look that asked for it may have retired it
        sender.missed += sequence - sender.read - 1
        sender.read = sequence
        try:
            post = Post.decode(data)
        except ValueError:
            self.unreadable += bool(data)  # an empty slot's post was dropped by its sender
            sender.missed += 1
            return
        if post.sequence == sequence:
            sender.take(post, self._looked_s)
        else:  # overwritten since the head was read, or dropped
            sender.missed += 1

    def looked(self, started_s: float) -> None:
        """A look that began at `started_s` has read everything. What comes next was not there at that time."""
        self._looked_s = started_s

    def collect(self, now_s: float) -> Collected:
        """What has come since the last call."""
        payloads: dict[int, list[Received]] = {}
        for sender in (self._own, *self._senders.values()):
            while sender.unread:
                post, not_before_s = sender.unread.popleft()
                age_s = post.held_s + max(0.0, now_s - not_before_s)
                for rank, payload in post.payloads.items():
                    payloads.setdefault(rank, []).append(Received(payload, age_s, sender.node, post.sequence))
        self._own.heard_s = now_s
        nodes: dict[str, list[_Sender]] = {self._own.node: [self._own]}
        for sender in self._senders.values():
            nodes.setdefault(sender.node, []).append(sender)
        contacts = {node: _contact(node, senders, now_s) for node, senders in nodes.items()}
        return Collected({rank: tuple(received) for rank, received in payloads.items()}, contacts)

    def namesakes(self) -> list[str]:
        """Nodes whose name several living sidecars use: one was heard after its successor had come."""
        return sorted({older.node for older, newer in self._successions() if older.heard_s > newer.joined_s})

    def _retire(self, now_s: float) -> None:
        """Stops asking for senders that another of the same node has replaced."""
        for older, newer in self._successions():
            if older.heard_s <= newer.joined_s < now_s - RETIRED_AFTER_S:
                self._polled = {name: sender for name, sender in self._polled.items() if sender is not older}

    def _successions(self) -> Iterable[tuple[_Sender, _Sender]]:
        newest = {self._own.node: self._own}
        for sender in self._polled.values():
            if sender.node in newest:
                yield newest[sender.node], sender
            newest[sender.node] = sender


def _contact(node: str, senders: list[_Sender], now_s: float) -> NodeContact:
    newest = senders[-1]
    return NodeContact(
        node,
        max(0.0, now_s - max(sender.heard_s for sender in senders)),
        sum(sender.posts for sender in senders),
        sum(sender.missed for sender in senders),
        len(senders) - 1,
        newest.head is not None and newest.head.leaving,
    )
