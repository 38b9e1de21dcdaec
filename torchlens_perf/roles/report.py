"""Add the iterations of a job with several roles to its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torchlens_perf.roles.causes import Cause, engine_names, find_causes
from torchlens_perf.roles.evidence import build_verdict
from torchlens_perf.roles.facts import PARTS, Engine, Iterations, RoleReport
from torchlens_perf.roles.iterations import Iteration, pair_events, sum_tokens
from torchlens_perf.roles.lanes import build_lanes
from torchlens_perf.roles.table import read_iterations, read_trainer_steps
from torchlens_perf.roles.what_if import predict_changes
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.report import Report

_OF_STEPS = ("long_steps", "straggler", "host_bound", "data_bound", "communication_bound")
"""Kinds of verdicts that a trainer's wait for samples causes, because steps contain the wait."""
_TOLERANCE = 0.3
_WAITS = "the trainer's wait for samples and weights is in the table of iterations, and has no other verdict"


def add_iterations(run: RunDirectory, report: Report) -> None:
    """Add the iterations, and verdicts on what makes them slow, if there are whole iterations."""
    notes = report["quality"]["notes"]
    recorded, iterations = read_iterations(run, notes)
    if recorded.lost:
        notes.append(f"{recorded.lost} events of roles were overwritten before they were read")
    for each in recorded.detected:
        notes.append(f"the role of {each} was detected, not set: {recorded.roles[each]}")
    if not iterations:
        notes.append("the events of roles contain no second iteration: see batch_complete")
        return
    steps, per_iteration = read_trainer_steps(run, iterations, recorded.shifts, notes)
    found = find_causes(iterations, steps, per_iteration)
    count, total_s = len(iterations), sum(each.seconds for each in iterations)
    roles = list(recorded.roles.values())
    cast(RoleReport, report)["iterations"] = Iterations(
        count,
        total_s / count,
        {part: seconds / count for part, seconds in sum_parts(iterations).items()},
        [_build_engine(iterations, name) for name in engine_names(iterations)],
        found,
        {role: roles.count(role) for role in dict.fromkeys(roles)},
        recorded.lost,
        predict_changes(iterations),
        build_lanes(iterations, list(pair_events(recorded.events)), recorded.roles),
        len({each.process for each in steps}) > 1,
    )
    place = recorded.pids[iterations[0].trainer]
    ranks = (each for each in report["ranks"] if (each["host"], each["pid"]) == place)
    lead = next((each["rank"] for each in ranks), None)
    wait_s = sum(each.seconds - each.steps_s for each in iterations) / count / per_iteration
    replace_verdicts(report, iterations, found, lead, wait_s)


def replace_verdicts(
    report: Report,
    iterations: Sequence[Iteration],
    causes: Sequence[Cause],
    lead: int | None,
    wait_s: float,
) -> None:
    """Add verdicts on large causes, and remove those on steps that only show the trainer's wait.

    lead: rank of the trainer that waits for the samples; None if not known. wait_s: its wait for samples
    and weights, per step.
    """
    count, total_s = len(iterations), sum(each.seconds for each in iterations)
    slow = {f"rank {each.rank}" for each in report["verdicts"] if each.kind == "straggler"}
    ranks = max(1, report["run"]["world_size"])
    waits = [each for each in report["verdicts"] if _is_wait_of_trainer(each, ranks, lead, wait_s)]
    verdicts = [each for each in report["verdicts"] if each not in waits]
    verdicts += [
        build_verdict(each, count, total_s / count, report["steps"]["count"])
        for each in causes
        # A verdict on a slow rank says more than one on iterations.
        if each.is_large and each.subject not in slow
    ]
    report["verdicts"] = sorted(verdicts, key=lambda each: each.sort_key)
    if waits:
        report["quality"]["notes"].append(_WAITS)


def _is_wait_of_trainer(verdict: Verdict, ranks: int, lead: int | None, wait_s: float) -> bool:
    """Return True for a verdict on steps whose cost is the trainer's wait for samples and weights."""
    if verdict.traits.name not in _OF_STEPS or verdict.rank not in (None, lead):
        return False
    # Limits of the typical step are means over the ranks. One rank waits for samples, and the others
    # wait for this rank.
    waiting = {"communication_bound": ranks - 1, "host_bound": 1, "data_bound": 1}
    expected_s = wait_s * waiting.get(verdict.traits.name, ranks) / ranks
    return abs((verdict.cost_s_per_step or 0.0) - expected_s) <= _TOLERANCE * expected_s


def sum_parts(iterations: Sequence[Iteration]) -> dict[str, float]:
    """Return the seconds of each part that occurs, in the order of PARTS."""
    sums = dict.fromkeys(PARTS, 0.0)
    for each in iterations:
        for part in each.path():
            sums[part.part] += part.end_s - part.begin_s
    return {part: seconds for part, seconds in sums.items() if seconds > 0}


def _build_engine(iterations: Sequence[Iteration], name: str) -> Engine:
    samples = [sample for each in iterations for sample in each.samples if sample.engine == name]
    tokens = sum_tokens(each.tokens for each in samples)
    seconds = sum(each.seconds("generation") for each in samples)
    return Engine(name, len(samples), tokens, seconds / tokens if tokens else None)
