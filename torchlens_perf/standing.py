"""Verdicts besides slow ranks and hangs that alerts are raised for: an imbalance, and slow links."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchlens_perf import node_state
from torchlens_perf.alert import no_modules
from torchlens_perf.culprits import Named
from torchlens_perf.errors import RunStoreError
from torchlens_perf.report.straggler_words import straggler_verdicts

if TYPE_CHECKING:
    from torchlens_perf.node_state import NodeState
    from torchlens_perf.records import Verdict
    from torchlens_perf.run_directory import RunDirectory
    from torchlens_perf.straggler import Findings

_PERIOD_S = 10.0  # between two looks for slow links, which are judged by the whole run
_LEAST_REST = 20.0  # times what a look has taken


class LinkWatch:
    """Looks for slow links now and then. Belongs to the sidecar's thread."""

    def __init__(self, run: RunDirectory, host: str) -> None:
        self._run = run
        self._host = host
        self._verdict: Verdict | None = None
        self._due_s = float("-inf")
        self._was_final = False

    def look(self, state: NodeState, now_s: float, *, final: bool) -> Verdict | None:
        """The verdict on slow links, by the node's state and by what other nodes have saved, where they share a disk.

        now_s: a monotonic clock. final: no process of the node runs, so that one more look will do.
        """
        if now_s >= self._due_s or (final and not self._was_final):
            started_s = time.monotonic()
            self._verdict = self._find(state)
            self._due_s = now_s + max(_PERIOD_S, _LEAST_REST * (time.monotonic() - started_s))
        self._was_final = final
        return self._verdict

    def _find(self, state: NodeState) -> Verdict | None:
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


def standing(findings: Findings, named: Named, links: Verdict | None) -> Sequence[Verdict]:
    """The verdicts that stand now. links: that on slow links, if there are any."""
    found, _ = straggler_verdicts(no_modules(), dataclasses.replace(findings, episodes=()), _without_culprits(named))
    return [*found, links] if links is not None else found


def _without_culprits(named: Named) -> Named:
    return dataclasses.replace(named, culprits=())
