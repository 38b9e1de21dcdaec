"""All that is known of one generation of processes of the job. A restart replaces the object as a whole.

The sidecar feeds it from rings and from other nodes' summaries, a replay from the records that are kept.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.analysis.statistics.modules import ModuleTimes
from torchlens_perf.analysis.statistics.restarts import UNRELATED
from torchlens_perf.analysis.statistics.step_bins import MIN_ROW_NS
from torchlens_perf.exporters.choice.rank_rows import RankRows
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.sidecar.hang_watch import HangWatch
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.trace_sampler import TraceSampler
from torchlens_perf.verdicts.causes.metrics import MetricHistory, vector
from torchlens_perf.verdicts.causes.rules import diagnose
from torchlens_perf.verdicts.causes.straggler_groups import with_groups
from torchlens_perf.verdicts.stragglers.detector import JobDetector
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.stragglers.merged_windows import MergedWindows, held_against
from torchlens_perf.verdicts.stragglers.window import BinBatch

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.collectives.hang import Progress
    from torchlens_perf.analysis.statistics.step_bins import StepBins
    from torchlens_perf.run.identity import Identity, ProcessGroup
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.nodes.endpoints import Endpoints
    from torchlens_perf.sidecar.nodes.messages import Received
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis, Findings, StragglerGroup
    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.words.hang import OpenHang

SILENT_S = 6.0  # nodes post every second; one whose posts are missing for so long is silent
_MIN_SENT_ROW_NS = 100_000_000  # between nodes: at most ten rows a second and rank
_MAX_COMPARED = 256  # ranks whose metrics a slow rank's are held against


@dataclasses.dataclass
class LocalRank:
    """A rank of this node."""

    identity: Identity
    place: Placement
    progress: Progress | None = None
    unsent: list[StepBins] = dataclasses.field(default_factory=list)
    modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stack_file: str = ""
    ended: bool = False
    end_sent: bool = False


@dataclasses.dataclass
class _RemoteRank:
    """A rank of another node."""

    progress: Progress
    reported_s: float


class Epoch:
    """Belongs to one thread: the sidecar's, or a replay's."""

    def __init__(self, generation: int = UNRELATED, earlier: Findings = NOTHING) -> None:
        """generation: see restarts.py. earlier: what an earlier sidecar has found about the same processes."""
        self.generation = generation
        self.began_s = time.monotonic()
        self.detector = JobDetector(earlier)
        self.ranks: dict[int, LocalRank] = {}
        """This node's ranks."""
        self.meeting_points: dict[int, Endpoints] = {}
        """Where the nodes of a job of several can meet, by the rank that reported it."""
        self.is_whole_job = False
        """Whether this node's ranks are all ranks of the job."""
        self.rank_rows = RankRows()
        """What the ranks of all nodes did in the newest steps."""
        self.module_times = ModuleTimes()
        """Of the ranks of all nodes."""
        self.traces = TraceSampler(generation, self.rank_rows, self.detector.places)
        self._windows = MergedWindows()
        self._metrics = MetricHistory()
        self._hangs = HangWatch(SILENT_S)
        self._groups: dict[str, tuple[int, ...]] = {}
        self._remote: dict[int, _RemoteRank] = {}
        self._judged: Findings | None = None
        self._judged_from, self._windows_seen = NOTHING, 0

    @property
    def hang(self) -> OpenHang | None:
        """The hang in progress; None while the job makes steps."""
        return self._hangs.hang

    @property
    def places(self) -> Mapping[int, Placement]:
        """Of all ranks that are judged here."""
        return self.detector.places

    @property
    def world_size(self) -> int:
        """How many ranks the job has; 0 before the first of this node's is known."""
        return max((local.identity.world_size for local in self.ranks.values()), default=0)

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks of the job are here, though no launcher may have said it."""
        return bool(self.ranks) and len(self.ranks) >= self.world_size

    # -- from this node

    def add_steps(
        self, identity: Identity, place: Placement, steps: StepTable, meeting_point: Endpoints | None = None
    ) -> None:
        """Add finished steps of a rank. meeting_point: where the nodes meet, of a job of several."""
        local = self._local(identity, place)
        if meeting_point is None or identity.on_one_node:
            self.is_whole_job = True
        else:
            self.meeting_points[identity.rank] = meeting_point
        min_row_ns = _MIN_SENT_ROW_NS if self.meeting_points else MIN_ROW_NS
        rows = self.detector.add_steps(identity.rank, place, steps, min_row_ns)
        if rows is not None:
            self.rank_rows.add(BinBatch.of(identity.rank, rows))
            local.unsent += [rows] if self.meeting_points else []

    def add_windows(self, records: npt.NDArray[np.void], world_size: int) -> None:
        """Add what the devices merged over all ranks. records: any of rank 0."""
        self._windows.add(records, world_size)

    def set_progress(
        self,
        identity: Identity,
        place: Placement,
        progress: Progress,
        groups: Mapping[str, ProcessGroup],
        stack_file: str = "",
        modules_ns: Mapping[str, float] | None = None,
    ) -> None:
        """Set how far a rank is. stack_file: where it writes its stack when it is asked to.

        modules_ns: its modules' mean own forward time a step.
        """
        local = self._local(identity, place)
        local.progress, local.stack_file, local.modules_ns = progress, stack_file, modules_ns or {}
        self.module_times.set_local(identity.rank, local.modules_ns)
        self._groups.update({name: parse_ranges(group["ranks"]) for name, group in groups.items()})

    def add_metrics(self, values: Mapping[int, Mapping[str, float]], now_s: float) -> None:
        """Add what was measured in the last second, by rank; see verdicts/causes/metrics.py."""
        there = {rank: metrics for rank, metrics in values.items() if rank in self.ranks}
        for rank, metrics in there.items():
            self.ranks[rank].metrics = metrics
        if there:
            steps = [local.progress.step if local.progress else 0 for local in map(self.ranks.__getitem__, there)]
            rows = np.stack([vector(metrics) for metrics in there.values()])
            self._metrics.add(np.array(list(there)), np.array(steps), rows, now_s)

    def end(self, identity: Identity) -> None:
        """End a rank: its process has ended, and all of its steps were added."""
        local = self.ranks.get(identity.rank)
        rows = self.detector.end(identity.rank)
        if local is not None and local.identity.key == identity.key:
            local.ended = True
            local.unsent += [rows] if rows is not None and self.meeting_points else []

    def _local(self, identity: Identity, place: Placement) -> LocalRank:
        local = self.ranks.get(identity.rank)
        if local is None or local.identity.key != identity.key:
            local = self.ranks[identity.rank] = LocalRank(identity, place)
        local.place = place
        return local

    # -- from other nodes

    def add_remote(self, values: npt.NDArray[np.void], received: Sequence[Received], now_s: float) -> None:
        """Add summaries of other nodes' ranks, which are sound and of this generation. received: the post of each."""
        hosts = [each.node.split("/")[0] for each in received]
        locations = ["".join(each.node.split("/")[2:]) for each in received]
        ages_s = [each.age_s for each in received]
        for progress, age_s in zip(summary.progress(values, hosts, ages_s), ages_s, strict=True):
            self._remote[progress.rank] = _RemoteRank(progress, now_s - age_s)
        ranks = values["rank"].tolist()
        for index, rank in enumerate(ranks):
            if not self.detector.has_rows(rank):
                self.detector.set_place(rank, summary.place(values[index], hosts[index], locations[index]))
        for rank, key, times_ns in zip(ranks, values["modules"].tolist(), summary.modules_ns(values), strict=True):
            self.module_times.set_remote(rank, key, times_ns)
        self._metrics.add(values["rank"].astype(np.int64), values["step"].astype(np.int64), values["signals"], now_s)
        for index in np.flatnonzero(values["ended"]).tolist():
            self.detector.end(ranks[index])
        for population, block in summary.blocks(values):
            self.detector.add_block(population, block)
            self.rank_rows.add(block)

    # -- what follows from it

    def judge(self, *, final: bool = False) -> Findings | None:
        """Return the slow ranks, as held against the devices' windows; None before the first step.

        final: the run has ended.
        """
        found = self.detector.judge(final=final)
        if not self.places:
            return None
        if self._judged is None or found is not self._judged_from or self._windows.seen != self._windows_seen:
            self._judged_from, self._windows_seen = found, self._windows.seen
            self._judged = held_against(found, self._windows, self.places)
        return self._judged

    def with_groups(
        self,
        findings: Findings,
        before: Findings = NOTHING,
        details: Callable[[int], Mapping[str, str]] | None = None,
    ) -> Findings:
        """Return the findings with which ranks are slow together, where, and why. before: the findings until now.

        details: of a rank, see diagnose(); None: no diagnosis is made.
        """
        why = None if details is None else lambda group: self.diagnose(group, details(group.lead.rank))
        return with_groups(findings, self.places, self.module_times.excess_ns, diagnosed=why, before=before)

    def diagnose(self, straggler: StragglerGroup, details: Mapping[str, str]) -> Diagnosis:
        """Return why a rank is slow. details: see rules.diagnose(); of a rank of another node there are none."""
        episode, places = straggler.lead, self.places
        # Of those that do the same work; any of them, as ranks in steps of eight have the same place on their nodes.
        same = places[episode.rank].population if episode.rank in places else ""
        alike = [rank for rank in self._metrics.ranks if rank in places and places[rank].population == same]
        if len(alike) > _MAX_COMPARED:
            alike = random.Random(episode.rank).sample(alike, _MAX_COMPARED)
        during = self._metrics.means([episode.rank, *alike], episode.since_step)
        before = None if episode.from_start else self._metrics.usual_before(episode.rank, episode.since_step)
        return diagnose(episode, during, before, straggler.ranks, details)

    def look_for_hang(self, now_s: float) -> None:
        """Look whether the job hangs at this moment. now_s: a monotonic clock."""
        ranks = {rank: local.progress for rank, local in self.ranks.items() if local.progress is not None}
        ages_s = {rank: now_s - remote.reported_s for rank, remote in self._remote.items()}
        everybody = tuple(range(self.world_size))
        groups = {
            name: everybody if len(members) == len(everybody) else members for name, members in self._groups.items()
        }
        processes = {rank: (local.identity, local.stack_file) for rank, local in self.ranks.items()}
        remote = {rank: each.progress for rank, each in self._remote.items()}
        self._hangs.look(ranks, remote, ages_s, groups, processes, now_s)
