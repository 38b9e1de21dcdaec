"""The report on a run directory: what the command line shows, and what the sidecar writes for rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.report.build import build
from torchlens_perf.report.captures import captures
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.verdicts.node_state import NodeState
    from torchlens_perf.verdicts.words.report import Report


def run_report(run: RunDirectory) -> Report:
    """The report as its files tell it now. A node's file that cannot be used costs that node only, and is noted.

    Raises RunStoreError if there are none, or none can be used.
    """
    return report_and_states(run)[0]


def report_and_states(
    run: RunDirectory, advanced: Callable[[int, int], object] = lambda done, total: None
) -> tuple[Report, list[NodeState]]:
    """run_report(), and the nodes' states that it is made of. Raises RunStoreError likewise.

    advanced: called with the number of nodes' files that are read, and of all.
    """
    unusable: list[str] = []
    return report_of(run, node_state.load_all(run, unusable, advanced), unusable)


def report_of(run: RunDirectory, states: list[NodeState], unusable: Sequence[str]) -> tuple[Report, list[NodeState]]:
    """The same of nodes' states that are loaded. unusable: why each of the others could not be."""
    unusable, requests = list(unusable), list[str]()
    captured = captures(run, requests)
    try:
        report = build(run.run_id, states, captured)
    except DAMAGED_DATA:
        broken = {state.host: problem for state in states if (problem := _problem(run, state))}
        if not broken:
            raise
        if len(broken) == len(states):
            raise RunStoreError("; ".join(broken.values())) from None
        unusable += broken.values()
        states = [state for state in states if state.host not in broken]
        report = build(run.run_id, states, captured)
    notes = report["quality"]["notes"]
    notes += [each for each in requests if each not in notes]  # the sidecar notes those that it has seen
    notes += [f"{each}: the ranks of that node are missing here" for each in unusable]
    return report, states


def _problem(run: RunDirectory, state: NodeState) -> str:
    """Why no report can be made of this node; "" if one can."""
    try:
        build(run.run_id, [state])
    except DAMAGED_DATA as error:
        return f"{run.node_state(state.host)} cannot be used: {type(error).__name__}: {error}"
    return ""
