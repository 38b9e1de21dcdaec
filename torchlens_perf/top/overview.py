"""The lines of the first screen, but for the grid: the run, its pace, its verdicts, the typical step, data quality."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import duration, duration_or_dash, percent, steps_whole
from torchlens_perf.run.records import PARTS
from torchlens_perf.top.pace import curve, time_left
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.hang import HangEvidence
from torchlens_perf.verdicts.words.run_state import ranks_words, state_of

if TYPE_CHECKING:
    from torchlens_perf.top.lettering import Lettering
    from torchlens_perf.top.pace import Pace
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import Rank, Report

_DAY_S = 86_400
_BAR = 12  # cells
_NAMES = {"communication": "wait", "recompute": "recomp."}
_PART_STYLES = {
    "data": "yellow", "forward": "green", "recompute": "magenta", "backward": "blue", "optimizer": "cyan",
    "communication": "dim", "host": "red", "tool": "dim",
}  # fmt: skip


# -- the run and its pace


def title_line(view: View, width: int, lettering: Lettering) -> Text:
    """Which run, and whether it is live."""
    report = view.report
    state, style = run_state(view)
    if report is None:
        left = f"torchlens-perf top  {view.run_id}"
    else:
        run = report["run"]
        attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
        program = f"{run['program']}  " if run["program"] else ""
        left = f"{program}{view.run_id}  {ranks_words(run)}{attempt}"
    room = max(0, width - cell_len(state) - 1)
    line = Text(lettering.fitted(left, room) + " ", style="bold")
    return line.append(lettering.inert(state), style=style)


def run_state(view: View) -> tuple[str, str]:
    """In a few words, and their style."""
    report = view.report
    if report is None:
        return "waiting" if view.trouble else "reading", "bold yellow"
    run = report["run"]
    if not run["live"]:
        at = clock_time(seconds_of(run["ended"])) if run["ended"] else ""
        state, comma, which = state_of(False, run["died"], run["ranks_seen"]).partition(",")
        return f"{state.upper()} {at}".rstrip() + comma + which, "bold magenta" if run["died"] else "bold"
    hang = next((v["evidence"] for v in report["verdicts"] if isinstance(v["evidence"], HangEvidence)), None)
    as_of = f" {clock_time(seconds_of(run['as_of']))}" if run["as_of"] else ""
    if hang is not None:
        return f"HANG: no step for {duration(hang.since_s)} at{as_of}", "bold red"
    _, comma, which = state_of(True, run["died"], run["ranks_seen"]).partition(",")
    return f"LIVE{as_of}{comma}{which}", "bold magenta" if which else "bold green"


def pace_lines(view: View, width: int, lettering: Lettering) -> list[Text]:
    """How far and how fast: two lines, of which the second has the curve."""
    report, pace = view.report, view.pace
    if report is None or pace is None:
        return [Text(), Text()]
    steps = report["steps"]
    hangs = any(isinstance(verdict["evidence"], HangEvidence) for verdict in report["verdicts"])
    ends = view.has_ended or hangs
    numbers = [pace.progress or "no step yet"]
    if pace.steps_per_s is not None and not ends:
        numbers.append(f"{_three_figures(pace.steps_per_s)} steps/s")
    if pace.now_s is not None and not ends:
        numbers.append(f"now {duration(pace.now_s)}")
    if steps["p50_s"] is not None:
        numbers += [f"p50 {duration(steps['p50_s'])}", f"p95 {duration_or_dash(steps['p95_s'])}"]
        numbers.append(f"max {duration_or_dash(steps['max_s'])}")
    if steps["by"] == DEVICE:
        numbers.append("on the device")
    first = _fitting(numbers, width)
    for left in () if ends else _left(pace):
        with_left = _fitting([*numbers[:1], left, *numbers[1:]], width)
        if left in with_left:
            first = with_left
            break
    return [Text(lettering.fitted(first, width), style="bold"), _curve_line(pace, width, lettering)]


def _left(pace: Pace) -> list[str]:
    """How long the rest takes, in words, and in ever fewer ones; none where it is not known."""
    if not pace.left_s:
        return []
    mean, *now = map(time_left, pace.left_s)
    if now and now[0] != mean:
        return [f"{mean} left, {now[0]} at the present pace", f"{mean} left, now {now[0]}", f"{mean} left"]
    return [f"{mean} left"]


def _curve_line(pace: Pace, width: int, lettering: Lettering) -> Text:
    if len(pace.curve_s) < 2:
        return Text("step time: no curve before two windows of steps", style="dim")
    low, high = min(pace.curve_s), max(pace.curve_s)
    label = "step time "
    scale = f" {duration(low)}" + (f" to {duration(high)}" if duration(low) != duration(high) else "")
    windows = f", medians of {pace.window_steps} steps" if width >= 100 else ""
    drawn = curve(pace.curve_s, width - len(label + scale + windows), lettering.blocks)
    return Text.assemble((label, "dim"), (drawn, "cyan"), (scale + windows, "dim"))


def trouble_lines(view: View, width: int, lettering: Lettering, most: int = 3) -> list[Text]:
    """Why there is nothing newer to show; none where nothing is wrong."""
    if not view.trouble:
        return []
    text = f"{view.trouble}." + ("" if view.has_ended else " Looking again each second.")
    return [Text(line, style="bold yellow") for line in lettering.wrapped(text, width)[:most]]


# -- the typical step


def phase_lines(report: Report, width: int, lettering: Lettering) -> list[Text]:
    """What a typical step is made of: the mean over the ranks, and the rank with most of each part."""
    by_device = report["run"]["judged_by"] == DEVICE
    parts_of = {rank["rank"]: parts for rank in report["ranks"] if (parts := step_parts(rank, by_device=by_device))}
    if not parts_of:
        return [Text(lettering.fitted("no step yet that is no warm-up", width), style="dim")]
    unknown = {part for rank in report["ranks"] for part in rank["not_measured"]} if not by_device else set()
    total_s = sum(sum(parts.values()) for parts in parts_of.values()) / len(parts_of)
    lines = []
    for part in PARTS:
        name = f"{_NAMES.get(part, part):<9}"
        if part in unknown:
            lines.append(Text(lettering.fitted(f"{name} not measured: part of backward", width), style="dim"))
        values = {rank: parts[part] for rank, parts in parts_of.items() if part in parts}
        if part in unknown or not any(values.values()):
            continue
        mean_s = sum(values.values()) / len(parts_of)
        share = mean_s / total_s if total_s else 0.0
        line = Text(f"{name} {duration(mean_s):>8} {percent(share):>5} ")
        line.append(lettering.bar * max(1, round(share * _BAR)), style=_PART_STYLES[part])
        most = max(values, key=lambda rank: values[rank])
        if len(parts_of) > 1:
            line.append(" " * max(0, _BAR + 25 - line.cell_len))
            line.append(f" {most}: {duration(values[most])}", style="dim")
        line.truncate(width)
        lines.append(line)
    return lines


def phase_title(report: Report, width: int) -> str:
    ranks = len(report["ranks"])
    clock = "device" if report["run"]["judged_by"] == DEVICE else "host"
    if width < 52:
        return f"step by the {clock}" + (f", mean of {ranks}" if ranks > 1 else "")
    return f"step by the {clock}" + (f", mean of {ranks} ranks; who has most" if ranks > 1 else "")


def step_parts(rank: Rank, *, by_device: bool) -> dict[str, float]:
    """Seconds of each part of a rank's typical step; of the mean one, by its device. Empty where it is not known."""
    if by_device:
        return rank["device"]["parts"] if rank["device"] is not None else {}
    return {part: phase["typical_s"] for part, phase in rank["phases"].items()}


