"""Reports of simulated runs, and functions that change copies of reports."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

from tests.support.live_simulation import LiveSimulation
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.top.reading import RunReader, View
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.stragglers.findings import NOTHING
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.report import Report


def view_of(path: Path, ranks: int, *faults: str, blocks: int = 3, **options: int) -> View:
    """Return the view of a live run.

    `options` are those of LiveSimulation.
    """
    with LiveSimulation(path, ranks, *faults, **options) as live:
        live.add_blocks(blocks)
        return RunReader(live.run).poll()


def report_of(view: View) -> Report:
    assert view.report is not None, view.trouble
    return view.report


def changed(report: Report, **parts: Any) -> Report:
    """Return a copy of the report with other values in `run`, or with other lists."""
    value: Any = copy.deepcopy(report)
    for name, part in parts.items():
        if name in value:
            value[name] = part
        else:
            value["run"][name] = part
    return value  # type: ignore[no-any-return]


def verdict(kind: str, text: str, **facts: Any) -> Verdict:
    """Return a row of `verdicts`."""
    finding, _, action = text.partition(" Next: ")
    facts.setdefault("evidence", Evidence())
    is_over = kind.endswith(("_ended", "_transient"))
    return Verdict(
        kind=kind, confidence=0.9, notes=(finding,), action=action, is_over=is_over, **facts
    )


def add_node(run: RunDirectory, number: int) -> Path:
    """Add a node's file, whose ranks behave like those of the first node, and return its path."""
    first = run.node_state_path("node-0000")
    state = node_state.load(first)
    state.host = f"node-{number:04d}"
    for process in state.processes.values():
        who = process.identity
        process.identity = dataclasses.replace(
            who, rank=who.rank + 100 * number, host=state.host, node=state.host
        )
    state.findings = NOTHING
    state.save(run)
    return run.node_state_path(state.host)
