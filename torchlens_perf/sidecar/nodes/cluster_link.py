"""A node's connection to the other nodes of its job: the only interface between sidecar/cluster.py and this package.

On node 0, collect() returns what the other nodes have reported, and send_control() sends them the run's id, its process
generations and instructions. On the other nodes, post() reports, and receive() takes those instructions over. The
exchange stays open while processes are replaced: other nodes may have restarted already, or may be about to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.run.location import location
from torchlens_perf.run.place.node import host_of
from torchlens_perf.run.processes import age_s
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.membership import ControlMessage, Membership
from torchlens_perf.sidecar.nodes.messages import MAX_REPLY_BYTES, Collected, Received

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.identity import Identity
    from torchlens_perf.sidecar.nodes.exchange import Exchange

logger = logging.getLogger("torchlens_perf.sidecar")

_CUT_OFF_S = 30.0  # node 0's sidecar, started again, is found sooner
_BETWEEN = b"\n"  # not part of any control message
OpenExchange = Callable[[Endpoints, str, str, bool], "Exchange"]


class ClusterLink:
    """Belongs to the sidecar's thread. Only close() waits for another node."""

    def __init__(self, node: str, run_id: str, open_exchange: OpenExchange | None) -> None:
        """node: its name, see run/place/node.py. open_exchange: None for Exchange."""
        host = host_of(node)
        self.name = f"{host}/{node.removeprefix(host).lstrip('-')}"
        """What other nodes call this one: its host, and what distinguishes it from another node of that host."""
        self.membership = Membership(run_id)
        """Which processes of all nodes run together."""
        self._open = open_exchange
        self._exchange: Exchange | None = None
        self._role: tuple[Endpoints, bool] | None = None  # where the nodes meet, and whether this is node 0
        self._notes: list[str] = []  # of exchanges that are closed
        self._received = b""  # from node 0, newest
        self.more = b""
        """Further instructions of node 0, at most `room_for_more` bytes; on the others, those received."""

    @property
    def is_open(self) -> bool:
        return self._exchange is not None

    @property
    def merges(self) -> bool:
        """Whether this is node 0, which collects."""
        return self._role is not None and self._role[1]

    @property
    def sends(self) -> bool:
        return self._exchange is not None and not self.merges

    @property
    def is_cut_off(self) -> bool:
        """Whether node 0 is to judge, and has not been reached for long: it knows nothing new of this node's ranks."""
        return self._exchange is not None and not self.merges and self._exchange.unreached_s > _CUT_OFF_S

    def began(self, identity: Identity, generation: int, number: int | None) -> None:
        """A set of processes of this node began, of which this is one. See Membership.began()."""
        started_s = time.monotonic() - age_s(identity.process_started)
        self.membership.began(generation, started_s, identity.world_size, restarts=identity.restarts, number=number)

    def is_as(self, places: Endpoints, merges: bool) -> bool:
        """Whether the exchange that is open is the right one."""
        return self._role == (places, merges)

    def open(self, places: Endpoints, some: Identity, merges: bool) -> None:
        """Meets the other nodes in one of these places. some: any rank of this node. merges: whether rank 0 is here."""
        # A job of one node needs neither asyncio nor what else they import.
        from torchlens_perf.sidecar.nodes.exchange import Exchange
        from torchlens_perf.sidecar.nodes.rendezvous import exchange_key

        if merges:
            self.membership.lead()
        else:
            self.membership.follow()
        # The node's name includes its location, so that those who receive the name know the location too.
        where = location(some.attributes).replace("/", "-")
        logger.info("%s windows between nodes; %s", "merging" if merges else "sending", places.text)
        name = f"{self.name}/{where}" if where else self.name
        self._exchange = (self._open or Exchange)(places, exchange_key(some.watch), name, merges)
        self._role = places, merges

    def close(self) -> None:
        """Ends the exchange, and sends what is left: this waits for some seconds at most."""
        if self._exchange is not None:
            # Taken before it is closed: that the other end has left already is worth no note.
            self._notes += [note for note in self._exchange.notes() if note not in self._notes]
            self._exchange.close()
            self.receive()
            self._exchange = self._role = None

    def notes(self) -> list[str]:
        return self._notes + (self._exchange.notes() if self._exchange is not None else [])

    def post(self, payloads: Mapping[int, bytes]) -> None:
        if self._exchange is not None:
            self._exchange.post(payloads)

    def collect(self) -> Collected:
        """What has come to node 0."""
        return self._exchange.collect() if self._exchange is not None else Collected((), {})

    def set_links(self, links: bytes) -> None:
        """On the others, report what this node knows of its links, see link_report.py."""
        if self._exchange is not None and not self.merges:
            self._exchange.set_links(links)

    def links(self) -> list[bytes]:
        """On node 0, what the other nodes know of theirs."""
        return self._exchange.links() if self._exchange is not None and self.merges else []

    def send_control(self) -> None:
        """On node 0, send the others the run's id and its process generations."""
        if self._exchange is not None and self.merges:
            control = self._control()
            more = self.more if len(control) + 1 + len(self.more) <= MAX_REPLY_BYTES else b""
            self._exchange.set_reply(control + _BETWEEN + more if more else control)

    @property
    def room_for_more(self) -> int:
        """Bytes."""
        return MAX_REPLY_BYTES - 1 - len(self._control())

    def _control(self) -> bytes:
        return self.membership.control(time.monotonic()).encode()

    def receive(self) -> None:
        """On the others, take over what node 0 has sent."""
        received = self._exchange.reply() if self._exchange is not None else b""
        if received and received != self._received:
            self._received = received
            control, _, self.more = received.partition(_BETWEEN)
            try:
                self.membership.receive(ControlMessage.decode(control), time.monotonic())
            except ValueError as error:
                logger.warning("node 0's control message cannot be read: %s", error)

    def of_generation(
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
