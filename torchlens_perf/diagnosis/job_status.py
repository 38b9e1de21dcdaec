"""Classes of a job's time, and its crash, for exporters. Pure.

They are computed from the state of one node, without a report.
"""

from __future__ import annotations

from typing import NamedTuple

from torchlens_perf.diagnosis.facts.collective_rows import collective_rows
from torchlens_perf.diagnosis.facts.module_rows import section_rows
from torchlens_perf.diagnosis.facts.rank_rows import build_rank_row
from torchlens_perf.diagnosis.facts.steps import build_steps, measure_run
from torchlens_perf.diagnosis.facts.trainings import select_findings, shown_processes
from torchlens_perf.diagnosis.goodput import build_goodput, find_losses
from torchlens_perf.diagnosis.lost_time import begin_of_present, classify_time, join_classes
from torchlens_perf.diagnosis.step_times import read_judged_rows
from torchlens_perf.verdicts.latest_attempt import latest_collective_joins
from torchlens_perf.verdicts.node_state import NodeState
from torchlens_perf.verdicts.stragglers.detector import StragglerDetector
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.oom import build_out_of_memory_verdicts
from torchlens_perf.verdicts.words.report import StepFacts
from torchlens_perf.verdicts.words.run_state import build_crash_verdicts
from torchlens_perf.verdicts.words.stragglers import measure_slow_ranks


class JobStatus(NamedTuple):
    """Classes of a job's time, and the verdict on the rank that ended it."""

    goodput_s: dict[str, float]
    """Seconds of this node's ranks by class."""
    critical_path_s: dict[str, float]
    """Seconds per step of all ranks by class. Empty with too few steps."""
    crash: Verdict | None


def measure_job(state: NodeState, detector: StragglerDetector) -> JobStatus:
    """Return the status of a job. detector: has the newest steps of all ranks."""
    processes = shown_processes([state])
    findings = select_findings(state.findings, processes)
    facts: StepFacts = {
        "steps": build_steps(processes, findings),
        "ranks": [build_rank_row(rank, processes[rank]) for rank in sorted(processes)],
        "sections": section_rows(processes),
        "collectives": collective_rows(latest_collective_joins([state])),
    }
    slow = measure_slow_ranks(findings, measure_run(facts["steps"], processes))
    goodput = build_goodput([state], find_losses(slow))
    classes = {} if goodput is None else goodput.classes
    times = read_judged_rows(detector)
    path = (
        []
        if times is None
        else classify_time(times.select_since(begin_of_present(slow)), facts, slow)
    )
    size = max((each.identity.world_size for each in processes.values()), default=0)
    crashes = [
        *build_out_of_memory_verdicts(facts["ranks"]),
        *build_crash_verdicts(facts["ranks"], size),
    ]
    return JobStatus(
        {name: each.seconds for name, each in classes.items() if each.seconds is not None},
        join_classes(path),
        next(iter(crashes), None),
    )
