"""Tables with a row for each rank: host and device step times, CPU use, and memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torchlens_perf.analysis.statistics.quantities import format_duration, format_duration_or_dash
from torchlens_perf.run.records import PARTS as RECORDED_PARTS
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.cpu import describe_programs
from torchlens_perf.verdicts.words.report import DeviceTimes, Rank, Report
from torchlens_perf.view.specs import NOT_MEASURED, Column, Quantity, Table, Value, columns_if
from torchlens_perf.view.theme import PARTS

FIRST_ROWS = 8
_FIRST_SLOW, _FIRST_EQUAL = 5, 4
_MIN_SECTION_SHARE = 0.5
_MIN_COLUMN_SHARE = 0.02
"""Smallest share of a step for which a part has a column."""
_SHOWN_PARTS = tuple(part for part in RECORDED_PARTS if part != "tool")
_COMPUTE = "Step time without comm wait and CPU contention."
_DEVICE_HELP = {
    "communication": "Time for which the device waited for other ranks or transfers.",
    "data": "Time between phases for which the device waited for the data loader.",
    "host": "Time between phases for which the device waited for other host code.",
}
_HOST_HELP = {
    "communication": "Time for which the rank was blocked in communication, by other ranks or by transfers.",
    "host": "Time in Python and other host code between phases.",
}


def current_stragglers(report: Report) -> list[Verdict]:
    """Return the verdicts on ranks that are slow now, costliest first."""
    return [row for row in report["verdicts"] if row.kind == "straggler" and not row.is_over]


def slow_ranks(report: Report) -> dict[int, int]:
    """Return the ranks that are currently slow, each with the index of its verdict."""
    found = list(enumerate(current_stragglers(report)))
    # Of several verdicts on a rank, the first one counts.
    return {rank: place for place, row in reversed(found) for rank in row.ranks}


def slowest_ranks(report: Report) -> list[int]:
    """Return the slowest rank of each current verdict on slow ranks, costliest first."""
    return [row.rank for row in current_stragglers(report) if row.rank is not None]


def build_rank_table(report: Report) -> Table | None:
    """Return the typical step of each rank by the host's clock, slow ranks first."""
    timed = [rank for rank in report["ranks"] if rank["typical"] is not None]
    if not timed:
        return None
    ranks, slow, first = _order_ranks(timed, slow_ranks(report), compute_s)
    several = report["run"]["world_size"] > 1
    steps_s = [rank["typical"]["s"] for rank in ranks if rank["typical"]]
    unit_of = max(steps_s) / 3
    # With devices, their work is not part of the host's step, so the host table has no compute
    # column.
    by_host = report["run"]["judged_by"] != DEVICE
    seen = {part for rank in ranks for part in (*rank["phases"], *rank["not_measured"])}
    contention_s = [_contention_s(rank) for rank in ranks]
    last = [rank["arrived_last"] for rank in ranks]
    # Each process group has a last rank of its own.
    whole = "in own groups" if sum(each["share"] for each in last if each) > 1.001 else "to arrive"
    memory = [rank["memory"]["max_bytes"] for rank in ranks]
    clock = ", host clock" if report["run"]["device"] is not None else ""
    columns = [
        *columns_if(several, *_rank_columns(ranks)),
        Column("step", steps_s, unit_of=unit_of, optional=0.15,
               help="Mean duration of the typical steps."),
        *columns_if(
            by_host,
            Column("compute", [compute_s(rank) for rank in ranks], unit_of=unit_of, help=_COMPUTE),
        ),
        *(
            _build_phase_column(part, ranks, unit_of)
            for part in _SHOWN_PARTS
            if part in seen and (several or part != "communication")
        ),
        *columns_if(
            any(
                (seconds or 0) >= _MIN_COLUMN_SHARE * step_s
                for seconds, step_s in zip(contention_s, steps_s, strict=True)
            ),
            Column(PARTS["cpu"].name, contention_s, unit_of=unit_of, optional=0.3,
                   help="Time for which the thread was runnable but not scheduled. Other columns"
                   " exclude this time."),
        ),
        *columns_if(
            several and any(last),
            Column(f"last {whole}", [each and each["share"] for each in last], Quantity.SHARE, 0.5,
                   "Share of the compared collectives of the rank's process groups in which it arrived last."),
        ),
        *columns_if(
            any(memory),
            Column(f"peak {'host ' * bool(clock)}memory", memory, Quantity.BYTES, 0.9,
                   "Largest amount of host memory that the rank used."),
        ),
    ]  # fmt: skip
    title = f"Typical step{' of each rank' * several}{covered_steps(report)}{clock}"
    missing = sorted({part for rank in ranks for part in rank["not_measured"]})
    notes = [
        _compute_note(report, {rank["rank"]: compute_s(rank) for rank in ranks}) if by_host else "",
        f"{', '.join(PARTS[part].name for part in missing)}: not measured separately, but"
        " included in backward." if missing else "",
    ]  # fmt: skip
    note = " ".join(filter(None, notes))
    return Table(
        "ranks", title, columns, slow, first, note, "rank", "compute" if by_host else "step"
    )


