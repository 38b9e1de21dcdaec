"""The report in a terminal, or as plain text where there is none."""

from __future__ import annotations

import io
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchlens_perf.report.captures import capture_lines
from torchlens_perf.report.collective_table import collective_table
from torchlens_perf.report.device_table import device_table
from torchlens_perf.report.gpu_table import gpu_table, link_table
from torchlens_perf.report.heat_map import HeatMap
from torchlens_perf.report.memory_table import memory_table, oom_table
from torchlens_perf.report.quantities import duration, duration_or_dash, printable
from torchlens_perf.report.rank_table import rank_table
from torchlens_perf.report.tables import new_table

_MOST_MODULES, _MOST_SECTIONS = 8, 8
_STYLES = {
    "hang": "bold red", "out_of_memory": "bold red", "straggler": "bold red", "none": "bold green",
    "no_steps": "bold yellow",
}  # fmt: skip
_PLAIN_WIDTH = 118
_STANDS_OUT = 5.0  # robust deviations above the ranks' median


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
    for verdict in report["verdicts"]:
        parts.append(_verdict(verdict))
        if verdict["kind"] == "out_of_memory" and verdict["evidence"]["table"] is not None:
            parts += [oom_table(verdict["evidence"]), Text("")]
    captured = capture_lines(report, run_dir)
    if captured:
        parts.append(Padding(Text("\n".join(captured)), (0, 0, 1, 2)))
    if report["steps"]["count"]:
        parts += [_step_line(report), rank_table(report)]
        if any(rank["device"] for rank in report["ranks"]):
            parts.append(device_table(report["ranks"]))
        if any(rank["memory"]["device"] for rank in report["ranks"]):
            parts.append(memory_table(report["ranks"]))
        parts.append(HeatMap(report["heat"]))
    if report["gpus"]:
        parts.append(gpu_table(report["gpus"]))
    if any(link["errors"] for link in report["links"]):
        parts.append(link_table(report["links"]))
    if report["modules"]:
        parts.append(_module_table(report))
    if report["sections"]:
        parts.append(_section_table(report))
    if report["device_sections"]:
        parts.append(_device_section_table(report["device_sections"]))
    if report["collectives"]:
        parts.append(collective_table(report["collectives"]))
    parts += [_quality(report), Text(f"run directory: {printable(run_dir)}", style="dim")]
    return Group(*parts)


def _title(report: dict[str, Any]) -> Text:
    run = report["run"]
    nodes = f" on {len(run['nodes'])} nodes" if len(run["nodes"]) > 1 else ""
    ranks = f"{run['world_size']} rank{'s' if run['world_size'] != 1 else ''}{nodes}"
    state = "running" if run["live"] else "ended"
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    program = f"{printable(run['program'])}, " if run["program"] else ""
    return Text.assemble(("torchlens_perf  ", "bold"), f"{program}run {run['id']}: {ranks}{attempt}, {state}")


def _verdict(verdict: dict[str, Any]) -> RenderableType:
    head, _, action = verdict["text"].partition(" Next: ")
    text = Text(printable(head), style=_STYLES.get(verdict["kind"], "bold"))
    if action:
        text.append("\nNext: ", style="bold")
        text.append(printable(action), style="default not bold")
    for rank, stack in verdict["evidence"].get("stacks", {}).items():
        lines = stack["lines"] or [f"none: {stack['reason']}"]
        text.append(f"\nPython stack of rank {rank}, innermost first:", style="bold")
        for line in lines:
            text.append("\n  " + printable(line), style="default not bold")
    return Padding(text, (0, 0, 1, 2))


