"""Ranks in the report: rows of the JSON."""

from __future__ import annotations

from torchlens_perf.diagnosis.facts.device_times import build_device_times
from torchlens_perf.diagnosis.facts.distribution import summarize_sketch
from torchlens_perf.diagnosis.facts.memory_rows import memory_row
from torchlens_perf.diagnosis.facts.step_classes import (
    build_phases,
    build_step_account,
    build_typical_step,
    other_thread_times,
)
from torchlens_perf.verdicts.node_state import ProcessState
from torchlens_perf.verdicts.words.report import CpuUse, LastArrivals, Rank


def build_rank_row(rank: int, process: ProcessState, last: LastArrivals | None = None) -> Rank:
    """Return the row of a rank. last: how often it was last to arrive; None if not known."""
    statistics, loader = process.statistics, process.facts.training.loader
    typical, device = build_typical_step(statistics), build_device_times(process)
    sums = statistics.sums_of_typical_steps()
    return {
        "rank": rank,
        "host": process.identity.host,
        "local_rank": process.identity.local_rank,
        "pid": process.identity.pid,
        "attempt": process.identity.attempt,
        "state": process.ended or "running",
        "inside": process.open_spans,
        "failure": process.failure,
        "end": process.end,
        "now": None if process.ended else process.now,
        "steps": statistics.counted_steps,
        "first_step": statistics.first_step,
        "last_step": statistics.last_step,
        "step_s": summarize_sketch(statistics.step),
        "own_s": summarize_sketch(statistics.own),
        "work_s": summarize_sketch(statistics.work) if statistics.work.count else None,
        "typical": typical,
        "account": build_step_account(statistics),
        "lines": {
            line: samples
            for line, samples in sums.lines.items()
            # While workers load the data, the main process only waits for them.
            if not (line.startswith("data") and loader is not None and loader.workers)
        },
        "host_gaps": sums.gaps_s_per_step,
        "loader_period_s": process.facts.loader_period_ns / 1e9 or None,
        "phases": {} if typical is None else build_phases(statistics, typical),
        "other_threads": other_thread_times(statistics),
        "not_measured": process.facts.not_measured,
        "memory": memory_row(process),
        "out_of_memory": process.out_of_memory,
        "device": device,
        "arrived_last": last,
        "cpu": _build_cpu_facts(process),
        "coverage": statistics.coverage,
        "lost": statistics.lost,
    }


def _build_cpu_facts(process: ProcessState) -> CpuUse | None:
    """Return the CPUs of a rank and the programs that use them; None without data."""
    found = process.cpu_users
    if not found.cpus and not process.facts.threads:
        return None
    others_share = found.others[0] / found.others[1] if found.others[1] else None
    return {
        "cpus": found.cpus or None,
        "threads": process.facts.threads or None,
        "workers": found.workers if found.cpus else None,
        "others_share": others_share,
        "programs": found.programs,
        "ranks": found.ranks or None,
    }
