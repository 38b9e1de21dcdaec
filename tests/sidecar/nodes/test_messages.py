"""Tests of reports between sidecars: encoding, retransmission, and counts of dropped posts."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.collected import payloads, posts_about_rank
from torchlens_perf.sidecar.nodes.messages import (
    KEPT_POSTS,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RANKS,
    Inbox,
    NodeReport,
    Outbox,
    Post,
    decode_reply,
    decode_report,
    encode,
)

payloads_of_ranks = st.dictionaries(
    st.integers(0, 2**32 - 1), st.binary(max_size=MAX_PAYLOAD_BYTES), max_size=8
)


def send(
    outbox: Outbox, inbox: Inbox, now_s: float = 0.0, *, replied: bool = True, leaving: bool = False
) -> None:
    """Send reports until nothing is waiting, without network delay.

    If no reply arrives, the function stops after some attempts.
    """
    while True:
        report = outbox.build_report(now_s, leaving=leaving)
        inbox.receive_report("a1", encode(report), now_s)
        if not replied:
            return
        outbox.mark_received(report)
        if not outbox.has_unsent:
            return


def outbox_and_inbox(node: str = "n1") -> tuple[Outbox, Inbox]:
    inbox = Inbox("n0")
    inbox.add_sender("a1", node, 0.0)
    return Outbox(), inbox


class TestWire:
    @given(payloads_of_ranks, st.floats(0, 1e6))
    def test_unpacked_report_equals_the_packed_one(
        self, payloads: dict[int, bytes], posted_s: float
    ) -> None:
        """A report is only a little longer than its payloads."""
        report = NodeReport(1.5e6, 0, False, [Post(posted_s, payloads)])
        data = encode(report)

        assert decode_report(data) == report
        assert len(data) <= 40 + sum(8 + len(payload) for payload in payloads.values())

    @given(st.binary(max_size=200))
    def test_invalid_report_bytes_raise_value_error(self, data: bytes) -> None:
        for decode in (decode_report, decode_reply):
            with suppress(ValueError):
                decode(data)

    @given(payloads_of_ranks, st.integers(1, 30))
    def test_truncated_reports_raise_an_error(self, payloads: dict[int, bytes], cut: int) -> None:
        """Reports with additional bytes raise the same error."""
        data = encode(NodeReport(1.0, 0, False, [Post(1.0, payloads)]))
        for wrong in (data[:-cut], data + b"x"):
            with pytest.raises(ValueError, match=r"\S"):
                decode_report(wrong)

    @pytest.mark.parametrize(
        "posts",
        [
            [Post(math.nan, {})],
            [Post(math.inf, {})],
            [Post(9.0, {})],
            [Post(1.0, {}), Post(0.0, {})],
            [Post(0.0, {1: b"x" * (MAX_PAYLOAD_BYTES + 1)})],
            [Post(0.0, {-1: b"x"})],
            [Post(float(number), {}) for number in range(KEPT_POSTS + 1)],
            [Post(0.0, dict.fromkeys(range(MAX_RANKS + 1), b""))],
        ],
    )
    def test_report_values_out_of_range_raise_an_error(self, posts: list[Post]) -> None:
        """The values are times, ranks and sizes that no sender creates."""
        with pytest.raises(ValueError, match=r"\S"):
            decode_report(encode(NodeReport(8.5, 0, False, posts)))

    def test_large_posts_are_split_into_several_reports(self) -> None:
        """Only the last report says that the node leaves."""
        outbox, inbox = outbox_and_inbox()
        for _ in range(KEPT_POSTS):
            outbox.add_post(dict.fromkeys(range(MAX_RANKS), b"x" * MAX_PAYLOAD_BYTES), 0.0)
        sizes, leaving = [], []
        while outbox.has_unsent:
            report = outbox.build_report(0.0, leaving=True)
            inbox.receive_report("a1", encode(report), 0.0)
            outbox.mark_received(report)
            sizes.append(len(encode(report)))
            leaving.append(report.leaving)

        assert max(sizes) <= MAX_MESSAGE_BYTES
        assert leaving == [False] * (len(sizes) - 1) + [True]
        assert len(inbox.collect_posts(0.0).posts) == KEPT_POSTS


class TestAccount:
    @given(
        st.lists(
            st.sampled_from(["post", "post", "send", "no reply", "lost", "collect"]), max_size=80
        )
    )
    def test_every_post_arrives_once_or_counts_as_missed(self, steps: list[str]) -> None:
        """Posts arrive complete and in order, whatever fails.

        Received and missed posts add up to the number of posts.
        """
        outbox, inbox = outbox_and_inbox()
        posted, seen = 0, []
        for step in [*steps, "send", "collect"]:
            if step == "post":
                posted += 1
                outbox.add_post({3: str(posted).encode()}, 0.0)
            elif step in ("send", "no reply"):
                send(outbox, inbox, replied=step == "send")
            elif step == "lost":  # The report is lost together with its connection.
                outbox.build_report(0.0)
            else:
                seen.extend(map(int, payloads(inbox.collect_posts(0.0), 3)))
        missed = inbox.collect_posts(0.0).nodes["n1"].missed

        assert seen == sorted(set(seen))
        assert len(seen) <= posted <= len(seen) + missed
        # Without a reply, a sender may count a post as dropped although it arrived.
        if "no reply" not in steps:
            assert len(seen) + missed == posted

    def test_last_8_posts_are_kept_during_an_outage(self) -> None:
        """Sender and receiver count the lost posts."""
        outbox, inbox = outbox_and_inbox()
        send(outbox, inbox)
        for number in range(20):
            outbox.add_post({0: b"%d" % number}, 0.0)
        send(outbox, inbox)
        collected = inbox.collect_posts(0.0)

        assert list(map(int, payloads(collected, 0))) == list(range(12, 20))
        assert (collected.nodes["n1"].missed, outbox.dropped) == (12, 12)

    def test_uncollected_posts_beyond_8_per_node_count_as_missed(self) -> None:
        outbox, inbox = outbox_and_inbox()
        for number in range(20):
            outbox.add_post({1: b"%d" % number}, 0.0)
            send(outbox, inbox)
        collected = inbox.collect_posts(0.0)

        assert list(map(int, payloads(collected, 1))) == list(range(12, 20))
        assert collected.nodes["n1"].missed == 12

    def test_age_of_a_post_includes_time_at_the_sender_and_on_the_network(self) -> None:
        """The age also includes the time in the receiver's inbox."""
        outbox, inbox = outbox_and_inbox()
        send_at = outbox.build_report(5000.0)
        inbox.receive_report("a1", encode(send_at), 100.0)  # The clocks of the nodes are unrelated.
        outbox.add_post({1: b"x"}, 5001.0)
        outbox.add_post({1: b"z"}, 5003.0)
        # The transmission of this report took 4 s.
        inbox.receive_report("a1", encode(outbox.build_report(5003.0)), 107.0)
        collected = inbox.collect_posts(108.5)

        assert [post.age_s for post, _ in posts_about_rank(collected, 1)] == pytest.approx(
            [7.5, 5.5]
        )

    def test_drift_of_a_slow_clock_is_not_added_to_ages(self) -> None:
        outbox, inbox = outbox_and_inbox()
        for second in range(2000):
            inbox.receive_report("a1", encode(outbox.build_report(second * 0.999)), float(second))
        outbox.add_post({1: b"x"}, 2000 * 0.999)
        inbox.receive_report("a1", encode(outbox.build_report(2000 * 0.999)), 2000.0)

        assert inbox.collect_posts(2000.0).posts[0].age_s < 0.2  # The clock has drifted by 2 s.

    def test_silent_missing_and_left_nodes_are_listed_separately(self) -> None:
        """A report without posts shows that a sidecar is alive."""
        inbox = Inbox("n0")
        assert inbox.collect_posts(1.0).nodes == {}
        outbox = Outbox()
        inbox.add_sender("a1", "n1", 2.0)
        send(outbox, inbox, 3.0)
        silent = inbox.collect_posts(10.0).nodes
        send(outbox, inbox, 11.0, leaving=True)
        gone = inbox.collect_posts(11.5).nodes

        assert (silent["n1"].silent_s, silent["n1"].left) == (7.0, False)
        assert (gone["n1"].silent_s, gone["n1"].left) == (0.5, True)

    def test_counts_continue_after_a_restart_of_a_nodes_sidecar(self) -> None:
        """The last posts of the old sidecar are kept."""
        first, inbox = outbox_and_inbox()
        for number in range(10):
            first.add_post({0: b"a%d" % number}, 0.0)
        send(first, inbox, leaving=True)
        second = Outbox()
        inbox.add_sender("b2", "n1", 1.0)
        second.add_post({0: b"b0"}, 1.0)
        inbox.receive_report("b2", encode(second.build_report(1.0)), 1.0)
        collected = inbox.collect_posts(1.0)

        assert payloads(collected, 0) == [b"a%d" % n for n in range(2, 10)] + [b"b0"]
        # Two posts were dropped before the first report.
        assert (collected.nodes["n1"].missed, collected.nodes["n1"].left) == (2, False)
        assert inbox.find_duplicate_names() == []

    def test_two_live_sidecars_with_the_same_name_are_noted(self) -> None:
        """Posts of both sidecars are read."""
        inbox = Inbox("n0")
        for sender in ("a1", "b2"):
            inbox.add_sender(sender, "n1", 0.0)
        for at in range(1, 3):
            for sender in ("a1", "b2"):
                inbox.receive_report(
                    sender,
                    encode(NodeReport(float(at), 0, False, [Post(float(at), {at: b""})])),
                    float(at),
                )

        assert inbox.find_duplicate_names() == ["n1"]
        assert len(inbox.collect_posts(3.0).posts) == 4

    def test_sidecar_with_the_name_of_node_0_is_noted(self) -> None:
        _, inbox = outbox_and_inbox("n0")

        assert inbox.find_duplicate_names() == ["n0"]

    def test_post_that_is_replaced_while_it_is_on_its_way_is_counted_once(self) -> None:
        outbox = Outbox()
        outbox.add_post({0: b"first"}, 0.0)
        on_its_way = outbox.build_report(0.0)
        for _ in range(KEPT_POSTS):
            outbox.add_post({0: b"later"}, 0.0)
        assert outbox.dropped == 1
        outbox.mark_received(on_its_way)

        assert outbox.dropped == 0
        assert len(outbox.build_report(1.0).posts) == KEPT_POSTS

    def test_new_node_0_receives_the_last_posts_again(self) -> None:
        """Posts that the old node 0 had received do not count as missed."""
        outbox, inbox = outbox_and_inbox()
        for number in range(20):
            outbox.add_post({0: b"%d" % number}, 0.0)
            send(outbox, inbox)
        _, inbox = outbox_and_inbox()
        for number in range(20, 23):
            outbox.add_post({0: b"%d" % number}, 0.0)
        outbox.require_resend()
        send(outbox, inbox)
        collected = inbox.collect_posts(0.0)

        assert list(map(int, payloads(collected, 0))) == list(range(15, 23))
        assert collected.nodes["n1"].missed == 0

    def test_unreadable_report_is_counted_for_its_sender(self) -> None:
        """The sender's next report is read."""
        outbox, inbox = outbox_and_inbox()
        with pytest.raises(ValueError, match=r"\S"):
            inbox.receive_report("a1", b"?", 0.0)
        outbox.add_post({0: b"x"}, 0.0)
        send(outbox, inbox)

        assert inbox.count_unreadable_reports() == {"n1": 1}
        assert len(inbox.collect_posts(0.0).posts) == 1
