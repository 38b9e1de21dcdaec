"""The nodes that the verdicts of a run name, and the rules for reporting one. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec import Struct

from torchlens_perf.analysis.statistics.quantities import format_count, format_percent
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.report import Report

_OF_WORK = ("more_work", "imbalance", "slow_data")
"""Classes of slow ranks that get other work or data than others, for which no node is to blame."""
_OF_PROGRAM = ("gc", "own_threads", "alloc_retries", "slow_storage", "cpu_quota")
"""Kinds of causes that are not in one machine. All others are."""
_MIN_HELD = 0.8
"""Smallest share of the windows in which a node must be slow."""
DAY_S = 86_400.0
_ONE_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Rules(NamedTuple):
    """Conditions for reporting a node."""

    allowed: tuple[str, ...] = ()
    """Patterns of the names of nodes that may be reported; () for none."""
    min_share: float = 0.05
    """Smallest cost, as a share of the job's step."""
    min_windows: int = 3
    """Smallest number of windows of steps in which it is slow."""
    most: int = 1
    """Most nodes of one folder of runs in 24 hours."""


class NamedNode(Struct, frozen=True):
    """A node that a current verdict names."""

    run: str
    host: str
    scheduler_names: dict[str, str]
    """The node's names by attribute, such as slurm.node.name."""
    kind: str
    ranks: tuple[int, ...]
    cost_share: float
    windows: int
    """Number of windows in which it is slow."""
    judged: int
    """Number of windows since then."""
    since: str
    """Time at which it began, in UTC; "" if not known."""
    text: str
    causes: tuple[str, ...]
    """Kinds of the measured causes that are in the machine."""
    is_whole: bool
    """True if all ranks of the node are slow together."""
    is_live: bool
    """True if the job still runs."""

    @property
    def reason(self) -> str:
        """Why it is reported, in one line."""
        return f"torchlens_perf run {self.run}: {self.text}"

    def name_for(self, attribute: str) -> str:
        """Return the node's name in a scheduler, or else its host name."""
        return self.scheduler_names.get(attribute, self.host)


def find_nodes(report: Report) -> Iterator[NamedNode]:
    """Yield the nodes that current verdicts on slow ranks name, the most expensive first."""
    hosts = {each["rank"]: each["host"] for each in report["ranks"]}
    for verdict in report["verdicts"]:
        if verdict.is_over or not is_of_machine(verdict):
            continue
        held, found = verdict.held, verdict.diagnosis
        named = (verdict.where or {}).get("host.name", "")
        for host in sorted({hosts[rank] for rank in verdict.ranks if rank in hosts}):
            yield NamedNode(
                run=report["run"]["id"],
                host=host,
                scheduler_names=(verdict.where or {}) if host == named else {},
                kind=verdict.kind,
                ranks=tuple(rank for rank in verdict.ranks if hosts.get(rank) == host),
                cost_share=verdict.cost_share or 0.0,
                windows=(held.windows_held if held else None) or 0,
                judged=(held.windows_judged if held else None) or 0,
                since=(held.since if held else None) or "",
                text=verdict.text,
                causes=tuple(
                    each.kind
                    for each in (found.causes if found else ())
                    if each.kind not in _OF_PROGRAM
                ),
                is_whole=verdict.evidence.scope == "node",
                is_live=report["run"]["live"],
            )


def is_of_machine(verdict: Verdict) -> bool:
    """Return True if the machine may be the reason why the ranks of a verdict are slow."""
    is_slow = verdict.traits.name == "straggler" and verdict.evidence.scope in ("rank", "node")
    is_contended = verdict.traits.name == "lack_of_cpu" and verdict.rank is not None
    return (is_slow and verdict.evidence.cause not in _OF_WORK) or is_contended


def find_objection(
    node: NamedNode,
    rules: Rules,
    recent: Collection[str],
    *,
    drains: bool,
    sent_name: str,
    while_live: bool = False,
) -> str:
    """Return why a node must not be reported now; "" if it may.

    recent: nodes that were reported in the last 24 hours. drains: True if the node would get no new
    work. sent_name: the node's name at the target, which comes from the job as the host does.
    while_live: True if it drains while the job runs, too.
    """
    if not any(fnmatchcase(sent_name, pattern) for pattern in rules.allowed):
        return f"no --allow pattern matches {sent_name}"
    if not _ONE_NODE.fullmatch(sent_name):
        return f"{sent_name} is no name of one node"
    if node.cost_share < rules.min_share:
        return f"it costs {format_percent(node.cost_share)} of the step, less than {format_percent(rules.min_share)}"
    if node.windows < rules.min_windows or node.windows < _MIN_HELD * node.judged:
        return f"it was slow in {node.windows} of {format_count(node.judged, 'window')} of steps"
    if drains and node.is_live and not while_live:
        return "the job still runs: a node is drained at the end of its job"
    if drains and not (node.is_whole or node.causes):
        return "no cause in this machine was measured, and not all of its ranks are slow"
    if node.host not in recent and len(recent) >= rules.most:
        return f"{format_count(len(recent), 'node')} in 24 hours is the limit: --most-nodes"
    return ""