# -- what it is worth


def quality_line(report: Report, width: int, lettering: Lettering) -> Text:
    quality = report["quality"]
    overhead = quality["overhead_share"]
    cost = "not measured"
    if overhead is not None:
        cost = f"{overhead:.2%} of the steps" if overhead >= 0.0001 else "below 0.01% of the steps"
    notes = len(quality["notes"])
    parts = [
        f"data: {quality['lost']:,} of {quality['records'] + quality['lost']:,} records lost, "
        + steps_whole(quality["coverage"], any_step=report["steps"]["count"] > 0),
        f"this tool cost {cost}",
        f"{notes} note{'s' if notes != 1 else ''}" if notes else "",
        f"sidecars {duration(quality['sidecar_cpu_s'])} of CPU",
    ]
    style = "bold yellow" if quality["lost"] else "dim"
    return Text(lettering.fitted(_fitting(parts, width), width), style=style)


def note_lines(report: Report, width: int, lettering: Lettering) -> list[Text]:
    lines = []
    for note in report["quality"]["notes"]:
        lines += [Text(line) for line in lettering.wrapped(f"- {note}", width, 2)]
    return lines or [Text("nothing is noted")]


def rule(title: str, width: int, lettering: Lettering, *, chosen: bool = False) -> Text:
    """A line between two parts of the screen, with the title of the lower one; chosen: which the keys are for."""
    if not title:
        return Text(lettering.rule * width, style="dim")
    shown = lettering.fitted(title, min(cell_len(lettering.inert(title)), max(0, width - 4)))
    line = Text.assemble((lettering.rule * 2 + " ", "dim"), (shown, "bold underline" if chosen else "bold"), " ")
    return line.append(lettering.rule * max(0, width - line.cell_len), style="dim")


def _fitting(parts: Iterable[str], width: int) -> str:
    """As many of these as there is room for, in their order."""
    text = ""
    for part in filter(None, parts):
        longer = f"{text}   {part}" if text else part
        if text and len(longer) > width:
            continue
        text = longer
    return text


def _three_figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds_of(time: str) -> float:
    """Seconds of UTC of a time of the report's."""
    return datetime.datetime.fromisoformat(time).timestamp()


def clock_time(unix_s: float | None, now_s: float | None = None) -> str:
    """In this terminal's time zone; with the day, where it is not of the last 24 hours. "" for what is not known."""
    if unix_s is None:
        return ""
    now = datetime.datetime.now().timestamp() if now_s is None else now_s
    pattern = "%H:%M:%S" if abs(now - unix_s) < _DAY_S else "%Y-%m-%d %H:%M"
    return datetime.datetime.fromtimestamp(unix_s).strftime(pattern)
