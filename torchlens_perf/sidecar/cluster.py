"""Connect this node with the other nodes of its job.

On node 0, exchange_data() receives summaries of the other nodes' ranks. It sends the run's id, its
process generations and instructions to the other nodes. On those nodes, exchange_data() sends
summaries of the node's ranks to node 0. The exchange stays open while processes restart, because
each node may restart its processes at another time.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from torchlens_perf.exporters import TALLY_MARK, CoveredRanks
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.run.location import describe_location
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.run.processes import process_age_s
from torchlens_perf.sidecar.job_generation import SILENT_S
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.membership import ControlMessage, Membership

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.run.identity import Identity
    from torchlens_perf.sidecar.job_generation import JobGeneration
    from torchlens_perf.sidecar.nodes.exchange import Exchange
    from torchlens_perf.sidecar.nodes.messages import NodeContact, ReceivedPost


# Interval of hang checks. A rank that makes no steps sends posts at the same interval.
ROUND_S = 1.0
_MAX_TALLIES = 16384
# First byte of a payload with lines of code by rank, in which ranks hang.
_LINES_MARK, _MAX_LINES, _MAX_LINE = b"\xf2", 16, 40
_lines = msgspec.msgpack.Decoder(dict[int, str])
OpenExchange = Callable[[Endpoints, str, str, bool], "Exchange"]


class ClusterLink:
    """This node's link to the other nodes of the job. Not thread-safe. Only close() may block."""

    def __init__(
        self,
        node: str,
        run_id: str = "",
        open_exchange: OpenExchange | None = None,
        cut_off_after_s: float = 30.0,
        node_0_timeout_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """node: this node's name, see run/place/node.py. open_exchange: replaces Exchange in tests.

        cut_off_after_s: time without contact to node 0 after which this node judges its own ranks.
        It must be longer than a node needs to find a restarted sidecar of node 0.
        node_0_timeout_s: longest wait for node 0's message about the job's process generations.
        clock: a monotonic clock in seconds.
        """
        self.membership = Membership(run_id)
        """The generations of processes that run together on all nodes."""
        host = host_of_node(node)
        # Other nodes see this name: the host's name and a suffix that distinguishes nodes on one
        # host.
        self._name = f"{host}/{node.removeprefix(host).lstrip('-')}"
        self._open_exchange = open_exchange
        self._clock = clock
        self._cut_off_after_s, self._node_0_timeout_s = cut_off_after_s, node_0_timeout_s
        self._exchange: Exchange | None = None
        self._role: tuple[Endpoints, bool] | None = None  # endpoints, and whether this is node 0
        self._slow_ranks: tuple[int, ...] = ()  # sent by node 0 or received from it
        self._received = b""  # newest reply of node 0
        self._tallies: deque[tuple[str, bytes]] = deque(maxlen=_MAX_TALLIES)
        self._sent_lines: dict[int, str] = {}  # newest lines of code that node 0 has been sent
        self._round_s = float("-inf")
        self._closed_notes: list[str] = []  # notes of closed exchanges
        self._contacts: Mapping[str, NodeContact] = {}
        self._unreadable: set[str] = set()  # nodes that run another version of this package
        self._corrupt: Counter[str] = Counter()  # number of corrupt summaries by node

    @property
    def judges_alone(self) -> bool:
        """True if this node judges its own ranks, False if node 0 judges them on another node."""
        return self._exchange is None or self._is_node_0

    @property
    def has_other_nodes(self) -> bool:
        return self._exchange is not None

    @property
    def is_cut_off(self) -> bool:
        """True if node 0, which judges this node's ranks, has been unreachable for too long."""
        return (
            self._exchange is not None
            and not self._is_node_0
            and self._exchange.time_without_contact_s > self._cut_off_after_s
        )

    @property
    def others_still_send(self) -> bool:
        """True on node 0 while other nodes are still sending."""
        return self._is_node_0 and any(
            not contact.left and contact.silent_s < SILENT_S for contact in self._contacts.values()
        )

    @property
    def received_slow_ranks(self) -> frozenset[int]:
        """The ranks that node 0 has found slow; empty on a node that judges its own ranks."""
        return frozenset() if self.judges_alone else frozenset(self._slow_ranks)

    def publish_slow_ranks(self, ranks: tuple[int, ...]) -> None:
        """Send the slow ranks to all other nodes if this is node 0. Otherwise do nothing."""
        if self._is_node_0 and ranks != self._slow_ranks:
            self._slow_ranks = ranks
            self._publish_control()

    def send_link_statistics(self, links: bytes) -> None:
        """Report statistics of this node's links to node 0, see nodes/link_report.py."""
        if self._exchange is not None and not self._is_node_0:
            self._exchange.set_links(links)

    def other_nodes_link_reports(self) -> list[bytes]:
        """Return the link reports of the other nodes. The list is empty except on node 0."""
        return (
            self._exchange.link_reports() if self._exchange is not None and self._is_node_0 else []
        )

    def send_tally(self, tally: bytes, job: JobGeneration) -> None:
        """Send this node's sums of metrics (a tally) to node 0, whose exporter adds them up."""
        if tally and self._exchange is not None and not self._is_node_0 and job.ranks:
            self._exchange.post({min(job.ranks): tally})

    def take_tallies(self) -> list[tuple[str, bytes]]:
        """Remove and return the tallies received from other nodes, each with its node's name."""
        tallies = list(self._tallies)
        self._tallies.clear()
        return tallies

    def export_part(self, job: JobGeneration) -> CoveredRanks | None:
        """Return this node's part in exporting the job's metrics, or None while it is not known."""
        if not self.judges_alone:
            return CoveredRanks.FORWARDER
        on_one_node = any(local.identity.on_one_node for local in job.ranks.values())
        if self._is_node_0 or on_one_node or job.has_all_ranks:
            return CoveredRanks.WHOLE
        return CoveredRanks.ALONE if job.is_whole_job else None

    def awaits_node_0(self, job: JobGeneration) -> bool:
        """Return True while this node waits for node 0's message with the run's id and attempt.

        The wait ends after node_0_timeout_s.
        """
        known = self.membership.is_generation_number_known(job.generation)
        return (
            bool(job.meeting_points)
            and not known
            and self._clock() - job.began_s < self._node_0_timeout_s
        )

    def add_generation(
        self, identity: Identity, generation: int, number: int | None = None
    ) -> None:
        """Register a generation of this node's processes.

        identity: identity of one of the processes. number: the generation's number in the job, if
        the node's saved state contains it.
        """
        started_s = self._clock() - process_age_s(identity.process_started)
        self.membership.add_set(
            generation, started_s, identity.world_size, restarts=identity.restarts, number=number
        )

    def finish_generation(self, job: JobGeneration) -> None:
        """Send the last data of a replaced generation, and discard all data of other nodes."""
        self._report_ranks(job)
        self._contacts = {}
        self._unreadable.clear()
        self._corrupt.clear()
        self._tallies.clear()

    def exchange_data(self, job: JobGeneration, now_s: float, *, final: bool = False) -> None:
        """Send and receive data, and look for a hang once a second.

        now_s: a monotonic clock. final: the run has ended.
        """
        self._open_or_replace_exchange(job)
        if self._is_node_0:
            self._collect_reports(job, now_s)
        else:
            self._receive_control()
        due = now_s - self._round_s >= ROUND_S
        full = any(sum(map(len, each.unsent)) >= summary.ROWS for each in job.ranks.values())
        if due or final or full:
            self._report_ranks(job)
        if due:
            self._round_s = now_s
            self._publish_control()
            job.look_for_hang(now_s)

    def notes(self) -> list[str]:
        """Return notes for the report about the exchange between nodes."""
        contacts = self._contacts.items()
        return [
            *(
                f"node {node} has sent nothing for {contact.silent_s:.0f} s: its ranks are not compared"
                for node, contact in contacts
                if contact.silent_s > SILENT_S and not contact.left
            ),
            *(
                f"{contact.missed} windows of node {node} were lost before node 0 compared them"
                for node, contact in contacts
                if contact.missed
            ),
            *(
                f"node {node} runs another version of torchlens_perf: not compared"
                for node in self._unreadable
            ),
            *(
                f"{count} windows of node {node} were corrupt: left out"
                for node, count in self._corrupt.items()
            ),
            *self._closed_notes,
            *(self._exchange.notes() if self._exchange else ()),
        ]

    def close(self, job: JobGeneration) -> None:
        """Send the remaining data and end the exchange. Blocks for a few seconds at most."""
        self._report_ranks(job)
        if self._exchange is not None:
            # Collect the notes before closing, because no note is needed if node 0's sidecar has
            # already left.
            self._closed_notes += [
                note for note in self._exchange.notes() if note not in self._closed_notes
            ]
            self._exchange.close()
            self._receive_control()
            self._exchange = self._role = None

    # -- parts

    @property
    def _is_node_0(self) -> bool:
        """True on node 0, which collects the summaries."""
        return self._role is not None and self._role[1]

    def _open_or_replace_exchange(self, job: JobGeneration) -> None:
        """Open the exchange once ranks have made steps, or replace it if this node's role changes.

        When ranks make their first steps, all ranks of this node are known.
        """
        if job.is_whole_job or job.has_all_ranks:
            self.close(job)
            job.meeting_points.clear()
        if not job.meeting_points or not job.ranks:
            return
        role = next(iter(job.meeting_points.values())), 0 in job.ranks
        if self._role != role:
            self.close(job)
            self._connect(*role, next(iter(job.ranks.values())).identity)

    def _connect(self, endpoints: Endpoints, merges: bool, identity: Identity) -> None:
        """Open the exchange. merges: True on node 0. identity: that of any rank of this node."""
        # Import the exchange here, because a job with one node needs neither asyncio nor grpc.
        from torchlens_perf.sidecar.nodes.exchange import Exchange
        from torchlens_perf.sidecar.nodes.rendezvous import store_key_of_watch

        self.membership.set_leading(merges)
        # Add the node's location to the name that other nodes receive.
        where = describe_location(identity.attributes).replace("/", "-")
        logger.info(
            "%s windows between nodes; %s",
            "merging" if merges else "sending",
            endpoints.description,
        )
        name = f"{self._name}/{where}" if where else self._name
        self._exchange = (self._open_exchange or Exchange)(
            endpoints, store_key_of_watch(identity.watch), name, merges
        )
        self._role = endpoints, merges

    def _publish_control(self) -> None:
        """Send the run's id, its process generations and slow ranks. Only node 0 sends them."""
        if self._exchange is not None and self._is_node_0:
            control = self.membership.build_control_message(self._clock(), self._slow_ranks)
            self._exchange.set_instructions(control.encode())

    def _receive_control(self) -> None:
        """Apply node 0's newest control message. Node 0 itself receives none."""
        received = self._exchange.instructions() if self._exchange is not None else b""
        if received and received != self._received:
            self._received = received
            try:
                control = ControlMessage.decode(received)
            except ValueError as error:
                logger.warning("node 0's control message cannot be read: %s", error)
                return
            self._slow_ranks = control.slow_ranks
            self.membership.apply_control_message(control, self._clock())

    def _report_ranks(self, job: JobGeneration) -> None:
        """Report progress and new rows of this node's ranks to node 0, unless this is node 0."""
        more = True
        while more and self._exchange is not None and not self._is_node_0:
            payloads = {}
            for rank, local in job.ranks.items():
                if local.progress is None or (local.end_sent and not local.unsent):
                    continue
                rows = local.unsent.pop(0) if local.unsent else None
                local.end_sent = local.ended and not local.unsent
                payloads[rank] = summary.pack_summary(
                    local.progress,
                    job.places.get(rank, local.place),
                    local.identity.world_size,
                    set=job.generation,
                    age_s=self.membership.age_of_set_s(job.generation, self._clock()),
                    rows=rows,
                    modules_ns=local.modules_ns,
                    ended=local.end_sent,
                    signals=local.metrics,
                )
            if payloads:
                self._exchange.post(payloads)
            more = any(job.ranks[rank].unsent for rank in payloads)
        lines = {
            rank: line.encode()[:_MAX_LINE].decode(errors="ignore")
            for rank, line in list(job.user_lines.items())[:_MAX_LINES]
        }
        is_new = bool(job.ranks) and lines != self._sent_lines
        if is_new and self._exchange is not None and not self._is_node_0:
            changed = dict.fromkeys(self._sent_lines, "") | lines
            data = _LINES_MARK + msgspec.msgpack.encode(changed)
            self._exchange.post({min(job.ranks): data})
            self._sent_lines = lines

    def _collect_reports(self, job: JobGeneration, now_s: float) -> None:
        """Add the reports of the other nodes to the job. Called on node 0."""
        if self._exchange is None:
            return
        for local in job.ranks.values():
            local.unsent.clear()  # Node 0 judges its own rows without sending them.
        collected = self._exchange.collect_posts()
        posts: list[ReceivedPost] = []  # the post of each payload
        payloads: list[bytes] = []
        for post in collected.posts:
            for payload in post.payloads.values():
                if payload[:1] == TALLY_MARK:
                    self._tallies.append((post.node, payload))
                elif payload[:1] == _LINES_MARK:
                    # Lines only add to what a hang shows, so invalid ones are left out.
                    with contextlib.suppress(msgspec.DecodeError):
                        job.remote_lines |= _lines.decode(payload[1:])
                elif summary.has_current_format(payload):
                    posts.append(post)
                    payloads.append(payload)
                else:
                    self._unreadable.add(post.node)
        if posts:
            self._unreadable -= {post.node for post in posts}
            self._add_summaries(job, payloads, posts, now_s)
        self._contacts = collected.nodes

    def _add_summaries(
        self, job: JobGeneration, payloads: list[bytes], received: list[ReceivedPost], now_s: float
    ) -> None:
        values = summary.unpack_summaries(payloads)
        valid = summary.find_valid_summaries(values)
        self._corrupt.update(
            received[index].node.rstrip("/") for index in np.flatnonzero(~valid).tolist()
        )
        values, received = values[valid], list(compress(received, valid.tolist()))
        chosen = self._mask_of_generation(values, received, job.generation)
        if chosen.any():
            job.add_remote_summaries(
                values[chosen], list(compress(received, chosen.tolist())), now_s
            )

    def _mask_of_generation(
        self, values: npt.NDArray[np.void], received: Sequence[ReceivedPost], generation: int
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the summaries that belong to this node's process generation.

        Replaced processes may send summaries too late, and new processes may send them too early.

        received: the post of each summary. generation: number of this node's process generation.
        """
        now_s, current = self._clock(), self.membership.generation_number(generation)
        known: dict[tuple[str, int], bool] = {}
        chosen = []
        columns = (values[name].tolist() for name in ("set", "age_s", "world_size"))
        for each, of_set, set_age_s, world_size in zip(received, *columns, strict=True):
            key = each.node, of_set
            if key not in known:
                started_s = now_s - each.age_s - set_age_s
                known[key] = (
                    self.membership.generation_of_remote_set(*key, started_s, world_size) == current
                )
            chosen.append(known[key])
        return np.array(chosen, bool)
