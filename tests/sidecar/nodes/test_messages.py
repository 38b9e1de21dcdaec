"""What sidecars exchange, on values: the wire, and the account of what was received and missed."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collected import of_rank, payloads
from torchlens_perf.sidecar.nodes.messages import (
    KEPT_POSTS,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RANKS,
    Inbox,
    Message,
    Outbox,
    Post,
    decode_answer,
    decode_message,
    encode,
)

payloads_of_ranks = st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=MAX_PAYLOAD_BYTES), max_size=8)


def send(outbox: Outbox, inbox: Inbox, now_s: float = 0.0, *, answered: bool = True, leaving: bool = False) -> None:
    """All that is due, over a network without delay; answers may be lost."""
    while True:
        message = outbox.due(now_s, beat=True, leaving=leaving)
        newest = inbox.receive("a1", encode(message), now_s)
        if answered and newest is not None:
            outbox.acknowledge(newest)
        if not outbox.waiting:
            return


def ends(node: str = "n1") -> tuple[Outbox, Inbox]:
    inbox = Inbox("n0", 0.0)
    inbox.enter("a1", node, 0.0)
    return Outbox(), inbox


class TestWire:
    @given(payloads_of_ranks, st.integers(1, 2**62 - 1), st.floats(0, 1e6))
    def test_round_trip(self, payloads: dict[int, bytes], sequence: int, held_s: float) -> None:
        """What is decoded is what was encoded, and little longer than the payloads."""
        message = Message(1.5, 1, True, False, [Post(sequence, held_s, payloads)])
        data = encode(message)

        assert decode_message(data) == message
        assert len(data) <= 40 + sum(8 + len(payload) for payload in payloads.values())

    @given(st.binary(max_size=200))
    def test_garbage_is_refused(self, data: bytes) -> None:
        """Bytes that are no message or no answer raise ValueError and nothing else."""
        for decode in (decode_message, decode_answer):
            with suppress(ValueError):
                decode(data)

    @given(payloads_of_ranks, st.integers(1, 30))
    def test_cut_messages_are_refused(self, payloads: dict[int, bytes], cut: int) -> None:
        """A message that lost its end, or has bytes behind it, is refused."""
        data = encode(Message(0.0, 1, True, False, [Post(1, 0.0, payloads)]))
        for wrong in (data[:-cut], data + b"x"):
            with pytest.raises(ValueError, match=r"\S"):
                decode_message(wrong)

    @pytest.mark.parametrize(
        "posts",
        [
            [Post(1, math.nan, {})],
            [Post(1, -1.0, {})],
            [Post(1, 0.0, {1: b"x" * (MAX_PAYLOAD_BYTES + 1)})],
            [Post(1, 0.0, {-1: b"x"})],
            [Post(-1, 0.0, {})],
            [Post(number, 0.0, {}) for number in range(KEPT_POSTS + 1)],
            [Post(1, 0.0, dict.fromkeys(range(MAX_RANKS + 1), b""))],
        ],
    )
    def test_what_does_not_fit_is_refused(self, posts: list[Post]) -> None:
        """Times, ranks, sizes and numbers that no sender of ours makes."""
        with pytest.raises(ValueError, match=r"\S"):
            decode_message(encode(Message(0.0, 1, True, False, posts)))

    def test_no_message_is_too_large(self) -> None:
        """The largest posts are sent in several messages."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        for _ in range(KEPT_POSTS):
            outbox.post(dict.fromkeys(range(MAX_RANKS), b"x" * MAX_PAYLOAD_BYTES), 0.0)
        sizes = []
        while outbox.waiting:
            data = encode(outbox.due(0.0, beat=False))
            sizes.append(len(data))
            inbox.receive("a1", data, 0.0)

        assert max(sizes) <= MAX_MESSAGE_BYTES
        assert inbox.collect(0.0).nodes["n1"].posts == KEPT_POSTS


