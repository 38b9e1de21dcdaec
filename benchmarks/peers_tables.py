"""Tables and a chart of the values of peers.py, for docs/internals/performance.md and the README."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from torchlens_perf.view.markdown import table_lines
from torchlens_perf.view.markup import raw_element, tag
from torchlens_perf.view.specs import EMPTY, Column, Quantity, Table
from torchlens_perf.view.theme import FASTER, SLOWER

PAGE = Path("docs", "internals", "performance.md")
CHART = Path("docs", "images", "peers.svg")
MARKED = re.compile(r"(<!-- bench-peers -->\n)(.*?)(<!-- /bench-peers -->)", re.DOTALL)
SAMPLES = 2000
BASE = "none"
Values = Sequence[Sequence[float]]


def interval(
    values: Values, base: Values, statistic: Callable[[float, float], float]
) -> tuple[float, float, float]:
    """Return the median of `statistic(value, base)` over all rounds, and its 95 % interval.

    values, base: by generation and round. The interval resamples generations, then rounds.
    """
    found = [
        [statistic(*pair) for pair in zip(*rounds, strict=True)]
        for rounds in zip(values, base, strict=True)
    ]
    draw = random.Random(1)
    medians = sorted(
        statistics.median(
            each
            for generation in draw.choices(found, k=len(found))
            for each in draw.choices(generation, k=len(generation))
        )
        for _ in range(SAMPLES)
    )
    middle = statistics.median(each for generation in found for each in generation)
    return middle, medians[SAMPLES // 40], medians[-SAMPLES // 40 - 1]


def _tools(data: dict[str, Any]) -> list[str]:
    """Return the measured tools, ours first, without the base."""
    found = dict.fromkeys(tool for times in data["times_ns"].values() for tool in times)
    return sorted(found.keys() - {BASE}, key=lambda tool: (tool != "torchlens_perf", tool.lower()))


def _cells(
    data: dict[str, Any], work: str, write: Callable[[float, float, float], str],
    statistic: Callable[[float, float], float],
) -> list[str]:  # fmt: skip
    times = data["times_ns"].get(work, {})
    return [
        write(*interval(times[tool], times[BASE], statistic))
        if len(times.get(tool, ())) == len(times.get(BASE, ())) > 0
        else EMPTY
        for tool in _tools(data)
    ]


def _change(value: float, base: float) -> float:
    return 100 * (value / base - 1)


def _added_us(value: float, base: float) -> float:
    return (value - base) / 1e3


def _percent(middle: float, low: float, high: float) -> str:
    return f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"


def _us(middle: float, low: float, high: float) -> str:
    return f"{middle:+.1f} us ({low:+.1f} to {high:+.1f})"


def _ns(middle: float, low: float, high: float) -> str:
    return f"{middle:.0f} ns ({low:.0f} to {high:.0f})"


def draw_tables(data: dict[str, Any]) -> Iterator[str]:
    """Yield the two tables as lines of Markdown."""
    tools = _tools(data)

    def column(title: str, cells: Sequence[str]) -> Column:
        return Column(title, cells, Quantity.TEXT)

    generations = max(len(each) for times in data["times_ns"].values() for each in times.values())
    failed = f" Failed: {', '.join(data['failed'])}." if data["failed"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in sorted(data["versions"].items()))
    yield from table_lines(
        Table(
            "peers",
            "Compared with other tools",
            [
                column("tool", tools),
                column("GPT step", _cells(data, "gpt", _percent, _change)),
                column("every module", _cells(data, "modules", _percent, _change)),
                column("DDP step, 2 ranks", _cells(data, "ddp", _percent, _change)),
                column("4 KB all-reduce", _cells(data, "all_reduce", _us, _added_us)),
                column("empty section", _cells(data, "section", _ns, lambda value, base: value)),
            ],
            note=(
                "Added time relative to the same work without a tool, with 95 % intervals;"
                f" starts: {generations}, rounds: {data['rounds']}; 15-minute load"
                f" {data['load']:.1f}; {data['machine']}; {data['date']}; {versions}.{failed}"
            ),
        )
    )
    yield ""
    resources = data["resources"]
    if BASE not in resources:
        return
    shown = [tool for tool in tools if tool in resources]

    def added(title: str, unit: str, scale: float, *keys: str) -> Column:
        """Return median and range over generations, beyond the median without a tool."""

        def sums(tool: str) -> list[float]:
            return [sum(each) for each in zip(*(resources[tool][key] for key in keys), strict=True)]

        base = statistics.median(sums(BASE))
        cells = []
        for tool in shown:
            values = [scale * (each - base) for each in sums(tool)]
            low, middle, high = min(values), statistics.median(values), max(values)
            cells.append(f"{middle:,.0f}{unit} ({low:,.0f} to {high:,.0f})")
        return column(title, cells)

    yield from table_lines(
        Table(
            "peer-resources",
            "Start, exit, files and memory",
            [
                column("tool", shown),
                added("import and start", " ms", 1e3, "import_s", "start_s"),
                added("exit", " ms", 1e3, "exit_s"),
                added("bytes a step", "", 1.0, "bytes_per_step"),
                added("memory", " MB", 1e-6, "resident_bytes"),
                added("its own processes", " MB", 1e-6, "helper_bytes"),
            ],
            note=(
                "Medians and ranges of the processes of the GPT step, beyond the median without a tool."
                f" Files of {data['steps']} steps, with parts that each run writes once."
            ),
        )
    )


def draw_chart(data: dict[str, Any]) -> str:
    """Return a chart of the time that each tool adds to a GPT step, with its interval, as SVG."""
    times = data["times_ns"]["gpt"]
    rows = [
        (tool, *interval(times[tool], times[BASE], _added_us))
        for tool in _tools(data)
        if len(times.get(tool, ())) == len(times[BASE])
    ]
    rows.sort(key=lambda row: row[1])
    left, width, height, top = 170, 360, 20, 30
    longest = max(max(row[3] for row in rows), 1.0)
    parts = [
        tag("text", "added to a training step of 84 modules, 95 % interval", class_="t", x=8, y=16)
    ]
    for number, (tool, middle, low, high) in enumerate(rows):
        y = top + number * height

        def x(value: float) -> float:
            return round(left + width * max(value, 0.0) / longest, 1)

        color = FASTER.light if tool == "torchlens_perf" else "#8a919a"
        parts += [
            tag("text", tool, x=left - 8, y=y + 12, text_anchor="end"),
            tag("rect", x=left, y=y + 2, width=round(x(middle) - left, 1), height=12, fill=color),
            tag("path", d=f"M{x(low)} {y + 8}H{x(high)}", stroke=SLOWER.light, stroke_width="2"),
            tag("text", f"{middle:.0f} us", x=x(high) + 6, y=y + 12),
        ]
    style = "text{font:12px system-ui,sans-serif;fill:#777777}.t{font-weight:600}"
    total = top + len(rows) * height + 8
    drawn = tag(
        "svg", raw_element("style", style), parts, xmlns="http://www.w3.org/2000/svg", width=620, height=total,
        viewBox=f"0 0 620 {total}",
    )  # fmt: skip
    return ElementTree.tostring(drawn, encoding="unicode")


def write(data: dict[str, Any], root: Path) -> None:
    """Replace the marked parts of the page and of the README, and write the chart."""
    (root / CHART).write_text(draw_chart(data))
    image = f"![time that each tool adds to a training step]({CHART})\n"
    for page, text in ((PAGE, "\n".join(draw_tables(data)) + "\n"), (Path("README.md"), image)):
        before = (root / page).read_text()
        if len(MARKED.findall(before)) != 1:
            raise ValueError(f"{page} must have one part between the marks of bench-peers")
        after = MARKED.sub(lambda found, text=text: f"{found[1]}\n{text}\n{found[3]}", before)
        (root / page).write_text(after)
