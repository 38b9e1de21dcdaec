"""This node among those of its job: sends its ranks' summaries to node 0, or receives those of all other nodes.

On node 0, update() takes over what the other nodes have reported, and sends them the run's id, its process generations
and instructions. On the other nodes, it reports, and takes those over. The exchange stays open while processes are
replaced: other nodes may have restarted already, or may be about to.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.exporters import TALLY_MARK, Part
from torchlens_perf.run.location import location
from torchlens_perf.run.place.node import host_of
from torchlens_perf.run.processes import age_s
from torchlens_perf.sidecar.epoch import SILENT_S
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.membership import ControlMessage, Membership
from torchlens_perf.sidecar.nodes.messages import MAX_REPLY_BYTES
from torchlens_perf.sidecar.nodes.summary import RankSummary

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.identity import Identity
    from torchlens_perf.sidecar.epoch import Epoch
    from torchlens_perf.sidecar.nodes.exchange import Exchange
    from torchlens_perf.sidecar.nodes.messages import Received

logger = logging.getLogger("torchlens_perf.sidecar")

ROUND_S = 1.0  # between two posts of a rank that makes no steps, and between two checks for hangs
_ALONE_S = 2.0  # between two calls of update() where no other node gets windows
_MAX_TALLIES = 16384
_BETWEEN = b"\n"  # not part of any control message
OpenExchange = Callable[[Endpoints, str, str, bool], "Exchange"]


class Cluster:
    """Belongs to the sidecar's thread. Only close() waits for another node."""

    def __init__(
        self,
        node: str,
        run_id: str = "",
        open_exchange: OpenExchange | None = None,
        cut_off_after_s: float = 30.0,
        node_0_timeout_s: float = 15.0,
    ) -> None:
        """node: its name, see run/place/node.py. open_exchange: None for Exchange.

        cut_off_after_s: without node 0, this node judges its own ranks; node 0's sidecar, started again, is found
        sooner. node_0_timeout_s: within which node 0 says which processes run together, if it ever does.
        """
        self.membership = Membership(run_id)
        """Which processes of all nodes run together."""
        host = host_of(node)
        # What other nodes call this one: its host, and what distinguishes it from another node of that host.
        self._name = f"{host}/{node.removeprefix(host).lstrip('-')}"
        self._open_exchange = open_exchange
        self._cut_off_after_s, self._node_0_timeout_s = cut_off_after_s, node_0_timeout_s
        self._exchange: Exchange | None = None
        self._role: tuple[Endpoints, bool] | None = None  # where the nodes meet, and whether this is node 0
        self._instructions = b""  # of node 0: to be sent, or received
        self._received = b""  # from node 0, newest
        self._tallies: deque[tuple[str, bytes]] = deque(maxlen=_MAX_TALLIES)
        self._round_s = float("-inf")
        self._closed_notes: list[str] = []  # of exchanges that are closed
        self._missing: dict[str, str] = {}
        self._unreadable: set[str] = set()  # nodes whose summaries are of another version of this package
        self._corrupt: Counter[str] = Counter()  # summaries, by node
        self._others: list[str] = []

    @property
    def judges_alone(self) -> bool:
        """Whether this node judges; else node 0 does."""
        return self._exchange is None or self._merges

    @property
    def is_cut_off(self) -> bool:
        """Whether node 0 is to judge, and has not been reached for long: it knows nothing new of this node's ranks."""
        return self._exchange is not None and not self._merges and self._exchange.unreached_s > self._cut_off_after_s

    @property
    def update_every_s(self) -> float:
        """How often to call update(). Where nodes exchange windows, it is as often as they expect a post."""
        return ROUND_S if self._exchange is not None else _ALONE_S

    @property
    def others_are_there(self) -> bool:
        """True on node 0 while other nodes are still sending."""
        return self._merges and bool(self._others)

    @property
    def received(self) -> bytes:
        """Node 0's newest instructions, see publish()."""
        return b"" if self.judges_alone else self._instructions

    @property
    def max_published_bytes(self) -> int:
        """How many bytes publish() takes now."""
        return MAX_REPLY_BYTES - 1 - len(self._control())

    def publish(self, instructions: bytes) -> None:
        """On node 0, send instructions to all other nodes."""
        if self._merges and instructions != self._instructions:
            self._instructions = instructions
            self._send_control()

    def set_links(self, links: bytes) -> None:
        """Report what this node knows of its links to node 0, see nodes/link_report.py."""
        if self._exchange is not None and not self._merges:
            self._exchange.set_links(links)

    def links_of_others(self) -> list[bytes]:
        """On node 0, what the other nodes have reported of theirs."""
        return self._exchange.links() if self._exchange is not None and self._merges else []

    def forward(self, tally: bytes, epoch: Epoch) -> None:
        """Send what node 0's exporter adds up."""
        if tally and self._exchange is not None and not self._merges and epoch.ranks:
            self._exchange.post({min(epoch.ranks): tally})

    def take_tallies(self) -> list[tuple[str, bytes]]:
        """Take out what other nodes forward to this one's exporter, with their names."""
        tallies = list(self._tallies)
        self._tallies.clear()
        return tallies

    def part(self, epoch: Epoch) -> Part | None:
        """What this node is in the job; None while that is not known."""
        if not self.judges_alone:
            return Part.HANDS_ON
        on_one_node = any(local.identity.on_one_node for local in epoch.ranks.values())
        if self._merges or on_one_node or epoch.has_all_ranks:
            return Part.WHOLE
        return Part.ALONE if epoch.is_whole_job else None

    def awaits_node_0(self, epoch: Epoch) -> bool:
        """Whether node 0 is still to say what the run is called, and how often it was started; soon it is."""
        known = self.membership.is_known(epoch.generation)
        return bool(epoch.meeting_points) and not known and time.monotonic() - epoch.began_s < self._node_0_timeout_s

    def begin(self, identity: Identity, generation: int, number: int | None = None) -> None:
        """Register a generation of this node's processes. identity: of one of them.

        number: of the job's generation, if an earlier sidecar knew it.
        """
        started_s = time.monotonic() - age_s(identity.process_started)
        self.membership.began(generation, started_s, identity.world_size, restarts=identity.restarts, number=number)

    def leave(self, epoch: Epoch) -> None:
        """Send what is left of an epoch that another one replaces."""
        self._report(epoch)
        self._missing.clear()
        self._unreadable.clear()
        self._corrupt.clear()
        self._others.clear()
        self._tallies.clear()

    def update(self, epoch: Epoch, now_s: float, *, final: bool = False) -> None:
        """Send and receive, and look for a hang once a second. now_s: a monotonic clock. final: the run has ended."""
        self._join(epoch)
        if self._merges:
            self._collect(epoch, now_s)
        else:
            self._receive_control()
        due = now_s - self._round_s >= ROUND_S
        full = any(sum(map(len, each.unsent)) >= summary.ROWS for each in epoch.ranks.values())
        if due or final or full:
            self._report(epoch)
        if due:
            self._round_s = now_s
            self._send_control()
            epoch.look_for_hang(now_s)

    def notes(self) -> list[str]:
        """What a person should know about the exchange between nodes."""
        notes = [*self._missing.values()]
        notes += [f"node {node} runs another version of torchlens_perf: not compared" for node in self._unreadable]
        notes += [f"{count} windows of node {node} were corrupt: left out" for node, count in self._corrupt.items()]
        return notes + self._closed_notes + (self._exchange.notes() if self._exchange is not None else [])

    def close(self, epoch: Epoch) -> None:
        """Send what is left and end the exchange. Wait for some seconds at most."""
        self._report(epoch)
        if self._exchange is not None:
            # Taken before it is closed: that the other end has left already is worth no note.
            self._closed_notes += [note for note in self._exchange.notes() if note not in self._closed_notes]
            self._exchange.close()
            self._receive_control()
            self._exchange = self._role = None

    # -- parts

    @property
    def _merges(self) -> bool:
        """Whether this is node 0, which collects."""
        return self._role is not None and self._role[1]

    def _join(self, epoch: Epoch) -> None:
        """Open the exchange, or another one, as soon as ranks have made steps: by then this node's are all known."""
        if epoch.is_whole_job or epoch.has_all_ranks:
            self.close(epoch)
            epoch.meeting_points.clear()
        if not epoch.meeting_points or not epoch.ranks:
            return
        role = next(iter(epoch.meeting_points.values())), 0 in epoch.ranks
        if self._role != role:
            self.close(epoch)
            self._open(*role, next(iter(epoch.ranks.values())).identity)

    def _open(self, endpoints: Endpoints, merges: bool, some: Identity) -> None:
        """Meet the other nodes. merges: whether rank 0 is here. some: any rank of this node."""
        # A job of one node needs neither asyncio nor what else they import.
        from torchlens_perf.sidecar.nodes.exchange import Exchange
        from torchlens_perf.sidecar.nodes.rendezvous import exchange_key

        if merges:
            self.membership.lead()
        else:
            self.membership.follow()
        # The node's name includes its location, so that those who receive the name know the location too.
        where = location(some.attributes).replace("/", "-")
        logger.info("%s windows between nodes; %s", "merging" if merges else "sending", endpoints.text)
        name = f"{self._name}/{where}" if where else self._name
        self._exchange = (self._open_exchange or Exchange)(endpoints, exchange_key(some.watch), name, merges)
        self._role = endpoints, merges

    def _send_control(self) -> None:
        """On node 0, send the others the run's id, its process generations and instructions."""
        if self._exchange is not None and self._merges:
            control, more = self._control(), self._instructions
            fits = more and len(control) + 1 + len(more) <= MAX_REPLY_BYTES
            self._exchange.set_reply(control + _BETWEEN + more if fits else control)

    def _control(self) -> bytes:
        return self.membership.control(time.monotonic()).encode()

    def _receive_control(self) -> None:
        """On the others, take over what node 0 has sent."""
        received = self._exchange.reply() if self._exchange is not None else b""
        if received and received != self._received:
            self._received = received
            control, _, self._instructions = received.partition(_BETWEEN)
            try:
                self.membership.receive(ControlMessage.decode(control), time.monotonic())
            except ValueError as error:
                logger.warning("node 0's control message cannot be read: %s", error)

    def _report(self, epoch: Epoch) -> None:
        """On the others, report how far this node's ranks are, and their rows that were not reported yet."""
        while self._exchange is not None and not self._merges:
            payloads, more = {}, False
            for rank, local in epoch.ranks.items():
                if local.progress is None or (local.end_sent and not local.unsent):
                    continue
                rows = summary.take_rows(local.unsent)
                more |= bool(local.unsent)
                local.end_sent = local.ended and not local.unsent
                payloads[rank] = summary.pack(
                    RankSummary(
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
                self._exchange.post(payloads)
            if not more:
                return

    def _collect(self, epoch: Epoch, now_s: float) -> None:
        """On node 0, take over what the other nodes have reported."""
        if self._exchange is None:
            return
        for local in epoch.ranks.values():
            local.unsent.clear()  # node 0 has its own rows
        collected = self._exchange.collect()
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
            if not contact.left and contact.silent_s < SILENT_S and not f"{node}/".startswith(f"{self._name}/")
        ]
        self._missing = {
            node: f"node {node} has not been heard of for {contact.silent_s:.0f} s: its ranks are not compared"
            for node, contact in collected.nodes.items()
            if contact.silent_s > SILENT_S and not contact.left
        }

    def _add_summaries(self, epoch: Epoch, payloads: list[bytes], received: list[Received], now_s: float) -> None:
        values = summary.unpack(payloads)
        valid = summary.are_valid(values)
        self._corrupt.update(received[index].node.rstrip("/") for index in np.flatnonzero(~valid).tolist())
        values, received = values[valid], list(compress(received, valid.tolist()))
        chosen = self._of_generation(values, received, epoch.generation)
        if chosen.any():
            epoch.add_remote(values[chosen], list(compress(received, chosen.tolist())), now_s)

    def _of_generation(
        self, values: npt.NDArray[np.void], received: Sequence[Received], generation: int
    ) -> npt.NDArray[np.bool_]:
        """Which summaries do not come late from processes that these have replaced, or early from those that come next.

        received: the post of each. generation: of this node's processes, as it counts them.
        """
        now_s, current = time.monotonic(), self.membership.number(generation)
        known: dict[tuple[str, int], bool] = {}
        chosen = []
        columns = (values[name].tolist() for name in ("set", "age_s", "world_size"))
        for each, of_set, set_age_s, world_size in zip(received, *columns, strict=True):
            key = each.node, of_set
            if key not in known:
                started_s = now_s - each.age_s - set_age_s
                known[key] = self.membership.of_other(*key, started_s, world_size) == current
            chosen.append(known[key])
        return np.array(chosen, bool)
