"""The report in a terminal, or as plain text where there is none."""

from __future__ import annotations

import io
import unicodedata
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchlens_perf.records import PARTS
from torchlens_perf.report.collective_table import collective_table
from torchlens_perf.report.heat_map import HeatMap
from torchlens_perf.report.quantities import duration

_MOST_MODULES, _MOST_SECTIONS, _MOST_RANKS = 8, 8, 16
_STYLES = {"hang": "bold red", "straggler": "bold red", "none": "bold green", "no_steps": "bold yellow"}
_PLAIN_WIDTH = 118
_BAR_LETTERS = 16
_HEADERS = {"communication": "wait", "recompute": "recomp."}
_LETTERS = {
    "data": "d", "forward": "f", "recompute": "r", "backward": "b", "optimizer": "o", "communication": "w", "host": "h",
}  # fmt: skip
_PART_STYLES = {
    "data": "yellow", "forward": "green", "recompute": "magenta", "backward": "blue", "optimizer": "cyan",
    "communication": "dim", "host": "red",
}  # fmt: skip


def show(report: dict[str, Any], file: IO[str], run_dir: str) -> None:
    """Prints the report: colours and the terminal's width on a terminal, plain text elsewhere."""
    if file.isatty():
        Console(file=file, highlight=False, markup=False, emoji=False).print(layout(report, run_dir))
    else:
        file.write(render(report, run_dir, columns=_PLAIN_WIDTH, color=False))


def render(report: dict[str, Any], run_dir: str, *, columns: int, color: bool) -> str:
    """The report as text for a terminal of `columns`, with its escape sequences if `color`."""
    file = io.StringIO()
    console = Console(
        file=file,
        width=columns or _PLAIN_WIDTH,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,  # a module may be called "[bold]"
        emoji=False,
    )
    console.print(layout(report, run_dir))
    return _without_padding(file.getvalue())


def _without_padding(text: str) -> str:
    """rich fills lines with spaces up to the width; copied into an issue they are only in the way."""
    return "\n".join(line.rstrip() for line in text.split("\n"))


def layout(report: dict[str, Any], run_dir: str) -> RenderableType:
    """The report for a rich console."""
    parts: list[RenderableType] = [_title(report), Text("")]
    parts += [_verdict(verdict) for verdict in report["verdicts"]]
    if report["steps"]["count"]:
        parts += [_step_line(report), _rank_table(report), HeatMap(report["heat"])]
    if report["modules"]:
        parts.append(_module_table(report))
    if report["sections"]:
        parts.append(_section_table(report))
    if report["collectives"]:
        parts.append(collective_table(report["collectives"]))
    parts += [_quality(report), Text(f"run directory: {_clean(run_dir)}", style="dim")]
    return Group(*parts)


def _clean(text: str) -> str:
    """Without control characters: a module's name may hold anything, also escape sequences."""
    return "".join(c if unicodedata.category(c)[0] != "C" else "?" for c in text)


def _title(report: dict[str, Any]) -> Text:
    run = report["run"]
    nodes = f" on {len(run['nodes'])} nodes" if len(run["nodes"]) > 1 else ""
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] != 1 else ''}{nodes}"
    state = "running" if run["live"] else "ended"
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    program = f"{_clean(run['program'])}, " if run["program"] else ""
    return Text.assemble(("torchlens_perf  ", "bold"), f"{program}run {run['id']}: {ranks}{attempt}, {state}")


def _verdict(verdict: dict[str, Any]) -> RenderableType:
    head, _, action = verdict["text"].partition(" Next: ")
    text = Text(_clean(head), style=_STYLES.get(verdict["kind"], "bold"))
    if action:
        text.append("\nNext: ", style="bold")
        text.append(_clean(action), style="default not bold")
    for rank, stack in verdict["evidence"].get("stacks", {}).items():
        lines = stack["lines"] or [f"none: {stack['reason']}"]
        text.append(f"\nPython stack of rank {rank}, innermost first:", style="bold")
        for line in lines:
            text.append("\n  " + _clean(line), style="default not bold")
    return Padding(text, (0, 0, 1, 2))


def _step_line(report: dict[str, Any]) -> Text:
    steps = report["steps"]
    unit = "forward passes" if steps["inference"] else "steps"
    if steps["p50_s"] is None:
        return Text(f"{steps['count']} {unit}, all of them warm-up (up to {duration(steps['warm_up_max_s'])})")
    text = Text.assemble(
        (f"{steps['count']} {unit}  ", "bold"),
        "  ".join(
            f"{name} {duration(steps[field])}"
            for name, field in (("p50", "p50_s"), ("p95", "p95_s"), ("p99", "p99_s"), ("max", "max_s"))
        ),
    )
    if steps["micro_steps"] > 1:
        text.append(f"  {steps['micro_steps']} micro-steps each")
    trend = steps["trend"]
    if trend is not None:
        change = trend["change"]
        word = "steady" if abs(change) < 0.03 else "slower" if change > 0 else "faster"
        text.append(f"  trend: {word} ({change:+.1%} from the first to the last third)")
    return text


