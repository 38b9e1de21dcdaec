"""What sidecars exchange: how messages look on the wire, the sender's Outbox, and the Inbox of node 0 that counts them.

Pure: knows no network, no thread and no clock. Each sidecar process is a sender with a random id of its own, so that
one that was started again is never taken for its predecessor. It numbers its posts; node 0 takes each number once, and
counts those that never came as missed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

KEPT_POSTS = 8
MAX_PAYLOAD_BYTES = 1024
MAX_RANKS = 512  # of a node: with them, a message of one post is within MAX_MESSAGE_BYTES
MAX_MESSAGE_BYTES = 1 << 20
MAX_REPLY_BYTES = 1024
POSTS_PER_ANSWER = 4  # half of what is kept: posts wait for the answer, and new ones come meanwhile
_DELAYS = 64  # messages over which the quickest is the one that was not delayed

_Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD_BYTES)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class Post(msgspec.Struct, array_like=True, frozen=True):
    """The payloads of a node's ranks, sent together."""

    sequence: _Number
    held_s: float
    """How long it had waited on its node when it was sent."""
    payloads: Annotated[dict[_Rank, _Payload], msgspec.Meta(max_length=MAX_RANKS)]


class Message(msgspec.Struct, array_like=True, frozen=True):
    """What a sender sends at a time; without posts, a sign of life."""

    sent_s: float
    """By the sender's own monotonic clock."""
    first: _Number
    """The number of its first post for this node 0: what came before was for an earlier one."""
    wants_answer: bool
    leaving: bool
    """It ends in good order, and this is its last message."""
    posts: Annotated[list[Post], msgspec.Meta(max_length=KEPT_POSTS)]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Node 0's answer to a message that wants one."""

    newest: int
    """All posts up to this number have come, or never will."""
    pace_s: float
    """No more than one message in so many seconds, please."""
    reply: bytes
    """What node 0 has to say to everybody, see Exchange.reply()."""


_message, _answer = msgspec.msgpack.Decoder(Message), msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.Encoder().encode


def decode_message(data: bytes) -> Message:
    """Raises ValueError for anything that is not a message."""
    message = _message.decode(data)
    times = [message.sent_s, *(post.held_s for post in message.posts)]
    if not all(map(math.isfinite, times)) or any(post.held_s < 0 for post in message.posts):
        raise ValueError("a time that is none")
    return message


def decode_answer(data: bytes) -> Answer:
    """Raises ValueError for anything that is not an answer."""
    answer = _answer.decode(data)
    if not 0 <= answer.pace_s <= 60:
        raise ValueError(f"a pace of {answer.pace_s} s")
    return answer


def check_payloads(payloads: Mapping[int, bytes]) -> None:
    """Raises ValueError for payloads that do not fit."""
    for rank, payload in payloads.items():
        if not 0 <= rank < 1 << 32:
            raise ValueError(f"rank {rank} is none")
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"rank {rank}'s payload has {len(payload)} bytes, more than {MAX_PAYLOAD_BYTES}")
    if len(payloads) > MAX_RANKS:
        raise ValueError(f"{len(payloads)} ranks on a node")


class Outbox:
    """A sender's posts: those not yet sent, and the last KEPT_POSTS in case that node 0 starts anew."""

    def __init__(self) -> None:
        self._posts: deque[tuple[int, float, dict[int, bytes]]] = deque(maxlen=KEPT_POSTS)
        self._newest = 0
        self._acknowledged = 0
        self._sent = 0
        self._first = 1
        self.dropped = 0
        """Posts that had to make room here for newer ones before node 0 was known to have them."""

    def post(self, payloads: Mapping[int, bytes], now_s: float) -> None:
        if len(self._posts) == KEPT_POSTS and self._posts[0][0] > self._acknowledged:
            self.dropped += 1
        self._newest += 1
        self._posts.append((self._newest, now_s, dict(payloads)))

    def enter(self, *, known: bool) -> None:
        """A new connection. known: to the very node 0 that has acknowledged posts; others get all that is kept."""
        oldest = self._posts[0][0] if self._posts else self._newest + 1
        if not known:
            self._first = min(oldest, self._acknowledged + 1)
        self._sent = max(oldest - 1, self._acknowledged) if known else oldest - 1

    def due(self, now_s: float, *, beat: bool, leaving: bool = False) -> Message:
        """What to send now. beat: an answer is due, whatever is sent."""
        posts: list[Post] = []
        size = 0
        for sequence, posted_s, payloads in self._posts:
            if sequence > self._sent:
                size += 32 + sum(16 + len(payload) for payload in payloads.values())
                if posts and size > MAX_MESSAGE_BYTES:
                    break
                posts.append(Post(sequence, max(0.0, now_s - posted_s), payloads))
        if posts:
            self._sent = posts[-1].sequence
        waiting = self._sent - self._acknowledged
        leaving = leaving and not self.waiting  # there is another message
        wants = beat or leaving or waiting >= POSTS_PER_ANSWER or self.waiting
        return Message(now_s, self._first, wants, leaving, posts)

    def acknowledge(self, sequence: int) -> None:
        """Node 0 has all posts up to this one."""
        self._acknowledged = max(self._acknowledged, min(sequence, self._newest))

    @property
    def waiting(self) -> bool:
        """Whether there are posts that have not been sent over this connection."""
        return self._newest > self._sent


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """One post of a node."""

    node: str
    sequence: int
    """Counted by its sender, from 1."""
    age_s: float
    """Since it was posted: what its sender held it back, the network delayed it, and it waited here."""
    payloads: Mapping[int, bytes]
    """By rank."""


