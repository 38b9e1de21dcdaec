"""Read access to messages that node 0 has collected from other nodes."""

from __future__ import annotations

from torchlens_perf.sidecar.nodes.messages import CollectedPosts, ReceivedPost


def posts_about_rank(collected: CollectedPosts, rank: int) -> list[tuple[ReceivedPost, bytes]]:
    """Return the posts about a rank, each with the rank's payload, in the order of posting."""
    return [(post, post.payloads[rank]) for post in collected.posts if rank in post.payloads]


def payloads(collected: CollectedPosts, rank: int) -> list[bytes]:
    return [payload for _, payload in posts_about_rank(collected, rank)]


def ranks(collected: CollectedPosts) -> set[int]:
    return {rank for post in collected.posts for rank in post.payloads}
