"""The job as this node's sidecar sees it: judges its ranks, exchanges windows with other nodes, looks for hangs.

In a job of several nodes every sidecar sends its ranks' windows to that of node 0, which judges all ranks together.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens_perf import summary
from torchlens_perf.diagnosis import Diagnosis, diagnose
from torchlens_perf.exchange import Exchange
from torchlens_perf.exchange_meeting import exchange_key
from torchlens_perf.hang import ENDED, LEAST_S, Hang, Progress, find_hang
from torchlens_perf.module_times import ModuleTimes
from torchlens_perf.node_judge import NodeJudge
from torchlens_perf.rank_ranges import parse_ranges
from torchlens_perf.report import hang_words
from torchlens_perf.signals import SignalBoard, vector
from torchlens_perf.site import site
from torchlens_perf.stacks import asked_stack, python_stack
from torchlens_perf.step_rows import LEAST_ROW_NS, Rows
from torchlens_perf.straggler import Findings, Place
from torchlens_perf.summary import Summary

if TYPE_CHECKING:
    from torchlens_perf.culprits import Culprit
    from torchlens_perf.identity import Identity
    from torchlens_perf.records import StepTable

logger = logging.getLogger("torchlens_perf.sidecar")

ROUND_S = 1.0  # between two posts of a rank that makes no steps, and two looks for hangs
SILENT_S = 6.0  # a node that posts every ROUND_S and is not heard of for so long is silent
MOST_STACKS = 3
_MOST_COMPARED = 256  # ranks whose signals a slow rank's are held against
_LEAST_ROW_NS = 100_000_000  # between nodes: at most ten rows a second and rank


@dataclasses.dataclass
class _Local:
    """A rank of this node."""

    identity: Identity
    place: Place
    world_size: int
    progress: Progress | None = None
    unsent: list[Rows] = dataclasses.field(default_factory=list)
    modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    signals: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stack_file: str = ""
    ended: bool = False
    told_end: bool = False


class JobView:
    """Belongs to the sidecar's thread."""

    def __init__(self, host: str, open_exchange: Callable[..., Exchange] = Exchange) -> None:
        self.hang: dict[str, Any] | None = None
        """The hang in progress: its sentence, its ranks, and the stacks that were taken; None while the job moves."""
        self.hang_key: object = None
        self._host = host
        self._judge = NodeJudge()
        self._local: dict[int, _Local] = {}
        self._remote: dict[int, Progress] = {}
        self._remote_heard_s: dict[int, float] = {}
        self._module_times = ModuleTimes()
        self._signals = SignalBoard()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._open_exchange = open_exchange
        self._exchange: Exchange | None = None
        self._exchange_attempt = -1
        self._round_s = float("-inf")
        self._missing: dict[str, str] = {}
        self._unreadable: set[str] = set()  # nodes whose summaries are of another version of this package
        self._last_notes: list[str] = []  # of exchanges that are closed
        self._others: list[str] = []

    @property
    def judges_alone(self) -> bool:
        """Whether this node judges; else node 0 does."""
        return not self._sends

    @property
    def attempt(self) -> int:
        """The attempt that is judged."""
        return self._judge.attempt

    @property
    def places(self) -> Mapping[int, Place]:
        """Of all ranks that are judged here."""
        return self._judge.places

    # -- from the sidecar's sources

    def begin(self, attempt: int) -> None:
        """Other processes begin: those of another attempt, or of the same one with other nodes (generations.py)."""
        self.close()
        self._exchange_attempt = attempt
        self.hang, self.hang_key = None, None
        self._judge = NodeJudge()
        known = self._local, self._remote, self._remote_heard_s, self._groups, self._missing, self._others
        for each in (*known, self._unreadable):
            each.clear()
        self._module_times, self._signals = ModuleTimes(), SignalBoard()

    def add_steps(self, identity: Identity, place: Place, steps: StepTable, job_store: tuple[str, int] | None) -> None:
        """Finished steps of a rank of this node. job_store: the job's TCPStore, for a job of several nodes."""
        local = self._local_of(identity, place)
        if local is None:
            return
        self._join(identity, job_store)
        least_row_ns = _LEAST_ROW_NS if self._exchange is not None else LEAST_ROW_NS
        rows = self._judge.add_steps(identity.attempt, identity.rank, place, steps, least_row_ns)
        if rows is not None and self._sends:
            local.unsent.append(rows)

    def progress(
        self,
        identity: Identity,
        place: Place,
        now: Progress,
        groups: Mapping[str, Mapping[str, Any]],
        stack_file: str = "",
        modules_ns: Mapping[str, float] | None = None,
    ) -> None:
        """How far a rank of this node is. stack_file: where it writes its stack when it is asked to.

        modules_ns: its modules' mean own forward time a step.
        """
        local = self._local_of(identity, place)
        if local is not None:
            local.progress, local.stack_file, local.modules_ns = now, stack_file, modules_ns or {}
            self._module_times.know(identity.rank, local.modules_ns)
            self._groups.update({name: parse_ranges(group["ranks"]) for name, group in groups.items()})

    def add_signals(self, values: Mapping[int, Mapping[str, float]], now_s: float) -> None:
        """What was measured of ranks of this node in the last second, see signals.py."""
        there = {rank: signals for rank, signals in values.items() if rank in self._local}
        steps = [local.progress.step if local.progress else 0 for local in map(self._local.__getitem__, there)]
        for rank, signals in there.items():
            self._local[rank].signals = signals
        if there:
            rows = np.stack([vector(signals) for signals in there.values()])
            self._signals.add(np.array(list(there)), np.array(steps), rows, now_s)

    def diagnose(self, culprit: Culprit, details: Mapping[str, str]) -> Diagnosis:
        """Why a slow rank is slow. details: see diagnosis.diagnose(); of a rank of another node there are none."""
        episode, places = culprit.lead, self._judge.places
        # Of those that do the same work; any of them, as ranks in steps of eight have the same place on their nodes.
        same = places[episode.rank].population if episode.rank in places else ""
        alike = [rank for rank in self._signals.ranks if rank in places and places[rank].population == same]
        if len(alike) > _MOST_COMPARED:
            alike = random.Random(episode.rank).sample(alike, _MOST_COMPARED)
        sample = [episode.rank, *alike]
        during = self._signals.means(sample, episode.since_step)
        before = None if episode.from_start else self._signals.usual_before(episode.rank, episode.since_step)
        return diagnose(episode, during, before, culprit.ranks, details)

    def end(self, identity: Identity) -> None:
        """A process of this node has ended, and all of it is counted."""
        local = self._local.get(identity.rank)
        rows = self._judge.end(identity.attempt, identity.rank)
        if local is not None and local.identity.key == identity.key:
            local.ended = True
            if rows is not None and self._sends:
                local.unsent.append(rows)

    # -- once in every round of the sidecar

    def look(self, now_s: float, *, final: bool = False) -> Findings:
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

    def module_excess_ns(self, rank: int) -> dict[str, float]:
        """By module, how much longer it takes on a rank of any node than on the others; empty if not known."""
        return self._module_times.excess_ns(rank)

    def notes(self) -> list[str]:
        """What is to be said of the exchange between nodes."""
        notes = [*self._last_notes, *self._missing.values()]
        notes += [f"node {node} runs another version of torchlens_perf: not compared" for node in self._unreadable]
        return notes + (self._exchange.notes() if self._exchange is not None else [])

    def others_are_there(self) -> bool:
        """Whether node 0 hears of nodes that have not ended: their last windows are still to come."""
        return self._exchange is not None and self._merges and bool(self._others)

    def close(self) -> None:
        """Sends what is left and ends the exchange."""
        if self._exchange is not None:
            if self._sends:
                self._post()
            # Before it is closed: that the other end has left already is nothing to tell.
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

    def _local_of(self, identity: Identity, place: Place) -> _Local | None:
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
        # Who hears of the node by this name knows where it is, too.
        where = f"/{known}" if (known := site(identity.attributes).replace("/", "-")) else ""
        logger.info(
            "%s windows between nodes; the job's store is %s:%d", "merging" if merges else "sending", *job_store
        )
        self._exchange = self._open_exchange(job_store, key, f"{self._host}/{first}{where}", merges)

    def _post(self) -> None:
        assert self._exchange is not None
        while True:
            payloads, more = {}, False
            for rank, local in self._local.items():
                if local.progress is None or (local.told_end and not local.unsent):
                    continue
                rows = _take(local.unsent)
                more |= bool(local.unsent)
                local.told_end = local.ended and not local.unsent
                payloads[rank] = summary.pack(
                    Summary(
                        attempt=local.identity.attempt,
                        world_size=local.world_size,
                        place=self._judge.places.get(rank, local.place),
                        progress=local.progress,
                        pid=local.identity.pid,
                        rows=rows,
                        modules_ns=local.modules_ns,
                        ended=local.told_end,
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
        received = [(each, node) for parts in collected.payloads.values() for each in parts for node in (each.node,)]
        readable = [(each, node) for each, node in received if summary.is_readable(each.payload)]
        self._unreadable |= {node for _, node in received}
        self._unreadable -= {node for _, node in readable}
        received = readable
        if received:
            values = summary.unpack([each.payload for each, _ in received])
            hosts = [node.split("/")[0] for _, node in received]
            sites = ["".join(node.split("/")[2:]) for _, node in received]
            ages_s = [each.age_s for each, _ in received]
            for progress, age_s in zip(summary.progress(values, hosts, ages_s), ages_s, strict=True):
                self._remote[progress.rank] = progress
                self._remote_heard_s[progress.rank] = now_s - age_s
            ranks = values["rank"].tolist()
            for index, rank in enumerate(ranks):
                if not self._judge.has_rows(rank):
                    place = summary.place(values[index], hosts[index], sites[index])
                    self._judge.know(self._exchange_attempt, rank, place)
            for rank, key, times_ns in zip(ranks, values["modules"].tolist(), summary.modules_ns(values), strict=True):
                self._module_times.hear(rank, key, times_ns)
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
        ages_s = {rank: now_s - heard_s for rank, heard_s in self._remote_heard_s.items()}
        # Of many ranks, none is looked at closer while all make steps.
        longest_s = max(
            (told.since_step_s + ages_s[rank] - told.told_s for rank, told in self._remote.items()), default=0.0
        )
        if max([longest_s, *(each.since_step_s for each in ranks.values())]) <= LEAST_S:
            self.hang, self.hang_key = None, None
            return
        for rank, told in self._remote.items():
            since_step_s = told.since_step_s
            # What a silent node does is not known: that no step is told of is not that none is made.
            if ages_s[rank] <= SILENT_S or told.state in ENDED:
                since_step_s += ages_s[rank] - told.told_s
            ranks[rank] = dataclasses.replace(told, told_s=ages_s[rank], since_step_s=since_step_s)
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
            self.hang = self._described(hang, self._stacks(hang))
            logger.warning("%s", self.hang["text"])
        else:
            self.hang = self._described(hang, self.hang["stacks"])  # it grows older, and what is told with it

    def _stacks(self, hang: Hang) -> dict[str, Any]:
        stacks: dict[str, Any] = {}
        for rank in hang.look_at:
            local = self._local.get(rank)
            if local is not None and len(stacks) < MOST_STACKS:
                stack = python_stack(local.identity.pid)
                if not stack.lines and local.stack_file:
                    identity = local.identity
                    stack = asked_stack(identity.pid, Path(local.stack_file), identity.process_started)
                stacks[str(rank)] = {"lines": list(stack.lines), "reason": stack.reason}
        return stacks

    def _described(self, hang: Hang, stacks: dict[str, Any]) -> dict[str, Any]:
        return {
            "text": hang_words.text(hang),
            "kind": hang.kind,
            "since_s": hang.since_s,
            "step": hang.step,
            "ranks": [culprit.progress.rank for culprit in hang.culprits],
            "waiting": list(hang.waiting),
            "stacks": stacks,
        }


def _take(unsent: list[Rows]) -> Rows | None:
    """The next rows, as many as fit into a summary."""
    if not unsent:
        return None
    first, *later = list(summary.windows(unsent.pop(0)))
    unsent[:0] = later
    return first


def usual_step_s(durations_ns: Sequence[float]) -> float:
    """The median of the last steps; 0 until there are ten."""
    return float(np.median(durations_ns)) / 1e9 if len(durations_ns) >= 10 else 0.0
