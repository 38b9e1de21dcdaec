"""Trainings that the processes of a run make one after the other, such as the trials of a search.

A report covers one of them, because nothing is typical of several models together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from torchlens_perf.verdicts.latest_attempt import latest_processes
from torchlens_perf.verdicts.node_state import NodeState, ProcessState, Training
from torchlens_perf.verdicts.stragglers.findings import Findings

Processes = dict[int, ProcessState]


def list_trainings(processes: Mapping[int, ProcessState]) -> Sequence[Training]:
    """Return the trainings of the first rank; () for one training, or if ranks have others."""
    found = [each.by_training if each.facts.trainings else [] for each in processes.values()]
    if len({tuple(each.first_step for each in trainings) for trainings in found}) != 1:
        return ()
    return found[0]


def find_shown_training(processes: Mapping[int, ProcessState]) -> int | None:
    """Return the first step of the training that takes the most time; None for one training."""
    longest = max(list_trainings(processes), key=lambda each: each.total_ns, default=None)
    return None if longest is None else longest.first_step


def select_training(
    processes: Mapping[int, ProcessState], first_step: int | None
) -> Processes | None:
    """Return the processes with the statistics of the training that begins with this step.

    The result is None if a rank has not kept them, or without a step.
    """
    if first_step is None:
        return None
    found: Processes = {}
    for rank, process in processes.items():
        kept = {each.first_step: each.statistics for each in process.by_training}
        statistics = kept.get(first_step)
        if statistics is None:
            return None
        found[rank] = dataclasses.replace(process, statistics=statistics, by_training=[])
    return found


def shown_processes(nodes: Sequence[NodeState]) -> Processes:
    """Return the newest process of each rank, with the statistics that the report covers."""
    processes = latest_processes(nodes)
    return select_training(processes, find_shown_training(processes)) or processes


def select_findings(findings: Findings, processes: Processes) -> Findings:
    """Return the findings without episodes that are over before, or begin after, a training."""
    steps = [
        step
        for each in processes.values()
        for step in (each.statistics.first_step, each.statistics.last_step)
        if step is not None
    ]
    first, last = (min(steps), max(steps)) if steps else (0, np.inf)
    kept = [
        each
        for each in findings.episodes
        if each.since_step <= last and (each.until_step is None or each.until_step > first)
    ]
    groups = tuple(each for each in findings.groups if each.lead in kept)
    return findings.with_episodes(kept, groups=groups)