class TestAccount:
    @given(st.lists(st.sampled_from(["post", "post", "send", "unanswered", "lost", "back", "collect"]), max_size=80))
    def test_every_post_is_received_once_or_missed(self, steps: list[str]) -> None:
        """Whatever fails in between, posts arrive in order, once, whole; received and missed add up to all."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        posted, seen = 0, []
        for step in [*steps, "back", "send", "collect"]:
            if step == "post":
                posted += 1
                outbox.post({3: str(posted).encode()}, 0.0)
            elif step in ("send", "unanswered"):
                send(outbox, inbox, answered=step == "send")
            elif step == "lost":  # on its way, with its connection
                outbox.due(0.0, beat=True)
                outbox.enter(known=True)
            elif step == "back":
                outbox.enter(known=True)
            else:
                seen.extend(map(int, payloads(inbox.collect(0.0), 3)))
        contact = inbox.collect(0.0).nodes["n1"]

        assert seen == sorted(set(seen))
        # The last posts that were dropped here before anything newer was sent are known to the sender alone.
        assert len(seen) == contact.posts
        assert len(seen) + contact.missed == posted
        assert contact.missed <= outbox.dropped + max(0, posted - KEPT_POSTS)
        assert contact.restarts == 0

    def test_an_outage_loses_what_exceeds_what_is_kept(self) -> None:
        """A node that cannot send keeps its last 8 posts; the loss is counted on both ends."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        send(outbox, inbox)
        for number in range(20):
            outbox.post({0: b"%d" % number}, 0.0)
        send(outbox, inbox)
        collected = inbox.collect(0.0)

        assert list(map(int, payloads(collected, 0))) == list(range(12, 20))
        assert (collected.nodes["n1"].missed, outbox.dropped) == (12, 12)

    def test_posts_nobody_collects_are_bounded(self) -> None:
        """Without collect() only the last 8 posts of a node are kept, node 0's own too; the others are missed."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        for number in range(20):
            inbox.post_own({0: b"%d" % number}, 0.0)
            outbox.post({1: b"%d" % number}, 0.0)
            send(outbox, inbox)
        collected = inbox.collect(0.0)

        for rank, node in enumerate(["n0", "n1"]):
            assert list(map(int, payloads(collected, rank))) == list(range(12, 20))
            assert collected.nodes[node].missed == 12

    def test_ages(self) -> None:
        """A payload is as old as it was held back, as the network delayed it, and as it waited here."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        inbox.receive("a1", encode(outbox.due(5000.0, beat=True)), 100.0)  # clocks of nodes have nothing in common
        outbox.post({1: b"x"}, 5001.0)
        outbox.post({1: b"z"}, 5003.0)
        inbox.receive("a1", encode(outbox.due(5003.0, beat=True)), 107.0)  # 4 s on its way
        inbox.post_own({0: b"y"}, 108.0)
        collected = inbox.collect(108.5)

        assert [post.age_s for post, _ in of_rank(collected, 1)] == pytest.approx([7.5, 5.5])
        assert of_rank(collected, 0)[0][0].age_s == pytest.approx(0.5)

    def test_clocks_that_drift(self) -> None:
        """A sender's clock that goes slow for days makes its payloads no older."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        for second in range(2000):
            inbox.receive("a1", encode(outbox.due(second * 0.999, beat=True)), float(second))
        outbox.post({1: b"x"}, 2000 * 0.999)
        inbox.receive("a1", encode(outbox.due(2000 * 0.999, beat=True)), 2000.0)

        assert inbox.collect(2000.0).posts[0].age_s < 0.2  # of 2 s in all

    def test_silence(self) -> None:
        """Signs of life count without posts; nodes never heard of are not there; who leaves has left."""
        inbox = Inbox("n0", 0.0)
        assert set(inbox.collect(1.0).nodes) == {"n0"}
        outbox = Outbox()
        inbox.enter("a1", "n1", 2.0)
        outbox.enter(known=False)
        send(outbox, inbox, 3.0)
        silent = inbox.collect(10.0).nodes
        send(outbox, inbox, 11.0, leaving=True)
        gone = inbox.collect(11.5).nodes

        assert (silent["n1"].silent_s, silent["n1"].left, silent["n0"].silent_s) == (7.0, False, 0.0)
        assert (gone["n1"].silent_s, gone["n1"].left) == (0.5, True)

    def test_a_new_sidecar_replaces_the_old_one(self) -> None:
        """A node's counts go on over its sidecars, and the old one's last posts are still there."""
        first, inbox = ends()
        first.enter(known=False)
        for number in range(10):
            first.post({0: b"a%d" % number}, 0.0)
        send(first, inbox)
        second = Outbox()
        inbox.enter("b2", "n1", 1.0)
        second.enter(known=False)
        second.post({0: b"b0"}, 1.0)
        inbox.receive("b2", encode(second.due(1.0, beat=True)), 1.0)
        collected = inbox.collect(1.0)
        contact = collected.nodes["n1"]

        assert payloads(collected, 0) == [b"a%d" % n for n in range(2, 10)] + [b"b0"]
        # It had not said anything before it had ten posts, so that two of them were never to come.
        assert (contact.posts, contact.missed, contact.restarts) == (9, 2, 1)
        assert inbox.namesakes() == []

    def test_two_sidecars_of_one_name(self) -> None:
        """Two that live at the same time under one name are both read, and it is said."""
        inbox = Inbox("n0", 0.0)
        for sender in ("a1", "b2"):
            inbox.enter(sender, "n1", 0.0)
        for at in range(1, 3):
            for sender in ("a1", "b2"):
                inbox.receive(sender, encode(Message(at, 1, True, False, [Post(at, 0.0, {at: b""})])), float(at))

        assert inbox.namesakes() == ["n1"]
        assert inbox.collect(3.0).nodes["n1"].posts == 4

    def test_a_new_node_0_starts_counting_anew(self) -> None:
        """It gets the last posts of each node again, and does not count as missed what its predecessor had read."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        for number in range(20):
            outbox.post({0: b"%d" % number}, 0.0)
            send(outbox, inbox)
        _, inbox = ends()
        for number in range(20, 23):
            outbox.post({0: b"%d" % number}, 0.0)
        outbox.enter(known=False)
        send(outbox, inbox)
        collected = inbox.collect(0.0)

        assert list(map(int, payloads(collected, 0))) == list(range(15, 23))
        assert collected.nodes["n1"].missed == 0

    def test_an_unreadable_message_is_counted(self) -> None:
        """Bytes of another making are counted as their sender's, and what it sends next is read."""
        outbox, inbox = ends()
        outbox.enter(known=False)
        with pytest.raises(ValueError, match=r"\S"):
            inbox.receive("a1", b"?", 0.0)
        outbox.post({0: b"x"}, 0.0)
        send(outbox, inbox)

        assert inbox.unreadable() == {"n1": 1}
        assert inbox.collect(0.0).nodes["n1"].posts == 1
