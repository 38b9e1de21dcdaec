"""What sidecars exchange, on values: the wire, and the account of what was received and missed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchlens_perf.sidecar.nodes.messages import (
    MAX_PAYLOAD_BYTES,
    RETIRED_AFTER_S,
    SLOTS,
    Head,
    Inbox,
    Outbox,
    Post,
    head_key,
    slot_key,
)

payloads_of_ranks = st.dictionaries(st.integers(0, 2**32 - 1), st.binary(max_size=MAX_PAYLOAD_BYTES), max_size=8)


class Store:
    """What a TCPStore does with values, without one."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {"members": b""}

    def enter(self, outbox: Outbox) -> None:
        keys, line = outbox.enter()
        self.values.update(keys)
        self.values["members"] += line

    def send(self, outbox: Outbox, now_s: float, *, answered: bool = True, leaving: bool = False) -> None:
        values, newest = outbox.due(now_s, leaving=leaving)
        self.values.update(values)
        if answered:
            outbox.acknowledge(newest)

    def look(self, inbox: Inbox, now_s: float, meanwhile: Callable[[], None] = lambda: None) -> int:
        """meanwhile: what senders do between the heads and the slots. Returns how many slots were read."""
        inbox.register(self.values["members"], now_s)
        wanted = inbox.update({name: self.values[head_key(name)] for name in inbox.polled}, now_s)
        meanwhile()
        for sender, sequence in wanted:
            inbox.receive(sender, sequence, self.values[slot_key(sender, sequence)])
        inbox.looked(now_s)
        return len(wanted)


class TestPosts:
    @given(st.integers(0, 2**64 - 1), st.floats(0, 1e6), payloads_of_ranks)
    def test_round_trip(self, sequence: int, held_s: float, payloads: dict[int, bytes]) -> None:
        """What is decoded is what was encoded, and it is 18 bytes and 6 a rank longer than the payloads."""
        post = Post(sequence, held_s, payloads)
        data = post.encode()

        assert Post.decode(data) == post
        assert len(data) == 18 + sum(6 + len(payload) for payload in payloads.values())

    @given(st.binary(max_size=200))
    def test_garbage_is_refused(self, data: bytes) -> None:
        """Bytes that are no post or no head raise ValueError and nothing else."""
        for decode in (Post.decode, Head.decode):
            with suppress(ValueError):
                decode(data)

    @given(payloads_of_ranks, st.integers(1, 50))
    def test_cut_posts_are_refused(self, payloads: dict[int, bytes], cut: int) -> None:
        """A post that lost its end, or has bytes behind it, is refused."""
        data = Post(1, 0.0, payloads).encode()
        with pytest.raises(ValueError, match="not a post"):
            Post.decode(data[:-cut])
        with pytest.raises(ValueError, match="not a post"):
            Post.decode(data + b"x")


