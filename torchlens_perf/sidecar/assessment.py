"""What an exporter gets to know of the judge's findings: alerts, also on an imbalance and on slow links."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.analysis.collectives.slow_link import link_statistics, merged_links, slow_links
from torchlens_perf.exporters import Assessment
from torchlens_perf.sidecar.nodes import link_report
from torchlens_perf.verdicts.alert import no_modules
from torchlens_perf.verdicts.causes.straggler_groups import StragglerGroup, StragglerSummary, straggler_groups
from torchlens_perf.verdicts.slow_links import slow_link_verdict
from torchlens_perf.verdicts.stragglers.detector import NOTHING
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, straggler_verdicts

if TYPE_CHECKING:
    from torchlens_perf.analysis.node_state import NodeState
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.sidecar.job import JobView
    from torchlens_perf.verdicts.causes.rules import Diagnosis
    from torchlens_perf.verdicts.finding_log import FindingLog
    from torchlens_perf.verdicts.stragglers.detector import Findings
    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.words.evidence import Verdict
    from torchlens_perf.verdicts.words.hang import OpenHang

logger = logging.getLogger("torchlens_perf.sidecar")

_LEFT_OUT = "this node has too many process groups: slow links among the least used ones raise no alerts"
_PERIOD_S = 10.0  # between two judgements of the links, which are judged by the whole run
_MIN_IDLE_RATIO = 100.0  # to the duration of a judgement


class LinkWatch:
    """Judges the links now and then: on node 0, those of all nodes. Belongs to the sidecar's thread."""

    def __init__(self) -> None:
        self._verdict: Verdict | None = None
        self._due_s = float("-inf")
        self._was_final = False

    def update(self, state: NodeState, job: JobView, now_s: float, *, final: bool) -> Verdict | None:
        """Report this node's links to node 0. Return the verdict on slow links, by all that is known here.

        now_s: a monotonic clock. final: no process of the node runs, so one more judgement is enough.
        """
        if now_s >= self._due_s or (final and not self._was_final):
            started_s = time.monotonic()
            self._verdict = self._judge(state, job)
            self._due_s = now_s + max(_PERIOD_S, _MIN_IDLE_RATIO * (time.monotonic() - started_s))
        self._was_final = final
        return self._verdict

    def _judge(self, state: NodeState, job: JobView) -> Verdict | None:
        attempt, rows = job.attempt, link_statistics(state.join.operations())
        reported = [rows]
        if not job.judges_alone:
            own, left_out = link_report.encode(attempt, rows)
            job.set_links(own)
            if left_out and _LEFT_OUT not in state.notes:
                state.notes.append(_LEFT_OUT)
        for each in job.links_of_others():
            try:
                reported.append(link_report.decode(each, attempt, job.world_size))
            except ValueError as error:
                logger.warning("%s", error)
        hosts = {rank: place.host for rank, place in job.places.items()}
        ranks = [each.statistics for each in state.processes.values() if each.identity.attempt == attempt]
        return slow_link_verdict(slow_links(merged_links(reported), hosts), ranks)


class Assessor:
    """Raises alerts, and says with whom a slow rank is slow: in a live run, and in a replay. One thread."""

    def __init__(self, log: FindingLog) -> None:
        self.log = log
        self._judged: Findings = NOTHING
        self._together: Sequence[StragglerGroup] = ()

    def assess(
        self,
        identity: Identity,
        attempt: int,
        findings: Findings,
        named: StragglerSummary,
        places: Mapping[int, Placement],
        nodes: list[NodeState],
        unix_ns: int,
        *,
        links: Verdict | None,
        diagnosed: Callable[[StragglerGroup], Diagnosis | None],
        hang: OpenHang | None = None,
        at_step: int | None = None,
        last_step: int | None = None,
        judge: str | None = "",
    ) -> Assessment:
        """What holds at unix_ns, and what has changed since the last call.

        identity: see Assessment. nodes: whose states sentences take details from. links: the verdict on slow links.
        For the others see FindingLog.changes().
        """

        def context() -> SlowRankContext:
            from torchlens_perf.report.build import for_alerts  # it needs what shows tables: not without need

            return for_alerts(nodes)

        alerts = self.log.changes(
            attempt, findings, hang, places, unix_ns, at_step=at_step, last_step=last_step, judge=judge,
            verdicts=_other_verdicts(findings, named, links), context=context, diagnosed=diagnosed,
        )  # fmt: skip
        if findings is not self._judged:  # the same for many rounds, and of many ranks it takes a while
            self._judged, self._together = findings, straggler_groups(findings.slow_now, places)
        return Assessment(identity, findings, hang, alerts, judge == "", self._together)


def _other_verdicts(findings: Findings, named: StragglerSummary, links: Verdict | None) -> Sequence[Verdict]:
    """The verdicts that stand now, but for those on slow ranks."""
    nobody_slow = dataclasses.replace(findings, episodes=()), dataclasses.replace(named, groups=())
    found, _ = straggler_verdicts(no_modules(), *nobody_slow)
    return [*found, links] if links is not None else found
