"""The page's charts in a real browser: all are drawn from what the page holds, and say what is under the pointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.page.browser.conftest import WIDE_RANKS, WIDE_SINCE, WIDE_SLOW, WIDE_STEPS, TabOf
from tests.page.browser.tab import Tab, need_browser
from tests.page.conftest import SINCE_STEP, SLOW_RANK, STEPS
from torchlens_perf.analysis.statistics.quantities import amount, duration, percent
from torchlens_perf.page.contents import Contents
from torchlens_perf.page.decoded import Steps
from torchlens_perf.page.matrix import decoded
from torchlens_perf.page.pictures.heat import levels, palette
from torchlens_perf.page.sections.ranks import by_prominence
from torchlens_perf.page.sections.step import _words

need_browser()

DRAWN = "torchlensPage.charts.filter(({plot}) => plot).map(({figure}) => torchlens.figureName(figure)).sort()"


def test_every_chart_is_drawn_and_nothing_is_asked_for(tab_of: TabOf, wide_file: Path) -> None:
    """No error in the console, no request beyond the file itself, and pictures are not shown beside charts."""
    tab = tab_of(wide_file).open()
    tab.show_all()
    assert tab.value(DRAWN) == sorted(
        [
            "heat",
            "steps",
            "phases",
            "step",
            "modules",
            "collectives",
            "memory",
            "GPU temperature",
            "SM clock",
        ]
    )
    assert (tab.problems, tab.foreign()) == ([], [])
    hidden = "[...document.querySelectorAll('figure.drawn > .picture')].every(each => !each.getClientRects().length)"
    assert tab.value(hidden)
    canvases = """torchlensPage.charts.map(({place}) => { const found = []; const walk = root => { for (const each of
        root.querySelectorAll('*')) { if (each.tagName === 'CANVAS') found.push(each); if (each.shadowRoot)
        walk(each.shadowRoot); } }; walk(place); const canvas = found.find(each => each.width > 100), data =
        canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data; return data.some(Boolean); })"""
    assert all(tab.value(canvases))


def test_matrices_are_decoded_as_python_decodes_them(tab: Tab, shown: Contents) -> None:
    """What was not measured is not a number, zero is zero, and excess is that of the judgement."""
    matrices = shown["steps"]
    assert matrices is not None
    steps = Steps(matrices)
    ranks = len(matrices["places"])
    for name, expected in (
        ("step", steps.step_s()),
        ("work", steps.work_s),
        ("forward", decoded(matrices["parts"]["forward"], ranks)),
        ("excess", steps.excess()),
    ):
        found = tab.value(f"Array.from(torchlensPage.steps.values('{name}'), each => Number.isNaN(each) ? null : each)")
        values = np.array([np.nan if each is None else each for each in found])
        np.testing.assert_allclose(values, expected.ravel(), rtol=1e-5, atol=1e-6)


def test_excess_in_large_populations_and_small_ones(tab_of: TabOf, wide_file: Path, wide: Contents) -> None:
    """More than 16 ranks are compared with the median of all, fewer with that of the others."""
    matrices = wide["steps"]
    assert matrices is not None
    tab = tab_of(wide_file).open()
    found = tab.value("Array.from(torchlensPage.steps.values('excess'), each => Number.isNaN(each) ? null : each)")
    values = np.array([np.nan if each is None else each for each in found])
    np.testing.assert_allclose(values, Steps(matrices).excess().ravel(), rtol=1e-4, atol=1e-6)
    slow = values.reshape(WIDE_RANKS, WIDE_STEPS)[WIDE_SLOW]
    assert np.nanmean(slow[WIDE_SINCE:]) > 0.2 > 0.05 > abs(np.nanmean(slow[:WIDE_SINCE]))


def test_quantities_are_written_as_in_the_report(tab: Tab) -> None:
    """Durations, shares and amounts have the same figures in charts as in tables."""
    seconds = [0.0, 3e-9, 4.2e-7, 9.996e-4, 1.2345e-3, 0.0999, 0.1, 1.0, 12.34, 123.4, 9999.0]
    assert [tab.value(f"torchlens.duration({each})") for each in seconds] == [duration(each) for each in seconds]
    shares = [0.0, 0.0123, 0.0999, 0.1, 0.256, 1.0, 12.0]
    assert [tab.value(f"torchlens.percent({each})") for each in shares] == [percent(each) for each in shares]
    counts = [0, 1, 999, 1000, 123_456, 4.2e9, 7e15]
    assert [tab.value(f"torchlens.amount({each}, 'B')") for each in counts] == [amount(each, "B") for each in counts]
    assert tab.value("torchlens.duration(NaN)") == tab.value("torchlens.duration(null)") == "not measured"


def test_axes_are_written_with_units(tab: Tab) -> None:
    """Durations and bytes, short; ranks and steps plainly, and nothing that Bokeh could take for TeX."""
    tab.show_all()

    def ticks(name: str, axis: str, values: list[float]) -> Any:
        axes = f"{tab.named(name)}.plot.{axis}axes[0]"
        assert tab.value(f"{axes}.major_label_overrides.size") == 0
        return tab.value(f"{axes}.formatter.format_graphics({values}, {{loc: 0}}).map(({{text}}) => text)")

    assert ticks("steps", "y", [0, 0.05, 0.1234, 2.5]) == ["0", "50 ms", "123 ms", "2.5 s"]
    assert ticks("steps", "x", [0, 50, 1000]) == ["0", "50", "1000"]
    assert ticks("heat", "y", [7.5, 0.5]) == ["rank 0", "rank 7"]
    assert ticks("step", "x", [0, 0.5, 100]) == ["0", "500 us", "100 ms"]


def test_heat_has_the_colours_of_its_picture(tab: Tab) -> None:
    """The same value has the same colour with scripts as without, and "not compared" is no colour of a value."""
    tab.show("heat")
    values = [-0.4, -0.31, -0.11, -0.02, -0.005, 0.0, 0.009, 0.02, 0.06, 0.17, 0.29, 0.31, 0.5]
    expected = [palette()[int(level)] for level in levels(np.array(values))]
    bytes_of = "pixel => [...new Uint8Array(new Uint32Array([pixel]).buffer)]"
    found = tab.value(f"{values}.map(value => {tab.named('heat')}.scale.at(value, 0)).map({bytes_of})")
    for one, other in zip(found, expected, strict=True):
        assert one[3] == pytest.approx(other[3], abs=1)
        assert one[3] == 0 or tuple(one[:3]) == other[:3]
    grey = tab.value(f"{tab.named('heat')}.scale.unknown.map({bytes_of})")
    assert {tuple(each[:3]) for each in grey} == {(128, 128, 128)}
    assert grey[0][3] != grey[1][3]
    assert min(grey[0][3], grey[1][3]) > 30


def test_no_rank_is_lost_where_rows_are_thinner_than_pixels(tab: Tab) -> None:
    """Of several cells in one pixel the largest is seen, and pointed at; what was not measured is seen only alone."""
    found = tab.value(
        """(() => { const ranks = 1000, columns = 4, values = new Float32Array(ranks * columns).fill(0.001);
        values[777 * columns + 2] = 0.25; values[3] = NaN;
        for (let row = 0; row < 2; row++) values[row * columns] = NaN;
        const scale = { at: value => (Number.isNaN(value) ? 7 : value > 0.2 ? 9 : 1) };
        const order = Array.from({ length: ranks }, (_, row) => row);
        const most = { rows: 500, columns: 100 };
        const made = torchlens.heatPixels(values, columns, order, [0, ranks], [0, columns], most, scale);
        const at = made.pixels.indexOf(9);
        return { height: made.height, at: [at % made.width, made.height - 1 - Math.floor(at / made.width)],
                 row: made.rows[at], column: made.columns[at], count: made.pixels.filter(each => each === 9).length,
                 unknown: made.pixels.filter(each => each === 7).length }; })()"""
    )
    assert found == {"height": 500, "at": [2, 388], "row": 777, "column": 2, "count": 1, "unknown": 1}


def test_hover_on_the_heat_map(tab: Tab) -> None:
    """Rank, host, step, value and what a column did."""
    tab.page.mouse.move(*tab.at("heat", SINCE_STEP + 20.5, 8 - SLOW_RANK - 0.5))
    text = tab.tip()
    assert f"rank {SLOW_RANK} on node-0001, step {SINCE_STEP + 20}" in text
    values = {key: tab.value(f"torchlensPage.steps.values('{key}')[{SLOW_RANK} * {STEPS} + {SINCE_STEP + 20}]")
              for key in ("excess", "step", "work")}  # fmt: skip
    assert f"more work than the others: +{percent(values['excess'])}" in text
    assert f"step time: {duration(values['step'])}" in text
    assert f"work: {duration(values['work'])}" in text
    tab.page.mouse.move(2, 300)
    assert tab.tip() == ""


def test_hover_says_not_compared_and_not_zero(tab_of: TabOf, wide_file: Path) -> None:
    """A sampled step is not compared, and says what it did besides training."""
    tab = tab_of(wide_file).open("#heat")
    tab.page.mouse.move(*tab.at("heat", 32.5, WIDE_RANKS - 20.5))
    assert "more work than the others: not compared" in tab.tip()
    assert "work: not measured" in tab.tip()
    tab.page.mouse.move(*tab.at("heat", 99.5, WIDE_RANKS - 20.5))
    assert "did: checkpoint" in tab.tip()


def test_hover_on_the_other_charts(tab_of: TabOf, wide_file: Path, wide: Contents) -> None:
    """Each says what is under the pointer, as its picture's tables do."""
    tab = tab_of(wide_file).open()
    tab.page.mouse.move(*tab.at("steps", WIDE_SINCE + 10.5, 0.1))
    assert f"step {WIDE_SINCE + 10}" in tab.tip()
    assert f"rank {WIDE_SLOW} is slow in forward" in tab.tip()
    tab.page.mouse.move(*tab.at("phases", 0.1, 23.5))
    first = by_prominence(wide["report"])[0]
    assert first["typical"] is not None
    assert tab.tip().splitlines()[0] == f"rank {first['rank']}"
    assert f"forward: {duration(first['typical']['parts']['forward'])}" in tab.tip()
    tab.page.mouse.move(*tab.at("modules", 0.001, len(wide["report"]["modules"]) - 0.5))
    assert wide["report"]["modules"][0]["name"] in tab.tip()
    assert f"{duration(wide['report']['modules'][0]['own_s_per_step'])} a step" in tab.tip()
    tab.page.mouse.move(*tab.at("collectives", 0.001, 0.5))
    assert "came last in" in tab.tip()
    tab.page.mouse.move(*tab.at("memory", 100.5, 2.6e9))
    assert f"rank {WIDE_SLOW}: 2.6 GB" in tab.tip() or f"rank {WIDE_SLOW}: 2.5 GB" in tab.tip()
    assert tab.problems == []


