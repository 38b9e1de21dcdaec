"""Tables and a chart of the values of peers.py, for peers.md and the README.

    python -m benchmarks.peers_tables

writes them anew from benchmarks/peers.json. Without this file, the pages state that nothing was
measured.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.peers_tools import CONTROL, TOOLS
from torchlens_perf.view.markdown import table_lines
from torchlens_perf.view.markup import Element, raw_element, tag
from torchlens_perf.view.specs import EMPTY, Column, Quantity, Table
from torchlens_perf.view.theme import FASTER, SURFACES

REPO = Path(__file__).parents[1]
DATA = Path("benchmarks", "peers.json")
PAGE = Path("benchmarks", "peers.md")
CHART = Path("docs", "images", "peers.svg")
README = Path("README.md")
MARKED = re.compile(r"(<!-- bench-peers -->\n)(.*?)(<!-- /bench-peers -->)", re.DOTALL)
NOT_MEASURED = "Not measured yet.\n"
SAMPLES = 1000
BASE, OURS = "none", "torchlens_perf"
Values = Sequence[Sequence[float]]
Statistic = Callable[[float, float], float]


def interval(values: Values, base: Values, statistic: Statistic) -> tuple[float, float, float]:
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
    """Return the measured tools without the base: ours first, the control last."""
    found = {tool for times in data["times_ns"].values() for tool in times} - {BASE}
    return sorted(found, key=lambda tool: (tool == CONTROL, tool != OURS, tool.lower()))


def _intervals(
    data: dict[str, Any], work: str, statistic: Statistic
) -> dict[str, tuple[float, float, float]]:
    """Return the interval of each tool that took part in all generations."""
    times = data["times_ns"].get(work, {})
    base = times.get(BASE, ())
    return {
        tool: interval(times[tool], base, statistic)
        for tool in _tools(data)
        if len(times.get(tool, ())) == len(base) > 0
    }


def _change(value: float, base: float) -> float:
    return 100 * (value / base - 1)


def _added_us(value: float, base: float) -> float:
    return (value - base) / 1e3


def _text(title: str, cells: Sequence[str]) -> Column:
    return Column(title, cells, Quantity.TEXT)


def draw_tables(data: dict[str, Any]) -> Iterator[str]:
    """Yield all tables as lines of Markdown."""
    for table in (
        _records_table(data),
        _times_table(data),
        _resources_table(data),
        *_growth_tables(data.get("growth", {})),
    ):
        if table is not None:
            yield from table_lines(table)
            yield ""


def _records_table(data: dict[str, Any]) -> Table:
    tools = [tool for tool in _tools(data) if tool != CONTROL]
    steps = data["steps_found"]
    cells = []
    for tool in tools:
        found = steps.get(tool, {}).get("found")
        cells.append(EMPTY if found is None else f"{found} of {steps[tool]['made']}")
    versions = [
        ", ".join(f"{name} {data['versions'].get(name, '?')}" for name in TOOLS[tool][0].packages)
        for tool in tools
    ]
    return Table(
        "peer-records",
        "What each tool recorded",
        [
            _text("tool", tools),
            _text("package", versions),
            _text("records", [TOOLS[tool][0].records for tool in tools]),
            _text("steps in its results", cells),
        ],
        note=(
            "Steps of the job with the GPT step. Marked parts: the script marks the step, forward,"
            " backward, optimizer and all-reduce, and each module's forward call by two hooks."
        ),
    )


def _times_table(data: dict[str, Any]) -> Table:
    tools = _tools(data)

    def column(title: str, work: str, statistic: Statistic, form: str, unit: str) -> Column:
        found = _intervals(data, work, statistic)
        cells = []
        for tool in tools:
            texts = [format(each, form) for each in found.get(tool, ())]
            cells.append(f"{texts[0]} {unit} [{texts[1]}, {texts[2]}]" if texts else EMPTY)
        return _text(title, cells)

    bases = {
        work: statistics.median(each for rounds in times[BASE] for each in rounds)
        for work, times in data["times_ns"].items()
    }
    without = ", ".join(
        f"{name} {bases[work] / 1e3:,.0f} us"
        for work, name in (
            ("gpt", "GPT step"),
            ("ddp", "DDP step"),
            ("all_reduce", "all-reduce of two ranks"),
        )
        if work in bases
    )
    generations = max(len(times[BASE]) for times in data["times_ns"].values())
    failed = f" Failed: {', '.join(data['failed'])}." if data["failed"] else ""
    clock = "" if data["clock"] == "wall" else " Processor time of jobs with one rank."
    return Table(
        "peers",
        "Time that each tool adds",
        [
            _text("tool", tools),
            column("GPT step", "gpt", _change, "+.2f", "%"),
            column("every module", "modules", _change, "+.2f", "%"),
            column("DDP step, 2 ranks", "ddp", _change, "+.2f", "%"),
            column("4 KB all-reduce", "all_reduce", _added_us, "+.1f", "us"),
            column("empty section", "section", lambda value, base: value, ",.0f", "ns"),
        ],
        note=(
            f"Medians of pairs with the same work without a tool, and 95 % intervals. Without a tool:"
            f" {without}. The row with the control has the noise. Starts: {generations}, rounds in"
            f" each: {data['rounds']}. Load before the run: {data['load_before']}. {data['machine']},"
            f" {data['date']}, {data['minutes']} minutes.{clock}{failed}"
        ),
    )


def _resources_table(data: dict[str, Any]) -> Table | None:
    resources = data["resources"]
    if BASE not in resources:
        return None
    shown = [tool for tool in _tools(data) if tool in resources]

    def added(title: str, unit: str, scale: float, *keys: str, digits: int = 0) -> Column:
        """Return median and range over generations, beyond the median without a tool."""

        def sums(tool: str) -> list[float]:
            return [sum(each) for each in zip(*(resources[tool][key] for key in keys), strict=True)]

        base = statistics.median(sums(BASE))
        cells = []
        for tool in shown:
            values = [scale * (each - base) for each in sums(tool)]
            middle, low, high = (
                f"{each:,.{digits}f}"
                for each in (statistics.median(values), min(values), max(values))
            )
            cells.append(f"{middle} {unit} ({low} to {high})")
        return _text(title, cells)

    steps = data["steps_found"][BASE]["made"]
    return Table(
        "peer-resources",
        "Start, exit, files and memory",
        [
            _text("tool", shown),
            added("import and start", "ms", 1e3, "import_s", "start_s"),
            added("exit", "ms", 1e3, "exit_s"),
            added("files a step", "KB", 1e-3, "bytes_per_step", digits=1),
            added("memory of the rank", "MB", 1e-6, "rank_bytes"),
            added("memory of its own processes", "MB", 1e-6, "helper_bytes"),
            added("CPU time of its own processes", "s", 1.0, "helper_cpu_s", digits=2),
        ],
        note=(
            "Medians and ranges of the starts, beyond the median without a tool, from jobs of the GPT"
            f" step. Files of {steps} steps include what each run writes once, such as the report. Processor"
            " time from their start until the last step."
        ),
    )


# Title, scale, format, and the keys whose values are added.
_Column = tuple[str, float, str, tuple[str, ...]]
_OWN_MEMORY: _Column = ("memory of its own processes, MB", 1e-6, ",.0f", ("helper_bytes",))
_OWN_CPU: _Column = ("CPU time of its own processes, s", 1.0, ",.1f", ("helper_cpu_s",))
_GROWTH: dict[str, tuple[str, tuple[_Column, ...], str]] = {
    "modules": (
        "modules",
        (
            ("added by each module, us a step", 1e-3, ".2f", ("added_by_module_ns",)),
            ("import and start, ms", 1e3, ",.0f", ("import_s", "start_s")),
            ("memory of the rank, MB", 1e-6, ",.1f", ("added_bytes",)),
        ),
        (
            "Every module is marked. The modules are ReLUs in a chain. The added time of a step is"
            " divided by the number of modules. A step without a tool: {base} ms."
        ),
    ),
    "steps": (
        "steps",
        (
            ("memory of the rank, MB", 1e-6, ",.1f", ("rank_bytes",)),
            _OWN_MEMORY,
            _OWN_CPU,
            ("files, MB", 1e-6, ",.2f", ("written_bytes",)),
            ("exit, s", 1.0, ",.1f", ("exit_s",)),
        ),
        (
            "Runs of a model with one layer. A million steps would take an hour under all tools."
            " `python -m benchmarks long_run` makes them under this package."
        ),
    ),
    "ranks": (
        "ranks of one machine",
        (
            _OWN_MEMORY,
            _OWN_CPU,
            ("import and start, slowest rank, s", 1.0, ".1f", ("import_s", "start_s")),
            ("exit, slowest rank, s", 1.0, ".1f", ("exit_s",)),
        ),
        (
            "Ranks that start at the same time on all CPUs, make a short step every 50 ms for 12 s and do"
            " not communicate. Other tools have no processes of their own."
        ),
    ),
}


def _growth_tables(growth: dict[str, Any]) -> Iterator[Table]:
    """Yield a table for each kind of growth, with the values at each count: "1 / 2 / 3"."""
    for name in filter(growth.get, _GROWTH):
        found, (what, columns, note) = growth[name], _GROWTH[name]
        tools = [tool for tool in found if tool != BASE and found[tool]]
        counts = " / ".join(f"{int(each):,}" for each in max(found.values(), key=len))
        base_ms = [
            f"{1e-6 * each['ns']:,.2f}" for each in found.get(BASE, {}).values() if "ns" in each
        ]
        yield Table(
            f"peer-{name}",
            f"Growth with {what}: {counts}",
            [
                _text("tool", tools),
                *(_numbers(column, [found[tool].values() for tool in tools]) for column in columns),
            ],
            note=note.format(base=" / ".join(base_ms)),
        )


def _numbers(column: _Column, rows: Sequence[Iterable[dict[str, float]]]) -> Column:
    title, scale, form, keys = column
    cells = [
        " / ".join(format(scale * sum(each[key] for key in keys), form) for each in row)
        for row in rows
    ]
    return _text(title, cells)


def draw_chart(data: dict[str, Any]) -> str:
    """Return a chart of the time that each tool adds to a GPT step as SVG: a dot with its interval
    on a logarithmic axis, and a ring for the step in which every module is marked.
    """
    dots, rings = _intervals(data, "gpt", _added_us), _intervals(data, "modules", _added_us)
    rows = sorted((tool for tool in dots if tool != CONTROL), key=lambda tool: dots[tool][0])
    step_ns = statistics.median(each for rounds in data["times_ns"]["gpt"][BASE] for each in rounds)
    left, right, width, height, top = 190, 570, 720, 26, 52
    largest = max(each[2] for found in (dots, rings) for each in found.values())
    decades = max(2, math.ceil(math.log10(max(largest, 1.0))))

    def x(value_us: float) -> float:
        """Return the place of a value. Values below 1 us lie at the left edge."""
        return round(left + (right - left) * math.log10(max(value_us, 1.0)) / decades, 1)

    bottom = top + len(rows) * height
    parts: list[Element] = [
        tag("rect", class_="ground", x=0, y=0, width=width, height=bottom + 52, rx=6),
        tag("text", f"Added to a training step of {step_ns / 1e6:.1f} ms with 84 modules, on a CPU",
            class_="title", x=14, y=24),
    ]  # fmt: skip
    for decade in range(decades + 1):
        place = x(10.0**decade)
        name = f"{10**decade} us" if decade < 3 else f"{10 ** (decade - 3)} ms"
        parts += [
            tag("path", class_="rule", d=f"M{place} {top - 8}V{bottom}"),
            tag("text", name if decade else "≤ 1 us", class_="dim", x=place, y=bottom + 16,
                text_anchor="middle"),
        ]  # fmt: skip
    for number, tool in enumerate(rows):
        y = top + number * height + 8
        kind = "ours" if tool == OURS else "other"
        idle = " (no listener)" if TOOLS[tool][0].is_idle() else ""
        parts.append(tag("text", f"{tool}{idle}", x=left - 14, y=y + 4, text_anchor="end"))
        for found, drawn in ((rings, "ring"), (dots, "dot")):
            if tool in found:
                middle, low, high = found[tool]
                parts += [
                    tag("path", class_=f"line {kind}", d=f"M{x(low)} {y}H{x(high)}"),
                    tag("circle", class_=f"{drawn} {kind}", cx=x(middle), cy=y, r=4.5),
                ]
        texts = [f"{each[tool][0]:,.0f}" for each in (dots, rings) if tool in each]
        parts.append(
            tag("text", f"{' / '.join(texts)} us", x=width - 16, y=y + 4, text_anchor="end")
        )
    y = bottom + 36
    parts += [
        tag("circle", class_="dot other", cx=left, cy=y - 4, r=4.5),
        tag("text", "step and its phases", class_="dim", x=left + 10, y=y),
        tag("circle", class_="ring other", cx=left + 150, cy=y - 4, r=4.5),
        tag("text", "and every module", class_="dim", x=left + 160, y=y),
        tag("text", "lines: 95 % intervals", class_="dim", x=left + 290, y=y),
    ]
    drawing = tag(
        "svg", raw_element("style", _chart_style()), parts, xmlns="http://www.w3.org/2000/svg",
        width=width, height=bottom + 52, viewBox=f"0 0 {width} {bottom + 52}",
    )  # fmt: skip
    return ElementTree.tostring(drawing, encoding="unicode") + "\n"


def _chart_style() -> str:
    """Return the style for a light page, and for a dark one. The chart brings its own ground."""

    def colors(theme: str) -> str:
        def color(name: str) -> str:
            return str(getattr(SURFACES[name], theme))

        ours, other, ground = getattr(FASTER, theme), color("dim"), color("ground")
        return (
            f"text{{fill:{color('text')}}}.dim{{fill:{color('dim')}}}.ground{{fill:{ground}}}"
            f".rule{{stroke:{color('rule')}}}.line.ours{{stroke:{ours}}}.line.other{{stroke:{other}}}"
            f".dot.ours{{fill:{ours}}}.dot.other{{fill:{other}}}"
            f".ring{{fill:{ground}}}.ring.ours{{stroke:{ours}}}.ring.other{{stroke:{other}}}"
        )

    return (
        "text{font:12px system-ui,sans-serif}.title{font-weight:600}.line,.ring{stroke-width:2}"
        f"{colors('light')}@media(prefers-color-scheme:dark){{{colors('dark')}}}"
    )


def write(data: dict[str, Any] | None, root: Path) -> None:
    """Replace the marked parts of the page and of the README, and write the chart."""
    texts = {PAGE: NOT_MEASURED, README: ""}
    if data is None:
        (root / CHART).unlink(missing_ok=True)
    else:
        (root / CHART).write_text(draw_chart(data))
        texts[PAGE] = "\n" + "\n".join(draw_tables(data))
        texts[README] = (
            f"![time that each tool adds to a training step]({CHART})\n"
            f"The tools record [different things]({PAGE}#other-tools).\n"
        )
    for page, text in texts.items():
        before = (root / page).read_text()
        if len(MARKED.findall(before)) != 1:
            raise ValueError(f"{page} must have one part between the marks of bench-peers")
        replace = functools.partial(_replace, text)
        (root / page).write_text(MARKED.sub(replace, before))


def _replace(text: str, found: re.Match[str]) -> str:
    return f"{found[1]}{text}{found[3]}"


def to_json(data: dict[str, Any]) -> str:
    """Return the data as JSON with a line for each tool of each part."""

    def lines(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, dict) or not value:
            return json.dumps(value)
        indent = " " * (3 - depth)
        inner = ",\n".join(
            f"{indent}{json.dumps(key)}: {lines(each, depth - 1)}" for key, each in value.items()
        )
        return f"{{\n{inner}\n{indent[1:]}}}"

    return lines(data, 3) + "\n"


def load(root: Path) -> dict[str, Any] | None:
    """Return the data of the last measurement, or None if nothing was measured."""
    path = root / DATA
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    write(load(REPO), REPO)
