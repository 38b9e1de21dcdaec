"""Exchange reports between sidecars: the wire format, the sender's Outbox, and node 0's Inbox.

This module uses no network, thread or clock. A report contains the posts that node 0 has not
confirmed, so the next report repeats the content of a failed call. Node 0 recognises duplicate
posts by their time. Each sidecar process has a random id, so a restarted sidecar counts as a new
sender.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

KEPT_POSTS = 8
MAX_PAYLOAD_BYTES = 1024
MAX_RANKS = 512  # Limit per node: one post must fit into MAX_MESSAGE_BYTES.
MAX_MESSAGE_BYTES = 1 << 20
MAX_REPLY_BYTES = 1024
MAX_LINKS_BYTES = 1 << 14
# Number of reports for each estimate of the clock offset. The fastest report counts as not delayed.
_REPORTS_PER_OFFSET = 64

_Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD_BYTES)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Post(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The payloads that a node's ranks send at one time."""

    posted_s: float
    """Time on the sender's monotonic clock.

    Each post has a later time, which identifies the post.
    """
    payloads: Annotated[dict[_Rank, _Payload], msgspec.Meta(max_length=MAX_RANKS)]


class NodeReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One node's report. A report without posts shows that the sidecar is alive."""

    sent_s: float
    """Time on the sender's monotonic clock."""
    dropped: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
    """Number of posts that the sender has dropped since its start."""
    leaving: bool
    """True in the last report of a sender that ends normally."""
    posts: Annotated[list[Post], msgspec.Meta(max_length=KEPT_POSTS)]
    """Posts, oldest first."""
    links: Annotated[bytes, msgspec.Meta(max_length=MAX_LINKS_BYTES)] = b""
    """Statistics of the node's links, see link_report.py, or b"" if node 0 has them already."""


class ReportReply(msgspec.Struct, array_like=True, frozen=True):
    """Node 0's reply to a report."""

    pace_s: float
    """Minimum time between two reports."""
    instructions: bytes
    """Instructions for all nodes, see Exchange.instructions()."""


_report, _reply = msgspec.msgpack.Decoder(NodeReport), msgspec.msgpack.Decoder(ReportReply)
encode = msgspec.msgpack.Encoder().encode


def decode_report(data: bytes) -> NodeReport:
    """Decode a report. Raises ValueError for invalid data."""
    report = _report.decode(data)
    times = [*(post.posted_s for post in report.posts), report.sent_s]
    if not all(map(math.isfinite, times)) or times != sorted(times):
        raise ValueError("invalid times")
    return report


def decode_reply(data: bytes) -> ReportReply:
    """Decode a reply. Raises ValueError for invalid data."""
    reply = _reply.decode(data)
    if not 0 <= reply.pace_s <= 60:
        raise ValueError(f"invalid pace of {reply.pace_s} s")
    return reply


class Outbox:
    """The last KEPT_POSTS posts of a sender. They are sent again if node 0's sidecar restarts."""

    def __init__(self) -> None:
        self.links = b""
        """Statistics of the node's links, see link_report.py."""
        self.instructions = b""
        """Node 0's newest instructions."""
        self._posts: deque[Post] = deque(maxlen=KEPT_POSTS)
        self._newest_s = -math.inf
        self._delivered_s = -math.inf  # newest post received by any process of node 0
        self._received_s = -math.inf  # newest post received by its current process
        self._undelivered = 0  # number of posts that no process of node 0 has received
        self._received_links = b""

    @property
    def dropped(self) -> int:
        """Number of posts that newer ones replaced before node 0 had received them."""
        return self._undelivered - sum(post.posted_s > self._delivered_s for post in self._posts)

    def add_post(self, payloads: Mapping[int, bytes], now_s: float) -> None:
        """Add payloads by rank. Raises ValueError for payloads that exceed a limit."""
        posted_s = max(now_s, math.nextafter(self._newest_s, math.inf))
        self._posts.append(msgspec.convert((posted_s, payloads), Post))
        self._newest_s = posted_s
        self._undelivered += 1

    @property
    def has_unsent(self) -> bool:
        """True while the current process of node 0 has not received all posts and links."""
        return self._newest_s > self._received_s or self.links != self._received_links

    def require_resend(self) -> None:
        """Mark all posts as not received, because node 0 has a new process."""
        self._received_s, self._received_links = -math.inf, b""

    def build_report(self, now_s: float, *, leaving: bool = False) -> NodeReport:
        """Return a report with changed links and the oldest unconfirmed posts that fit."""
        posts: list[Post] = []
        size = 0
        waiting = [post for post in self._posts if post.posted_s > self._received_s]
        for post in waiting:
            size += 32 + sum(16 + len(payload) for payload in post.payloads.values())
            if posts and size > MAX_MESSAGE_BYTES:
                break
            posts.append(post)
        leaving = leaving and len(posts) == len(waiting)
        links = self.links if self.links != self._received_links else b""
        return NodeReport(max(now_s, self._newest_s), self.dropped, leaving, posts, links)

    def mark_received(self, report: NodeReport) -> None:
        """Mark the posts and links of a report as received, because node 0 has replied to it."""
        self._received_links = report.links or self._received_links
        if report.posts:
            self._undelivered -= sum(post.posted_s > self._delivered_s for post in report.posts)
            self._received_s = report.posts[-1].posted_s
            self._delivered_s = max(self._delivered_s, self._received_s)


# A large job creates thousands of ReceivedPost objects per second. Structs are created and freed
# faster than dataclasses.
class ReceivedPost(msgspec.Struct, gc=False):
    """One post that node 0 has received."""

    node: str
    age_s: float
    """Age of the post: its time at the sender, on the network and in the Inbox."""
    payloads: Mapping[int, bytes]
    """Payloads by rank."""


