"""All tables of a report, in the order in which all screens show them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from torchlens_perf.analysis.statistics.host_gaps import split_gap
from torchlens_perf.run.captures import TRACE
from torchlens_perf.run.rank_ranges import format_ranges
from torchlens_perf.verdicts.long_steps import LongSteps
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.oom import allocation_place
from torchlens_perf.verdicts.words.report import Capture, Module, Report
from torchlens_perf.verdicts.words.stragglers import ModuleTimes
from torchlens_perf.view.collective_table import build_collective_table, build_slow_link_table
from torchlens_perf.view.goodput_table import build_goodput_table
from torchlens_perf.view.hardware_tables import build_gpu_table, build_port_table
from torchlens_perf.view.headline import phase_name
from torchlens_perf.view.iteration_tables import build_iteration_change_table, build_iteration_table
from torchlens_perf.view.lost_time_tables import (
    build_change_table,
    build_critical_path_table,
)
from torchlens_perf.view.rank_tables import (
    build_cpu_table,
    build_device_table,
    build_memory_table,
    build_rank_table,
    covered_steps,
    current_stragglers,
)
from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table, columns_if
from torchlens_perf.view.training_table import build_training_table
from torchlens_perf.view.utilization_tables import build_roofline_table, build_utilization_table

_FIRST_ROWS, _FIRST_SITES = 8, 5
_MIN_SHARE = 0.001
"""Modules and gaps below this share of a step are left out."""
_MIN_HOST_SHARE = 0.1
_MAX_STEPS = 5
"""Step numbers in a cell."""
_OUTLIER = 5.0
"""Robust standard deviations above the ranks' median at which a value is marked: rare by chance."""


def build_tables(report: Report) -> list[Table]:
    """Return the report's tables that have data."""
    ranks = [build_rank_table, build_device_table]
    if report["run"]["judged_by"] == DEVICE:
        ranks.reverse()
    made = [
        build_training_table, build_iteration_table, build_iteration_change_table,
        build_critical_path_table, build_change_table, *ranks, build_host_gap_table,
        build_utilization_table,
        build_module_table, build_roofline_table, build_section_table, build_device_section_table,
        build_step_class_table,
        build_collective_table, build_slow_link_table, build_cause_table, build_cpu_table,
        build_out_of_memory_table, build_memory_table, build_gpu_table, build_port_table, build_capture_table,
        build_goodput_table,
    ]  # fmt: skip
    return [table for make in made if (table := make(report)) is not None and table.rows]


def build_host_gap_table(report: Report) -> Table | None:
    """Return where the host code of a typical step is; None if it is a small share of the step."""
    typical = [each["typical"]["s"] for each in report["ranks"] if each["typical"] is not None]
    step_s, gaps = max(typical, default=0.0), report["steps"]["host_gaps"]
    if not step_s or sum(gaps.values()) < _MIN_HOST_SHARE * step_s:
        return None
    shown = {gap: gap_s for gap, gap_s in gaps.items() if gap_s >= _MIN_SHARE * step_s}
    columns = [
        Column("from", [split_gap(gap)[0] for gap in shown], Quantity.TEXT),
        Column("to", [split_gap(gap)[1] for gap in shown], Quantity.TEXT),
        Column("per step", [*shown.values()], help="With this tool's time there."),
        Column("share of step", [gap_s / step_s for gap_s in shown.values()], Quantity.SHARE),
    ]
    return Table(
        "host_gaps", "Host code by place", columns, first=_FIRST_ROWS, noun="place",
        ranged="per step",
    )  # fmt: skip


def build_module_table(report: Report) -> Table:
    """Return the module times per step: the slow rank and the others or, without one, all ranks."""
    slow = next(iter(current_stragglers(report)), None)
    return (_compare_modules(report, slow) if slow is not None else None) or _list_all_modules(
        report
    )