class TestAccount:
    @given(
        st.lists(
            st.sampled_from(["post", "post", "send", "unanswered", "reenter", "look", "overtaken", "collect"]),
            max_size=80,
        )
    )
    def test_every_post_is_received_once_or_missed(self, steps: list[str]) -> None:
        """Whatever fails in between, posts arrive in order, once, whole; received and missed add up to all."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 0.0), Store()
        store.enter(outbox)
        posted, seen = 0, []

        def post() -> None:
            nonlocal posted
            posted += 1
            outbox.post({3: str(posted).encode()}, 0.0)

        def post_and_send() -> None:
            for _ in range(3):
                post()
            store.send(outbox, 0.0)

        def collect() -> None:
            seen.extend(int(each.payload) for each in inbox.collect(0.0).payloads.get(3, ()))

        for step in [*steps, "send", "look", "collect"]:
            if step == "post":
                post()
            elif step in ("send", "unanswered"):
                store.send(outbox, 0.0, answered=step == "send")
            elif step == "reenter":  # it does not know whether it had entered
                store.enter(outbox)
            elif step in ("look", "overtaken"):
                assert store.look(inbox, 0.0, post_and_send if step == "overtaken" else lambda: None) <= SLOTS
            else:
                collect()
        contact = inbox.collect(0.0).nodes["n1"]

        assert seen == sorted(set(seen))
        assert (len(seen), len(seen) + contact.missed) == (contact.posts, posted)
        assert contact.restarts == 0

    @pytest.mark.parametrize("backlog", [1, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS])
    def test_a_stall_of_node_0_loses_what_exceeds_the_slots(self, backlog: int) -> None:
        """The last 8 posts are read after a stall; those before are missed, and counted."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 0.0), Store()
        store.enter(outbox)
        for number in range(backlog):
            outbox.post({0: b"%d" % number}, 0.0)
            store.send(outbox, 0.0)
        store.look(inbox, 0.0)
        collected = inbox.collect(0.0)

        assert [int(each.payload) for each in collected.payloads[0]] == list(range(backlog))[-SLOTS:]
        assert collected.nodes["n1"].missed == max(0, backlog - SLOTS)

    def test_an_outage_loses_what_exceeds_the_slots(self) -> None:
        """A node that cannot send keeps its last 8 posts; the loss is counted on both ends."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 0.0), Store()
        store.enter(outbox)
        store.send(outbox, 0.0)
        store.look(inbox, 0.0)
        for number in range(20):
            outbox.post({0: b"%d" % number}, 0.0)
        store.send(outbox, 0.0)
        store.look(inbox, 0.0)
        collected = inbox.collect(0.0)

        assert [int(each.payload) for each in collected.payloads[0]] == list(range(12, 20))
        assert (collected.nodes["n1"].missed, outbox.dropped) == (12, 12)

    def test_posts_nobody_collects_are_bounded(self) -> None:
        """Without collect() only the last 8 posts of a node are kept, node 0's own too; the others are missed."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 0.0), Store()
        store.enter(outbox)
        for number in range(20):
            inbox.post_own({0: b"%d" % number}, 0.0)
            outbox.post({1: b"%d" % number}, 0.0)
            store.send(outbox, 0.0)
            store.look(inbox, 0.0)
        collected = inbox.collect(0.0)

        for rank, node in enumerate(["n0", "n1"]):
            assert [int(each.payload) for each in collected.payloads[rank]] == list(range(12, 20))
            assert collected.nodes[node].missed == 12

    def test_ages(self) -> None:
        """A payload is as old as it was held back, and as node 0's look before it came is away."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 100.0), Store()
        store.enter(outbox)
        store.look(inbox, 101.0)
        outbox.post({1: b"x"}, 5000.0)  # clocks of nodes have nothing to do with each other
        store.send(outbox, 5007.0)
        store.look(inbox, 102.0)
        inbox.post_own({0: b"y"}, 104.0)
        collected = inbox.collect(104.5)

        assert collected.payloads[1][0].age_s == pytest.approx(7.0 + 3.5)
        assert collected.payloads[0][0].age_s == pytest.approx(0.5)

    def test_silence(self) -> None:
        """Signs of life count without posts; nodes never heard of are not there; who leaves has left."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 0.0), Store()
        assert set(inbox.collect(1.0).nodes) == {"n0"}
        store.enter(outbox)
        store.look(inbox, 2.0)
        store.send(outbox, 0.0)
        store.look(inbox, 3.0)
        store.look(inbox, 9.0)
        silent = inbox.collect(10.0).nodes
        store.send(outbox, 0.0, leaving=True)
        store.look(inbox, 11.0)
        gone = inbox.collect(11.5).nodes

        assert (silent["n1"].silent_s, silent["n1"].left, silent["n0"].silent_s) == (7.0, False, 0.0)
        assert (gone["n1"].silent_s, gone["n1"].left) == (0.5, True)

    def test_a_new_sidecar_replaces_the_old_one(self) -> None:
        """A node's counts go on over its sidecars; the old one's last posts are still read, later it is not asked."""
        first, second, inbox, store = Outbox("a1", "n1"), Outbox("b2", "n1"), Inbox("n0", 0.0), Store()
        store.enter(first)
        for number in range(10):
            first.post({0: b"a%d" % number}, 0.0)
        store.send(first, 0.0)
        store.enter(second)
        second.post({0: b"b0"}, 0.0)
        store.send(second, 0.0)
        store.look(inbox, 1.0)
        collected = inbox.collect(1.0)
        polled = inbox.polled
        store.look(inbox, 2.0 + RETIRED_AFTER_S)

        assert [each.payload for each in collected.payloads[0]] == [b"a%d" % n for n in range(2, 10)] + [b"b0"]
        contact = collected.nodes["n1"]
        assert (contact.posts, contact.missed, contact.restarts) == (9, 2, 1)
        assert (polled, inbox.polled) == (["a1", "b2"], ["b2"])
        assert inbox.namesakes() == []

    def test_retired_by_the_look_that_asked_for_its_posts(self) -> None:
        """Slots that could not be read are asked for again, maybe when their sender has been replaced for long."""
        first, second, inbox, store = Outbox("a1", "n1"), Outbox("b2", "n1"), Inbox("n0", 0.0), Store()
        store.enter(first)
        first.post({0: b"a0"}, 0.0)
        store.send(first, 0.0)
        inbox.register(store.values["members"], 0.0)
        inbox.update({"a1": store.values[head_key("a1")]}, 0.0)  # and then the connection was lost
        store.enter(second)
        inbox.register(store.values["members"], 1.0)
        assert store.look(inbox, 2.0 + RETIRED_AFTER_S) == 1

        assert inbox.polled == ["b2"]
        assert [each.payload for each in inbox.collect(40.0).payloads[0]] == [b"a0"]

    def test_two_sidecars_of_one_name(self) -> None:
        """Two that live at the same time under one name are both read, and it is said."""
        first, second, inbox, store = Outbox("a1", "n1"), Outbox("b2", "n1"), Inbox("n0", 0.0), Store()
        store.enter(first)
        store.enter(second)
        for at in range(1, 100):
            for outbox in (first, second):
                outbox.post({at: b""}, 0.0)
                store.send(outbox, 0.0)
            store.look(inbox, float(at))

        assert inbox.namesakes() == ["n1"]
        assert inbox.polled == ["a1", "b2"]

    def test_a_new_node_0_starts_counting_anew(self) -> None:
        """It gets the last posts of each node again, and does not count as missed what its predecessor had read."""
        outbox, store = Outbox("a1", "n1"), Store()
        store.enter(outbox)
        for number in range(20):
            outbox.post({0: b"%d" % number}, 0.0)
            store.send(outbox, 0.0)
        inbox, store = Inbox("n0", 0.0), Store()
        for number in range(20, 23):
            outbox.post({0: b"%d" % number}, 0.0)
        store.enter(outbox)
        store.send(outbox, 0.0)
        store.look(inbox, 0.0)
        collected = inbox.collect(0.0)

        assert [int(each.payload) for each in collected.payloads[0]] == list(range(15, 23))
        assert collected.nodes["n1"].missed == 0

    def test_unreadable_values_are_counted(self) -> None:
        """Values of another making raise nothing: members, heads and posts that are none are counted."""
        outbox, inbox, store = Outbox("a1", "n1"), Inbox("n0", 0.0), Store()
        store.values["members"] = b"\xff\xfe\n\nonly-one-word\n"
        store.enter(outbox)
        store.look(inbox, 0.0)
        store.values[head_key("a1")] = b"?"
        store.look(inbox, 0.0)
        outbox.post({0: b""}, 0.0)
        store.send(outbox, 0.0)
        store.values[slot_key("a1", 1)] = b"?"
        store.look(inbox, 0.0)

        assert (inbox.unreadable, inbox.collect(0.0).nodes["n1"].missed) == (5, 1)