def test_telemetry_is_read_at_the_pointer_and_gaps_are_gaps(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open("#telemetry")
    place = tab.page.locator("#telemetry .part .chart").first
    box = place.bounding_box()
    tab.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 25)
    assert f"rank {WIDE_SLOW}: 8" in tab.tip()  # hotter than 80 degrees
    assert "°C" in tab.tip()
    gap = "torchlensPage.charts.find(({title}) => title).data[0].y.slice(100, 110).every(Number.isNaN)"
    assert tab.value(gap)


def test_time_line_shows_who_waits_for_whom(tab: Tab, shown: Contents) -> None:
    """Waits are where the joined collectives have them, and the rank that came last has a mark."""
    tab.show("step")
    line = tab.named("step")
    step = shown["traces"]["steps"][0]
    waits = {
        (joined["number"], joined["group_name"], rank): wait
        for joined in step["collectives"]
        for rank, wait in joined["wait_us"].items()
        if wait and joined["last_rank"] != int(rank)
    }
    drawn = tab.value(f"{line}.waits.left.map((at, index) => {line}.waits.right[index] - at)")
    assert sorted(drawn) == pytest.approx(sorted(wait / 1e3 for wait in waits.values()), abs=2e-3)
    lasts = sum(joined["last_rank"] is not None for joined in step["collectives"])
    assert tab.value(f"{line}.lasts.x.length") == lasts
    assert tab.page.locator("figure[data-chart=step] p.chart-words").inner_text().startswith(_words(step))