def _compare_modules(report: Report, slow: Verdict) -> Table | None:
    """Compare the slow rank's modules with the median of the other ranks, largest gap first."""
    rank, evidence = str(slow.rank), slow.evidence
    field, what = _module_times_field(slow.phase, on_device=report["run"]["judged_by"] == DEVICE)
    found: list[tuple[str, float, float]] = []
    for module in report["modules"]:
        others = [seconds for other, seconds in module[field].items() if other != rank]
        if rank in module[field] and others:
            found.append((_module_name(module), module[field][rank], statistics.median(others)))
    least_s = _MIN_SHARE * (report["steps"]["p50_s"] or 0.0)
    found = [each for each in found if max(each[1:]) >= least_s]
    more_s = sum(max(0.0, mine - others) for _, mine, others in found)
    if not more_s:
        return None
    found.sort(key=lambda each: each[2] - each[1])
    unit_of = max(each[1] for each in found)
    columns = [
        Column("module", [name for name, _, _ in found], Quantity.TEXT),
        Column(f"rank {rank}", [mine for _, mine, _ in found], unit_of=unit_of),
        Column("other ranks", [others for _, _, others in found], unit_of=unit_of, help="Median of the other ranks."),
        Column("difference", [mine - others for _, mine, others in found], unit_of=unit_of),
        Column("share of difference", [max(0.0, mine - others) / more_s for _, mine, others in found], Quantity.SHARE,
               help=f"Share of the extra module time on rank {rank}."),
    ]  # fmt: skip
    marked = frozenset(row for row, (name, _, _) in enumerate(found) if name in evidence.modules)
    return Table(
        "modules",
        f"Modules, {what} per step{covered_steps(report)}",
        columns,
        marked,
        _FIRST_ROWS,
        noun="module",
        ranged="difference",
    )


def _module_times_field(phase: str | None, *, on_device: bool) -> tuple[ModuleTimes, str]:
    if phase == "backward":
        return "backward_by_rank", "backward time with inner modules"
    return ("device_own_by_rank", "device time") if on_device else ("by_rank", "forward time")


def _list_all_modules(report: Report) -> Table:
    step_s = report["steps"]["p50_s"] or 0.0
    on_device = report["run"]["judged_by"] == DEVICE

    def cost_s(module: Module) -> float | None:
        return module["device_own_s_per_step" if on_device else "own_s_per_step"]

    rows = [
        each
        for each in report["modules"]
        if max(cost_s(each) or 0.0, each["own_s_per_step"]) > _MIN_SHARE * step_s
    ]
    rows.sort(key=lambda each: -(cost_s(each) or 0.0))
    # Device times are from samples.
    is_sampled = on_device and any(each["device_samples"] for each in rows)
    device_columns = [
        Column("device per step", [each["device_own_s_per_step"] for each in rows],
               help="Without inner modules. Missing below 5 samples."),
        Column("at least", [each["device_own_low_s"] for each in rows], optional=0.35),
        Column("at most", [each["device_own_high_s"] for each in rows], optional=0.35),
        Column("samples", [each["device_samples"] for each in rows], Quantity.NUMBER, 0.3,
               help="Steps in which the module was timed on the device while the device had work"
               " queued. Modules that do the same work share their samples."),
    ]  # fmt: skip
    costs_s = [cost_s(each) for each in rows]
    backward = [each["backward_s"] for each in rows]
    columns = [
        Column("module", [_module_name(each) for each in rows], Quantity.TEXT),
        *columns_if(is_sampled, *(each for each in device_columns if any(each.values))),
        Column("forward per step", [each["own_s_per_step"] for each in rows],
               help="Mean over the ranks, without the module's inner modules."),
        *columns_if(
            step_s and any(costs_s),
            Column("share of step", _shares(costs_s, step_s), Quantity.SHARE, 0.2),
        ),
        Column("forward p50", [each["own_s"]["p50_s"] for each in rows], optional=0.6,
               help="Of one call."),
        *columns_if(
            any(backward),
            Column("backward p50", [each and each["p50_s"] for each in backward], optional=0.4,
                   help="The time includes the module's inner modules."),
        ),
        Column("calls", [each["calls"] for each in rows], Quantity.NUMBER, 0.8,
               help="Timed calls on all ranks."),
    ]  # fmt: skip
    ranged = (
        "device per step"
        if any(each.title == "device per step" for each in columns)
        else "forward per step"
    )
    return Table("modules", "Modules", columns, first=_FIRST_ROWS, noun="module", ranged=ranged)


def _shares(seconds: Sequence[float | None], step_s: float) -> list[float | None]:
    return [None if each is None or not step_s else each / step_s for each in seconds]


def _module_name(module: Module) -> str:
    return f"{module['name']} (outside inner modules)" if module["is_root"] else module["name"]


