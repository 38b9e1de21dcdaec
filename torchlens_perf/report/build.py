"""Build the report, one value, from the nodes' state files.

Everything that shows a report starts here.

The top level is stable: `schema` is incremented if a field is removed or its meaning changes.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import structs

from torchlens_perf.analysis.statistics.rank import RankStatistics, Windows
from torchlens_perf.analysis.statistics.run_windows import RunWindows, align_windows
from torchlens_perf.analysis.statistics.trend import (
    MIN_VALUES,
    find_changes,
    find_gradual_change,
)
from torchlens_perf.diagnosis.facts.collective_rows import (
    collective_rows,
    count_last_arrivals,
    python_tap_notes,
)
from torchlens_perf.diagnosis.facts.device_times import (
    count_missing_device_times,
    device_section_rows,
)
from torchlens_perf.diagnosis.facts.memory_rows import memory_notes
from torchlens_perf.diagnosis.facts.module_rows import module_rows, section_rows
from torchlens_perf.diagnosis.facts.rank_rows import build_rank_row
from torchlens_perf.diagnosis.facts.slow_rank_context import device_kind, judging_clocks
from torchlens_perf.diagnosis.facts.step_classes import (
    build_step_classes,
)
from torchlens_perf.diagnosis.facts.steps import build_steps, count_made_steps, measure_run
from torchlens_perf.diagnosis.facts.trainings import (
    find_shown_training,
    list_trainings,
    select_findings,
    select_training,
)
from torchlens_perf.diagnosis.goodput import build_goodput, find_losses
from torchlens_perf.diagnosis.utilization import build_utilization
from torchlens_perf.report.gpu_rows import gpu_rows, network_port_rows
from torchlens_perf.report.heat import build_heat_map
from torchlens_perf.report.overhead import estimate_overhead, largest_period
from torchlens_perf.report.step_history import build_step_history
from torchlens_perf.roles.evidence import SlowIterationEvidence as SlowIterationEvidence
from torchlens_perf.run.place.node import host_of_node
from torchlens_perf.run.ring import MAX_FRAMES, Flag
from torchlens_perf.verdicts.finding_log import FindingRecords
from torchlens_perf.verdicts.judged_windows import JudgedWindows, with_hidden_data_waits
from torchlens_perf.verdicts.latest_attempt import (
    latest_collective_joins,
    latest_processes,
    latest_slow_links,
)
from torchlens_perf.verdicts.node_state import NodeState, ProcessState
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.stragglers.placement import Placement
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.verdict_periods import VerdictPeriods
from torchlens_perf.verdicts.words import run_state, verdict
from torchlens_perf.verdicts.words.bottleneck import other_threads_note
from torchlens_perf.verdicts.words.device_pace import replays_graphs
from torchlens_perf.verdicts.words.oom import out_of_memory_note
from torchlens_perf.verdicts.words.report import (
    Capture,
    Facts,
    Quality,
    Report,
    Run,
    Startup,
    Training,
    Trend,
)
from torchlens_perf.verdicts.words.run_state import (
    build_uneven_steps_verdicts,
    is_explained_by_uneven_steps,
)
from torchlens_perf.verdicts.words.stragglers import measure_slow_ranks

SCHEMA = 4
EVIDENCE = [leaf for each in Evidence.__subclasses__() for leaf in each.__subclasses__() or [each]]
"""All types of evidence of verdicts, which the modules above define."""
# Flags of steps of which ranks need not make equally many.
_OTHER_STEPS = int(Flag.EVALUATION | Flag.EVALUATED | Flag.INFERENCE)
# Waits for a CPU never take all of a step. The means of both are not over the same steps.
_LEAST_SHARE_LEFT = 0.01
_REMOVED = "were removed to stay below disk_bytes"


def build_report(run_id: str, nodes: list[NodeState], captures: Sequence[Capture] = ()) -> Report:
    """Return the report on a live or finished run.

    The report on a restarted run covers the last attempt, and the one on a process that makes
    several trainings the one that takes the most time. captures: the result of capture_rows().
    """
    whole = latest_processes(nodes)
    processes = select_training(whole, find_shown_training(whole)) or whole
    report = _build_report(run_id, nodes, captures, processes, processes is whole)
    report["trainings"] = list(_build_trainings(run_id, nodes, whole, report))
    return report


def _build_trainings(
    run_id: str, nodes: list[NodeState], whole: dict[int, ProcessState], report: Report
) -> Iterator[Training]:
    models = next(iter(whole.values())).facts.trainings if whole else []
    for number, each in enumerate(list_trainings(whole), 1):
        is_shown = each.first_step == find_shown_training(whole)
        processes = select_training(whole, each.first_step)
        of_this = report if is_shown else processes and _build_report(run_id, nodes, (), processes)
        yield {
            "number": number,
            # The first training may have begun before the recording.
            "model": next(
                (name for step, name in reversed(models) if step <= each.first_step and name), None
            ),
            "first_step": each.first_step,
            "last_step": each.last_step,
            "steps": each.steps,
            "total_s": each.total_ns / 1e9,
            "typical_s": of_this["steps"]["alike_mean_s"] if of_this else None,
            "verdict": of_this["verdicts"][0] if of_this and of_this["verdicts"] else None,
            "is_shown": is_shown,
        }


def _build_report(
    run_id: str,
    nodes: list[NodeState],
    captures: Sequence[Capture],
    processes: dict[int, ProcessState],
    is_whole: bool = False,
) -> Report:
    """Return the report on these processes.

    is_whole: False if they have the statistics of one of several trainings.
    """
    judged_windows = {rank: process.judged_windows() for rank, process in processes.items()}
    statistics = [each.statistics for each in processes.values()]
    grid = align_windows(
        judged_windows, max((each.last_step or 0 for each in statistics), default=0)
    )
    judged_grid = None if grid is None else with_hidden_data_waits(grid, processes)
    judging = max(nodes, key=lambda node: node.findings.compared, default=NodeState(""))
    findings = judging.findings if is_whole else select_findings(judging.findings, processes)
    links, collectives = latest_slow_links(nodes), collective_rows(latest_collective_joins(nodes))
    last = count_last_arrivals(collectives)
    steps = build_steps(processes, findings)
    steps["trend"] = _step_time_trend(grid, steps["by"])
    modules, run = module_rows(processes), measure_run(steps, processes)
    facts: Facts = {
        "schema": SCHEMA,
        "run": _build_run(run_id, nodes, latest_processes(nodes)),
        "steps": steps,
        "ranks": [
            build_rank_row(rank, processes[rank], last.get(rank)) for rank in sorted(processes)
        ],
        "heat": build_heat_map(judged_grid, findings, _rank_placements(processes)),
        "history": build_step_history(judged_windows),
        "modules": modules,
        "sections": section_rows(processes),
        "device_sections": device_section_rows(processes),
        "gpus": gpu_rows(nodes, processes),
        "links": network_port_rows(nodes),
        "collectives": collectives,
        "slow_links": links,
        "captures": list(captures),
        "goodput": None,
        "lost_time": None,  # It is computed from recorded steps, see run_report.py.
        "utilization": build_utilization(nodes, modules),
        "quality": _build_quality(nodes, latest_processes(nodes)),
    }
    of_ranks = (
        note for rank in facts["ranks"] for note in (*memory_notes(rank), out_of_memory_note(rank))
    )
    facts["quality"]["notes"] += filter(None, [*of_ranks, other_threads_note(facts)])
    if replays_graphs(facts):
        # A replayed graph is no phase. The rest of the step is therefore not host code.
        for each in (*steps["long"], *steps["short"]):
            each["part"] = ""
    hang = next(
        (node.hang for node in nodes if node.hang is not None and facts["run"]["live"]), None
    )
    by_device = facts["steps"]["by"] == DEVICE
    times = VerdictPeriods(
        facts,
        windows=(
            None
            if judged_grid is None
            else JudgedWindows(judged_grid, findings, _rank_placements(processes), by_device)
        ),
        records=max(
            (node.records for node in nodes if node.records.attempt == facts["run"]["attempt"]),
            key=lambda records: len(records.findings),  # The node that judges stragglers has most.
            default=FindingRecords(),
        ),
        step_time=functools.partial(_step_begin_time, processes, judged_windows),
        time=_format_utc,
        first_step=min((s.first_step for s in statistics if s.first_step is not None), default=0),
        run=run,
    )
    found = _add_uneven_steps(
        verdict.build_verdicts(facts, findings, hang, links), processes, by_device=by_device
    )
    rows = [
        structs.replace(each, where=_location_names(each, processes))
        for each in times.add_periods(found)
    ]
    facts["goodput"] = build_goodput(
        nodes, find_losses(measure_slow_ranks(findings, run)), facts["gpus"]
    )
    return {**facts, "verdicts": rows, "trainings": []}


def _step_begin_time(
    processes: dict[int, ProcessState], windows: dict[int, Windows], step: int, rank: int | None
) -> str | None:
    """Return the time at which a step began on a rank or, if its data are missing, on another rank.

    The time is interpolated between the first steps of windows. After the last window it is
    extrapolated with the step duration of that window. Return None if there is no window.
    """
    with_windows = [each for each in sorted(windows) if len(windows[each].first_step)]
    if not with_windows:
        return None
    rank = rank if rank in with_windows else with_windows[0]
    known, process = windows[rank], processes[rank]
    after = max(0.0, float(step - known.first_step[-1])) * float(known.duration_ns[-1])
    at_ns = float(np.interp(step, known.first_step, known.start_ns)) + after
    first_ns, last_ns = process.statistics.started_ns, process.statistics.ended_ns
    if first_ns is None or last_ns is None:
        return None
    return _format_utc(_to_unix_ns(process, int(min(max(at_ns, first_ns), last_ns))))


def _location_names(each: Verdict, processes: dict[int, ProcessState]) -> dict[str, str] | None:
    """Return attributes that locate a verdict's rank: host, scheduler, container and cloud.

    Return None if the verdict has no rank, or if the rank's node shares no disk with this one.
    """
    if each.rank is None or each.rank not in processes:
        return None
    identity = processes[each.rank].identity
    return {"host.name": identity.host, **identity.attributes}


def _rank_placements(processes: dict[int, ProcessState]) -> dict[int, Placement]:
    return {rank: each.placement for rank, each in processes.items()}


def _build_run(run_id: str, nodes: list[NodeState], processes: dict[int, ProcessState]) -> Run:
    started = [
        _to_unix_ns(p, p.statistics.started_ns)
        for p in processes.values()
        if p.statistics.started_ns is not None
    ]
    ended = [
        _to_unix_ns(p, p.statistics.ended_ns)
        for p in processes.values()
        if p.statistics.ended_ns is not None
    ]
    told = {process.facts.total_steps for process in processes.values()} - {0}
    live = any(not process.ended for process in processes.values())
    died, failed = (
        sorted(rank for rank, process in processes.items() if process.ended == state)
        for state in (run_state.DIED, run_state.FAILED)
    )
    who = next((process.identity for process in processes.values()), None)
    known = {
        "commit": next((node.commit for node in nodes if node.commit), ""),
        "launcher": who.launcher if who else "",
    }
    return {
        "id": run_id,
        "program": who.program if who else None,
        "world_size": who.world_size if who else 0,
        "nodes": _node_names(nodes),
        "attempt": max((process.identity.attempt for process in processes.values()), default=0),
        "started": _format_utc(min(started)) if started else None,
        "ended": None if live or not ended else _format_utc(max(ended)),
        "last_step_at": _format_utc(max(ended)) if ended else None,
        "as_of": (
            _format_utc(max(saved))
            if (saved := [node.saved_unix_ns for node in nodes if node.saved_unix_ns])
            else None
        ),
        "total_steps": told.pop() if len(told) == 1 else None,
        "live": live,
        "state": run_state.run_state(live, died, failed),
        "died": died,
        "failed": failed,
        "ranks_seen": len(processes),
        "startup": _slowest_startup(processes),
        "device": device_kind(processes),
        "judged_by": judging_clocks(processes),
        "deeper_modules": any(process.facts.deeper_modules for process in processes.values()),
        "settings": {
            **{name: text for name, text in known.items() if text},
            **(processes[min(processes)].facts.run_settings if processes else {}),
        },
    }


def _slowest_startup(processes: dict[int, ProcessState]) -> Startup | None:
    """Return the start-up times of the rank that took longest until its first recorded step."""
    found: list[Startup] = []
    for rank, process in processes.items():
        began_ns, first_ns = process.facts.process_began_ns, process.statistics.started_ns
        if began_ns and first_ns is not None:
            found.append(
                {
                    "rank": rank,
                    "before_first_step_s": max(0, first_ns - began_ns) / 1e9,
                    "warm_up_s": process.statistics.warm_up.sum_ns / 1e9,
                    "compile_s": process.facts.compile_s,
                    "cpu_wait_s": (
                        None
                        if process.facts.start_cpu_wait_ns is None
                        else process.facts.start_cpu_wait_ns / 1e9
                    ),
                    "interactive": process.facts.interactive,
                }
            )
    return max(found, key=lambda each: (each["before_first_step_s"], -each["rank"]), default=None)


def _node_names(nodes: list[NodeState]) -> list[str]:
    """Return the nodes' host names.

    Several nodes can have the same host name, for example pods on the host's network. Such nodes
    are listed by their names in the run directory.
    """
    hosts = [host_of_node(node.host) for node in nodes]
    return sorted(
        node.host if hosts.count(host) > 1 else host
        for node, host in zip(nodes, hosts, strict=True)
    )


def _to_unix_ns(process: ProcessState, monotonic_ns: int) -> int:
    return monotonic_ns + process.anchor.offset_ns


def _format_utc(unix_ns: int) -> str:
    return datetime.datetime.fromtimestamp(unix_ns / 1e9, datetime.timezone.utc).isoformat(
        timespec="milliseconds"
    )


def _comparable_step_counts(processes: dict[int, ProcessState]) -> dict[int, int]:
    """Return the number of steps by rank; {} if the ranks need not make equally many steps.

    These are ranks that do not all end normally, have different models, serve requests, or
    evaluate: often only rank 0 evaluates, and its evaluation counts as steps.
    """
    each = processes.values()
    size = max((process.identity.world_size for process in each), default=0)
    populations = {process.placement.population for process in each}
    if len(processes) < size or len(populations) != 1:
        return {}
    if any(
        process.ended != "closed" or process.statistics.flags_seen & _OTHER_STEPS
        for process in each
    ):
        return {}
    return {rank: count_made_steps(process) for rank, process in processes.items()}


def _add_uneven_steps(
    found: list[Verdict], processes: dict[int, ProcessState], *, by_device: bool
) -> list[Verdict]:
    """Return the verdicts with that on uneven steps, and without those that it explains."""
    steps = _comparable_step_counts(processes)
    uneven = build_uneven_steps_verdicts(steps)
    if not uneven:
        return found
    fewest = min(steps.values())
    ended = [processes[rank] for rank, count in steps.items() if count == fewest]
    before = build_step_classes(ended, by_device=by_device)["long"]
    return [
        *(each for each in found if not is_explained_by_uneven_steps(each, fewest, before)),
        *uneven,
    ]


def _step_time_trend(grid: RunWindows | None, clock: str) -> Trend | None:
    """Return the median step times of the first and the last third of a run. By the hosts' clocks,
    they are without waits for a CPU, which other programs may cause.

    Return None if the run is too short to tell a trend from the wander of its step times.
    """
    if grid is None:
        return None
    usual_ns = grid.duration_ns
    if clock != DEVICE:
        usual_ns = np.maximum(
            usual_ns - np.nansum(grid.lack_ns, axis=-1), _LEAST_SHARE_LEFT * usual_ns
        )
    # The first window includes steps of the warm-up.
    known = np.flatnonzero(np.isfinite(usual_ns).any(axis=0))[1:]
    if len(known) < MIN_VALUES:
        return None
    times_s = np.nanmedian(usual_ns[:, known], axis=0) / 1e9
    third = len(times_s) // 3
    first_s = float(np.median(times_s[:third]))
    last_s = float(np.median(times_s[-third:]))
    change = last_s / first_s - 1
    # Growth by the same time in each step is a curve in logarithms, and the reverse.
    scales = (np.log(times_s), times_s / np.median(times_s))
    fewest = min(len(find_changes(each)) for each in scales)
    simplest = [each for each in scales if len(find_changes(each)) == fewest]
    return {
        "first_third_p50_s": first_s,
        "last_third_p50_s": last_s,
        "change": change,
        "is_gradual": any(find_gradual_change(each) * change > 0 for each in simplest),
        "more_s": float(np.maximum(times_s - first_s, 0.0).mean()),
    }


def _build_quality(nodes: list[NodeState], processes: dict[int, ProcessState]) -> Quality:
    statistics: list[RankStatistics] = [process.statistics for process in processes.values()]
    of_nodes = (note for node in nodes for note in (*node.notes, *node.passing_notes))
    of_ranks = (note for rank in sorted(processes) for note in _rank_notes(processes[rank]))
    unwritten = sum(node.unwritten_records for node in nodes)
    counted = _count_notes(
        (
            sum(node.telemetry.lost_samples for node in nodes),
            (
                "samples of GPUs and network ports could not be written to the run directory."
                " Totals include these samples"
            ),
        ),
        (
            sum(node.telemetry.dropped_files for node in nodes),
            f"old telemetry files {_REMOVED}. Totals include their samples",
        ),
        (
            sum(node.dropped_segments for node in nodes),
            f"old segments of records {_REMOVED}. Statistics include these records",
        ),
        (
            unwritten,
            "records could not be written to the run directory. Statistics include these records",
        ),
    )
    overhead = estimate_overhead(processes)
    return {
        "records": sum(s.records for s in statistics),
        "lost": sum(s.lost for s in statistics) + unwritten,
        "too_deep": sum(process.too_deep for process in processes.values()),
        "coverage": min((s.coverage for s in statistics), default=0.0),
        "overhead_share": overhead.share,
        "overhead_low": overhead.low,
        "overhead_high": overhead.high,
        "module_period": largest_period(processes, "module_period"),
        "phase_period": largest_period(processes, "phase_period"),
        "sidecar_cpu_s": sum(node.sidecar_cpu_s for node in nodes),
        "notes": [
            *dict.fromkeys([*of_nodes, *of_ranks]),
            *counted,
            *python_tap_notes(processes.values()),
            *filter(None, [_missing_ranks_note(processes)]),
        ],
    }


def _count_notes(*counts: tuple[object, str], about: str = "") -> list[str]:
    """Return a note for each count that is not 0.

    counts: pairs of count and description. about: a prefix.
    """
    return [f"{about}{count} {what}" for count, what in counts if count]


def _rank_notes(process: ProcessState) -> list[str]:
    about = f"rank {process.identity.rank}: "
    notes = [*process.facts.notes]
    if process.names_lost:
        notes.append(
            f"{about}too many distinct names were recorded. Further names are shown as (other)"
        )
    notes += _count_notes(
        (
            process.statistics.lost,
            "records were overwritten before the sidecar read them. Increase ring_records",
        ),
        (
            process.unbalanced,
            "spans have no recorded end, for example because the optimizer raised an exception",
        ),
        (process.too_deep, f"spans nested deeper than {MAX_FRAMES} levels were not recorded"),
        (
            process.internal_errors,
            "internal errors were caught and did not affect training. See the rank's log",
        ),
        *count_missing_device_times(process),
        about=about,
    )
    return notes


def _missing_ranks_note(processes: dict[int, ProcessState]) -> str:
    world_size = max((process.identity.world_size for process in processes.values()), default=0)
    missing = sorted(set(range(world_size)) - set(processes))
    if not missing:
        return ""
    shown = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
    return f"{len(missing)} of {world_size} ranks are missing: {shown}"
