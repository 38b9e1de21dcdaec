"""The lines of one rank's screen: what it is doing now, where its step goes beside that of the others, and its host."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import amount, duration, duration_or_dash, percent, steps_whole
from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.run.records import PARTS
from torchlens_perf.top.cells import ASCII_SHADES
from torchlens_perf.top.overview import clock_time, rule, seconds_of, step_parts
from torchlens_perf.top.verdict_lines import verdict_lines
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.hang import place
from torchlens_perf.verdicts.words.order import ranks_of
from torchlens_perf.view.theme import EXCESS_BOUNDS, EXCESS_STYLES

if TYPE_CHECKING:
    from torchlens_perf.top.lettering import Lettering
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import Collective, Rank, Report

_MAX_MODULES, _MAX_COLLECTIVES = 12, 12
_NAMES = {"communication": "wait"}


def rank_lines(view: View, rank: int, width: int, lettering: Lettering) -> list[Text]:
    """All that is known of a rank."""
    report = view.report
    if report is None:
        return []
    found = next((each for each in report["ranks"] if each["rank"] == rank), None)
    if found is None:
        return [
            Text(f"Nothing has been heard of rank {rank}: its node's sidecar has not written, or the rank not begun.")
        ]
    lines = _who(found, report, width, lettering)
    about = [row for row in report["verdicts"] if rank in ranks_of(row)]
    if about:
        lines += [rule("verdicts on it", width, lettering), *verdict_lines(about, width, lettering, details=True)]
    lines += _over_the_run(report, rank, width, lettering)
    alike = {each for each in view.populations if view.populations[each] == view.populations.get(rank)} - {rank}
    lines += _parts(found, report, alike, width, lettering)
    lines += _modules(report, rank, alike, width, lettering)
    lines += _collectives(report["collectives"], rank, width, lettering)
    lines += _memory(found, width, lettering)
    lines += _gpus(report, rank, width, lettering)
    return lines


def _who(rank: Rank, report: Report, width: int, lettering: Lettering) -> list[Text]:
    local = "" if rank["local_rank"] is None else f" (local rank {rank['local_rank']})"
    attempt = f", attempt {rank['attempt']}" if rank["attempt"] else ""
    texts = [f"rank {rank['rank']}{local} on {rank['host']}, pid {rank['pid']}{attempt}: {rank['state']}"]
    now = rank["now"]
    if now is not None:
        within = f" for {duration(now['inside_s'])}" if now["inside_s"] is not None else ""
        at = f"at {clock_time(seconds_of(as_of))}: " if (as_of := report["run"]["as_of"]) else ""
        texts.append(f"{at}in step {now['step']} for {duration(now['step_s'])}, {place(now['inside'])}{within}")
    elif rank["state"] == "died":
        texts.append(f"died {place(rank['inside'])}")
    step, own = rank["step_s"], rank["own_s"]
    times = f"step p50 {duration_or_dash(step['p50_s'])}, p95 {duration_or_dash(step['p95_s'])}"
    last_step = rank["last_step"]
    if last_step is not None:
        texts.append(
            f"{rank['steps']} steps, the last one {last_step}; {times}, max {duration_or_dash(step['max_s'])}; "
            f"without waiting p50 {duration_or_dash(own['p50_s'])}"
        )
    last = rank["arrived_last"]
    if last is not None:
        texts.append(f"came last to {percent(last['share'])} of {last['joined']:,} collectives")
    whole = steps_whole(rank["coverage"], any_step=last_step is not None)
    texts.append(f"data: {rank['lost']:,} records lost, {whole}")
    return [Text(line) for text in texts for line in lettering.wrapped(text, width, 2)]


def _over_the_run(report: Report, rank: int, width: int, lettering: Lettering) -> list[Text]:
    """How much more work it had than the others, window by window."""
    heat = report["heat"]
    row = next((each for each in heat["ranks"] if each["rank"] == rank), None) if heat is not None else None
    if heat is None or row is None:
        return []
    together = -(-len(row["excess"]) // max(1, width - 2))
    line = Text("  ")
    for first in range(0, len(row["excess"]), together):
        values = [value for value in row["excess"][first : first + together] if value is not None]
        if not values:
            line.append(" ")
            continue
        level = sum(sum(values) / len(values) >= bound for bound in EXCESS_BOUNDS)
        line.append(ASCII_SHADES[level], style=EXCESS_STYLES[level])
    last = heat["first_steps"][-1] + heat["width"] - 1
    shades = ", ".join(f"{shade} {bound:.0%}" for shade, bound in zip(ASCII_SHADES[1:], EXCESS_BOUNDS, strict=True))
    title = f"work above the others, steps {heat['first_steps'][0]} to {last} ({shades})"
    return [rule(title, width, lettering), line]


def _parts(rank: Rank, report: Report, alike: set[int], width: int, lettering: Lettering) -> list[Text]:
    """Its typical step, beside the median of those that do the same."""
    by_device = report["run"]["judged_by"] == DEVICE
    mine = step_parts(rank, by_device=by_device)
    others = [step_parts(each, by_device=by_device) for each in report["ranks"] if each["rank"] in alike]
    others = [parts for parts in others if parts]
    clock = "device" if by_device else "host"
    whose = "another's that does" if len(others) == 1 else f"the median of {len(others)} that do"
    beside = f", beside {whose} the same work" if others else ""
    lines = [rule(f"its step by the {clock}{beside}", width, lettering)]
    if not mine:
        return [*lines, Text("not known", style="dim")]
    head = f"{'':<10}{'here':>10}" + (f"{'others':>10}{'more':>10}" if others else "")
    lines.append(Text(head, style="dim"))
    for part in PARTS:
        if not by_device and part in rank["not_measured"]:
            lines.append(Text(f"{_NAMES.get(part, part):<10}{'not measured: part of backward':>10}", style="dim"))
            continue
        median = statistics.median([parts.get(part, 0.0) for parts in others]) if others else None
        if not mine.get(part) and not median:
            continue
        lines.append(_beside(_NAMES.get(part, part), 10, mine.get(part, 0.0), median, sum(mine.values())))
    lack = rank["typical"]["lack_of_cpu"] if rank["typical"] is not None and not by_device else None
    if lack is not None and sum(lack.values()) > 0:
        lines.append(Text(f"{'no CPU':<10}{duration(sum(lack.values())):>10}  of that, ready without a free CPU"))
    return lines


def _beside(name: str, width: int, here_s: float, others_s: float | None, step_s: float) -> Text:
    """A line of a table: a time here and on the others, and the difference, which stands out where it is large."""
    line = Text(f"{name:<{width}}{duration(here_s):>10}")
    if others_s is not None:
        more_s = here_s - others_s
        large = step_s > 0 and more_s >= EXCESS_BOUNDS[0] * step_s
        more = f"{'+' if more_s > 0 else ''}{duration(more_s)}"
        line.append(f"{duration(others_s):>10}").append(f"{more:>10}", style="bold red" if large else "dim")
    return line


def _modules(report: Report, rank: int, alike: set[int], width: int, lettering: Lettering) -> list[Text]:
    """Own forward times a step, those first that take most more than on ranks that do the same."""
    rows = []
    for module in report["modules"]:
        mine = module["by_rank"].get(str(rank))
        if mine is not None:
            others = [value for key, value in module["by_rank"].items() if int(key) in alike]
            rows.append((module["name"], mine, statistics.median(others) if others else None))
    if not rows:
        return []
    rows.sort(key=lambda row: (row[2] - row[1] if row[2] is not None else 0.0, -row[1]))
    shown, total_s = rows[:_MAX_MODULES], sum(row[1] for row in rows)
    room = max(12, width - 30)
    rest = f" ({len(shown)} of {len(rows)})" if len(shown) < len(rows) else ""
    lines = [rule(f"modules: own forward time a step{rest}", width, lettering)]
    several = any(others is not None for _, _, others in shown)
    lines.append(Text(f"{'':<{room}}{'here':>10}" + (f"{'others':>10}{'more':>10}" if several else ""), style="dim"))
    return lines + [
        _beside(lettering.fitted(name, room - 1) + " ", room, mine, others, total_s) for name, mine, others in shown
    ]


def _collectives(rows: Sequence[Collective], rank: int, width: int, lettering: Lettering) -> list[Text]:
    """How long it waited for the others in each, by the mean, and how often it came last."""
    mine = [(row, row["by_rank"][str(rank)]) for row in rows if str(rank) in row["by_rank"] and row["joined"]]
    if not mine:
        return []
    mine.sort(key=lambda each: -(each[1]["exposed_wait_s"] + each[1]["overlapped_wait_s"]))
    room = max(16, width - 34)
    lines = [rule("collectives: mean wait for the other ranks", width, lettering)]
    lines.append(Text(f"{'':<{room}}{'joined':>8}{'wait':>12}{'came last':>12}", style="dim"))
    for row, values in mine[:_MAX_COLLECTIVES]:
        wait_s = (values["exposed_wait_s"] + values["overlapped_wait_s"]) / row["joined"]
        at_least = ">= " if not row["joined_whole"] else "~ " if row["asynchronous"] else ""
        last = percent(values["last"] / row["joined"]) if row["joined_whole"] else "not known"
        name = lettering.fitted(
            f"{row['operation']} of ranks {row['ranks'] or row['ranks_seen']}, group {row['group']}", room - 1
        )
        lines.append(Text(f"{name} {row['joined']:>8,}{at_least + duration(wait_s):>12}{last:>12}"))
    if any(row["asynchronous"] for row, _ in mine):
        lines.append(
            Text(lettering.fitted("~ asynchronous: how much earlier it came, not time that it was blocked", width))
        )
    return lines


def _memory(rank: Rank, width: int, lettering: Lettering) -> list[Text]:
    memory, texts = rank["memory"], []
    if memory["last_bytes"] is not None and memory["max_bytes"] is not None:
        source = f" ({memory['source']})" if memory["source"] else ""
        texts.append(f"now {amount(memory['last_bytes'], 'B')}, most {amount(memory['max_bytes'], 'B')}{source}")
    device = memory["device"]
    if device is not None:
        known = {
            "allocated": device["allocated_bytes"], "reserved": device["reserved_bytes"],
            "peak": device["peak_allocated_bytes"], "limit": device["limit_bytes"],
        }  # fmt: skip
        texts.append(
            "device: " + ", ".join(f"{name} {amount(value, 'B')}" for name, value in known.items() if value is not None)
        )
        if device["retries_in"] is not None and device["retries_in"]["count"]:
            texts.append(
                f"cudaMalloc retries: {device['retries_in']['count']} in {device['retries_in']['steps']} steps"
            )
    if rank["out_of_memory"] is not None:
        texts.append(f"ran out of memory in step {rank['out_of_memory']['step']}: see the verdicts")
    lines = [Text(line) for text in texts for line in lettering.wrapped(text, width, 2)]
    return [rule("memory", width, lettering), *(lines or [Text("not measured", style="dim")])]


def _gpus(report: Report, rank: int, width: int, lettering: Lettering) -> list[Text]:
    """Telemetry of the GPUs that it computes on; means over the run."""
    lines: list[Text] = []
    for gpu in report["gpus"]:
        if rank not in gpu["ranks"]:
            continue
        known = [gpu["name"] or "GPU", gpu["uuid"]]
        if gpu["sm_clock_hz"] is not None:
            share = gpu["signals"].get("sm_clock_share")
            known.append(
                f"SM clock {gpu['sm_clock_hz'] / 1e6:.0f} MHz" + (f", {percent(share)} of max" if share else "")
            )
        known += [f"throttled by {reason} {percent(part)}" for reason, part in gpu["throttled"].items() if part]
        if gpu["power_w"] is not None:
            known.append(f"{gpu['power_w']:.0f} W")
        if gpu["temperature_max_c"] is not None:
            known.append(f"hottest {gpu['temperature_max_c']:.0f} C")
        if gpu["sm_active"] is not None:
            known.append(f"SMs active {percent(gpu['sm_active'])}")
        if gpu["xids"]:
            known.append(f"{gpu['xids']:.0f} XIDs (last {gpu['last_xid']})")
        others = [each for each in gpu["ranks"] if each != rank]
        if others:
            known.append(f"also used by ranks {ranges(others)}")
        lines += [Text(line) for line in lettering.wrapped("; ".join(known), width, 2)]
    return [rule("GPU, over the run", width, lettering), *lines] if lines else []
