"""The report on a run directory, for the command line and the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchlens_perf.errors import DAMAGED_DATA, RunStoreError
from torchlens_perf.report.build import build_report
from torchlens_perf.report.captures import capture_rows
from torchlens_perf.report.last_check import add_last_check
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts import node_state
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.words.report import Report


def load_report(run: RunDirectory, *, lost_time: bool = True) -> Report:
    """Return the report on the current state files.

    lost_time: False leaves out `lost_time`, for which recorded steps are read.

    A node whose file is unusable is left out, with a note. Raise RunStoreError if no file can be
    used.
    """
    return (load_report_and_states if lost_time else _load_without_lost_time)(run)[0]


def load_report_and_states(
    run: RunDirectory, advanced: Callable[[int, int], object] = lambda done, total: None
) -> tuple[Report, list[NodeState]]:
    """Return the report and the node states it was made from.

    Raise RunStoreError like load_report().

    advanced: called with the number of files read so far and the total.
    """
    report, states = _load_without_lost_time(run, advanced)
    # This import takes 50 ms, which `top` does not need.
    from torchlens_perf.report.usual_steps import add_lost_time

    add_lost_time(run, report, states)
    return report, states


def _load_without_lost_time(
    run: RunDirectory, advanced: Callable[[int, int], object] = lambda done, total: None
) -> tuple[Report, list[NodeState]]:
    unusable: list[str] = []
    return report_from_states(run, node_state.load_all(run, unusable, advanced), unusable)


def report_from_states(
    run: RunDirectory, states: list[NodeState], unusable: Sequence[str]
) -> tuple[Report, list[NodeState]]:
    """Return the report on loaded states, and those of the states that are usable.

    It has no `lost_time`, and its actions are general: both need recorded steps.

    unusable: the reason for each unloadable file.
    """
    unusable, requests = list(unusable), list[str]()
    captured = capture_rows(run, requests)
    try:
        report = build_report(run.run_id, states, captured)
    except DAMAGED_DATA:
        broken = {state.host: problem for state in states if (problem := _why_unusable(run, state))}
        if not broken:
            raise
        if len(broken) == len(states):
            raise RunStoreError("; ".join(broken.values())) from None
        unusable += broken.values()
        states = [state for state in states if state.host not in broken]
        report = build_report(run.run_id, states, captured)
    if (run.path / "events").is_dir():
        # Jobs without roles do not need this module.
        from torchlens_perf.roles.report import add_iterations

        add_iterations(run, report)
    add_last_check(run.path.parent, report)
    notes = report["quality"]["notes"]
    # The sidecar may already have noted some of the unreadable requests.
    notes += [each for each in requests if each not in notes]
    notes += [f"{each}. The report lacks the ranks of that node" for each in unusable]
    return report, states


def _why_unusable(run: RunDirectory, state: NodeState) -> str:
    """Return the reason why this node's state cannot be reported; "" if it can."""
    try:
        build_report(run.run_id, [state])
    except DAMAGED_DATA as error:
        return f"{run.node_state_path(state.host)} cannot be used: {type(error).__name__}: {error}"
    return ""
