"""The report in a terminal, or as plain text where there is none."""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import (
    counted,
    duration,
    duration_or_dash,
    of_typical_step,
    printable,
    steps_whole,
)
from torchlens_perf.analysis.statistics.step_mix import WITHOUT_GRADIENTS
from torchlens_perf.report.captures import capture_lines
from torchlens_perf.report.collective_table import collective_table
from torchlens_perf.report.device_table import device_table, memory_table
from torchlens_perf.report.gpu_table import gpu_table, link_table
from torchlens_perf.report.heat_map import HeatMap
from torchlens_perf.report.rank_table import rank_table
from torchlens_perf.report.tables import Column, FittingTable, or_dash
from torchlens_perf.report.verdict_text import earlier_parts, verdict_parts
from torchlens_perf.verdicts.stragglers.judged_steps import DEVICE
from torchlens_perf.verdicts.words.run_state import ranks_words, state_words
from torchlens_perf.verdicts.words.startup import startup_words
from torchlens_perf.verdicts.words.verdict import warm_up_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchlens_perf.verdicts.words.report import (
        DeviceSection,
        Distribution,
        Module,
        Report,
        Section,
        Steps,
    )

_MAX_MODULES, _MAX_SECTIONS = 8, 8
_PLAIN_WIDTH = 118
_MAX_CHARACTERS = 2000  # of one text
_QUANTILES: tuple[tuple[str, Literal["p50_s", "p95_s", "p99_s", "max_s"]], ...] = (
    ("p50", "p50_s"), ("p95", "p95_s"), ("p99", "p99_s"), ("max", "max_s"),
)  # fmt: skip
_STANDS_OUT = 5.0  # robust deviations above the ranks' median


def show(report: Report, file: IO[str], run_dir: str) -> None:
    """Prints the report: colours and the terminal's width on a terminal, plain text elsewhere."""
    if file.isatty():
        Console(file=file, highlight=False, markup=False, emoji=False).print(layout(report, run_dir))
    else:
        file.write(render(report, run_dir, columns=_PLAIN_WIDTH, color=False))


def render(report: Report, run_dir: str, *, columns: int, color: bool) -> str:
    """The report as text for a terminal of `columns`, with its escape sequences if `color`."""
    return as_text(layout(report, run_dir), columns=columns, color=color)


def as_text(value: RenderableType, *, columns: int, color: bool) -> str:
    """As text for a terminal of `columns`, 0 for none, with its escape sequences if `color`."""
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
    console.print(value, crop=False)  # what is to be copied may be longer
    # rich fills lines with spaces up to the width; copied into an issue they are only in the way.
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def layout(report: Report, run_dir: str) -> RenderableType:
    """The whole report."""
    report = safe(report)
    parts: list[RenderableType] = [title(report), Text("")]
    for verdict in report["verdicts"]:
        if not verdict["is_over"]:
            parts += verdict_parts(verdict, report)
    parts += earlier_parts(report)
    captured = capture_lines(report, run_dir)
    if captured:
        parts.append(Padding(Text("\n".join(captured)), (0, 0, 1, 2)))
    if report["steps"]["count"]:
        parts += [step_line(report), *start_line(report)]
        if any(rank["typical"] for rank in report["ranks"]):
            parts.append(rank_table(report))
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
        parts.append(_module_table(report["modules"]))
    if report["sections"]:
        parts.append(_section_table(report["sections"]))
    if report["device_sections"]:
        parts.append(_device_section_table(report["device_sections"]))
    if report["collectives"]:
        parts.append(collective_table(report["collectives"]))
    parts += [_quality(report), Text(f"run directory: {printable(run_dir)}", style="dim")]
    return Group(*parts)