def build_section_table(report: Report) -> Table:
    """Return the user's sections, largest share of a typical step first."""
    rows, step_s = report["sections"], report["steps"]["p50_s"]
    outside_s = [each["host_s_per_typical_step"] for each in rows]
    device = [each["device_s"] for each in rows]
    per_step_s = [each["s_per_step"] for each in rows]
    columns = [
        Column("section", [each["name"] for each in rows], Quantity.TEXT),
        Column("calls", [each["calls"] for each in rows], Quantity.NUMBER, 0.8),
        Column("p50", [each["total_s"]["p50_s"] for each in rows], help="Of one call."),
        Column("per step", per_step_s, help="Time in a typical step, averaged over the ranks."),
        *columns_if(
            step_s,
            Column("share of step", _shares(per_step_s, step_s or 0.0), Quantity.SHARE, 0.1),
        ),
        *columns_if(
            any(outside_s),
            Column("outside phases", outside_s, optional=0.5,
                   help="Time of the section that is outside all phases of the step."),
        ),
        *columns_if(any(device), Column("device p50", [each and each["p50_s"] for each in device])),
    ]  # fmt: skip
    return Table(
        "sections", "Sections", columns, first=_FIRST_ROWS, noun="section", ranged="per step"
    )


def build_device_section_table(report: Report) -> Table:
    """Return the device sections, which kernels mark on the device."""
    rows = report["device_sections"]
    slowest = [_slowest_rank(each["by_rank"]) for each in rows]
    windows = [each["over_all_ranks"] for each in rows]
    columns = [
        Column("device section", [each["name"] for each in rows], Quantity.TEXT),
        Column("count", [each["calls"] for each in rows], Quantity.NUMBER, 0.5),
        Column("p50", [each["device_s"]["p50_s"] for each in rows]),
        Column("p99", [each["device_s"]["p99_s"] for each in rows], optional=0.3),
        Column("max", [each["device_s"]["max_s"] for each in rows], optional=0.2),
        *columns_if(
            any(rank for rank, _ in slowest),
            Column("slowest rank", [rank for rank, _ in slowest], Quantity.TEXT),
            Column("its mean", [mean_s for _, mean_s in slowest], optional=0.4),
        ),
        *columns_if(
            any(windows),
            Column(
                "median of ranks",
                [None if each is None else each["rank_median_ns"] / 1e9 for each in windows],
                optional=0.6,
                help="Median of the ranks in the last statistics that were merged on the device.",
            ),
            Column(
                "outlier",
                [_outlier_text(each) for each in windows],
                Quantity.TEXT,
                help="A rank that is at least 5 robust standard deviations above the median.",
            ),
        ),
    ]
    return Table(
        "device_sections",
        "Device sections",
        columns,
        first=_FIRST_ROWS,
        noun="section",
        ranged="p50",
    )


def _slowest_rank(mean_s: Mapping[str, float]) -> tuple[str | None, float | None]:
    if len(mean_s) < 2:
        return None, None
    rank = max(mean_s, key=lambda each: mean_s[each])
    return rank, mean_s[rank]


def _outlier_text(window: Mapping[str, float] | None) -> str | None:
    if window is None:
        return None
    found = window["slowest"] >= 0 and window["score"] >= _OUTLIER
    return f"rank {window['slowest']:.0f} ({window['score']:.0f} deviations)" if found else "none"


def build_step_class_table(report: Report) -> Table:
    """Return the classes of longer steps than the typical step, costliest first, then of shorter
    ones.
    """
    steps = report["steps"]
    rows = [*steps["long"], *steps["short"]]
    columns = [
        Column("outlier steps", [_step_kind(each) for each in rows], Quantity.TEXT),
        Column(
            "count",
            [each["count"] for each in rows],
            Quantity.NUMBER,
            help="Mean number of steps per rank.",
        ),
        Column("duration", [each["mean_s"] for each in rows], help="Mean duration of a step."),
        Column(
            "excess", [each["more_s"] for each in rows], help="Mean excess over the typical step."
        ),
        Column(
            "share of steps",
            [each["share"] for each in rows],
            Quantity.SHARE,
            help="Share of the total time of all steps.",
        ),
        Column(
            "mostly in", [phase_name(each["part"]) or None for each in rows], Quantity.TEXT, 0.3
        ),
        *columns_if(
            any(each["waited_for"] is not None for each in rows),
            Column("caused by rank", [each["waited_for"] for each in rows], Quantity.TEXT, 0.1),
        ),
        Column("steps", [_step_numbers_text(each["steps"]) for each in rows], Quantity.TEXT, 0.6),
    ]
    note = (
        f"{steps['alike']} of {steps['count']} steps are typical, {steps['warm_up']} are warm-up"
        " steps."
    )
    return Table(
        "outlier_steps",
        "Outlier steps",
        columns,
        first=_FIRST_ROWS,
        note=note,
        noun="kind",
        ranged="duration",
    )


