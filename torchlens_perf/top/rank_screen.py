"""The screen of one rank: its current activity, and its step, modules and collectives compared with
other ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_count,
    format_coverage,
    format_duration,
    format_duration_or_dash,
    format_percent,
)
from torchlens_perf.top.overview import format_clock_time
from torchlens_perf.top.ranks import draw_blocks
from torchlens_perf.top.text import build_difference_column, unwrapped_line
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.hang import open_spans_phrase
from torchlens_perf.verdicts.words.run_state import describe_exception, describe_failure_time
from torchlens_perf.view.collective_table import build_collective_table
from torchlens_perf.view.hardware_tables import build_gpu_table
from torchlens_perf.view.rank_tables import build_cpu_table, build_memory_table, step_parts
from torchlens_perf.view.specs import (
    NOT_MEASURED,
    Column,
    Quantity,
    Table,
    columns_if,
    sanitize_line,
)
from torchlens_perf.view.terminal import held_verdict_lines, table_lines
from torchlens_perf.view.theme import MIN_EXCESS, PARTS

if TYPE_CHECKING:
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import Rank, Report

_MAX_MODULES = 12


def rank_lines(view: View, number: int, width: int) -> list[Text]:
    """Return all data of a rank as lines."""
    report = view.report
    rank = (
        None
        if report is None
        else next((each for each in report["ranks"] if each["rank"] == number), None)
    )
    if report is None or rank is None:
        return [
            Text(
                f"No data of rank {number}: its node's sidecar has not written yet, or the rank did"
                " not start."
            )
        ]
    lines = [Text(f"  {sanitize_line(text)}") for text in _state_lines(rank, report)]
    lines += [
        line
        for row, of in zip(report["verdicts"], view.headlines, strict=True)
        if number in row.ranks
        for line in (unwrapped_line(), *held_verdict_lines(of, row, report, width))
    ]
    others = {
        each for each in view.populations if view.populations[each] == view.populations.get(number)
    } - {number}
    heat = (
        {row["rank"]: row["excess"] for row in report["heat"]["ranks"]}
        if report["heat"] is not None
        else {}
    )
    found = [
        _build_step_table(rank, report, others),
        _build_module_table(report, number, others),
        *_tables_of_rank(rank, report),
    ]
    for table in (table for table in found if table is not None and table.rows):
        lines += [unwrapped_line(), *table_lines(table, width, table.first or table.rows)]
        lines += [Text(f"  {sanitize_line(table.note)}", style="dim")] if table.note else []
        if table.key == "step" and number in heat and others:
            lines += [
                unwrapped_line(("  over the run  ", "dim"), draw_blocks(heat[number], width - 20))
            ]
    return lines


def _tables_of_rank(rank: Rank, report: Report) -> Iterator[Table | None]:
    """Yield the report's tables that are about this rank: collectives, CPUs, memory, GPUs."""
    name = str(rank["rank"])
    collectives = [row for row in report["collectives"] if name in row["by_rank"]]
    gpus = [gpu for gpu in report["gpus"] if rank["rank"] in gpu["ranks"]]
    one: Report = {**report, "ranks": [rank], "collectives": collectives, "gpus": gpus}
    for make in (build_collective_table, build_cpu_table, build_memory_table, build_gpu_table):
        yield make(one)


