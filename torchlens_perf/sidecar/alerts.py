"""What an exporter gets to know of the judge's findings: alerts, also on an imbalance and on slow links."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchlens_perf.analysis import node_state
from torchlens_perf.errors import RunStoreError
from torchlens_perf.exporters import Assessment
from torchlens_perf.verdicts.stragglers.findings import StragglerGroup
from torchlens_perf.verdicts.words.stragglers import SlowRankContext, imbalance_verdicts

if TYPE_CHECKING:
    from torchlens_perf.analysis.node_state import NodeState
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.verdicts import Alert
    from torchlens_perf.verdicts.finding_log import FindingLog
    from torchlens_perf.verdicts.stragglers.findings import Diagnosis, Findings
    from torchlens_perf.verdicts.stragglers.placement import Placement
    from torchlens_perf.verdicts.words.evidence import JudgedVerdict
    from torchlens_perf.verdicts.words.hang import OpenHang

_PERIOD_S = 10.0  # between two looks for slow links, which are judged by the whole run
_MIN_REST = 100.0  # times what a look has taken
_NEWEST_ALERTS = 32


class LinkWatch:
    """Looks for slow links now and then. Belongs to the sidecar's thread."""

    def __init__(self, run: RunDirectory, host: str) -> None:
        self._run = run
        self._host = host
        self._verdict: JudgedVerdict | None = None
        self._due_s = float("-inf")
        self._was_final = False

    def update(self, state: NodeState, now_s: float, *, final: bool) -> JudgedVerdict | None:
        """The verdict on slow links, by the node's state and by what other nodes have saved, where they share a disk.

        now_s: a monotonic clock. final: no process of the node runs, so that one more look will do.
        """
        if now_s >= self._due_s or (final and not self._was_final):
            started_s = time.monotonic()
            self._verdict = self._find(state)
            self._due_s = now_s + max(_PERIOD_S, _MIN_REST * (time.monotonic() - started_s))
        self._was_final = final
        return self._verdict

    def _find(self, state: NodeState) -> JudgedVerdict | None:
        if not state.join.operations():
            return None
        from torchlens_perf.report.build import slow_link_verdict  # it needs what shows tables: not without need

        nodes = [state]
        for path in sorted(self._run.nodes.glob("*.json")):
            if path != self._run.node_state(self._host):
                try:
                    nodes.append(node_state.load(path))
                except RunStoreError:
                    continue  # of another version, or just being replaced
        return slow_link_verdict(nodes)


class AlertManager:
    """Raise alerts, and say with whom a slow rank is slow: in a live run, and in a replay. One thread."""

    def __init__(self, log: FindingLog) -> None:
        self.log = log
        self.newest: deque[Alert] = deque(maxlen=_NEWEST_ALERTS)
        """For those who begin to listen later."""
        self.raised = 0
        self._untaken: Assessment | None = None  # the newest, with all alerts that no exporter has taken

    def assess(
        self,
        identity: Identity,
        attempt: int,
        findings: Findings,
        places: Mapping[int, Placement],
        nodes: list[NodeState],
        unix_ns: int,
        *,
        links: JudgedVerdict | None,
        diagnosed: Callable[[StragglerGroup], Diagnosis | None],
        hang: OpenHang | None = None,
        at_step: int | None = None,
        last_step: int | None = None,
        judge: str | None = "",
    ) -> Assessment:
        """Return what holds at unix_ns, and what has changed since the last call.

        identity: see Assessment. nodes: whose states sentences take details from. links: the verdict on slow links.
        For the others see FindingLog.changes().
        """

        def context() -> SlowRankContext:
            from torchlens_perf.report.build import for_alerts  # it needs what shows tables: not without need

            return for_alerts(nodes)

        alerts = self.log.changes(
            attempt, findings, hang, places, unix_ns, at_step=at_step, last_step=last_step, judge=judge,
            verdicts=[*imbalance_verdicts(findings), *filter(None, [links])], context=context, diagnosed=diagnosed,
        )  # fmt: skip
        self.newest.extend(alerts)
        self.raised += len(alerts)
        return Assessment(identity, findings, hang, alerts, judge == "")

    def keep(self, assessment: Assessment) -> None:
        """Keep the newest assessment until an exporter takes it, with the alerts that none has taken yet."""
        not_taken = self._untaken.alerts if self._untaken is not None else ()
        self._untaken = dataclasses.replace(assessment, alerts=(*not_taken, *assessment.alerts))

    def take(self) -> Assessment | None:
        """Return what holds now and the alerts since the last call; None while no process is known."""
        found, self._untaken = self._untaken, None
        if found is not None:
            self._untaken = dataclasses.replace(found, alerts=())
        return found
