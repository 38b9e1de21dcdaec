"""Advice for jobs that lack CPUs, from what is known about the use of their CPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

from torchlens_perf.analysis.statistics.quantities import format_percent

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Facts

# Other programs are named if they keep at least this share of the job's CPUs busy.
_OTHERS = 0.1


def cpu_action(report: Facts) -> str:
    """Return the advice for a job that lacks CPUs."""
    known = [rank["cpu"] for rank in report["ranks"] if rank["cpu"] is not None]
    others = [each for each in known if each["others_share"] is not None]
    share = sum(each["others_share"] or 0.0 for each in others) / len(others) if others else 0.0
    begin = "see what else keeps the CPUs busy" if not others else ""
    if share >= _OTHERS:
        busiest = max(others, key=lambda each: each["others_share"] or 0.0)["busiest_other"]
        begin = (
            f"see which programs outside of the job keep {format_percent(share)} of its CPUs busy"
        )
        if busiest:
            begin += f", first of all {busiest}"
    threads = {each["threads"] for each in known}
    workers, cpus = {each["workers"] for each in known}, {each["cpus"] for each in known}
    less = []
    if threads - {None, 1}:
        less.append(f"fewer threads (OMP_NUM_THREADS{_current_value_clause(threads)})")
    # One worker is not fewer: without it, the training thread loads the data.
    if any(workers - {None, 0, 1}):
        # A loader for evaluation may have workers at the same time, so this is not num_workers.
        at_once = _current_value_clause(workers, "; child processes at once: ")
        less.append(f"fewer loader workers (num_workers{at_once})")
    if max(Counter(rank["host"] for rank in report["ranks"]).values(), default=0) > 1:
        less.append("fewer ranks a node")
    current = _current_value_clause(cpus, "now ")
    more = f"more CPUs ({current})" if current else "more CPUs"
    ways = f"{', '.join(less)} or {more}" if less else more
    return f"{begin}; then use {ways}." if begin else f"use {ways}."


def _current_value_clause(values: Set[int | None], before: str = ", now ") -> str:
    """Return a clause with the current number if it is known and equal for all ranks; else ""."""
    (value,) = values if len(values) == 1 else (None,)
    return "" if value is None else f"{before}{value}"
