"""The steps that the page holds whole: chosen, read, and cut down until they fit."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torchlens_perf.page.contents import SlowTime, StepTraceRow, StepTraces
from torchlens_perf.page.gather.span_files import Records, kept_steps, records_of
from torchlens_perf.page.gather.step_choice import chosen_steps
from torchlens_perf.page.gather.step_collectives import CommonClock, RankRecords, common_clock, joined
from torchlens_perf.page.gather.step_trace import Names, rank_trace
from torchlens_perf.run.ring import Kind

if TYPE_CHECKING:
    from torchlens_perf.analysis.node_state import ProcessState
    from torchlens_perf.page.gather.step_grid import StepGrid
    from torchlens_perf.run.directory import RunDirectory


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
    keys = {processes[rank].identity.key: node_of[rank] for rank in ranks}
    read = records_of(run, keys, [step for step, _ in steps], notes)
    names, rows, used_bytes, left_out = Names(), list[StepTraceRow](), 0, 0
    for step, why in steps:
        of_step = [
            RankRecords(rank, node_of[rank], _offset_ns(processes[rank]), processes[rank].groups, records)
            for rank in ranks
            if (records := _of_step(read.get(processes[rank].identity.key), step)) is not None
        ]
        row = _row(step, why, of_step, len(processes), names, uncomparable)
        if row is None:
            continue
        size = len(json.dumps(row, separators=(",", ":")))
        if used_bytes + size > budget_bytes:
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


def _offset_ns(process: ProcessState) -> int:
    return process.anchor.unix_ns - process.anchor.monotonic_ns


def _of_step(read: Records | None, step: int) -> Records | None:
    if read is None:
        return None
    records = read.records[read.records["step"] == step]
    return Records(records, read.names) if (records["kind"] == Kind.STEP).any() else None


def _row(
    step: int, why: str, ranks: Sequence[RankRecords], world_size: int, names: Names, uncomparable: Collection[str]
) -> StepTraceRow | None:
    if not ranks:
        return None
    clock = common_clock(ranks, uncomparable)
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
        "collectives": joined(ranks, clock, uncomparable),
    }


def _begin_ns(each: RankRecords, clock: CommonClock) -> int:
    records = each.records.records
    return int(records["start_ns"][records["kind"] == Kind.STEP][-1]) + clock.offset_ns[each.rank]
