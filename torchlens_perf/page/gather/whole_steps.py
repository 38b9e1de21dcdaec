"""The steps that the page holds whole: chosen, read, and cut down until they fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchlens_perf.page.contents import SlowTime, StepTraceRow, StepTraces
from torchlens_perf.page.gather.node_clocks import CommonClock, NodeClocks, RankRecords
from torchlens_perf.page.gather.span_files import COLLECTIVES, Records, kept_steps, records_of, size_bytes
from torchlens_perf.page.gather.step_choice import chosen_steps
from torchlens_perf.page.gather.step_collectives import joined_by_step
from torchlens_perf.page.gather.step_trace import Names, rank_trace
from torchlens_perf.page.gather.thinning import size_bytes as size_of
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.analysis.node_state import ProcessState
    from torchlens_perf.page.gather.step_grid import StepGrid
    from torchlens_perf.run.directory import RunDirectory

MAX_SPAN_BYTES = 1 << 30  # of span files, up to which those of ranks that are not shown are read too, for collectives


def whole_steps(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    ranks: Sequence[int],
    grid: StepGrid,
    slow: Sequence[SlowTime],
    uncomparable: Collection[str],
    budget_bytes: int,
    notes: list[str],
) -> StepTraces:
    """As many as fit into the budget, the most telling first. notes: gets what was left out, in sentences.

    node_of: each rank's node, as in names of files. ranks: those that are shown. uncomparable: groups whose sequence
    numbers do not compare.
    """
    warm_from = int(grid.warm_from.max(initial=0))
    kept = kept_steps(run, {node_of[rank] for rank in ranks})
    steps = chosen_steps(grid, slow, warm_from, kept)
    wanted = [step for step, _ in steps]
    keys = {rank: each.identity.key for rank, each in processes.items()}
    read = records_of(run, {keys[rank]: node_of[rank] for rank in ranks}, wanted, notes)
    if len(ranks) < len(processes) and size_bytes(run) <= MAX_SPAN_BYTES:
        others = {keys[rank]: node_of[rank] for rank in processes if rank not in ranks}
        read.update(records_of(run, others, wanted, notes, COLLECTIVES))
    of_ranks = [
        RankRecords(rank, node_of[rank], offset_ns(process), process.groups, read[keys[rank]])
        for rank, process in sorted(processes.items())
        if keys[rank] in read
    ]
    of_steps: dict[int, list[RankRecords]] = {step: [] for step in wanted}
    for each in of_ranks:
        if each.rank in ranks:
            for step, records in by_step(each.records).items():
                of_steps[step].append(each._replace(records=records))
    collectives = joined_by_step(of_ranks, ranks, uncomparable)
    clocks = NodeClocks(of_steps.values(), uncomparable)
    names, rows, used_bytes, left_out = Names(), list[StepTraceRow](), 0, 0
    for step, why in steps:
        known = len(names)
        row = step_row(step, why, of_steps[step], len(processes), names, clocks)
        if row is None:
            continue
        row["collectives"] = collectives.get(step, [])
        size = size_of(row) + size_of(names.all()[known:])
        if used_bytes + size > budget_bytes:
            names.forget(known)
            left_out += 1
            continue
        used_bytes += size
        rows.append(row)
    if left_out:
        notes.append(f"Of {left_out + len(rows)} steps that were to be shown whole, {left_out} are left out.")
    if len(ranks) < len(processes):
        notes.append(
            f"Whole steps show {len(ranks)} of {len(processes)} ranks: those that were slow, those that wait most on "
            "their nodes, and usual ones."
        )
    return {"names": names.all(), "steps": rows}


def offset_ns(process: ProcessState) -> int:
    return process.anchor.unix_ns - process.anchor.monotonic_ns


def by_step(read: Records) -> dict[int, Records]:
    """Of steps whose end is among the records."""
    steps, ends = read.records["step"], read.records["kind"] == int(Kind.STEP)
    return {step: Records(read.records[steps == step], read.names) for step in np.unique(steps[ends]).tolist()}


def step_row(
    step: int, why: str, ranks: Sequence[RankRecords], world_size: int, names: Names, clocks: NodeClocks
) -> StepTraceRow | None:
    """Without its collectives."""
    if not ranks:
        return None
    clock = clocks.of(ranks)
    begins = {each.rank: _begin_ns(each, clock) for each in ranks if each.rank in clock.offset_ns}
    first_ns = min(begins.values())
    found = []
    for each in ranks:
        offset_us = (begins[each.rank] - first_ns) / 1e3 if each.rank in begins else None
        traced = rank_trace(each.rank, each.records, names, offset_us)
        if traced is not None:
            found.append(traced.trace)
    return {
        "step": step,
        "why": why,
        "clock": clock.words,
        "ranks": found,
        "ranks_left_out": world_size - len(found),
        "collectives": [],
    }


def _begin_ns(each: RankRecords, clock: CommonClock) -> int:
    records = each.records.records
    return int(records["start_ns"][records["kind"] == Kind.STEP][-1]) + clock.offset_ns[each.rank]
