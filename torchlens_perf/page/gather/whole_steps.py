"""Read the spans of the chosen steps, for as many steps as fit into the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from torchlens_perf.page.contents import StepTrace, StepTraces
from torchlens_perf.page.gather.node_clocks import NodeClocks, RankRecords
from torchlens_perf.page.gather.step_collectives import join_collectives_by_step
from torchlens_perf.page.gather.step_trace import build_rank_trace, find_step_end
from torchlens_perf.page.gather.thinning import json_size_bytes as size_of
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.run.ring import Flag, Kind
from torchlens_perf.store.reader import ParquetFolder, make_error_collector
from torchlens_perf.store.segments import SPANS, ProcessRecords, read_records
from torchlens_perf.verdicts.node_state import ProcessState

# Collectives of hidden ranks are read too, unless the span files are larger than this. These
# collectives show which rank arrived last.
MAX_SPAN_BYTES = 1 << 30


def read_whole_steps(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    ranks: Sequence[int],
    steps: Sequence[tuple[int, str]],
    uncomparable: Collection[str],
    budget_bytes: float,
    notes: list[str],
    *,
    with_others: bool,
) -> StepTraces:
    """Return as many of these steps as fit into the budget, in order.

    notes: receives sentences on left-out data.

    node_of: each rank's node, as in file names. ranks: the ranks to show. steps: step numbers, each
    with the reason for showing it. uncomparable: groups whose sequence numbers differ between
    ranks. with_others: also read the collectives of other ranks, so that the last rank to arrive is
    known.
    """
    wanted = [step for step, _ in steps]
    of_ranks = read_rank_records(run, processes, node_of, ranks, wanted, notes)
    if (
        with_others
        and len(ranks) < len(processes)
        and ParquetFolder(run.spans).size_bytes() <= MAX_SPAN_BYTES
    ):
        others = [rank for rank in processes if rank not in ranks]
        of_ranks += read_rank_records(
            run, processes, node_of, others, wanted, notes, [Kind.COLLECTIVE]
        )
        of_ranks.sort(key=lambda each: each.rank)
    of_steps: dict[int, list[RankRecords]] = {step: [] for step in wanted}
    for each in of_ranks:
        if each.rank in ranks:
            for step, records in _split_by_step(each.records).items():
                of_steps[step].append(each._replace(records=records))
    collectives = join_collectives_by_step(of_ranks, ranks, uncomparable)
    clocks = NodeClocks(of_steps.values(), uncomparable)
    recorded = [(step, why) for step, why in steps if of_steps[step]]
    index_of, rows, used_bytes = dict[str, int](), list[StepTrace](), 0
    for step, why in recorded:
        with_its_own = dict(index_of)
        row = _build_step_trace(step, why, of_steps[step], len(processes), with_its_own, clocks)
        row["collectives"] = collectives.get(step, [])
        size = size_of(row) + size_of(list(with_its_own)[len(index_of) :])
        if used_bytes + size <= budget_bytes:
            index_of, used_bytes = with_its_own, used_bytes + size
            rows.append(row)
    left_out = len(recorded) - len(rows)
    if left_out:
        notes.append(
            f"Left out of {len(recorded)} chosen steps, because the page has no room: {left_out}."
        )
    if len(ranks) < len(processes):
        notes.append(
            f"Timelines show {len(ranks)} of {len(processes)} ranks: slow ranks, the ranks on their"
            " nodes that wait most, and typical ranks."
        )
    return {"names": list(index_of), "steps": rows}


def read_rank_records(
    run: RunDirectory,
    processes: Mapping[int, ProcessState],
    node_of: Mapping[int, str],
    ranks: Sequence[int],
    steps: Collection[int],
    notes: list[str],
    kinds: Collection[Kind] = SPANS,
) -> list[RankRecords]:
    """Return the records of these ranks in these steps. Ranks without records are left out."""
    keys = {rank: processes[rank].identity.key for rank in ranks}
    read = read_records(
        run,
        {keys[rank]: node_of[rank] for rank in ranks},
        steps,
        make_error_collector(notes),
        kinds,
    )
    return [
        RankRecords(
            rank,
            node_of[rank],
            processes[rank].anchor.offset_ns,
            processes[rank].facts.groups,
            read[keys[rank]],
        )
        for rank in ranks
        if keys[rank] in read
    ]


def _split_by_step(read: ProcessRecords) -> dict[int, ProcessRecords]:
    """Return the records of each step whose end is among the records."""
    steps, ends = read.records["step"], read.records["kind"] == int(Kind.STEP)
    return {
        step: ProcessRecords(read.records[steps == step], read.names)
        for step in np.unique(steps[ends]).tolist()
    }


def _build_step_trace(
    step: int,
    why: str,
    ranks: Sequence[RankRecords],
    world_size: int,
    index_of: dict[str, int],
    clocks: NodeClocks,
) -> StepTrace:
    """Return the spans of a step without its collectives."""
    clock = clocks.common_clock(ranks)
    ends = {each.rank: find_step_end(each.records.records) for each in ranks}
    begins = {
        rank: int(end["start_ns"]) + clock.offset_ns[rank]
        for rank, end in ends.items()
        if rank in clock.offset_ns
    }
    first_ns = min(begins.values())
    found, left_out = [], 0
    for each in ranks:
        offset_us = (begins[each.rank] - first_ns) / 1e3 if each.rank in begins else None
        trace, shortest = build_rank_trace(each.rank, each.records, index_of, offset_us)
        found.append(trace)
        left_out += shortest
    short = f"The {left_out:,} shortest spans are left out." if left_out else ""
    untimed = [rank for rank, end in ends.items() if end["flags"] & Flag.WITHOUT_MODULES]
    without = f"Modules were not timed on rank {format_ranges(untimed)}." if untimed else ""
    return {
        "step": step,
        "why": why,
        "clock": " ".join(filter(None, (clock.words, short, without))),
        "ranks": found,
        "ranks_left_out": world_size - len(found),
        "collectives": [],
    }