def _build_phase_column(part: str, ranks: Sequence[Rank], unit_of: float) -> Column:
    shares = [rank["phases"][part]["share"] for rank in ranks if part in rank["phases"]]
    left_out = 0.4 if part == "communication" else 1 - max(shares, default=0.0)
    return Column(
        PARTS[part].name,
        [_phase_without_contention(rank, part) for rank in ranks],
        unit_of=unit_of,
        optional=max(0.2, left_out),
        help=_HOST_HELP.get(part, ""),
    )


def _compute_note(report: Report, compute_s: Mapping[int, float | None]) -> str:
    """Return a note if the verdict on a slow rank and the table show different compute times.

    The verdict uses the mean of the slow steps, while the table shows a typical step. compute_s:
    the table's values by rank.
    """
    for row in current_stragglers(report):
        work_s, rank = row.evidence.work_s, row.rank
        since = None if row.held is None else row.held.since_step
        if work_s is not None and rank is not None and since is not None:
            mean = format_duration(work_s)
            if mean != format_duration_or_dash(compute_s.get(rank)):
                return f"Since step {since}, rank {rank} computes {mean} per step on average."
    return ""


def covered_steps(report: Report) -> str:
    """Return the steps of a table if the verdict on a slow rank is about fewer steps; else ""."""
    is_later = any(row.held and row.held.since_step for row in current_stragglers(report))
    return f", steps 0 to {report['steps']['made'] - 1}" if is_later else ""


def build_device_table(report: Report) -> Table | None:
    """Return the typical step of each rank by its device's clock, slow ranks first."""
    devices = {
        rank["rank"]: rank["device"] for rank in report["ranks"] if rank["device"] is not None
    }
    if not devices:
        return None

    timed = [rank for rank in report["ranks"] if rank["rank"] in devices]
    ranks, slow, first = _order_ranks(
        timed, slow_ranks(report), lambda rank: _device_step_s(devices[rank["rank"]])[1]
    )
    times = [devices[rank["rank"]] for rank in ranks]
    several, judged = report["run"]["world_size"] > 1, any(each["parts"] for each in times)
    steps_s = [_device_step_s(each)[0] for each in times]
    unit_of = max(steps_s) / 3
    work_s = [_device_step_s(each)[1] if each["work_s"] else None for each in times]
    parts_s = {
        part: [_device_part_s(each, part, judged=judged) for each in times] for part in _SHOWN_PARTS
    }
    behind_s = [each["behind_s"]["p50_s"] for each in times]
    caught_up = [each["caught_up"] for each in times]
    columns = [
        *columns_if(several, *_rank_columns(ranks)),
        Column("step", steps_s, unit_of=unit_of,
               help="Mean duration of the typical steps." if judged else "The median."),
        *columns_if(
            judged,
            Column("compute", work_s, unit_of=unit_of, optional=0.1,
                   help="Step time without comm wait, including waits of the device for its"
                   " host."),
        ),
        *(
            Column(PARTS[part].name, values, unit_of=unit_of,
                   optional=1 - min(0.8, max(value or 0.0 for value in values) / (3 * unit_of)),
                   help=_DEVICE_HELP.get(part, ""))
            for part, values in parts_s.items()
            if any(values)
        ),
        *columns_if(
            any(value is not None for value in behind_s),
            Column("lag behind host", behind_s, optional=0.9,
                   help="Median delay between the end of a forward or backward pass on the host and"
                   " on the device."),
        ),
        *columns_if(
            any(value is not None for value in caught_up),
            Column("starved passes", caught_up, Quantity.SHARE, 0.95,
                   "Share of forward and backward passes after which the device had no queued work"
                   " and waited for kernel launches."),
        ),
    ]  # fmt: skip
    notes = [
        _compute_note(report, dict(zip((rank["rank"] for rank in ranks), work_s, strict=True)))
    ] if judged else []  # fmt: skip
    clocks = " and ".join(sorted({str(each["clock"]) for each in times if each["clock"]}))
    title = (
        f"Typical step of {'each rank' if several else 'the device'}{covered_steps(report)},"
        " device clock"
    )
    note = " ".join(filter(None, (*notes, f"Measured by {clocks}." if clocks else "")))
    return Table(
        "device_times", title, columns, slow, first, note, "rank", "compute" if judged else "step"
    )