def safe(report: Report) -> Report:
    """A report in which no text drives the terminal or fills it: all of them pass here, whoever has written them."""
    return cast("Report", _safe(report))


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        text = printable(value)
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    if isinstance(value, dict):
        return {_safe(key): _safe(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_safe(each) for each in value]
    return value


def title(report: Report) -> Text:
    """Which run, and how it is."""
    run = report["run"]
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    program = f"{printable(run['program'])}, " if run["program"] else ""
    return Text.assemble(
        ("torchlens_perf  ", "bold"), f"{program}run {run['id']}: {ranks_words(run)}{attempt}, {state_words(run)}"
    )


def start_line(report: Report) -> list[Text]:
    """Return the line on the time before the first recorded step; empty where that is not known."""
    words = startup_words(report["run"])
    return [Text(words)] if words else []


def step_line(report: Report) -> Text:
    """How many steps, and how long they take."""
    steps = report["steps"]
    unit = "forward pass" if steps["inference"] else "step"
    if steps["p50_s"] is None:
        all_of_them = ", all of them" * (steps["count"] > 1)
        return Text(f"{counted(steps['count'], unit)}{all_of_them} warm-up{warm_up_words(steps)}")
    text = Text.assemble(
        (f"{counted(steps['count'], unit)}{_classes(steps)}  ", "bold"),
        "  ".join(f"{name} {duration_or_dash(steps[field])}" for name, field in _QUANTILES),
    )
    if steps["by"] == DEVICE:
        text.append("  on the device")
    if steps["micro_steps"] > 1:
        text.append(f"  {steps['micro_steps']} micro-steps each")
    trend = steps["trend"]
    if trend is not None:
        change = trend["change"]
        word = "steady" if abs(change) < 0.03 else "slower" if change > 0 else "faster"
        text.append(f"  trend: {word} ({change:+.1%} from the first to the last third)")
    return text


def _classes(steps: Steps) -> str:
    """Return how many steps are in which class, where some are not like the typical one."""
    if not (steps["long"] or steps["short"]):
        return ""
    counts = {"typical": steps["alike"]}
    for each in steps["long"]:
        kinds = ["no-grad" if kind == WITHOUT_GRADIENTS else kind for kind in each["kinds"]]
        name = " and ".join(kinds) or "long"
        counts[name] = counts.get(name, 0) + each["count"]
    counts["short"] = sum(each["count"] for each in steps["short"])
    counts["warm-up"] = steps["warm_up"]
    return f" ({', '.join(f'{count} {name}' for name, count in counts.items() if count)})"


def _module_table(modules: Sequence[Module]) -> FittingTable:
    shown = modules[:_MAX_MODULES]
    columns = [
        Column("module", [printable(each["name"]) for each in shown], left=True),
        Column("calls", [str(each["calls"]) for each in shown]),
        Column("own p50", [duration_or_dash(each["own_s"]["p50_s"]) for each in shown]),
        Column("own a step", [duration(each["own_s_per_step"]) for each in shown]),
        Column("backward p50", [_median(each["backward_s"]) for each in shown]),
    ]
    order = "own forward time"
    if any(each["device_s"] for each in modules):
        order = "device time without modules inside"
        columns.append(Column("device p50", [_median(each["device_s"]) for each in shown]))
        own = [duration_or_dash(each["device_own_s_per_step"]) for each in shown]
        columns.append(Column("device own a step", own))
    rest = [f"{len(shown)} of {len(modules)}; --json has all"] if len(modules) > len(shown) else []
    return FittingTable(f"modules by {order}", columns, lambda headers: rest)


def _section_table(sections: Sequence[Section]) -> FittingTable:
    shown = sections[:_MAX_SECTIONS]
    columns = [
        Column("section", [printable(each["name"]) for each in shown], left=True),
        Column("calls", [str(each["calls"]) for each in shown]),
        Column("p50", [duration_or_dash(each["total_s"]["p50_s"]) for each in shown]),
        Column("typical step", [of_typical_step(each["s_per_step"]) for each in shown]),
    ]
    if any(each["host_s_per_typical_step"] for each in sections):
        in_host = [duration_or_dash(each["host_s_per_typical_step"]) for each in shown]
        columns.append(Column("host code, typical step", in_host))
    if any(each["device_s"] for each in sections):
        columns.append(Column("device p50", [_median(each["device_s"]) for each in shown]))
    return FittingTable("sections", columns)


def _device_section_table(sections: Sequence[DeviceSection]) -> FittingTable:
    shown = sections[:_MAX_SECTIONS]
    columns = [
        Column("device section", [printable(each["name"]) for each in shown], left=True),
        Column("count", [str(each["calls"]) for each in shown]),
        Column("p50", [_median(each["device_s"]) for each in shown]),
        Column("p99", [duration_or_dash(each["device_s"]["p99_s"]) for each in shown]),
        Column("max", [duration_or_dash(each["device_s"]["max_s"]) for each in shown]),
        Column("slowest rank", [_slowest(each["by_rank"]) for each in shown]),
    ]
    if any(each["over_all_ranks"] for each in sections):
        windows = [each["over_all_ranks"] for each in shown]
        medians = [or_dash(each, lambda window: duration(window["rank_median_ns"] / 1e9)) for each in windows]
        columns.append(Column("all ranks' median", medians))
        columns.append(Column("stands out", [or_dash(each, _stands_out) for each in windows]))
    return FittingTable("device sections, by stamps of the device's clock", columns)


def _slowest(mean_s: dict[str, float]) -> str:
    rank = max(mean_s, key=lambda rank: mean_s[rank])
    return f"{rank} (mean {duration(mean_s[rank])})" if len(mean_s) > 1 else "-"


def _stands_out(window: dict[str, float]) -> str:
    """Who is far above the median of the ranks' medians: robust deviations, of which 5 are rare by chance."""
    found = window["slowest"] >= 0 and window["score"] >= _STANDS_OUT
    return f"rank {window['slowest']} ({window['score']:.0f} deviations)" if found else "none"


def _median(distribution: Distribution | None) -> str:
    return "-" if distribution is None else duration_or_dash(distribution["p50_s"])


def quality_line(report: Report) -> str:
    """What the records are worth, and what recording cost."""
    quality = report["quality"]
    overhead = quality["overhead_share"]
    cost = "not measured" if overhead is None else f"{overhead:.2%} of the steps' time"
    return (
        f"data quality: {quality['records']} records, {quality['lost']} lost, "
        f"{steps_whole(quality['coverage'], any_step=report['steps']['count'] > 0)}; this tool cost {cost}"
    )


def _quality(report: Report) -> RenderableType:
    quality, lines = report["quality"], [quality_line(report)]
    lines += [f"  - {printable(note)}" for note in quality["notes"]]
    return Text("\n".join(lines))
