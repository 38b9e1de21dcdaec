"""The job as this node's sidecar sees it: judges its ranks, exchanges windows with other nodes, looks for hangs.

In a job of several nodes every sidecar sends its ranks' windows to that of node 0, which judges all ranks together.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.causes.metrics import MetricHistory, vector
from torchlens_perf.analysis.causes.rules import Diagnosis, diagnose
from torchlens_perf.analysis.collectives.hang import ENDED, MIN_S, Hang, Progress, find_hang
from torchlens_perf.analysis.statistics.modules import ModuleTimes
from torchlens_perf.analysis.statistics.step_bins import MIN_ROW_NS, StepBins
from torchlens_perf.analysis.stragglers.detector import Findings, JobDetector
from torchlens_perf.analysis.stragglers.placement import Placement
from torchlens_perf.analysis.words.hang import OpenHang, RankStack, described
from torchlens_perf.run.location import location
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.sidecar.host.stacks import asked_stack, python_stack
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.nodes.exchange import Exchange
from torchlens_perf.sidecar.nodes.rendezvous import exchange_key
from torchlens_perf.sidecar.nodes.summary import Summary

if TYPE_CHECKING:
    from torchlens_perf.analysis.causes.straggler_groups import StragglerGroup
    from torchlens_perf.run.identity import Identity, ProcessGroup
    from torchlens_perf.run.records import StepTable

logger = logging.getLogger("torchlens_perf.sidecar")

ROUND_S = 1.0  # between two posts of a rank that makes no steps, and between two checks for hangs
_ALONE_S = 2.0  # between two calls of update() where no other node gets windows
SILENT_S = 6.0  # nodes post every ROUND_S; one whose posts are missing for so long is silent
MAX_STACKS = 3
_MAX_COMPARED = 256  # ranks whose signals a slow rank's are held against
_MIN_ROW_NS = 100_000_000  # between nodes: at most ten rows a second and rank


@dataclasses.dataclass
class _Local:
    """A rank of this node."""

    identity: Identity
    place: Placement
    world_size: int
    progress: Progress | None = None
    unsent: list[StepBins] = dataclasses.field(default_factory=list)
    modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    signals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stack_file: str = ""
    ended: bool = False
    end_sent: bool = False


class JobView:
    """Belongs to the sidecar's thread."""

    def __init__(self, host: str, open_exchange: Callable[..., Exchange] = Exchange) -> None:
        self._host = host
        self._open_exchange = open_exchange
        self._exchange: Exchange | None = None
        self._last_notes: list[str] = []  # of exchanges that are closed
        self._round_s = float("-inf")
        self.begin(-1)

    @property
    def judges_alone(self) -> bool:
        """Whether this node judges; else node 0 does."""
        return not self._sends

    @property
    def update_every_s(self) -> float:
        """How often to call update(). Where nodes exchange windows, it is as often as they expect a post."""
        return _ALONE_S if self._exchange is None else ROUND_S

    @property
    def attempt(self) -> int:
        return self._judge.attempt

    @property
    def places(self) -> Mapping[int, Placement]:
        """Of all ranks that are judged here."""
        return self._judge.places

    # -- from the sidecar's sources

    def begin(self, attempt: int) -> None:
        """Other processes begin: those of another attempt, or of the same one with other nodes (restarts.py)."""
        self.close()
        self._exchange_attempt = attempt
        self.hang: OpenHang | None = None
        """The hang in progress; None while the job moves."""
        self.hang_key: object = None
        self._judge = JobDetector()
        self._local: dict[int, _Local] = {}
        self._remote: dict[int, Progress] = {}
        self._remote_reported_s: dict[int, float] = {}
        self.module_times = ModuleTimes()
        """Of the ranks of all nodes."""
        self._signals = MetricHistory()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._missing: dict[str, str] = {}
        self._unreadable: set[str] = set()  # nodes whose summaries are of another version of this package
        self._others: list[str] = []

    def add_steps(
        self, identity: Identity, place: Placement, steps: StepTable, job_store: tuple[str, int] | None
    ) -> None:
        """Finished steps of a rank of this node. job_store: the job's TCPStore, for a job of several nodes."""
        local = self._local_of(identity, place)
        if local is None:
            return
        self._join(identity, job_store)
        min_row_ns = _MIN_ROW_NS if self._exchange is not None else MIN_ROW_NS
        rows = self._judge.add_steps(identity.attempt, identity.rank, place, steps, min_row_ns)
        if rows is not None and self._sends:
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
        if local is not None:
            local.progress, local.stack_file, local.modules_ns = now, stack_file, modules_ns or {}
            self.module_times.set_local(identity.rank, local.modules_ns)
            self._groups.update({name: parse_ranges(group["ranks"]) for name, group in groups.items()})

    def add_signals(self, values: Mapping[int, Mapping[str, float]], now_s: float) -> None:
        """What was measured of ranks of this node in the last second, see analysis/causes/metrics.py."""
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
        rows = self._judge.end(identity.attempt, identity.rank)
        if local is not None and local.identity.key == identity.key:
            local.ended = True
            if rows is not None and self._sends:
                local.unsent.append(rows)

    # -- once in every round of the sidecar

    def update(self, now_s: float, *, final: bool = False) -> Findings:
        """Sends, receives and judges. now_s: a monotonic clock. final: the run has ended."""
        if self._exchange is not None and self._merges:
            self._receive(now_s)
        due = now_s - self._round_s >= ROUND_S
        full = any(sum(map(len, each.unsent)) >= summary.ROWS for each in self._local.values())
        if self._sends and (due or final or full):
            self._post()
        if due:
            self._round_s = now_s
            self._look_for_hang(now_s)
        return self._judge.judge(final=final)

    def notes(self) -> list[str]:
        """What is to be said of the exchange between nodes."""
        notes = [*self._last_notes, *self._missing.values()]
        notes += [f"node {node} runs another version of torchlens_perf: not compared" for node in self._unreadable]
        return notes + (self._exchange.notes() if self._exchange is not None else [])

    def others_are_there(self) -> bool:
        """Whether this is node 0, and others that have not ended still post to it: their last windows are to come."""
        return self._exchange is not None and self._merges and bool(self._others)

    def close(self) -> None:
        """Sends what is left and ends the exchange."""
        if self._exchange is not None:
            if self._sends:
                self._post()
            # Taken before it is closed: that the other end has left already is worth no note.
            self._last_notes += [note for note in self._exchange.notes() if note not in self._last_notes]
            self._exchange.close()
            self._exchange = None

    # -- parts

    @property
    def _merges(self) -> bool:
        return 0 in self._local

    @property
    def _sends(self) -> bool:
        return self._exchange is not None and not self._merges

    def _local_of(self, identity: Identity, place: Placement) -> _Local | None:
        if identity.attempt < self._exchange_attempt:
            return None
        if identity.attempt > self._exchange_attempt:
            self.begin(identity.attempt)
        local = self._local.get(identity.rank)
        if local is None or local.identity.key != identity.key:
            local = self._local[identity.rank] = _Local(identity, place, identity.world_size)
        local.place = place
        return local

    def _join(self, identity: Identity, job_store: tuple[str, int] | None) -> None:
        if self._exchange is not None or job_store is None or identity.world_size <= identity.local_world_size:
            return
        # Launchers number a node's ranks one after the other.
        first = identity.rank - identity.local_rank
        merges = first == 0
        key = exchange_key(identity.run_id, identity.attempt)
        # The node's name includes its location, so that those who receive the name know the location too.
        where = location(identity.attributes).replace("/", "-")
        logger.info(
            "%s windows between nodes; the job's store is %s:%d", "merging" if merges else "sending", *job_store
        )
        node = f"{self._host}/{first}/{where}" if where else f"{self._host}/{first}"
        self._exchange = self._open_exchange(job_store, key, node, merges)

    def _post(self) -> None:
        assert self._exchange is not None
        while True:
            payloads, more = {}, False
            for rank, local in self._local.items():
                if local.progress is None or (local.end_sent and not local.unsent):
                    continue
                rows = _take(local.unsent)
                more |= bool(local.unsent)
                local.end_sent = local.ended and not local.unsent
                payloads[rank] = summary.pack(
                    Summary(
                        attempt=local.identity.attempt,
                        world_size=local.world_size,
                        place=self._judge.places.get(rank, local.place),
                        progress=local.progress,
                        pid=local.identity.pid,
                        rows=rows,
                        modules_ns=local.modules_ns,
                        ended=local.end_sent,
                        signals=local.signals,
                    )
                )  # fmt: skip
            if payloads:
                self._exchange.post(payloads)
            if not more:
                return

    def _receive(self, now_s: float) -> None:
        assert self._exchange is not None
        collected = self._exchange.collect()
        received = [each for of_rank in collected.payloads.values() for each in of_rank]
        readable = [each for each in received if summary.is_readable(each.payload)]
        self._unreadable |= {each.node for each in received}
        self._unreadable -= {each.node for each in readable}
        if readable:
            values = summary.unpack([each.payload for each in readable])
            hosts = [each.node.split("/")[0] for each in readable]
            locations = ["".join(each.node.split("/")[2:]) for each in readable]
            ages_s = [each.age_s for each in readable]
            for progress, age_s in zip(summary.progress(values, hosts, ages_s), ages_s, strict=True):
                self._remote[progress.rank] = progress
                self._remote_reported_s[progress.rank] = now_s - age_s
            ranks = values["rank"].tolist()
            for index, rank in enumerate(ranks):
                if not self._judge.has_rows(rank):
                    place = summary.place(values[index], hosts[index], locations[index])
                    self._judge.set_place(self._exchange_attempt, rank, place)
            for rank, key, times_ns in zip(ranks, values["modules"].tolist(), summary.modules_ns(values), strict=True):
                self.module_times.set_remote(rank, key, times_ns)
            self._signals.add(
                values["rank"].astype(np.int64), values["step"].astype(np.int64), values["signals"], now_s
            )
            for index in np.flatnonzero(values["ended"]).tolist():
                self._judge.end(self._exchange_attempt, ranks[index])
            for population, block in summary.blocks(values):
                self._judge.add_block(population, block)
        own = f"{self._host}/"
        self._others = [
            node
            for node, contact in collected.nodes.items()
            if not contact.left and contact.silent_s < SILENT_S and not node.startswith(own)
        ]
        self._missing = {
            node: f"node {node} has not been heard of for {contact.silent_s:.0f} s: its ranks are not compared"
            for node, contact in collected.nodes.items()
            if contact.silent_s > SILENT_S and not contact.left
        }

    def _look_for_hang(self, now_s: float) -> None:
        ranks = {rank: local.progress for rank, local in self._local.items() if local.progress is not None}
        if not ranks and not self._remote:
            return
        ages_s = {rank: now_s - reported_s for rank, reported_s in self._remote_reported_s.items()}
        # With many ranks it saves time to examine none closely while all make steps.
        longest_s = max(
            (remote.since_step_s + ages_s[rank] - remote.report_age_s for rank, remote in self._remote.items()),
            default=0.0,
        )
        if max([longest_s, *(each.since_step_s for each in ranks.values())]) <= MIN_S:
            self.hang, self.hang_key = None, None
            return
        for rank, remote in self._remote.items():
            since_step_s = remote.since_step_s
            # A silent node may still make steps: that no step is reported does not show that none is made.
            if ages_s[rank] <= SILENT_S or remote.state in ENDED:
                since_step_s += ages_s[rank] - remote.report_age_s
            ranks[rank] = dataclasses.replace(remote, report_age_s=ages_s[rank], since_step_s=since_step_s)
        world_size = max(local.world_size for local in self._local.values())
        groups = dict(self._groups)
        for name, members in groups.items():
            if len(members) == world_size:
                groups[name] = tuple(range(world_size))
        hang = find_hang(ranks, groups, silent_s=SILENT_S)
        if hang is None or not hang.alarm:
            self.hang, self.hang_key = None, None
        elif self.hang is None or hang.key != self.hang_key:
            self.hang_key = hang.key
            self.hang = described(hang, self._stacks(hang))
            logger.warning("%s", self.hang.text)
        else:
            self.hang = described(hang, self.hang.stacks)  # it lasts longer, and its description changes

    def _stacks(self, hang: Hang) -> dict[int, RankStack]:
        stacks: dict[int, RankStack] = {}
        for rank in hang.look_at:
            local = self._local.get(rank)
            if local is not None and len(stacks) < MAX_STACKS:
                stack = python_stack(local.identity.pid)
                if not stack.lines and local.stack_file:
                    identity = local.identity
                    stack = asked_stack(identity.pid, Path(local.stack_file), identity.process_started)
                stacks[rank] = RankStack(tuple(stack.lines), stack.reason)
        return stacks


def _take(unsent: list[StepBins]) -> StepBins | None:
    """The next rows, as many as fit into a summary."""
    if not unsent:
        return None
    first, *later = list(summary.windows(unsent.pop(0)))
    unsent[:0] = later
    return first


def usual_step_s(durations_ns: Sequence[float]) -> float:
    """The median of the last steps; 0 until there are ten."""
    return float(np.median(durations_ns)) / 1e9 if len(durations_ns) >= 10 else 0.0