@dataclasses.dataclass(frozen=True)
class NodeContact:
    """What node 0 knows of a node that it has heard of."""

    node: str
    silent_s: float
    """Since its last sign of life, posts or not; 0 for node 0 itself."""
    posts: int
    """Received from it."""
    missed: int
    """Posts of it that never came, or that nobody collected in time."""
    restarts: int
    """How many more sidecar processes it has had than one."""
    left: bool
    """Its sidecar has ended in good order."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """What has come since the last collect()."""

    posts: Sequence[Received]
    """Those of one sidecar in the order that it posted them in. One object a post: of a large job, one a rank and
    window took as long as all else that node 0 does for the exchange."""
    nodes: Mapping[str, NodeContact]
    """All nodes heard of so far. Of others nothing is known, and nothing is here."""


@dataclasses.dataclass
class _Sender:
    """One sidecar process, as the Inbox sees it."""

    node: str
    joined_s: float
    heard_s: float
    left: bool = False
    read: int | None = None
    posts: int = 0
    missed: int = 0
    unreadable: int = 0
    unread: deque[tuple[Post, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT_POSTS))
    # Clocks of nodes have nothing in common: how much later than the quickest of the last messages one came.
    quickest_s: tuple[float, float] = (math.inf, math.inf)
    messages: int = 0

    def take(self, post: Post, posted_s: float) -> None:
        """posted_s: when it was posted, by this node's clock."""
        if len(self.unread) == KEPT_POSTS:  # collect() is not being called
            self.missed += 1
        else:
            self.posts += 1
        self.unread.append((post, posted_s))

    def delay_s(self, message: Message, now_s: float) -> float:
        took_s = now_s - message.sent_s
        before_s, recent_s = self.quickest_s
        if self.messages % _DELAYS == 0:  # clocks drift: what was quickest long ago says nothing
            before_s, recent_s = recent_s, math.inf
        self.messages += 1
        self.quickest_s = before_s, min(recent_s, took_s)
        return took_s - min(self.quickest_s)


class Inbox:
    """Node 0's account of all senders."""

    def __init__(self, own_node: str, now_s: float) -> None:
        self._own = _Sender(own_node, now_s, now_s, read=0)
        self._senders: dict[str, _Sender] = {}
        self.refused = 0
        """Calls without this job's token."""

    def post_own(self, payloads: Mapping[int, bytes], now_s: float) -> None:
        assert self._own.read is not None
        self._own.read += 1
        self._own.take(Post(self._own.read, 0.0, dict(payloads)), now_s)

    def enter(self, sender: str, node: str, now_s: float) -> None:
        """A sender connects, for the first time or again."""
        if sender not in self._senders:
            self._senders[sender] = _Sender(node, now_s, now_s)

    def receive(self, name: str, data: bytes, now_s: float) -> int | None:
        """Takes what a sender that has entered sent.

        Returns the number of its newest post, if it wants an answer. Raises ValueError for bytes that are no message,
        and counts them as that node's.
        """
        sender = self._senders[name]
        sender.heard_s, sender.left = now_s, False
        try:
            message = decode_message(data)
        except ValueError:
            sender.unreadable += 1
            raise
        if sender.read is None:
            sender.read = max(0, message.first - 1)
        delay_s = sender.delay_s(message, now_s)
        for post in message.posts:
            if post.sequence > sender.read:  # else it comes again, for it was not acknowledged
                sender.missed += post.sequence - sender.read - 1
                sender.read = post.sequence
                sender.take(post, now_s - delay_s - post.held_s)
        sender.left = message.leaving
        return sender.read if message.wants_answer else None

    def collect(self, now_s: float) -> Collected:
        """What has come since the last call."""
        posts: list[Received] = []
        for sender in (self._own, *self._senders.values()):
            while sender.unread:
                post, posted_s = sender.unread.popleft()
                posts.append(Received(sender.node, post.sequence, max(0.0, now_s - posted_s), post.payloads))
        self._own.heard_s = now_s
        nodes: dict[str, list[_Sender]] = {self._own.node: [self._own]}
        for sender in self._senders.values():
            nodes.setdefault(sender.node, []).append(sender)
        contacts = {node: _contact(node, senders, now_s) for node, senders in nodes.items()}
        return Collected(posts, contacts)

    @property
    def senders(self) -> int:
        """How many sidecar processes of other nodes have entered."""
        return len(self._senders)

    def unreadable(self) -> dict[str, int]:
        """How many messages could not be read, by node."""
        return {sender.node: sender.unreadable for sender in self._senders.values() if sender.unreadable}

    def namesakes(self) -> list[str]:
        """Nodes whose name several living sidecars use: one was heard after its successor had come."""
        return sorted({older.node for older, newer in self._successions() if older.heard_s > newer.joined_s})

    def _successions(self) -> Iterable[tuple[_Sender, _Sender]]:
        newest = {self._own.node: self._own}
        for sender in self._senders.values():
            if sender.node in newest:
                yield newest[sender.node], sender
            newest[sender.node] = sender


def _contact(node: str, senders: list[_Sender], now_s: float) -> NodeContact:
    return NodeContact(
        node,
        max(0.0, now_s - max(sender.heard_s for sender in senders)),
        sum(sender.posts for sender in senders),
        sum(sender.missed for sender in senders),
        len(senders) - 1,
        senders[-1].left,
    )
