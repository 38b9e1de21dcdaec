"""Advice for jobs that lack CPUs, from what is known about the use of their CPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from torchlens_perf.analysis.statistics.quantities import format_count, format_percent
from torchlens_perf.run.cpu_programs import (
    CHILD,
    OTHER,
    OTHER_USER,
    OUTSIDE,
    RANK,
    SIDECAR,
    CpuProgram,
)
from torchlens_perf.verdicts.words.report import Facts, Rank

# Other programs are named if they keep at least this share of the job's CPUs busy.
_OTHERS = 0.1
_OWNERS = {
    RANK: "rank {}",
    CHILD: "a child process of a rank",
    SIDECAR: "the sidecar",
    OTHER_USER: "of another user",
    OTHER: "not of this job",
}


def cpu_action(report: Facts) -> str:
    """Return the advice for a job that lacks CPUs."""
    known = [rank["cpu"] for rank in report["ranks"] if rank["cpu"] is not None]
    others = [each for each in known if each["others_share"] is not None]
    share = sum(each["others_share"] or 0.0 for each in others) / len(others) if others else 0.0
    begin = "see what else keeps the CPUs busy" if not others else ""
    if share >= _OTHERS:
        busiest = max(others, key=lambda each: each["others_share"] or 0.0)
        others_use = f"outside of the job that keep {format_percent(share)} of its CPUs busy"
        begin = f"find the programs {others_use}, for example with htop, and stop or move them"
        named = [each for each in busiest["programs"] if each.owner in OUTSIDE]
        if named:
            # Programs that end soon are not seen, so the visible ones may use much less.
            is_most = 2 * sum(each.cpus for each in named) >= share * (busiest["cpus"] or 1)
            which = "mainly" if is_most else "many small ones; the largest is"
            names = ", ".join(map(_name_program, named if is_most else named[:1]))
            begin = f"stop or move the programs {others_use} ({which} {names})"
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
        less.append("fewer ranks per node")
    current = _current_value_clause(cpus, "now ")
    more = f"more CPUs ({current})" if current else "more CPUs"
    ways = f"{', '.join(less)} or {more}" if less else more
    return f"{begin}, or use {ways}." if begin else f"use {ways}."


def describe_cpu_users(report: Facts) -> str:
    """Return sentences on the programs that use the job's CPUs, and on too many threads or workers
    of the job itself; "" if nothing is known."""
    known = [(rank, cpu) for rank in report["ranks"] if (cpu := rank["cpu"]) is not None]
    if not known:
        return ""
    rank, found = max(known, key=lambda each: sum(used.cpus for used in each[1]["programs"]))
    text, ranks, cpus = describe_programs(report, rank), found["ranks"] or 0, found["cpus"] or 0
    sentences = [f"The busiest programs on the job's CPUs: {text}."] if text else []
    has = {"thread": found["threads"] or 1, "child process": found["workers"] or 0}
    if ranks * sum(has.values()) > cpus:
        theirs = " and ".join(format_count(count, name) for name, count in has.items() if count)
        sentences.append(
            f"The job itself has more threads and processes than CPUs: {format_count(ranks, 'rank')}"
            f" with {theirs} each, on {format_count(cpus, 'CPU')}."
        )
    return " ".join(sentences)


def describe_programs(report: Facts, rank: Rank) -> str:
    """Return name, owner and use of CPUs of the busiest programs on the CPUs of a rank."""
    pids = {each["pid"]: each["rank"] for each in report["ranks"] if each["host"] == rank["host"]}
    programs = [] if rank["cpu"] is None else rank["cpu"]["programs"]
    return "; ".join(
        f"{_name_program(each)}, {_OWNERS[each.owner].format(pids.get(each.pid, ''))},"
        f" {each.cpus:.2g} CPUs"
        for each in programs
    )


def _name_program(program: CpuProgram) -> str:
    return f"{program.name} (pid {program.pid})"


def _current_value_clause(values: Set[int | None], before: str = ", now ") -> str:
    """Return a clause with the current number if it is known and equal for all ranks; else ""."""
    (value,) = values if len(values) == 1 else (None,)
    return "" if value is None else f"{before}{value}"