def _step_line(report: dict[str, Any]) -> Text:
    steps = report["steps"]
    unit = "forward passes" if steps["inference"] else "steps"
    if steps["p50_s"] is None:
        return Text(f"{steps['count']} {unit}, all of them warm-up (up to {duration(steps['warm_up_max_s'])})")
    text = Text.assemble(
        (f"{steps['count']} {unit}{_alike(steps)}  ", "bold"),
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


def _alike(steps: dict[str, Any]) -> str:
    """How many steps are like the typical one, where some are not."""
    return f", {steps['alike']} of them alike" if steps["long"] else ""


def _module_table(report: dict[str, Any]) -> Table:
    modules = report["modules"]
    columns = ["module", "calls", "own p50", "own a step", "backward p50"]
    by_device = any(module["device_s"] for module in modules)
    title = f"modules by {'device time without modules inside' if by_device else 'own forward time'}"
    table = new_table(*columns, *["device p50", "device own a step"] * by_device, title=title)
    for module in modules[:_MOST_MODULES]:
        cells = [
            printable(module["name"]),
            str(module["calls"]),
            duration_or_dash(module["own_s"]["p50_s"]),
            duration(module["own_s_per_step"]),
            _median(module["backward_s"]),
        ]
        on_device = [_median(module["device_s"]), duration_or_dash(module["device_own_s_per_step"])]
        table.add_row(*cells, *on_device * by_device)
    if len(modules) > _MOST_MODULES:
        table.caption = f"{_MOST_MODULES} of {len(modules)}; --json has all"
    return table


def _section_table(report: dict[str, Any]) -> Table:
    by_device = any(section["device_s"] for section in report["sections"])
    table = new_table("section", "calls", "p50", "a step", *["device p50"] * by_device, title="sections")
    for section in report["sections"][:_MOST_SECTIONS]:
        cells = [
            printable(section["name"]),
            str(section["calls"]),
            duration_or_dash(section["total_s"]["p50_s"]),
            duration(section["s_per_step"]),
        ]
        table.add_row(*cells, *[_median(section["device_s"])] * by_device)
    return table


def _device_section_table(sections: list[dict[str, Any]]) -> Table:
    merged = any(section["over_all_ranks"] for section in sections)
    columns = [
        "device section",
        "count",
        "p50",
        "p99",
        "max",
        "slowest rank",
        *["all ranks' median", "stands out"] * merged,
    ]
    table = new_table(*columns, title="device sections, by stamps of the device's clock")
    for section in sections[:_MOST_SECTIONS]:
        slowest, mean_s = max(section["by_rank"].items(), key=lambda item: item[1])
        times = (section["device_s"][field] for field in ("p50_s", "p99_s", "max_s"))
        table.add_row(
            printable(section["name"]),
            str(section["calls"]),
            *(duration_or_dash(time) for time in times),
            f"{slowest} (mean {duration(mean_s)})" if len(section["by_rank"]) > 1 else "-",
            *_over_all_ranks(section["over_all_ranks"]) * merged,
        )
    return table


def _over_all_ranks(window: dict[str, Any] | None) -> list[str]:
    """The median of the ranks' medians, and who is far above it: robust deviations, of which 5 are rare by chance."""
    if window is None:
        return ["-", "-"]
    stands_out = window["slowest"] >= 0 and window["score"] >= _STANDS_OUT
    rank = f"rank {window['slowest']} ({window['score']:.0f} deviations)" if stands_out else "none"
    return [duration(window["rank_median_ns"] / 1e9), rank]


def _median(distribution: dict[str, Any] | None) -> str:
    return "-" if distribution is None else duration_or_dash(distribution["p50_s"])


def _quality(report: dict[str, Any]) -> RenderableType:
    quality = report["quality"]
    overhead = quality["overhead_share"]
    cost = "not measured" if overhead is None else f"{overhead:.2%} of the steps' time"
    lines = [
        f"data quality: {quality['records']} records, {quality['lost']} lost, {quality['coverage']:.1%} of steps "
        f"whole; this tool cost {cost}"
    ]
    lines += [f"  - {printable(note)}" for note in quality["notes"]]
    return Text("\n".join(lines))
