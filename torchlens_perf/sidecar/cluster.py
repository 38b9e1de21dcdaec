"""This node among those of its job: sends its ranks' summaries to node 0, or receives those of all other nodes."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.exporters import TALLY_MARK, Part
from torchlens_perf.sidecar.epoch import SILENT_S
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.cluster_link import ClusterLink, OpenExchange
from torchlens_perf.sidecar.nodes.summary import Summary

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.sidecar.epoch import Epoch
    from torchlens_perf.sidecar.nodes.messages import Received

logger = logging.getLogger("torchlens_perf.sidecar")

ROUND_S = 1.0  # between two posts of a rank that makes no steps, and between two checks for hangs
_ALONE_S = 2.0  # between two calls of update() where no other node gets windows
_NODE_0_TIMEOUT_S = 15.0  # within which node 0 says which processes run together, if it ever does
_MAX_TALLIES = 16384


class Cluster:
    """Belongs to the sidecar's thread. Stays while processes are replaced: other nodes may have begun anew already."""

    def __init__(self, node: str, run_id: str = "", open_exchange: OpenExchange | None = None) -> None:
        """node: its name, see run/place/node.py."""
        self._link = ClusterLink(node, run_id, open_exchange)
        self.membership = self._link.membership
        """Which processes of all nodes run together."""
        self._tallies: deque[tuple[str, bytes]] = deque(maxlen=_MAX_TALLIES)
        self._round_s = float("-inf")
        self._missing: dict[str, str] = {}
        self._unreadable: set[str] = set()  # nodes whose summaries are of another version of this package
        self._corrupt: Counter[str] = Counter()  # summaries, by node
        self._others: list[str] = []

    @property
    def judges_alone(self) -> bool:
        """Whether this node judges; else node 0 does."""
        return not self._link.sends

    @property
    def is_cut_off(self) -> bool:
        """See ClusterLink."""
        return self._link.is_cut_off

    @property
    def update_every_s(self) -> float:
        """How often to call update(). Where nodes exchange windows, it is as often as they expect a post."""
        return ROUND_S if self._link.is_open else _ALONE_S

    @property
    def others_are_there(self) -> bool:
        """True on node 0 while other nodes are still sending."""
        return self._link.merges and bool(self._others)

    @property
    def received(self) -> bytes:
        """What node 0 has sent last, beside which processes run together."""
        return self._link.more if self._link.sends else b""

    @property
    def max_published_bytes(self) -> int:
        """How many bytes publish() takes now."""
        return self._link.room_for_more

    def publish(self, more: bytes) -> None:
        """On node 0, send this to all other nodes."""
        if self._link.merges and more != self._link.more:
            self._link.more = more
            self._link.send_control()

    def set_links(self, links: bytes) -> None:
        """Report what this node knows of its links to node 0, see nodes/link_report.py."""
        self._link.set_links(links)

    def links_of_others(self) -> list[bytes]:
        """On node 0, what the other nodes have reported of theirs."""
        return self._link.links()

    def forward(self, tally: bytes, epoch: Epoch) -> None:
        """Send what node 0's exporter adds up."""
        if tally and self._link.sends and epoch.ranks:
            self._link.post({min(epoch.ranks): tally})

    def take_tallies(self) -> list[tuple[str, bytes]]:
        """Take out what other nodes forward to this one's exporter, with their names."""
        tallies = list(self._tallies)
        self._tallies.clear()
        return tallies

    def part(self, epoch: Epoch) -> Part | None:
        """What this node is in the job; None while that is not known."""
        if self._link.sends:
            return Part.HANDS_ON
        on_one_node = any(local.identity.on_one_node for local in epoch.ranks.values())
        if self._link.merges or on_one_node or epoch.has_all_ranks:
            return Part.WHOLE
        return Part.ALONE if epoch.is_whole_job else None

    def awaits_node_0(self, epoch: Epoch) -> bool:
        """Whether node 0 is still to say what the run is called, and how often it was started; soon it is."""
        known = self.membership.is_known(epoch.generation)
        return bool(epoch.meeting_points) and not known and time.monotonic() - epoch.began_s < _NODE_0_TIMEOUT_S

    def begin(self, identity: Identity, generation: int, number: int | None = None) -> None:
        """Register a generation of this node's processes. identity: of one of them.

        number: of the job's generation, if an earlier sidecar knew it.
        """
        self._link.began(identity, generation, number)

    def leave(self, epoch: Epoch) -> None:
        """Send what is left of an epoch that another one replaces."""
        if self._link.sends:
            self._post(epoch)
        self._missing.clear()
        self._unreadable.clear()
        self._corrupt.clear()
        self._others.clear()
        self._tallies.clear()

    def update(self, epoch: Epoch, now_s: float, *, final: bool = False) -> None:
        """Send and receive, and look for a hang once a second. now_s: a monotonic clock. final: the run has ended."""
        self._join(epoch)
        if self._link.merges:
            self._receive(epoch, now_s)
        else:
            self._link.receive()
        due = now_s - self._round_s >= ROUND_S
        full = any(sum(map(len, each.unsent)) >= summary.ROWS for each in epoch.ranks.values())
        if self._link.sends and (due or final or full):
            self._post(epoch)
        if due:
            self._round_s = now_s
            self._link.send_control()
            epoch.look_for_hang(now_s)

    def notes(self) -> list[str]:
        """What a person should know about the exchange between nodes."""
        notes = [*self._missing.values()]
        notes += [f"node {node} runs another version of torchlens_perf: not compared" for node in self._unreadable]
        notes += [f"{count} windows of node {node} were corrupt: left out" for node, count in self._corrupt.items()]
        return notes + self._link.notes()

    def close(self, epoch: Epoch | None = None) -> None:
        """Send what is left and end the exchange."""
        if self._link.sends and epoch is not None:
            self._post(epoch)
        self._link.close()

    # -- parts

    def _join(self, epoch: Epoch) -> None:
        """Open the exchange, or another one, as soon as ranks have made steps: by then this node's are all known."""
        if epoch.is_whole_job or epoch.has_all_ranks:
            self.close(epoch)
            epoch.meeting_points.clear()
        if not epoch.meeting_points or not epoch.ranks:
            return
        places = next(iter(epoch.meeting_points.values()))
        merges = 0 in epoch.ranks
        if self._link.is_as(places, merges):
            return
        self.close(epoch)
        self._link.open(places, next(iter(epoch.ranks.values())).identity, merges)

    def _post(self, epoch: Epoch) -> None:
        while True:
            payloads, more = {}, False
            for rank, local in epoch.ranks.items():
                if local.progress is None or (local.end_sent and not local.unsent):
                    continue
                rows = summary.take_rows(local.unsent)
                more |= bool(local.unsent)
                local.end_sent = local.ended and not local.unsent
                payloads[rank] = summary.pack(
                    Summary(
                        set=epoch.generation,
                        age_s=self.membership.age_s(epoch.generation, time.monotonic()),
                        world_size=local.identity.world_size,
                        place=epoch.places.get(rank, local.place),
                        progress=local.progress,
                        rows=rows,
                        modules_ns=local.modules_ns,
                        ended=local.end_sent,
                        signals=local.metrics,
                    )
                )  # fmt: skip
            if payloads:
                self._link.post(payloads)
            if not more:
                return

    def _receive(self, epoch: Epoch, now_s: float) -> None:
        for local in epoch.ranks.values():
            local.unsent.clear()  # node 0 has its own rows
        collected = self._link.collect()
        posts: list[Received] = []  # of each payload
        payloads: list[bytes] = []
        for post in collected.posts:
            for payload in post.payloads.values():
                if payload[:1] == TALLY_MARK:
                    self._tallies.append((post.node, payload))
                elif summary.is_readable(payload):
                    posts.append(post)
                    payloads.append(payload)
                else:
                    self._unreadable.add(post.node)
        if posts:
            self._unreadable -= {post.node for post in posts}
            self._add_summaries(epoch, payloads, posts, now_s)
        self._others = [
            node
            for node, contact in collected.nodes.items()
            if not contact.left and contact.silent_s < SILENT_S and not f"{node}/".startswith(f"{self._link.name}/")
        ]
        self._missing = {
            node: f"node {node} has not been heard of for {contact.silent_s:.0f} s: its ranks are not compared"
            for node, contact in collected.nodes.items()
            if contact.silent_s > SILENT_S and not contact.left
        }

    def _add_summaries(self, epoch: Epoch, payloads: list[bytes], received: list[Received], now_s: float) -> None:
        values = summary.unpack(payloads)
        sound = summary.sound(values)
        self._corrupt.update(received[index].node.rstrip("/") for index in np.flatnonzero(~sound).tolist())
        values, received = values[sound], list(compress(received, sound.tolist()))
        chosen = self._link.of_generation(values, received, epoch.generation)
        if chosen.any():
            epoch.add_remote(values[chosen], list(compress(received, chosen.tolist())), now_s)