def build_cpu_table(report: Report) -> Table:
    """Return the CPU use of ranks and other processes, with no row without CPU contention."""
    users = {rank["rank"]: rank["cpu"] for rank in report["ranks"] if rank["cpu"] is not None}
    shares = {
        rank: cpu["others_share"] for rank, cpu in users.items() if cpu["others_share"] is not None
    }
    waiting = [rank for rank in report["ranks"] if rank["rank"] in shares]
    ranks, slow, first = _order_ranks(
        waiting, slow_ranks(report), lambda rank: shares[rank["rank"]]
    )
    cpus = [users[rank["rank"]] for rank in ranks]
    columns = [
        *columns_if(report["run"]["world_size"] > 1, *_rank_columns(ranks)),
        Column("CPUs", [each["cpus"] for each in cpus], Quantity.NUMBER, help="Number of CPUs that the rank may use."),
        Column("threads", [each["threads"] for each in cpus], Quantity.NUMBER,
               help="Number of threads that torch uses for an operation."),
        Column("child processes", [each["workers"] for each in cpus], Quantity.NUMBER,
               help="Child processes of the rank, such as data loader workers."),
        Column("other programs", [each["others_share"] for each in cpus], Quantity.SHARE,
               help="Share of the rank's CPU time that programs outside the job used."),
        Column("busiest programs", [describe_programs(report, rank) or None for rank in ranks], Quantity.TEXT),
    ]  # fmt: skip
    return Table("cpus", "CPU use", columns, slow, first, noun="rank", ranged="other programs")


def build_memory_table(report: Report) -> Table:
    """Return the memory statistics of each rank's device allocator, most reserved memory first."""
    readings = {
        rank["rank"]: device
        for rank in report["ranks"]
        if (device := rank["memory"]["device"]) is not None
    }
    read = [rank for rank in report["ranks"] if rank["rank"] in readings]
    ranks, slow, first = _order_ranks(
        read, {}, lambda rank: readings[rank["rank"]]["reserved_bytes"] or 0.0
    )
    devices = [readings[rank["rank"]] for rank in ranks]
    growths = [rank["memory"]["growth"] for rank in ranks]
    columns = [
        *columns_if(report["run"]["world_size"] > 1, *_rank_columns(ranks)),
        Column("allocated", [each["allocated_bytes"] for each in devices], Quantity.BYTES),
        Column("reserved", [each["reserved_bytes"] for each in devices], Quantity.BYTES),
        Column(
            "peak allocated",
            [each["peak_allocated_bytes"] for each in devices],
            Quantity.BYTES,
            0.1,
        ),
        Column("limit", [each["limit_bytes"] for each in devices], Quantity.BYTES, 0.4),
        Column(
            "fragmentation",
            [each["fragmentation"] for each in devices],
            Quantity.SHARE,
            0.2,
            "Share of reserved memory that is free but not releasable.",
        ),
        Column("alloc retries", [each["alloc_retries"] for each in devices], Quantity.NUMBER, 0.3),
        *columns_if(
            any(growths),
            Column(
                "growth per step",
                [each and each["bytes_per_step"] for each in growths],
                Quantity.BYTES,
                0.15,
            ),
        ),
    ]
    note = ""
    if any(each["peak_resets"] for each in devices):
        note = "The job resets the allocator's peak, so the highest peak may be missing."
    return Table("memory", "Device memory", columns, slow, first, note, "rank", "reserved")


def _order_ranks(
    ranks: Sequence[Rank], place: Mapping[int, int], size: Callable[[Rank], float]
) -> tuple[list[Rank], frozenset[int], int | None]:
    """Return the ranks in display order, indexes of slow rows, and the number of rows shown first.

    Slow ranks come first, then ranks of larger size. If many ranks are slow, healthy ranks follow
    after a few of them, so the first rows contain both. place: the result of slow_ranks().
    """
    last = max(place.values(), default=0) + 1
    found = sorted(
        ranks, key=lambda rank: (place.get(rank["rank"], last), -size(rank), rank["rank"])
    )
    first = None
    if len(found) > FIRST_ROWS:
        named = sum(rank["rank"] in place for rank in found)
        first = FIRST_ROWS if named else _FIRST_EQUAL
        if _FIRST_SLOW < named < len(found):
            others = found[named:][: FIRST_ROWS - _FIRST_SLOW]
            found = [
                *found[:_FIRST_SLOW],
                *others,
                *found[_FIRST_SLOW:named],
                *found[named + len(others) :],
            ]
    return found, frozenset(row for row, rank in enumerate(found) if rank["rank"] in place), first


