"""Turn findings into alerts for exporters, including alerts on an imbalance and on slow links."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.slow_link import (
    build_link_statistics,
    find_slow_links,
    merge_links,
)
from torchlens_perf.diagnosis.facts.slow_rank_context import build_slow_rank_context
from torchlens_perf.exporters import Assessment
from torchlens_perf.output import sidecar_logger as logger
from torchlens_perf.sidecar.nodes import link_report
from torchlens_perf.verdicts.slow_links import build_slow_link_verdict
from torchlens_perf.verdicts.stragglers.findings import StragglerGroup
from torchlens_perf.verdicts.words.stragglers import build_imbalance_verdicts

if TYPE_CHECKING:
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.verdicts import Alert
    from torchlens_perf.sidecar.cluster import ClusterLink
    from torchlens_perf.sidecar.job_generation import JobGeneration
    from torchlens_perf.verdicts.finding_log import FindingLog
    from torchlens_perf.verdicts.node_state import NodeState
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis, Findings
    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.verdict import Verdict
    from torchlens_perf.verdicts.words.hang import HangEvidence


_TOO_MANY_GROUPS = (
    "this node has too many process groups: slow links among the least used ones raise no alerts"
)
# Links are judged rarely, because each judgement covers the whole run.
_PERIOD_S = 10.0
_MIN_IDLE_RATIO = 100.0
_NEWEST_ALERTS = 32


class SlowLinkMonitor:
    """Periodic search for slow links. Node 0 judges the links of all nodes. Not thread-safe."""

    def __init__(self) -> None:
        self._verdict: Verdict | None = None
        self._due_s = float("-inf")
        self._was_final = False

    def update_verdict(
        self,
        state: NodeState,
        cluster: ClusterLink,
        job: JobGeneration,
        now_s: float,
        *,
        final: bool,
    ) -> Verdict | None:
        """Send this node's link statistics to node 0.

        Return the verdict on the links of which this node has statistics.

        now_s: a monotonic clock. final: all processes of the node have ended. The first call with
        `final` judges the links at once.
        """
        if now_s >= self._due_s or (final and not self._was_final):
            started_s = time.monotonic()
            self._verdict = self._judge_links(state, cluster, job)
            self._due_s = now_s + max(_PERIOD_S, _MIN_IDLE_RATIO * (time.monotonic() - started_s))
        self._was_final = final
        return self._verdict

    def _judge_links(
        self, state: NodeState, cluster: ClusterLink, job: JobGeneration
    ) -> Verdict | None:
        attempt = cluster.membership.generation_number(job.generation)
        rows = build_link_statistics(state.join.operations())
        reported = [rows]
        if not cluster.judges_alone:
            own, left_out = link_report.encode_link_report(attempt, rows)
            cluster.send_link_statistics(own)
            if left_out and _TOO_MANY_GROUPS not in state.notes:
                state.notes.append(_TOO_MANY_GROUPS)
        for each in cluster.other_nodes_link_reports():
            try:
                reported.append(link_report.decode_link_report(each, attempt, job.world_size))
            except ValueError as error:
                logger.warning("%s", error)
        hosts = {rank: place.host for rank, place in job.places.items()}
        ranks = [
            each.statistics for each in state.processes.values() if each.identity.attempt == attempt
        ]
        return build_slow_link_verdict(find_slow_links(merge_links(reported), hosts), ranks)


class AlertManager:
    """Creator of alerts for a live run or a replay. Not thread-safe."""

    def __init__(self, log: FindingLog) -> None:
        self.log = log
        self.newest: deque[Alert] = deque(maxlen=_NEWEST_ALERTS)
        """Newest alerts, for listeners that start later."""
        self.raised = 0
        # The newest assessment, with all alerts that no exporter has received yet.
        self._untaken: Assessment | None = None

    def update_alerts(
        self,
        identity: Identity,
        attempt: int,
        findings: Findings,
        places: Mapping[int, Placement],
        nodes: list[NodeState],
        unix_ns: int,
        *,
        links: Verdict | None,
        diagnosed: Callable[[StragglerGroup], Diagnosis | None],
        hang: HangEvidence | None = None,
        at_step: int | None = None,
        last_step: int | None = None,
        judge: str | None = "",
    ) -> Assessment:
        """Return the findings at unix_ns, with alerts for all changes since the last call.

        identity: see Assessment. nodes: node states with details for the alerts' sentences. links:
        the verdict on slow links. The other parameters are those of FindingLog.record_changes().
        """
        alerts = self.log.record_changes(
            attempt, findings, hang, places, unix_ns, at_step=at_step, last_step=last_step, judge=judge,
            verdicts=[*build_imbalance_verdicts(findings), *filter(None, [links])], diagnosed=diagnosed,
            context=functools.partial(build_slow_rank_context, nodes),
        )  # fmt: skip
        self.newest.extend(alerts)
        self.raised += len(alerts)
        return Assessment(identity, findings, hang, alerts, judge == "")

    def queue_assessment(self, assessment: Assessment) -> None:
        """Queue an assessment, and keep the alerts of the queued one that it replaces."""
        not_taken = self._untaken.alerts if self._untaken is not None else ()
        self._untaken = dataclasses.replace(assessment, alerts=(*not_taken, *assessment.alerts))

    def take_assessment(self) -> Assessment | None:
        """Return the newest assessment, if any, with the alerts since the last call."""
        found, self._untaken = self._untaken, None
        if found is not None:
            self._untaken = dataclasses.replace(found, alerts=())
        return found