def _table(*columns: str, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _rank_table(report: dict[str, Any]) -> Table:
    present = [part for part in PARTS if any(part in rank["phases"] for rank in report["ranks"]) and part != "tool"]
    headers = [_HEADERS.get(part, part) for part in present]
    works = any(rank["work_s"] for rank in report["ranks"])
    table = _table(
        "rank",
        "step",
        "own",
        *(["work"] if works else []),
        *headers,
        "memory",
        "share of the step",
        title="median per step and rank",
    )
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", True
    suspect = next((v["rank"] for v in report["verdicts"] if v["kind"] == "straggler"), None)
    ranks = report["ranks"]
    if len(ranks) > _MOST_RANKS:
        slowest = sorted(ranks, key=lambda rank: -(rank["own_s"]["p50_s"] or 0.0))[:_MOST_RANKS]
        ranks = sorted(slowest, key=lambda rank: rank["rank"])
        table.caption = f"the {_MOST_RANKS} of {len(report['ranks'])} ranks with the most own time; --json has all"
    several_hosts = len({rank["host"] for rank in report["ranks"]}) > 1
    for rank in ranks:
        label = f"{rank['rank']} {_clean(rank['host'])}" if several_hosts else str(rank["rank"])
        cells: list[RenderableType] = [label + (" died" if rank["state"] == "died" else "")]
        cells += [_optional(rank[field]["p50_s"]) for field in ("step_s", "own_s")]
        if works:
            cells.append("-" if rank["work_s"] is None else _optional(rank["work_s"]["p50_s"]))
        for part in present:
            value = rank["phases"].get(part)
            cells.append("-" if value is None else duration(value["p50_s"]))
        memory = rank["memory"]["max_bytes"]
        cells += ["-" if memory is None else _bytes(memory), _bar(rank["phases"], present)]
        table.add_row(*cells, style="bold" if rank["rank"] == suspect else None)
    legend = "own: without waiting; work: without lack of a CPU too; " if works else ""
    legend += ", ".join(f"{_LETTERS[part]} {_HEADERS.get(part, part)}" for part in present)
    table.caption = f"{table.caption}\n{legend}" if table.caption else legend
    return table


def _bar(phases: dict[str, Any], present: list[str]) -> Text:
    """One letter for each sixteenth of the step's time."""
    bar, filled, total = Text(), 0, 0.0
    for part in present:
        total += phases.get(part, {"share": 0.0})["share"]
        letters = max(0, round(total * _BAR_LETTERS) - filled)
        filled += letters
        bar.append(_LETTERS[part] * letters, style=_PART_STYLES[part])
    return bar


def _module_table(report: dict[str, Any]) -> Table:
    modules = report["modules"]
    table = _table("module", "calls", "own p50", "own a step", "backward p50", title="modules by own forward time")
    for module in modules[:_MOST_MODULES]:
        backward = module["backward_s"]
        table.add_row(
            _clean(module["name"]),
            str(module["calls"]),
            _optional(module["own_s"]["p50_s"]),
            duration(module["own_s_per_step"]),
            "-" if backward is None else _optional(backward["p50_s"]),
        )
    if len(modules) > _MOST_MODULES:
        table.caption = f"{_MOST_MODULES} of {len(modules)}; --json has all"
    return table


def _section_table(report: dict[str, Any]) -> Table:
    table = _table("section", "calls", "p50", "a step", title="sections")
    for section in report["sections"][:_MOST_SECTIONS]:
        table.add_row(
            _clean(section["name"]),
            str(section["calls"]),
            _optional(section["total_s"]["p50_s"]),
            duration(section["s_per_step"]),
        )
    return table


def _quality(report: dict[str, Any]) -> RenderableType:
    quality = report["quality"]
    overhead = quality["overhead_share"]
    cost = "not measured" if overhead is None else f"{overhead:.2%} of the steps' time"
    lines = [
        f"data quality: {quality['records']} records, {quality['lost']} lost, {quality['coverage']:.1%} of steps "
        f"whole; this tool cost {cost}"
    ]
    lines += [f"  - {_clean(note)}" for note in quality["notes"]]
    return Text("\n".join(lines))


def _optional(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