class NodeContact(msgspec.Struct, frozen=True, gc=False):
    """Node 0's record of a node that has reported."""

    silent_s: float
    """Time since the node's last report."""
    missed: int
    """Number of posts that were lost at the node or in the Inbox."""
    left: bool
    """True if the node's sidecar has ended normally."""


@dataclasses.dataclass(frozen=True)
class CollectedPosts:
    """Posts since the last call of collect_posts(), and contacts with all nodes."""

    posts: Sequence[ReceivedPost]
    """Posts. Those of one sidecar are in the order of posting.

    There is one object per post, with all ranks. One object per rank would double the cost in a
    large job.
    """
    nodes: Mapping[str, NodeContact]
    """All other nodes that have ever reported."""


@dataclasses.dataclass
class _SenderRecord:
    """The Inbox's record of one sidecar process."""

    node: str
    joined_s: float
    last_report_s: float
    left: bool = False
    newest_s: float = -math.inf  # time of its newest post on its own clock
    dropped: int = 0  # number of posts that the sender has dropped
    overwritten: int = 0  # number of posts that node 0 has dropped before they were collected
    unreadable: int = 0
    links: bytes = b""
    # Until a post is collected, its age is the negative time of posting on node 0's clock.
    unread: deque[ReceivedPost] = dataclasses.field(
        default_factory=lambda: deque(maxlen=KEPT_POSTS)
    )
    # The nodes' clocks are unrelated, so delays are measured relative to the fastest recent report.
    fastest_s: tuple[float, float] = (math.inf, math.inf)
    reports: int = 0

    def add_post(self, post: Post, posted_s: float) -> None:
        """Add a post, unless it is a duplicate. posted_s: the post's time on node 0's clock."""
        if post.posted_s > self.newest_s:
            self.newest_s = post.posted_s
            # If collect_posts() is not called often enough, the deque is full and drops its oldest
            # post.
            self.overwritten += len(self.unread) == KEPT_POSTS
            self.unread.append(ReceivedPost(self.node, -posted_s, post.payloads))

    def measure_delay_s(self, sent_s: float, now_s: float) -> float:
        took_s = now_s - sent_s
        before_s, recent_s = self.fastest_s
        # Clocks drift, so only recent reports are compared.
        if self.reports % _REPORTS_PER_OFFSET == 0:
            before_s, recent_s = recent_s, math.inf
        self.reports += 1
        self.fastest_s = before_s, min(recent_s, took_s)
        return took_s - min(self.fastest_s)


class Inbox:
    """Node 0's record of all senders and their posts."""

    def __init__(self, own_node: str) -> None:
        self.instructions = b""
        """Instructions for all nodes."""
        self.refused = 0
        """Number of calls without this job's token."""
        self._own_node = own_node
        self.senders: dict[str, _SenderRecord] = {}

    def add_sender(self, sender: str, node: str, now_s: float) -> None:
        """Add a sender that has connected, unless it is already known."""
        if sender not in self.senders:
            self.senders[sender] = _SenderRecord(node, now_s, now_s)

    def receive_report(self, name: str, data: bytes, now_s: float) -> None:
        """Add the posts of a known sender's report. Duplicate posts are ignored.

        Raises ValueError for an invalid report, and counts it as unreadable.
        """
        sender = self.senders[name]
        sender.last_report_s, sender.left = now_s, False
        try:
            report = decode_report(data)
        except ValueError:
            sender.unreadable += 1
            raise
        offset_s = now_s - report.sent_s - sender.measure_delay_s(report.sent_s, now_s)
        for post in report.posts:
            sender.add_post(post, post.posted_s + offset_s)
        sender.links = report.links or sender.links
        sender.dropped, sender.left = max(sender.dropped, report.dropped), report.leaving

    def collect_posts(self, now_s: float) -> CollectedPosts:
        """Return the posts since the last call, and the contacts with all nodes."""
        posts: list[ReceivedPost] = []
        contacts: dict[str, NodeContact] = {}
        for sender in self.senders.values():
            for post in sender.unread:
                post.age_s = max(0.0, now_s + post.age_s)
            posts += sender.unread
            sender.unread.clear()
            silent_s = max(0.0, now_s - sender.last_report_s)
            missed = sender.dropped + sender.overwritten
            before = contacts.get(sender.node)
            if before is not None:
                silent_s, missed = min(silent_s, before.silent_s), missed + before.missed
            contacts[sender.node] = NodeContact(silent_s, missed, sender.left)
        return CollectedPosts(posts, contacts)

    def link_reports(self) -> list[bytes]:
        """Return the newest link report of each other node."""
        return list(
            {sender.node: sender.links for sender in self.senders.values() if sender.links}.values()
        )

    def count_unreadable_reports(self) -> dict[str, int]:
        """Return the number of unreadable reports, by node."""
        return {
            sender.node: sender.unreadable for sender in self.senders.values() if sender.unreadable
        }

    def find_duplicate_names(self) -> list[str]:
        """Return the node names that several live sidecars use at the same time.

        A node name is returned if its old sidecar sends reports after a new sidecar has connected.
        """
        newest: dict[str, _SenderRecord] = {}
        found = set()
        for sender in self.senders.values():
            before = newest.get(sender.node)
            if sender.node == self._own_node or (
                before is not None and before.last_report_s > sender.joined_s
            ):
                found.add(sender.node)
            newest[sender.node] = sender
        return sorted(found)
