"""A run in a notebook cell: its content is small, inert, and needs no scripts or style sheets."""

from __future__ import annotations

import base64
import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec import structs

from tests.report.test_report import report_on
from tests.support.ranks import Rank, make_run
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.errors import printable
from torchlens_perf.page.notebook import MAX_BYTES, build_cell, results_as_json
from torchlens_perf.page.small_charts import (
    MAX_BARS,
    build_image,
    draw_parts_chart,
    draw_step_chart,
)
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.view.headline import build_headlines
from torchlens_perf.view.markup import to_html
from torchlens_perf.view.rank_tables import step_parts
from torchlens_perf.view.theme import PARTS

WORK = {"data": 1, "forward": 4, "communication": 2, "backward": 6, "host": 1}
# Tags, attributes and styles that JupyterLab keeps in an untrusted notebook's HTML, as far as cells
# use them. The source is packages/apputils/src/sanitizer.ts.
TAGS: dict[str, set[str]] = {
    "div": {"style"}, "p": set(), "b": {"style"}, "br": set(), "small": set(), "img": {"alt", "src", "style"},
    "table": set(), "thead": set(), "tbody": set(), "tr": set(), "th": set(), "td": set(),
    "span": set(), "code": set(), "details": {"open"}, "summary": set(), "ul": set(), "li": set(),
}  # fmt: skip
STYLES = {
    "border-left": r"4px solid #[0-9a-f]{6}", "padding-left": r"\d+px", "margin": r"\d+px \d+px", "max-width": r"100%",
    "background-color": r"#[0-9a-f]{6}", "color": r"#ffffff", "padding": r"\d+px \d+px", "border-radius": r"\d+px",
    "font-size": r"\d+px", "font-family": r"system-ui, sans-serif", "overflow-x": "auto",
}  # fmt: skip
VOID = {"br", "img"}
SVG = {"svg", "style", "rect", "title", "text", "path", "polyline", "polygon", "circle"}
HOSTILE = (
    "\"></div><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e\u2028 ' ]]>"
    " &#60;b&#62; </svg>"
)


class Page(HTMLParser):
    """A parser of the HTML that a browser would show, which checks tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []
        self.images: list[tuple[str, ElementTree.Element]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert set(given) <= TAGS[tag], (tag, given)
        for style in filter(None, (given.get("style") or "").split(";")):
            name, _, value = style.partition(":")
            assert re.fullmatch(STYLES[name.strip()], value.strip()), style
        if tag == "img":
            head, _, data = (given["src"] or "").partition(",")
            assert head == "data:image/svg+xml;base64"
            self.images.append((given["alt"] or "", picture(base64.b64decode(data).decode())))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def picture(svg: str) -> ElementTree.Element:
    """Return a well-formed SVG after checking that it loads and runs nothing."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
        assert tag in SVG, tag
        for name, value in element.attrib.items():
            assert not name.startswith("on"), name
            assert "href" not in name, name
            assert "url(" not in value, value
    return root