def _rank_columns(ranks: Sequence[Rank]) -> list[Column]:
    """Return the columns that identify a rank: number, host if hosts differ, state if a rank
    died or failed.
    """
    hosts = [rank["host"] for rank in ranks]
    states = [rank["state"] for rank in ranks]
    return [
        Column("rank", [rank["rank"] for rank in ranks], Quantity.TEXT),
        *columns_if(len(set(hosts)) > 1, Column("host", hosts, Quantity.TEXT, 0.6)),
        *columns_if({"died", "failed"} & set(states), Column("state", states, Quantity.TEXT)),
    ]


def compute_s(rank: Rank) -> float:
    """Return the compute time of a typical step; 0 if the rank has no typical step.

    If CPU contention was not measured, return the step time without comm wait.
    """
    typical = rank["typical"]
    if typical is None:
        return 0.0
    return typical["own_s"] if typical["work_s"] is None else typical["work_s"]


def _contention_s(rank: Rank) -> float | None:
    lack = rank["typical"] and rank["typical"]["lack_of_cpu"]
    return sum(lack.values()) if lack is not None else None


def _phase_without_contention(rank: Rank, part: str) -> Value:
    """Return the time of a phase without CPU contention.

    CPU contention has its own column, so all columns add up to the step.
    """
    if part not in rank["phases"]:
        return NOT_MEASURED if part in rank["not_measured"] else None
    return host_parts(rank)[part]


def host_parts(rank: Rank) -> dict[str, float]:
    """Return the parts of a rank's typical step in seconds.

    CPU contention is a separate part, `cpu`.
    """
    typical = rank["typical"]
    if typical is None:
        return {}
    lack = typical["lack_of_cpu"] or {}
    parts = {
        part: max(0.0, seconds - lack.get(part, 0.0)) for part, seconds in typical["parts"].items()
    }
    return {**parts, "cpu": sum(lack.values())}


def step_parts(rank: Rank, *, by_device: bool) -> dict[str, float]:
    """Return the parts of a rank's typical step in seconds, by the host's or the device's clock."""
    if not by_device:
        return host_parts(rank)
    return dict(rank["device"]["parts"]) if rank["device"] is not None else {}


def parts_by_rank(report: Report) -> dict[int, dict[str, float]]:
    """Return the parts of each rank's typical step, by the clock that verdicts use."""
    by_device = report["run"]["judged_by"] == DEVICE
    found = {rank["rank"]: step_parts(rank, by_device=by_device) for rank in report["ranks"]}
    return {rank: parts for rank, parts in found.items() if parts}


def find_largest_section(report: Report, seconds: float) -> str:
    """Return the user section that takes at least half of this host time; "" if no section does."""
    found = ((each["host_s_per_typical_step"] or 0.0, each["name"]) for each in report["sections"])
    most_s, name = max(found, default=(0.0, ""))
    return name if most_s and most_s >= _MIN_SECTION_SHARE * seconds else ""


def part_name(report: Report, part: str, seconds: float) -> str:
    """Return the name of a step part.

    Host code is shown with the section that takes most of it. seconds: duration of the part.
    """
    section = find_largest_section(report, seconds) if part == "host" else ""
    return f"{PARTS[part].name} (section {section})" if section else PARTS[part].name


def mean_parts(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of several ranks' parts."""
    found = list(parts)
    names = (*RECORDED_PARTS, "cpu")
    return (
        {part: sum(each.get(part, 0.0) for each in found) / len(found) for part in names}
        if found
        else {}
    )


def _device_step_s(device: DeviceTimes) -> tuple[float, float]:
    """Return a device's step in seconds, and without comm wait.

    A typical step is the sum of its parts. A device without parts has only a median.
    """
    step_s = sum(device["parts"].values()) or device["step_s"]["p50_s"] or 0.0
    return step_s, step_s - device["parts"].get("communication", 0.0)


def _device_part_s(device: DeviceTimes, part: str, *, judged: bool) -> float | None:
    if judged:
        return device["parts"].get(part)
    phase = device["phases"].get(part)
    return None if phase is None else phase["s_per_step"]
