"""Combine all data about one generation of the job's processes. A restart creates a new object.

A live sidecar adds data from rings and from other nodes' summaries. A replay adds saved records.
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
from torchlens_perf.experts.causes import add_token_causes
from torchlens_perf.exporters.rank_times import RecentRankTimes
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.run.rank_ranges import parse_ranges
from torchlens_perf.sidecar.hang_watch import HangDetector
from torchlens_perf.sidecar.nodes import summary
from torchlens_perf.sidecar.stack_sampler import StackSampler
from torchlens_perf.sidecar.trace_sampler import TraceSampler
from torchlens_perf.verdicts.causes.metrics import MetricHistory, encode_signals
from torchlens_perf.verdicts.causes.rules import diagnose
from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.stragglers.merged_windows import MergedWindows, combine_with_windows

if TYPE_CHECKING:
    import numpy.typing as npt

    from torchlens_perf.analysis.collectives.device_progress import RankProgress
    from torchlens_perf.analysis.statistics.step_bins import BinBatch
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import StepTable
    from torchlens_perf.sidecar.nodes.endpoints import Endpoints
    from torchlens_perf.sidecar.nodes.messages import ReceivedPost
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis, Findings, StragglerGroup
    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.words.hang import HangEvidence

# Each node posts every second. A node that has not posted for this time counts as silent.
SILENT_S = 6.0
# Between nodes, a rank sends at most ten rows per second.
_MIN_SENT_ROW_NS = 100_000_000
# A slow rank's metrics are compared with those of at most this many other ranks.
_MAX_COMPARED_RANKS = 256


@dataclasses.dataclass
class LocalRank:
    """A rank of this node."""

    identity: Identity
    place: Placement
    progress: RankProgress | None = None
    unsent: list[BinBatch] = dataclasses.field(default_factory=list)
    """Rows to send to node 0, in pieces that fit into a summary."""
    modules_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    facts: RankFacts = dataclasses.field(default_factory=RankFacts)
    ended: bool = False
    end_sent: bool = False


class JobGeneration:
    """All data and findings about one generation of the job's processes. Not thread-safe."""

    def __init__(
        self,
        generation: int = UNRELATED,
        earlier: Findings = NOTHING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """generation: the generation's number, see restarts.py.

        earlier: findings about the same processes from before a restart of the sidecar.
        clock: a monotonic clock in seconds.
        """
        self.generation = generation
        self.began_s = clock()
        self.detector = StragglerDetector(earlier)
        self.ranks: dict[int, LocalRank] = {}
        """This node's ranks."""
        self.meeting_points: dict[int, Endpoints] = {}
        """Endpoints of the exchange between nodes, by the rank that has reported them."""
        self.is_whole_job = False
        """True if this node has all ranks of the job."""
        self.rank_rows = RecentRankTimes()
        """Rows of the newest steps, from the ranks of all nodes."""
        self.module_times = ModuleTimes()
        """Module times, from the ranks of all nodes."""
        self.traces = TraceSampler(generation)
        self.stacks = StackSampler(self.began_s)
        self.windows = MergedWindows()
        """Step times that devices have merged over all ranks, which rank 0 records."""
        self._metrics = MetricHistory()
        self._hangs = HangDetector(SILENT_S)
        self._groups: dict[str, tuple[int, ...]] = {}
        self._remote: dict[int, tuple[RankProgress, float]] = {}
        """Progress of ranks of other nodes, and when it was read."""
        self.remote_lines: dict[int, str] = {}
        """Lines of code in which ranks of other nodes hang, or "" if they do not."""
        self._judged: Findings | None = None
        self._judged_from, self._windows_seen = NOTHING, 0

    @property
    def hang(self) -> HangEvidence | None:
        """The hang in progress, or None while the job makes steps."""
        return self._hangs.hang

    @property
    def user_lines(self) -> Mapping[int, str]:
        """Lines of the user's code in which ranks of this node hang."""
        return self._hangs.user_lines

    @property
    def places(self) -> Mapping[int, Placement]:
        """Placements of all ranks that are judged here."""
        return self.detector.places

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, or 0 before the first rank of this node is known."""
        return max((local.identity.world_size for local in self.ranks.values()), default=0)

    @property
    def has_all_ranks(self) -> bool:
        """True if this node has all ranks of the job, even if no launcher has reported so."""
        return bool(self.ranks) and len(self.ranks) >= self.world_size

    # -- from this node

    def add_steps(
        self,
        identity: Identity,
        place: Placement,
        steps: StepTable,
        meeting_point: Endpoints | None = None,
    ) -> None:
        """Add finished steps of a rank. meeting_point: endpoints of the exchange between nodes."""
        local = self._get_or_add_local_rank(identity, place)
        if meeting_point is None or identity.on_one_node:
            self.is_whole_job = True
        else:
            self.meeting_points[identity.rank] = meeting_point
        min_row_ns = _MIN_SENT_ROW_NS if self.meeting_points else MIN_ROW_NS
        rows = self.detector.add_steps(identity.rank, place, steps, min_row_ns)
        if rows is not None:
            self.rank_rows.add_batch(rows)
            local.unsent += summary.split_rows(rows) if self.meeting_points else []

    def set_progress(
        self,
        identity: Identity,
        place: Placement,
        progress: RankProgress,
        facts: RankFacts,
        modules_ns: Mapping[str, float] | None = None,
    ) -> None:
        """Set the progress of a rank.

        modules_ns: the mean own forward time per step of the rank's modules.
        """
        local = self._get_or_add_local_rank(identity, place)
        modules_ns = modules_ns or {}
        if local.progress is None or modules_ns != local.modules_ns:
            self.module_times.set_times_of_local_rank(identity.rank, modules_ns)
        local.progress, local.facts, local.modules_ns = progress, facts, modules_ns
        self._groups.update(
            {name: parse_ranges(group["ranks"]) for name, group in facts.groups.items()}
        )

    def add_metrics(self, values: Mapping[int, Mapping[str, float]], now_s: float) -> None:
        """Add the metrics of the last second, by rank. See verdicts/causes/metrics.py."""
        known = {rank: metrics for rank, metrics in values.items() if rank in self.ranks}
        for rank, metrics in known.items():
            self.ranks[rank].metrics = metrics
        if known:
            steps = [
                local.progress.step if local.progress else 0
                for local in map(self.ranks.__getitem__, known)
            ]
            rows = np.stack([encode_signals(metrics) for metrics in known.values()])
            self._metrics.add_signals(np.array(list(known)), np.array(steps), rows, now_s)

    def end_rank(self, identity: Identity) -> None:
        """Mark a rank as ended, after all steps of its process were added."""
        local = self.ranks.get(identity.rank)
        rows = self.detector.end_rank(identity.rank)
        if local is not None and local.identity.key == identity.key:
            local.ended = True
            if rows is not None and self.meeting_points:
                local.unsent += summary.split_rows(rows)

    def _get_or_add_local_rank(self, identity: Identity, place: Placement) -> LocalRank:
        local = self.ranks.get(identity.rank)
        if local is None or local.identity.key != identity.key:
            local = self.ranks[identity.rank] = LocalRank(identity, place)
        local.place = place
        return local

    # -- from other nodes

    def add_remote_summaries(
        self, values: npt.NDArray[np.void], received: Sequence[ReceivedPost], now_s: float
    ) -> None:
        """Add valid summaries of other nodes' ranks. received: the post of each summary."""
        hosts = [each.node.split("/")[0] for each in received]
        locations = ["".join(each.node.split("/")[2:]) for each in received]
        ages_s = [each.age_s for each in received]
        for progress, age_s in zip(
            summary.unpack_progress(values, hosts, ages_s), ages_s, strict=True
        ):
            self._remote[progress.rank] = progress, now_s - age_s
        ranks = values["rank"].tolist()
        for index, rank in enumerate(ranks):
            if rank not in self.detector.ranks_with_rows:
                self.detector.set_placement(
                    rank, summary.unpack_placement(values[index], hosts[index], locations[index])
                )
        for rank, key, times_ns in zip(
            ranks, values["modules"].tolist(), summary.unpack_module_times(values), strict=True
        ):
            self.module_times.set_times_of_remote_rank(rank, key, times_ns)
        self._metrics.add_signals(
            values["rank"].astype(np.int64),
            values["step"].astype(np.int64),
            values["signals"],
            now_s,
        )
        for index in np.flatnonzero(values["ended"]).tolist():
            self.detector.end_rank(ranks[index])
        for population, block in summary.iter_row_batches(values):
            self.detector.add_bin_batch(population, block)
            self.rank_rows.add_batch(block)

    # -- findings

    def judge_ranks(self, *, final: bool = False) -> Findings | None:
        """Return the slow ranks, or None if no rank has finished a step. final: the run has ended."""
        found = self.detector.judge(final=final)
        if not self.places:
            return None
        if (
            self._judged is None
            or found is not self._judged_from
            or self.windows.seen != self._windows_seen
        ):
            self._judged_from, self._windows_seen = found, self.windows.seen
            self._judged = combine_with_windows(found, self.windows, self.places)
        return self._judged

    def add_groups_and_causes(
        self,
        findings: Findings,
        before: Findings = NOTHING,
        details: Callable[[int], Mapping[str, str]] | None = None,
    ) -> Findings:
        """Return the findings with groups of slow ranks, their places and their causes.

        before: the previous findings. details: returns a rank's details, see diagnose(). Without
        `details`, no causes are added.
        """
        why = (
            None
            if details is None
            else lambda group: self.diagnose_straggler(group, details(group.lead.rank))
        )
        return add_straggler_groups(
            findings,
            self.places,
            self.module_times.excess_over_median_ns,
            diagnosed=why,
            before=before,
        )

    def diagnose_straggler(
        self, straggler: StragglerGroup, details: Mapping[str, str]
    ) -> Diagnosis:
        """Return why a rank is slow. details: see rules.diagnose(), {} for remote ranks."""
        episode, places = straggler.lead, self.places
        # Compare with ranks that do the same work. In a large job, choose them at random: a regular
        # pattern could select ranks with the same place on their nodes.
        same = places[episode.rank].population if episode.rank in places else ""
        alike = [
            rank
            for rank in self._metrics.ranks
            if rank in places and places[rank].population == same
        ]
        if len(alike) > _MAX_COMPARED_RANKS:
            alike = random.Random(episode.rank).sample(alike, _MAX_COMPARED_RANKS)
        during = self._metrics.mean_signals([episode.rank, *alike], episode.since_step)
        before = (
            None
            if episode.from_start
            else self._metrics.usual_signals_before(episode.rank, episode.since_step)
        )
        return add_token_causes(
            diagnose(episode, during, before, straggler.ranks, details),
            episode,
            during,
            before,
            straggler.ranks,
        )

    def look_for_hang(self, now_s: float) -> None:
        """Search for a hang of the job at this moment. now_s: a monotonic clock."""
        ranks = {
            rank: local.progress for rank, local in self.ranks.items() if local.progress is not None
        }
        ages_s = {rank: now_s - read_s for rank, (_, read_s) in self._remote.items()}
        all_ranks = tuple(range(self.world_size))
        groups = {
            name: all_ranks if len(members) == len(all_ranks) else members
            for name, members in self._groups.items()
        }
        processes = {rank: (local.identity, local.facts) for rank, local in self.ranks.items()}
        remote = {rank: progress for rank, (progress, _) in self._remote.items()}
        self._hangs.update_hang(ranks, remote, ages_s, groups, processes, now_s, self.remote_lines)