def texts(image: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in image.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a report on two ranks, one of which is slow, with a note."""
    run = make_run(tmp_path_factory.mktemp("report"))
    ranks = [Rank(run, rank) for rank in range(2)]
    ranks[0].session.note("something is not measured")
    ranks[0].steps(100, **WORK)
    ranks[1].steps(100, **{**WORK, "forward": 9, "communication": 0.1})
    found = report_on(run, ranks)
    assert found["verdicts"][0].kind == "straggler"
    return found


def test_cell_has_verdict_numbers_notes_and_path_as_text(report: dict[str, Any]) -> None:
    """The order is verdict, numbers, notes and path."""
    cell = build_cell(report, "/runs/one")
    page = Page(cell)
    (first,) = build_headlines(report, "/runs/one")

    assert "SLOW RANK rank 1" in page.words
    assert first.cost
    assert first.cost in page.words
    for words in (first.sentence, f"Next: {first.action}", " ".join(first.command.split())):
        assert words in page.words
    assert page.words.index(first.sentence) < page.words.index("p50")
    for name in ("p50_s", "p95_s", "p99_s", "max_s"):
        assert format_duration(report["steps"][name]) in page.words
    assert f"{report['quality']['overhead_share']:.2%} of step time" in page.words
    assert "something is not measured" in page.words
    assert "run directory: /runs/one" in page.words
    assert '<div style="overflow-x: auto"><table>' in cell  # On a phone, the table scrolls inside.
    assert "Page: torchlens-perf serve /runs/one" in page.words
    assert re.search(r"as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", page.words)


def test_pictures_in_a_cell_have_alternative_texts(report: dict[str, Any]) -> None:
    """The texts have the report's numbers."""
    (steps, history), (parts, bars) = Page(build_cell(report, "/runs/one")).images

    assert steps.startswith("Step time over steps 0 to 99, ")
    assert {"step", "0", "100"} <= set(texts(history))
    assert format_duration(max(report["history"]["median_s"])) in steps
    title = "step time (median and range of the ranks); shaded: a rank is slow"
    assert title in texts(history)
    for rank in report["ranks"]:
        said = parts.partition(f"rank {rank['rank']} ")[2].partition(";")[0]
        assert said.startswith(format_duration(rank["typical"]["s"]))
        for part, seconds in step_parts(rank, by_device=False).items():
            if seconds:
                assert f"{PARTS[part].name} {format_duration(seconds)}" in said
                assert f"{PARTS[part].glyph} {PARTS[part].name}" in texts(bars)


def test_pictures_are_readable_in_a_light_and_in_a_dark_notebook(report: dict[str, Any]) -> None:
    """An image does not inherit the notebook's theme.

    The image has a transparent background, and its text has contrast on both themes.
    """
    for _, svg in Page(build_cell(report, "")).images:
        style = svg[0].text or ""
        (color,) = re.findall(r"text{[^}]*fill:(#\w+)", style)

        assert svg.find("{http://www.w3.org/2000/svg}rect") is None
        assert "prefers-color-scheme" not in style
        for ground in ("#ffffff", "#111111"):
            assert contrast(color, ground) >= 4.2
    # Only the status has a colour of its own, and a background.
    cell = build_cell(report, "")
    chips = re.findall(r"<b style=\"background-color: (#\w+); color: (#\w+);", cell)
    assert chips
    assert all(contrast(*each) >= 4.5 for each in chips)
    assert cell.count("color:") == 2 * len(chips)


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * each for each in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_hostile_names_are_inert_in_a_cell(report: dict[str, Any]) -> None:
    """No text of a report becomes a tag or attribute, controls a terminal, or reverses text."""
    clean = Page(build_cell(report, "/runs/one"))

    def planted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: planted(each) for key, each in value.items()}
        return (
            [planted(each) for each in value]
            if isinstance(value, list)
            else HOSTILE
            if isinstance(value, str)
            else value
        )

    def bad_verdict(row: Verdict) -> Verdict:
        kept = ("kind", "evidence", "held")
        texts = {name: value for name, value in structs.asdict(row).items() if name not in kept}
        return structs.replace(row, **planted(texts), evidence=Evidence())

    for field in ("run", "verdicts", "quality"):
        bad = {
            **report,
            field: (
                [bad_verdict(each) for each in report[field]]
                if field == "verdicts"
                else planted(report[field])
            ),
        }
        page = Page(build_cell(bad, HOSTILE))
        assert "<script>alert(1)</script>" in page.words
        assert not set("\x1b\u202e\u2028") & set(page.words + json.dumps(page.images[0][0]))
        assert len(page.images) == len(clean.images)
    json.loads(results_as_json({**report, "run": planted(report["run"])}, HOSTILE, HOSTILE))
    ((says, _),) = Page(
        to_html(build_image('<svg xmlns="http://www.w3.org/2000/svg"/>', HOSTILE))
    ).images
    assert says == printable(HOSTILE)


def test_cell_of_a_run_without_steps_has_no_chart(tmp_path: Path) -> None:
    """Values that were not measured are not shown as zero."""
    run = make_run(tmp_path)
    found = report_on(run, [Rank(run, 0, 1)])
    page = Page(build_cell(found, ""))

    assert page.images == []
    assert "overhead" in page.words
    assert "not measured" in page.words
    assert build_headlines(found)[0].sentence in page.words