def _state_lines(rank: Rank, report: Report) -> Iterator[str]:
    """Yield lines on the rank's identity, its current activity, and its steps."""
    local = "" if rank["local_rank"] is None else f" (local rank {rank['local_rank']})"
    attempt = f", attempt {rank['attempt']}" if rank["attempt"] else ""
    yield (
        f"rank {rank['rank']}{local} on {rank['host']}, pid {rank['pid']}{attempt}: {rank['state']}"
    )
    now, last, memory = rank["now"], rank["arrived_last"], rank["memory"]
    if now is not None:
        within = f" for {format_duration(now.inside_s)}" if now.inside_s is not None else ""
        at = f"at {format_clock_time(as_of)}: " if (as_of := report["run"]["as_of"]) else ""
        yield (
            f"{at}in step {now.step} for {format_duration(now.step_s)},"
            f" {open_spans_phrase(now.inside)}{within}"
        )
    elif rank["failure"] is not None:
        yield (
            f"failed {describe_failure_time(rank['failure'])}: {describe_exception(rank['failure'])}"
        )
    elif rank["state"] == "died":
        yield f"died {open_spans_phrase(rank['inside'])}"
    if last is not None:
        yield f"last to arrive in {format_percent(last['share'])} of its {last['joined']:,} collectives"
    used = "not measured"
    if memory["last_bytes"] is not None and memory["max_bytes"] is not None:
        used = f"{format_bytes(memory['last_bytes'], 'B')}, peak {format_bytes(memory['max_bytes'], 'B')}"
    yield f"memory {used}"
    whole = format_coverage(rank["coverage"], any_step=rank["last_step"] is not None)
    yield (
        f"{format_count(rank['steps'], 'step')} recorded, step p50"
        f" {format_duration_or_dash(rank['step_s']['p50_s'])}; {whole}"
    )


def _build_step_table(rank: Rank, report: Report, others: set[int]) -> Table | None:
    """Return the parts of a rank's typical step compared with the median of other ranks, largest
    difference first.
    """
    by_device = report["run"]["judged_by"] == DEVICE
    by_rank = {
        each["rank"]: parts
        for each in report["ranks"]
        if (parts := step_parts(each, by_device=by_device))
    }
    here = by_rank.get(rank["rank"])
    if here is None:
        return None
    of_others = [by_rank[other] for other in others if other in by_rank]
    missing = [] if by_device else [part for part in rank["not_measured"] if part in PARTS]
    rows = [
        (
            PARTS[part].name,
            here.get(part, 0.0),
            _median_or_none(of.get(part, 0.0) for of in of_others),
        )
        for part in PARTS
        if part not in missing and (here.get(part) or any(of.get(part) for of in of_others))
    ]
    title = f"Typical step, {'device' if by_device else 'host'} clock"
    title += (
        f"; others: median of {len(others)} ranks that do the same work" if len(others) > 1 else ""
    )
    note = (
        f"{', '.join(PARTS[part].name for part in missing)}: {NOT_MEASURED}, part of backward."
        if missing
        else ""
    )
    return Table("step", title, *_compare("phase", rows, sum(here.values())), note=note)


def _compare(
    what: str, rows: list[tuple[str, float, float | None]], whole_s: float
) -> tuple[list[Column], frozenset[int]]:
    """Return columns of times on this rank and others, largest difference first, and the slow rows.

    whole_s: total time of all rows.
    """
    rows.sort(key=lambda row: (row[2] - row[1] if row[2] is not None else 0.0, -row[1]))
    unit_of = max((max(row[1], row[2] or 0.0) for row in rows), default=0.0)
    difference = [None if row[2] is None else row[1] - row[2] for row in rows]
    columns = [
        Column(what, [row[0] for row in rows], Quantity.TEXT),
        Column("here", [row[1] for row in rows], unit_of=unit_of),
        *columns_if(
            any(each is not None for each in difference),
            Column("others", [row[2] for row in rows], unit_of=unit_of),
            build_difference_column("difference", difference, unit_of),
        ),
    ]
    slow = frozenset(
        at for at, more_s in enumerate(difference) if more_s and more_s >= MIN_EXCESS * whole_s
    )
    return columns, slow


def _median_or_none(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _build_module_table(report: Report, number: int, others: set[int]) -> Table:
    """Return the modules' own forward times, compared with the median of other ranks."""
    rows = [
        (
            module["name"],
            here,
            _median_or_none(
                seconds for rank, seconds in module["by_rank"].items() if int(rank) in others
            ),
        )
        for module in report["modules"]
        if (here := module["by_rank"].get(str(number))) is not None
    ]
    compared = _compare("module", rows, sum(row[1] for row in rows))
    return Table(
        "modules", "Modules, forward time per step", *compared, first=_MAX_MODULES, noun="module"
    )
