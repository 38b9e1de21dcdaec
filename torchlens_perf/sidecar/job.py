"""The job as this node's sidecar sees it: judges its ranks, exchanges windows with other nodes, looks for hangs.

In a job of several nodes every sidecar sends its ranks' windows to that of node 0, which judges all ranks together.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.modules import ModuleTimes
from torchlens_perf.analysis.statistics.step_bins import MIN_ROW_NS
from torchlens_perf.exporters import TALLY_MARK, Part
from torchlens_perf.exporters.choice.rank_rows import RankRows
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.sidecar.hang_watch import HangWatch
from torchlens_perf.sidecar.local_rank import LocalRank, next_rows
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.cluster_link import ClusterLink, OpenExchange
from torchlens_perf.sidecar.nodes.endpoints import Endpoints
from torchlens_perf.sidecar.nodes.summary import Summary
from torchlens_perf.verdicts.causes.metrics import MetricHistory, vector
from torchlens_perf.verdicts.causes.rules import Diagnosis, diagnose
from torchlens_perf.verdicts.stragglers.detector import Findings, JobDetector
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.stragglers.window import BinBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.collectives.hang import Progress
    from torchlens_perf.run.identity import Identity, ProcessGroup
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.nodes.messages import Received
    from torchlens_perf.verdicts.causes.straggler_groups import StragglerGroup
    from torchlens_perf.verdicts.words.hang import OpenHang

logger = logging.getLogger("torchlens_perf.sidecar")

ROUND_S = 1.0  # between two posts of a rank that makes no steps, and between two checks for hangs
_ALONE_S = 2.0  # between two calls of update() where no other node gets windows
SILENT_S = 6.0  # nodes post every ROUND_S; one whose posts are missing for so long is silent
_WORD_S = 15.0  # within which node 0 says which processes run together, if it ever does
_MAX_COMPARED = 256  # ranks whose signals a slow rank's are held against
_MAX_TALLIES = 16384
_MIN_ROW_NS = 100_000_000  # between nodes: at most ten rows a second and rank


class JobView:
    """Belongs to the sidecar's thread."""

    def __init__(self, node: str, open_exchange: OpenExchange | None = None, run_id: str = "") -> None:
        """node: its name, see run/place/node.py."""
        self._meeting = ClusterLink(node, run_id, open_exchange)
        self.membership = self._meeting.membership
        """Which processes of all nodes run together."""
        self._generation = -1
        self._local: dict[int, LocalRank] = {}
        self._round_s = float("-inf")
        self.begin(-1)

    @property
    def judges_alone(self) -> bool:
        """Whether this node judges; else node 0 does."""
        return not self._meeting.sends

    @property
    def is_cut_off(self) -> bool:
        """See ClusterLink."""
        return self._meeting.is_cut_off

    @property
    def hang(self) -> OpenHang | None:
        """The hang in progress; None while the job moves."""
        return self._hangs.hang

    @property
    def update_every_s(self) -> float:
        """How often to call update(). Where nodes exchange windows, it is as often as they expect a post."""
        return ROUND_S if self._meeting.is_open else _ALONE_S

    @property
    def part(self) -> Part | None:
        """What this node is in the job; None while that is not known."""
        some = next(iter(self._local.values()), None)
        if self._meeting.sends:
            return Part.HANDS_ON
        if self._meeting.merges or (some is not None and some.identity.on_one_node):
            return Part.WHOLE
        if some is not None and len(self._local) >= some.world_size:
            return Part.WHOLE
        return Part.ALONE if self._alone else None

    @property
    def heard(self) -> bytes:
        """What node 0 has said last, beside which processes run together."""
        return self._meeting.more if self._meeting.sends else b""

    @property
    def room_to_say(self) -> int:
        """How many bytes say() takes now."""
        return self._meeting.room_for_more

    def say(self, more: bytes) -> None:
        """On node 0, has the others hear it."""
        if self._meeting.merges and more != self._meeting.more:
            self._meeting.more = more
            self._meeting.send_control()

    def set_links(self, links: bytes) -> None:
        """Report what this node knows of its links to node 0, see nodes/link_report.py."""
        self._meeting.set_links(links)

    def links_of_others(self) -> list[bytes]:
        """On node 0, what the other nodes have reported of theirs."""
        return self._meeting.links()

    def hand_on(self, tally: bytes) -> None:
        """Posts what node 0's exporter adds up."""
        if tally and self._meeting.sends and self._local:
            self._meeting.post({min(self._local): tally})

    @property
    def generation(self) -> int:
        """Of this node's processes, whose steps are judged; -1 before the first."""
        return self._judge.attempt

    @property
    def attempt(self) -> int:
        """The job's generation of this node's processes."""
        return self.membership.number(self._generation)

    @property
    def world_size(self) -> int:
        """Of the newest processes; 0 before the first."""
        return max((local.world_size for local in self._local.values()), default=0)

    @property
    def places(self) -> Mapping[int, Placement]:
        """Of all ranks that are judged here."""
        return self._judge.places

    # -- from the sidecar's sources

    def begin(self, generation: int, identity: Identity | None = None) -> None:
        """Other processes of this node begin, as it counts them (restarts.py). identity: of one of them.

        The exchange goes on: other nodes may have begun already.
        """
        if identity is not None:
            self.began(identity, generation)
        if self._meeting.sends:
            self._post()
        self._generation = generation
        self._began_s = time.monotonic()
        self._alone = False  # whether they are all ranks of the job
        self._places: dict[int, Endpoints] = {}
        self._hangs = HangWatch(SILENT_S)
        self._judge = JobDetector()
        self._local = {}
        self._remote: dict[int, Progress] = {}
        self._remote_reported_s: dict[int, float] = {}
        self.rank_rows = RankRows()
        """What the ranks did in the newest steps."""
        self.tallies: deque[tuple[str, bytes]] = deque(maxlen=_MAX_TALLIES)
        """What other nodes hand on to this one's exporter, with their names."""
        self.module_times = ModuleTimes()
        """Of the ranks of all nodes."""
        self._signals = MetricHistory()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._missing: dict[str, str] = {}
        self._unreadable: set[str] = set()  # nodes whose summaries are of another version of this package
        self._corrupt: Counter[str] = Counter()  # summaries, by node
        self._others: list[str] = []

    def began(self, identity: Identity, generation: int, number: int | None = None) -> None:
        """Of these processes this is one. number: the job's generation, if an earlier sidecar knew it."""
        self._meeting.began(identity, generation, number)

    def add_steps(self, identity: Identity, place: Placement, steps: StepTable, places: Endpoints | None) -> None:
        """Finished steps of a rank of this node. places: where the nodes meet, for a job of several."""
        local = self._local_of(identity, place)
        if places is None or identity.on_one_node:
            self._alone = True
        else:
            self._places[identity.rank] = places
        min_row_ns = _MIN_ROW_NS if self._places else MIN_ROW_NS
        rows = self._judge.add_steps(self._generation, identity.rank, place, steps, min_row_ns)
        if rows is not None:
            self.rank_rows.add(BinBatch.of(identity.rank, rows))
            if self._may_send:
                local.unsent.append(rows)

    def progress(
        self,
        identity: Identity,
        place: Placement,
        now: Progress,
        groups: Mapping[str, ProcessGroup],
        stack_file: str = "",
        modules_ns: Mapping[str, float] | None = None,
    ) -> None:
        """How far a rank of this node is. stack_file: where it writes its stack when it is asked to.

        modules_ns: its modules' mean own forward time a step.
        """
        local = self._local_of(identity, place)
        local.progress, local.stack_file, local.modules_ns = now, stack_file, modules_ns or {}
        self.module_times.set_local(identity.rank, local.modules_ns)
        self._groups.update({name: parse_ranges(group["ranks"]) for name, group in groups.items()})

    def add_signals(self, values: Mapping[int, Mapping[str, float]], now_s: float) -> None:
        """What was measured of ranks of this node in the last second, see verdicts/causes/metrics.py."""
        there = {rank: signals for rank, signals in values.items() if rank in self._local}
        steps = [local.progress.step if local.progress else 0 for local in map(self._local.__getitem__, there)]
        for rank, signals in there.items():
            self._local[rank].signals = signals
        if there:
            rows = np.stack([vector(signals) for signals in there.values()])
            self._signals.add(np.array(list(there)), np.array(steps), rows, now_s)

    def diagnose(self, straggler: StragglerGroup, details: Mapping[str, str]) -> Diagnosis:
        """Why a slow rank is slow. details: see diagnosis.diagnose(); of a rank of another node there are none."""
        episode, places = straggler.lead, self._judge.places
        # Of those that do the same work; any of them, as ranks in steps of eight have the same place on their nodes.
        same = places[episode.rank].population if episode.rank in places else ""
        alike = [rank for rank in self._signals.ranks if rank in places and places[rank].population == same]
        if len(alike) > _MAX_COMPARED:
            alike = random.Random(episode.rank).sample(alike, _MAX_COMPARED)
        sample = [episode.rank, *alike]
        during = self._signals.means(sample, episode.since_step)
        before = None if episode.from_start else self._signals.usual_before(episode.rank, episode.since_step)
        return diagnose(episode, during, before, straggler.ranks, details)

    def end(self, identity: Identity) -> None:
        """A process of this node has ended, and all of it is counted."""
        local = self._local.get(identity.rank)
        rows = self._judge.end(self._generation, identity.rank)
        if local is not None and local.identity.key == identity.key:
            local.ended = True
            if rows is not None and self._may_send:
                local.unsent.append(rows)

    # -- once in every round of the sidecar

    def update(self, now_s: float, *, final: bool = False) -> Findings:
        """Sends, receives and judges. now_s: a monotonic clock. final: the run has ended."""
        self._join()
        if self._meeting.merges:
            self._receive(now_s)
        else:
            self._meeting.receive()
        due = now_s - self._round_s >= ROUND_S
        full = any(sum(map(len, each.unsent)) >= summary.ROWS for each in self._local.values())
        if self._meeting.sends and (due or final or full):
            self._post()
        if due:
            self._round_s = now_s
            self._meeting.send_control()
            self._look_for_hang(now_s)
        return self._judge.judge(final=final)

    def notes(self) -> list[str]:
        """What is to be said of the exchange between nodes."""
        notes = [*self._missing.values()]
        notes += [f"node {node} runs another version of torchlens_perf: not compared" for node in self._unreadable]
        notes += [f"{count} windows of node {node} were corrupt: left out" for node, count in self._corrupt.items()]
        return notes + self._meeting.notes()

    def others_are_there(self) -> bool:
        """Whether this is node 0, and others that have not ended still post to it: their last windows are to come."""
        return self._meeting.merges and bool(self._others)

    def awaits_node_0(self) -> bool:
        """Whether another node is still to say what the run is called, and how often it was started; soon it is."""
        known = self.membership.is_known(self._generation)
        return bool(self._places) and not known and time.monotonic() - self._began_s < _WORD_S

    def close(self) -> None:
        """Sends what is left and ends the exchange."""
        if self._meeting.sends:
            self._post()
        self._meeting.close()

    # -- parts

    @property
    def _may_send(self) -> bool:
        """Whether it sends, or may find out that it does."""
        return bool(self._places) and not self._meeting.merges

    def _local_of(self, identity: Identity, place: Placement) -> LocalRank:
        local = self._local.get(identity.rank)
        if local is None or local.identity.key != identity.key:
            local = self._local[identity.rank] = LocalRank(identity, place, identity.world_size)
        local.place = place
        return local

    def _join(self) -> None:
        """Opens the exchange, or another one, as soon as ranks have made steps: by then this node's are all known."""
        some = next(iter(self._local.values()), None)
        # No launcher may have said it, but all ranks are here.
        if self._alone or (some is not None and len(self._local) >= some.world_size):
            self.close()
            self._places.clear()
        if not self._places or some is None:
            return
        places = next(iter(self._places.values()))
        merges = 0 in self._local
        if self._meeting.is_as(places, merges):
            return
        self.close()
        if merges:
            for local in self._local.values():
                local.unsent.clear()
        self._meeting.open(places, some.identity, merges)

    def _post(self) -> None:
        while True:
            payloads, more = {}, False
            for rank, local in self._local.items():
                if local.progress is None or (local.end_sent and not local.unsent):
                    continue
                rows = next_rows(local.unsent)
                more |= bool(local.unsent)
                local.end_sent = local.ended and not local.unsent
                payloads[rank] = summary.pack(
                    Summary(
                        set=self._generation,
                        age_s=self.membership.age_s(self._generation, time.monotonic()),
                        world_size=local.world_size,
                        place=self._judge.places.get(rank, local.place),
                        progress=local.progress,
                        rows=rows,
                        modules_ns=local.modules_ns,
                        ended=local.end_sent,
                        signals=local.signals,
                    )
                )  # fmt: skip
            if payloads:
                self._meeting.post(payloads)
            if not more:
                return

    def _receive(self, now_s: float) -> None:
        collected = self._meeting.collect()
        posts: list[Received] = []  # of each payload
        payloads: list[bytes] = []
        for post in collected.posts:
            for payload in post.payloads.values():
                if payload[:1] == TALLY_MARK:
                    self.tallies.append((post.node, payload))
                elif summary.is_readable(payload):
                    posts.append(post)
                    payloads.append(payload)
                else:
                    self._unreadable.add(post.node)
        if posts:
            self._unreadable -= {post.node for post in posts}
            self._take_over(summary.unpack(payloads), posts, now_s)
        self._others = [
            node
            for node, contact in collected.nodes.items()
            if not contact.left and contact.silent_s < SILENT_S and not f"{node}/".startswith(f"{self._meeting.name}/")
        ]
        self._missing = {
            node: f"node {node} has not been heard of for {contact.silent_s:.0f} s: its ranks are not compared"
            for node, contact in collected.nodes.items()
            if contact.silent_s > SILENT_S and not contact.left
        }

    def _take_over(self, values: npt.NDArray[np.void], received: Sequence[Received], now_s: float) -> None:
        """What other nodes' ranks tell of themselves. received: the post of each."""
        sound = summary.sound(values)
        self._corrupt.update(received[index].node.rstrip("/") for index in np.flatnonzero(~sound).tolist())
        values, received = values[sound], list(compress(received, sound.tolist()))
        chosen = self._meeting.of_generation(values, received, self._generation)
        values, received = values[chosen], list(compress(received, chosen.tolist()))
        if not received:
            return
        hosts = [each.node.split("/")[0] for each in received]
        locations = ["".join(each.node.split("/")[2:]) for each in received]
        ages_s = [each.age_s for each in received]
        for progress, age_s in zip(summary.progress(values, hosts, ages_s), ages_s, strict=True):
            self._remote[progress.rank] = progress
            self._remote_reported_s[progress.rank] = now_s - age_s
        ranks = values["rank"].tolist()
        for index, rank in enumerate(ranks):
            if not self._judge.has_rows(rank):
                place = summary.place(values[index], hosts[index], locations[index])
                self._judge.set_place(self._generation, rank, place)
        for rank, key, times_ns in zip(ranks, values["modules"].tolist(), summary.modules_ns(values), strict=True):
            self.module_times.set_remote(rank, key, times_ns)
        self._signals.add(values["rank"].astype(np.int64), values["step"].astype(np.int64), values["signals"], now_s)
        for index in np.flatnonzero(values["ended"]).tolist():
            self._judge.end(self._generation, ranks[index])
        for population, block in summary.blocks(values):
            self._judge.add_block(population, block)
            self.rank_rows.add(block)

    def _look_for_hang(self, now_s: float) -> None:
        ranks = {rank: local.progress for rank, local in self._local.items() if local.progress is not None}
        ages_s = {rank: now_s - reported_s for rank, reported_s in self._remote_reported_s.items()}
        world_size = max((local.world_size for local in self._local.values()), default=0)
        groups = {
            name: tuple(range(world_size)) if len(members) == world_size else members
            for name, members in self._groups.items()
        }
        processes = {rank: (local.identity, local.stack_file) for rank, local in self._local.items()}
        self._hangs.look(ranks, self._remote, ages_s, groups, processes, now_s)