def test_cell_stays_below_its_size_limit(report: dict[str, Any]) -> None:
    """Omitted data are counted."""
    large = copy.deepcopy(report)
    large["ranks"] = [{**report["ranks"][0], "rank": rank} for rank in range(4096)]
    large["verdicts"] = [
        structs.replace(large["verdicts"][0], text="x" * 5000, action="y" * 5000)
    ] * 100
    large["quality"]["notes"] = ["z" * 5000] * 100
    columns = range(64)
    large["history"] = {
        "width": 1024, "first_steps": [1024 * i for i in columns], "median_s": [1.23456789 + i for i in columns],
        "fastest_s": [1.0 for _ in columns], "slowest_s": [100.0 for _ in columns],
    }  # fmt: skip
    text = build_cell(large, "/runs/" + "d" * 5000)
    page = Page(text)

    assert len(text.encode()) < MAX_BYTES
    assert "92 more: torchlens-perf report" in page.words
    assert f"typical step, by part, {MAX_BARS} of 4096 ranks" in texts(page.images[1][1])


def test_chart_shows_the_first_ranks_in_the_given_order() -> None:
    order = [77, 3, *range(50, 100)]
    chart = draw_parts_chart({rank: {"forward": 0.1, "backward": 0.2} for rank in order}, "step")
    assert chart is not None
    labels = [text for text in texts(picture(chart[0])) if text.startswith("rank ")]

    assert labels == [f"rank {rank}" for rank in order[:MAX_BARS]]


def test_chart_lengths_are_proportional_to_the_numbers() -> None:
    """A bar's pieces are as long as the parts, and a point is as high as the step."""
    chart = draw_parts_chart(
        {0: {"forward": 0.1, "backward": 0.3}, 1: {"forward": 0.1, "backward": 0.1}}, "typical step"
    )
    assert chart is not None
    lengths = [float(each) for each in re.findall(r'width="([\d.]+)%"[^>]* data-part', chart[0])]
    assert [round(each / lengths[0], 2) for each in lengths] == [1.0, 3.0, 1.0, 1.0]

    history = {
        "width": 8,
        "first_steps": [0, 8, 16],
        "median_s": [0.1, 0.2, 0.4],
        "fastest_s": [0.1] * 3,
        "slowest_s": [0.4] * 3,
    }
    svg, _ = draw_step_chart(history, 22, [(8, 16)])  # type: ignore[arg-type]
    (line,) = re.findall(r'<polyline[^>]*points="([^"]+)"', svg)
    assert {"200 ms", "400 ms", "0", "5", "10", "15", "20"} <= set(texts(picture(svg)))
    (zero,) = re.findall(r'y="([\d.]+)" text-anchor="end">0<', svg)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    heights = [float(zero) - 4 - y for _, y in points]
    assert [round(each / heights[0], 1) for each in heights] == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    # A window is a level from its first step to its last one, and 22 steps fill the chart.
    step = (points[-1][0] - points[0][0]) / 22
    places = [round((x - points[0][0]) / step, 1) for x, _ in points]
    assert places == [0.0, 8.0, 8.0, 16.0, 16.0, 22.0]
    ((begin, end),) = re.findall(r'class="s" d="M([\d.]+) \d+H([\d.]+)', svg)
    assert (float(begin), float(end)) == (points[2][0], points[3][0])


def test_ranks_judged_by_devices_are_shown_by_device_times(report: dict[str, Any]) -> None:
    """Host times of these ranks are not drawn."""
    device = {"parts": {"forward": 0.01, "backward": 0.02, "communication": 0.005}}
    ranks = [{**rank, "device": device} for rank in report["ranks"]]
    by_device = {**report, "run": {**report["run"], "judged_by": "device"}, "ranks": ranks}
    (steps, _), (parts, _) = Page(build_cell(by_device, "")).images

    assert steps.startswith("Step time on the device over steps")
    assert parts.startswith(
        "A step on the device, by part. rank 1 35.0 ms: forward 10.0 ms, backward 20.0 ms"
    )


def test_summary_object_has_the_numbers_of_the_report(report: dict[str, Any]) -> None:
    value = json.loads(results_as_json(report, "/runs/one", "the text"))
    summary, verdict = value["summary"], report["verdicts"][0]

    assert value["text"] == "the text"
    assert summary["verdicts"][0] == {
        **{
            name: getattr(verdict, name)
            for name in ("kind", "rank", "phase", "cost_s_per_step", "cost_share", "since_step")
        },
        "text": verdict.text,
        "next": verdict.action,
    }
    assert summary["step_p50_s"] == report["steps"]["p50_s"]
    assert (summary["steps"], summary["ranks"], summary["running"]) == (100, 2, False)
    for name in ("overhead_share", "overhead_low", "overhead_high", "module_period"):
        assert summary[name] == report["quality"][name]
    assert summary["sidecar_cpu_s"] == report["quality"]["sidecar_cpu_s"]