def test_hover_on_the_time_line(tab: Tab, shown: Contents) -> None:
    """A collective says who came last, and is framed on all of its ranks."""
    tab.show("step")
    line = tab.named("step")
    step = shown["traces"]["steps"][0]
    joined = max(step["collectives"], key=lambda each: max(wait or 0 for wait in each["wait_us"].values()))
    waiter = max(joined["wait_us"], key=lambda rank: joined["wait_us"][rank] or 0)
    place = tab.value(
        f"""(() => {{ const line = {line}, at = line.about.findIndex(({{rank, key}}) => rank === {waiter} && key ===
        `allreduce {joined["group_name"]} {joined["number"]}`); const {{left, right, top, bottom}} = line.spans;
        return [(left[at] + right[at]) / 2, (top[at] + bottom[at]) / 2]; }})()"""
    )
    tab.page.mouse.move(*tab.at("step", *place))
    text = tab.tip()
    assert f"rank {joined['last_rank']} came last" in text
    assert f"waited {duration((joined['wait_us'][waiter] or 0) / 1e6)}" in text
    assert tab.value(f"{line}.focus.spans.data.left.length") == len(joined["wait_us"])


def test_device_lanes(tab_of: TabOf, device_file: Path) -> None:
    """Work on a device has a lane of its own, and phases can be had by its clock."""
    tab = tab_of(device_file).open("#step")
    lanes: Any = tab.value(
        "[...torchlensPage.charts.find(({figure}) => figure.dataset.chart === 'step').labels.values()]"
    )
    assert "device" in lanes
    tab.show("phases")
    before = tab.page.locator("figure[data-chart=phases] p.chart-words")
    tab.page.select_option("select[name=clock]", "device")
    tab.settle()
    assert "by the device's clock" in before.inner_text()
    assert tab.problems == []