def _step_kind(each: LongSteps) -> str:
    if each["kinds"]:
        return " and ".join(each["kinds"])
    if each["more_s"] < 0:
        return "shorter"
    return "stall of one rank" if each["waited_for"] is not None else "unknown cause"


def _step_numbers_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[-_MAX_STEPS:]))
    return f"..., {shown}" if len(steps) > _MAX_STEPS else shown


def build_cause_table(report: Report) -> Table | None:
    """Compare measurements on the first slow rank, while it is slow, with those on the other ranks."""
    for row in current_stragglers(report):
        diagnosis = row.diagnosis
        if diagnosis is not None and diagnosis.signals:
            missing = ", ".join(diagnosis.not_measured)
            note = f"Not measured: {missing}." if missing else ""
            return build_signal_table(
                "causes", row.rank, diagnosis.signals, diagnosis.others_signals, note
            )
    return None


def build_signal_table(
    key: str,
    rank: int | None,
    signals: Mapping[str, float],
    others: Mapping[str, float],
    note: str = "",
) -> Table:
    """Compare the measurements on a slow rank with their medians over the other ranks."""
    columns = [
        Column("measurement", [name.replace("_", " ") for name in signals], Quantity.TEXT),
        Column(f"rank {rank}", list(signals.values()), Quantity.NUMBER),
        Column("other ranks", [others.get(name, NOT_MEASURED) for name in signals], Quantity.NUMBER,
               help="Median of the other ranks."),
    ]  # fmt: skip
    title = f"Measurements on rank {rank} while it is slow"
    return Table(key, title, columns, first=_FIRST_ROWS, note=note, noun="measurement")


def build_out_of_memory_table(report: Report) -> Table | None:
    """Return the largest groups of live memory blocks at the time when a device ran out of
    memory.
    """
    named = {row.rank for row in report["verdicts"] if row.kind == "out_of_memory"}
    for rank in report["ranks"]:
        oom = rank["out_of_memory"] if rank["rank"] in named else None
        if oom is not None and (held := oom["table"]) is not None:
            blocks, events = held["rows"], held["history_events"]
            columns = [
                Column("allocated at", [allocation_place(each) for each in blocks], Quantity.TEXT),
                Column("size", [each["bytes"] for each in blocks], Quantity.BYTES),
                Column("blocks", [each["blocks"] for each in blocks], Quantity.NUMBER),
                *columns_if(
                    events,
                    Column(
                        "new blocks",
                        [each["new_blocks"] for each in blocks],
                        Quantity.NUMBER,
                        0.5,
                        f"Blocks within the last {events} allocations and frees.",
                    ),
                ),
            ]
            note = f"The full list is in {oom['file']}."
            title = f"Memory of rank {oom['rank']} when it ran out"
            return Table(
                "out_of_memory",
                title,
                columns,
                first=_FIRST_SITES,
                note=note,
                noun="allocation site",
                ranged="size",
            )
    return None


def build_capture_table(report: Report) -> Table:
    """Return the captured profiles, newest first."""
    rows = report["captures"][::-1]
    columns = [
        Column("rank", [each["rank"] for each in rows], Quantity.TEXT),
        Column("steps", [_captured_steps_text(each) for each in rows], Quantity.TEXT),
        Column("trace", [_trace_path(each) for each in rows], Quantity.TEXT),
        Column(
            "paused",
            [each["paused_s"] for each in rows],
            optional=0.5,
            help="Time for which training paused to write the files.",
        ),
    ]
    note = "Open traces in ui.perfetto.dev. Paths are relative to the run directory."
    return Table("captures", "Profiles", columns, first=_FIRST_ROWS, note=note, noun="profile")


def _captured_steps_text(each: Capture) -> str | None:
    first, last = each["first_step"], each["last_step"]
    return None if first is None or last is None else format_ranges(range(first, last + 1))


def _trace_path(each: Capture) -> str:
    if TRACE in each["files"]:
        return each["files"][TRACE]["path"]
    return f"none: {each['ended'] or each['left_out'].get(TRACE, 'unknown reason')}"
