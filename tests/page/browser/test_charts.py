"""Charts in a real browser draw the page's data and show values at the pointer."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.page.browser.conftest import (
    WIDE_RANKS,
    WIDE_SINCE,
    WIDE_SLOW,
    WIDE_STEPS,
    TabOf,
    written,
)
from tests.page.browser.tab import Tab, need_browser
from tests.page.conftest import SINCE_STEP, SLOW_RANK, STEPS, recorded
from tests.support.page_contents import enlarged
from tests.support.page_matrices import Steps, decoded
from torchlens_perf.analysis.statistics.quantities import (
    format_bytes,
    format_duration,
    format_percent,
)
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.gather.run_contents import gather_contents
from torchlens_perf.simulate.simulation import Topology
from torchlens_perf.verdicts.verdict import Verdict
from torchlens_perf.verdicts.words.evidence import NoSlowRankEvidence
from torchlens_perf.view.theme import FULL_EXCESS, MIN_EXCESS

need_browser()

DRAWN = (
    "torchlensPage.charts.filter(({plot}) => plot).map(({figure}) =>"
    " torchlens.figureName(figure)).sort()"
)


def test_every_chart_is_drawn_without_requests_or_errors(tab_of: TabOf, wide_file: Path) -> None:
    """Every canvas has some pixels drawn."""
    tab = tab_of(wide_file).open()
    tab.show_all()
    assert tab.value(DRAWN) == sorted(
        ["heat", "steps", "step", "memory", "GPU temperature", "SM clock"]
    )
    assert (tab.problems, tab.foreign()) == ([], [])
    painted = """torchlensPage.charts.map(({plot}) => plot.ctx.getImageData(0, 0, plot.ctx.canvas.width,
        plot.ctx.canvas.height).data.some(Boolean))"""
    assert all(tab.value(painted))


def test_charts_have_titles_axes_with_units_and_legends(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open()
    tab.show_all()
    for figure in tab.page.locator("main figure").all():
        assert 0 < len(figure.locator("h3").inner_text()) < 60
    labels = tab.value("Object.fromEntries(torchlensPage.charts.map(c => [torchlens.figureName(c.figure), "
                       "c.plot.axes.map(({label}) => label)]))")  # fmt: skip
    assert labels["steps"] == ["step", "step time"]
    assert labels["memory"] == ["step", "memory"]
    assert labels["GPU temperature"] == ["seconds since the first step", "°C"]
    for name in ("steps", "heat", "memory", "step"):
        assert tab.page.locator(f"figure[data-chart={name}] ul.legend li").count() > 1
    assert (
        tab.page.locator("figure[data-chart=memory]").inner_text().count(f"rank {WIDE_SLOW}") >= 1
    )


def test_matrices_are_decoded_to_the_same_values_as_in_python(
    tab: Tab, shown: PageContents
) -> None:
    """Missing values are NaN, zero is zero, and the excess equals that of the verdicts."""
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
        found = tab.value(
            f"Array.from(torchlensPage.steps.values('{name}'), each => Number.isNaN(each) ? null :"
            " each)"
        )
        values = np.array([np.nan if each is None else each for each in found])
        np.testing.assert_allclose(values, expected.ravel(), rtol=1e-5, atol=1e-6)


def test_excess_is_relative_to_all_ranks_only_above_16_ranks(
    tab_of: TabOf, wide_file: Path, wide: PageContents
) -> None:
    """More than 16 ranks are compared with the median of all, fewer ranks with the median of the
    others.
    """
    matrices = wide["steps"]
    assert matrices is not None
    tab = tab_of(wide_file).open()
    found = tab.value(
        "Array.from(torchlensPage.steps.values('excess'), each => Number.isNaN(each) ? null : each)"
    )
    values = np.array([np.nan if each is None else each for each in found])
    np.testing.assert_allclose(values, Steps(matrices).excess().ravel(), rtol=1e-4, atol=1e-6)
    slow = values.reshape(WIDE_RANKS, WIDE_STEPS)[WIDE_SLOW]
    assert np.nanmean(slow[WIDE_SINCE:]) > 0.2 > 0.05 > abs(np.nanmean(slow[:WIDE_SINCE]))


def test_quantities_in_charts_are_written_as_in_the_report(tab: Tab) -> None:
    """Durations, shares and amounts have the same number of figures as in tables, also halves."""
    seconds = [0.0, 3e-9, 4.2e-7, 9.996e-4, 1.2345e-3, 0.0999, 0.1, 1.0, 12.34, 123.4, 9999.0]
    seconds += [100.5, 101.5, -100.5, 10.25, 10.75, 1.125, 2.675, 112_500e-9, 113_500e-9]
    assert [tab.value(f"torchlens.duration({each})") for each in seconds] == [
        format_duration(each) for each in seconds
    ]
    shares = [0.0, 0.0123, 0.0999, 0.1, 0.256, 1.0, 12.0, 0.125, 0.375, 0.0625, -0.125, 0.145]
    assert [tab.value(f"torchlens.percent({each})") for each in shares] == [
        format_percent(each) for each in shares
    ]
    counts = [0, 1, 999, 1000, 123_456, 4.2e9, 7e15]
    assert [tab.value(f"torchlens.amount({each}, 'B')") for each in counts] == [
        format_bytes(each, "B") for each in counts
    ]
    assert (
        tab.value("torchlens.duration(NaN)")
        == tab.value("torchlens.duration(null)")
        == "not measured"
    )


def test_axis_labels_have_units_and_short_numbers(tab: Tab) -> None:
    """Ranks and steps are plain numbers."""
    tab.show_all()

    def ticks(name: str, axis: int, values: list[float]) -> Any:
        return tab.value(f"{tab.named(name)}.plot.axes[{axis}].values(null, {values})")

    assert ticks("steps", 1, [0, 0.05, 0.1234, 2.5]) == ["0", "50 ms", "123 ms", "2.5 s"]
    assert ticks("steps", 0, [0, 50, 1000]) == ["0", "50", "1000"]
    assert ticks("heat", 1, [0.5, 7.5])[0] == f"rank {SLOW_RANK}"
    assert ticks("step", 0, [0, 0.5, 100]) == ["0", "500 us", "100 ms"]


def test_warm_up_does_not_scale_the_chart_and_slow_times_have_labels(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    made: Any = copy.deepcopy(shown)
    for name in ("p50_s", "p95_s", "max_s"):
        made["steps"]["bands"][name][0] = 100.0
    tab = tab_of(written(tmp_path, "warm", made)).open("#steps")
    longest = max(
        each
        for each in made["steps"]["bands"]["max_s"][made["report"]["steps"]["warm_up"] + 1 :]
        if each
    )
    assert tab.value(f"{tab.named('steps')}.plot.scales.y.max") < 1.3 * longest
    legend = tab.page.locator("#steps ul.legend").inner_text()
    assert "warm-up" in legend
    assert "a rank is slow" in legend
    tab.page.mouse.move(*tab.at("steps", 0.5, 0.1))
    assert tab.tip().splitlines()[-1] == "warm-up"


def test_memory_chart_is_scaled_to_the_data(
    tab_of: TabOf, wide_file: Path, wide: PageContents
) -> None:
    tab = tab_of(wide_file).open("#memory")
    assert wide["steps"] is not None
    memory = np.array(wide["steps"]["memory_bytes"], float)
    low, high = tab.value(f"(({{min, max}}) => [min, max])({tab.named('memory')}.plot.scales.y)")
    assert 0 < low < memory.min()
    assert memory.max() < high < memory.max() * 1.2


def test_heat_map_colours_only_a_detectable_excess(
    tab_of: TabOf, wide: PageContents, tmp_path: Path
) -> None:
    """Slower is orange and faster is blue, with stronger colours for a larger excess."""
    quiet: Any = copy.deepcopy(wide)
    quiet["report"]["verdicts"] = [
        Verdict(
            kind="none", confidence=0.9, evidence=NoSlowRankEvidence(0.025, 64, 200, 0.1, "host")
        )
    ]
    of: Any = {}
    for name, contents in (("slow", wide), ("quiet", quiet)):
        tab = tab_of(written(tmp_path, name, contents)).open("#heat")
        heat = tab.named("heat")
        smallest = of[name] = tab.value(f"{heat}.smallest")
        values = [
            -0.5,
            -smallest * 1.01,
            -smallest * 0.99,
            0.0,
            smallest * 0.99,
            smallest * 1.01,
            0.2,
            0.5,
        ]
        pixels = tab.value(f"{values}.map(value => [...new Uint8Array(new Uint32Array([{heat}.scaling.at(value, 0)])"
                           ".buffer)])")  # fmt: skip
        assert [pixel[3] > 0 for pixel in pixels] == [
            True,
            True,
            False,
            False,
            False,
            True,
            True,
            True,
        ]
        assert all(red > blue for red, _, blue, _ in pixels[5:])
        assert all(blue > red for red, _, blue, _ in pixels[:2])
        assert pixels[5][3] < pixels[6][3] < pixels[7][3] == 255
        words = tab.page.locator("figure[data-chart=heat] ul.legend").inner_text()
        for word in ("slower", "faster"):
            assert f"{format_percent(smallest)} {word}" in words
            assert f"{format_percent(FULL_EXCESS)} or more {word}" in words
    work = np.median(Steps(wide["steps"]).work_s[np.isfinite(Steps(wide["steps"]).work_s)])  # type: ignore[arg-type]
    assert of["quiet"] == pytest.approx(0.025 / work, rel=0.01)
    assert MIN_EXCESS <= of["slow"] < of["quiet"]


def test_healthy_ranks_are_blank_in_the_heat_map(tab_of: TabOf, wide_file: Path) -> None:
    """At most 1 % of the cells of healthy ranks have a colour, and nearly all cells of the slow
    rank.
    """
    tab = tab_of(wide_file).open("#heat")
    coloured = """(({scaling, steps}, slow, since) => { const values = steps.values("excess"), found = [0, 0, 0, 0];
        values.forEach((value, at) => { if (Number.isNaN(value)) return;
          const isSlow = Math.floor(at / steps.columns) === slow && at % steps.columns >= since;
          found[isSlow ? 0 : 2]++; if (scaling.at(value, 0)) found[isSlow ? 1 : 3]++; }); return found; })"""
    slow, slow_coloured, healthy, healthy_coloured = tab.value(
        f"({coloured})({tab.named('heat')}, {WIDE_SLOW}, {WIDE_SINCE})"
    )
    assert slow_coloured / slow > 0.95
    assert healthy_coloured / healthy < 0.01


def test_fewer_than_five_ranks_are_drawn_as_lines(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    """Each line is the compute time of a rank."""
    tab = tab_of(written(tmp_path, "few", enlarged(shown, 2, 100, 1, 40))).open("#heat")
    compute = tab.named("compute")
    assert tab.value(f"{compute}.data.map(({{label}}) => label)") == ["rank 0", "rank 1"]
    work = tab.value(f"{compute}.data[1].y[50]")
    assert work == pytest.approx(tab.value("torchlensPage.steps.work[150]"))
    tab.page.mouse.move(*tab.at("compute", 50.4, work))
    assert f"rank 1: {format_duration(work)}" in tab.tip()
    assert tab.value(f"{compute}.heading.textContent") == "Compute time per step"
    assert tab.problems == []


def test_slow_rank_comes_first_in_the_heat_map_of_64_ranks(tab_of: TabOf, wide_file: Path) -> None:
    """Few ranks are shown at first. A button shows all ranks, and the address has this setting."""
    tab = tab_of(wide_file).open("#heat")
    ranks = f"{tab.named('heat')}.order.map(row => torchlensPage.steps.places[row].rank)"
    assert tab.value(ranks)[0] == WIDE_SLOW
    assert 8 <= len(tab.value(ranks)) <= 16
    tab.value("torchlensPage.view.set({rank: 60})")
    tab.settle()
    assert 60 in tab.value(ranks)
    tab.page.get_by_role("button", name=f"Show all {WIDE_RANKS}").click()
    tab.settle()
    assert len(tab.value(ranks)) == WIDE_RANKS
    assert "rows=all" in tab.address()


def test_no_slow_rank_is_lost_if_rows_are_thinner_than_pixels(tab: Tab) -> None:
    """If cells share a pixel, the largest value is shown.

    A missing value is visible only in a pixel without other values.
    """
    found = tab.value(
        """(() => { const ranks = 1000, columns = 4, values = new Float32Array(ranks * columns).fill(0.001);
        values[777 * columns + 2] = 0.25; values[3] = NaN;
        for (let row = 0; row < 2; row++) values[row * columns] = NaN;
        const scale = { at: value => (Number.isNaN(value) ? 7 : value > 0.2 ? 9 : 1) };
        const order = Array.from({ length: ranks }, (_, row) => row);
        const most = { rows: 500, columns: 100 };
        const made = torchlens.heatPixels(values, columns, order, [0, columns], most, scale);
        const at = made.pixels.indexOf(9);
        return { height: made.height, at: [at % made.width, Math.floor(at / made.width)],
                 row: made.rows[at], column: made.columns[at], count: made.pixels.filter(each => each === 9).length,
                 unknown: made.pixels.filter(each => each === 7).length }; })()"""
    )
    assert found == {
        "height": 500,
        "at": [2, 388],
        "row": 777,
        "column": 2,
        "count": 1,
        "unknown": 1,
    }


def test_heat_map_tooltip_has_rank_host_step_value_and_flags(tab: Tab) -> None:
    tab.open("#heat;order=rank")
    tab.page.mouse.move(*tab.at("heat", SINCE_STEP + 20.5, SLOW_RANK + 0.5))
    text = tab.tip()
    assert f"rank {SLOW_RANK} on node-0001, step {SINCE_STEP + 20}" in text
    values = {key: tab.value(f"torchlensPage.steps.values('{key}')[{SLOW_RANK} * {STEPS} + {SINCE_STEP + 20}]")
              for key in ("excess", "step", "work")}  # fmt: skip
    assert f"excess over the other ranks: +{format_percent(values['excess'])}" in text
    assert f"step time: {format_duration(values['step'])}" in text
    assert f"compute: {format_duration(values['work'])}" in text
    tab.page.mouse.move(2, 300)
    assert tab.tip() == ""


def test_tooltip_of_a_sampled_step_says_not_compared(tab_of: TabOf, wide_file: Path) -> None:
    """The tooltip gives the sampling as the reason."""
    tab = tab_of(wide_file).open("#heat;order=rank;rows=all")
    tab.page.mouse.move(*tab.at("heat", 32.5, 20.5))
    assert "excess over the other ranks: not compared" in tab.tip()
    assert "compute: not measured" in tab.tip()
    tab.page.mouse.move(*tab.at("heat", 99.5, 20.5))
    assert "also: checkpoint" in tab.tip()


def test_tooltip_of_each_chart_has_the_values_at_the_pointer(
    tab_of: TabOf, wide_file: Path
) -> None:
    tab = tab_of(wide_file).open()
    tab.page.mouse.move(*tab.at("steps", WIDE_SINCE + 10.5, 0.1))
    assert f"step {WIDE_SINCE + 10}" in tab.tip()
    assert f"rank {WIDE_SLOW} is slow in forward" in tab.tip()
    tab.show("memory")
    tab.page.mouse.move(*tab.at("memory", 100.5, 2.6e9))
    assert f"rank {WIDE_SLOW}: 2.6 GB" in tab.tip() or f"rank {WIDE_SLOW}: 2.5 GB" in tab.tip()
    assert tab.problems == []


def test_telemetry_tooltip_has_values_and_gaps_at_the_pointer(
    tab_of: TabOf, wide_file: Path
) -> None:
    tab = tab_of(wide_file).open("#telemetry")
    tab.show("telemetry")
    tab.page.mouse.move(*tab.at("telemetry", 40.0, 85.0))
    # The planted temperature is above 80 degrees.
    assert f"rank {WIDE_SLOW}: 8" in tab.tip()
    assert "°C" in tab.tip()
    gap = f"{tab.named('telemetry')}.data[0].y.slice(100, 110).every(value => value === null)"
    assert tab.value(gap)


def test_timeline_shows_waits_and_the_last_rank_of_collectives(
    tab: Tab, shown: PageContents
) -> None:
    """The waits equal those of the joined collectives."""
    tab.show("step")
    line = tab.named("step")
    step = shown["traces"]["steps"][0]
    waits = {
        (joined["number"], joined["group_name"], rank): wait
        for joined in step["collectives"]
        for rank, wait in joined["wait_us"].items()
        if wait and joined["last_rank"] != int(rank)
    }
    drawn = tab.value(
        f"{line}.laid.spans.filter(each => each.waitUntil).map(each => each.waitUntil - each.left)"
    )
    assert sorted(drawn) == pytest.approx(sorted(wait / 1e3 for wait in waits.values()), abs=2e-3)
    lasts = sum(joined["last_rank"] is not None for joined in step["collectives"])
    assert tab.value(f"{line}.laid.spans.filter(each => each.isLast).length") == lasts
    words = tab.page.locator("figure[data-chart=step] > p").first.inner_text()
    longest = max(step["ranks"], key=lambda trace: trace["duration_us"])
    assert words.startswith(
        f"Step {step['step']} takes {format_duration(longest['duration_us'] / 1e6)} on rank"
    )
    assert words.endswith(f"for rank {SLOW_RANK}.")


def test_collective_tooltip_has_its_last_rank(tab: Tab, shown: PageContents) -> None:
    """The collective has a frame in the lanes of all its ranks."""
    tab.show("step")
    line = tab.named("step")
    step = shown["traces"]["steps"][0]
    joined = max(
        step["collectives"], key=lambda each: max(wait or 0 for wait in each["wait_us"].values())
    )
    waiter = max(joined["wait_us"], key=lambda rank: joined["wait_us"][rank] or 0)
    place = tab.value(
        f"""(({{left, right, y}}) => [(left + right) / 2, y + 7])({line}.laid.spans.find(({{rank, key}}) =>
        rank === {waiter} && key === `allreduce {joined["group_name"]} {joined["number"]}`))"""
    )
    tab.page.mouse.move(*tab.at("step", *place))
    text = tab.tip()
    assert f"last to arrive: rank {joined['last_rank']}" in text
    assert f"waited {format_duration((joined['wait_us'][waiter] or 0) / 1e6)}" in text
    assert tab.value(f"{line}.laid.byKey.get({line}.pointed).length") == len(joined["wait_us"])


def test_hang_does_not_flatten_the_charts_of_step_times(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    """Few steps that are much longer than the others are cut off, and their times are written."""
    hung = recorded(tmp_path, "stalls:rank=1,share=300,every=50", topology=Topology(2), steps=80)
    tab = tab_of(written(tmp_path, "hung", gather_contents(hung))).open()
    for name in ("steps", "compute"):
        tab.chart(name)
        plot = f"{tab.named(name)}.plot"
        longest = f"Math.max(...{plot}.data.slice(1).flatMap(each => [...each ?? []]))"
        assert tab.value(longest) > 50 * tab.value(f"{plot}.scales.y.max")
        tab.value(f"""(() => {{
            window.words = [];
            {plot}.ctx.fillText = text => words.push(text);
            {plot}.redraw(false);
        }})()""")
        assert any(str(each).startswith("\u2191 ") for each in tab.until("words.length && words"))


def test_code_between_the_phases_of_a_step_is_shown(tab_of: TabOf, tmp_path: Path) -> None:
    """A rank that hangs between two phases is not drawn as an empty row. Buttons zoom."""
    contents = gather_contents(recorded(tmp_path, topology=Topology(2), steps=24))
    step = copy.deepcopy(contents["traces"]["steps"][0])
    late = step["ranks"][1]
    for row in late["rows"]:
        row["start_us"] = [start + 60e6 for start in row["start_us"]]
    late["duration_us"] += 60e6
    traces: Any = {**contents["traces"], "steps": [step]}
    tab = tab_of(written(tmp_path, "hung", {**contents, "traces": traces}), phone=True).open()
    tab.show("step")
    line = tab.named("step")
    gap = tab.value(f"{line}.laid.spans.filter(({{ name }}) => name === 'host code')")
    assert [(each["rank"], round(each["right"] / 1e3)) for each in gap] == [(late["rank"], 60)]
    assert "host code" in tab.page.locator("figure[data-chart=step] .legend").inner_text()
    end = tab.value(f"{line}.window[1]")
    tab.page.locator("#step").get_by_role("button", name="Zoom in").click()
    assert tab.value(f"{line}.window[1]") < 0.8 * end


def test_span_names_its_last_module_or_first_word_where_the_name_does_not_fit(tab: Tab) -> None:
    tab.show("step")
    width = "{ measureText: text => ({ width: 6 * text.length }) }"

    def fitting(kind: str, name: str, room: int) -> Any:
        span = f"{{ kind: '{kind}', key: '', name: '{name}' }}"
        return tab.value(f"{tab.named('step')}.fitting({width}, {span}, {room})")

    assert fitting("module", "blocks.12", 54) == "blocks.12"
    assert fitting("module", "blocks.12", 50) == "12"
    assert fitting("optimizer", "optimizer AdamW", 60) == "optimizer"
    assert fitting("optimizer", "optimizer AdamW", 48) == "optimiz\u2026"
    assert fitting("optimizer", "optimizer AdamW", 20) == ""


def test_keys_zoom_and_move_the_timeline(tab: Tab) -> None:
    """W and S zoom, A and D move, 0 shows the whole step. A drag with the mouse zooms too."""
    tab.show("step")
    tab.chart("step").focus()
    line = tab.named("step")
    window = f"{line}.window"
    begin, end = tab.value(window)
    tab.page.keyboard.press("w")
    inner = tab.value(window)
    assert (inner[1] - inner[0]) == pytest.approx((end - begin) / 2)
    tab.page.keyboard.press("d")
    assert tab.value(window)[0] > inner[0]
    tab.page.keyboard.press("a")
    assert tab.value(window) == pytest.approx(inner)
    assert tab.value(f"[{line}.plot.scales.x.min, {line}.plot.scales.x.max]") == pytest.approx(
        inner
    )
    tab.page.keyboard.press("s")
    assert tab.value(window) == pytest.approx([begin, end])
    since, until = begin + (end - begin) / 4, begin + (end - begin) / 2
    at, there = tab.at("step", since, 5), tab.at("step", until, 5)
    tab.page.mouse.move(*at)
    tab.page.mouse.down()
    tab.page.mouse.move(*there, steps=3)
    tab.page.mouse.up()
    assert tab.value(window) == pytest.approx([since, until], rel=0.02)
    tab.page.keyboard.press("0")
    assert tab.value(window) == pytest.approx([begin, end])


def test_device_work_is_a_separate_lane_of_the_timeline(tab_of: TabOf, device_file: Path) -> None:
    """Bars of phases have times of the device's clock."""
    tab = tab_of(device_file).open("#step")
    lanes: Any = tab.value(f"[...{tab.named('step')}.laid.labels.values()]")
    assert "device" in lanes
    tab.show("phases")
    assert "device clock" in tab.page.locator("#phases-device h3").inner_text()
    assert tab.problems == []


# -- bars


def test_rank_bars_have_the_numbers_of_the_report_and_select_a_rank(
    tab: Tab, shown: PageContents
) -> None:
    """A rank's bar has the lengths and titles of its typical step.

    A click selects the rank in all charts.
    """
    tab.show("phases")
    rank = next(each for each in shown["report"]["ranks"] if each["rank"] == SLOW_RANK)
    assert rank["typical"] is not None
    row = tab.page.locator(f"#phases-host [data-rank='{SLOW_RANK}']")
    forward = row.locator("rect[data-part=forward]")
    assert (
        f"forward: {format_duration(rank['typical']['parts']['forward'])}"
        in forward.locator("title").inner_html()
    )
    longest = max(
        each["typical"]["s"] for each in shown["report"]["ranks"] if each["typical"] is not None
    )
    expected = rank["typical"]["parts"]["forward"] / longest
    width = forward.bounding_box()["width"] / row.locator("svg").bounding_box()["width"]
    assert width == pytest.approx(expected, abs=0.02)
    forward.click()
    tab.settle()
    assert tab.view()["rank"] == SLOW_RANK
    assert "chosen" in row.get_attribute("class")


# -- export


def exported(tab: Tab, figure: Any, kind: str) -> bytes:
    with tab.page.expect_download() as waiting:
        button = figure.get_by_role("button", name=f"as {kind}")
        button.focus()
        tab.page.keyboard.press("Enter")
    assert waiting.value.suggested_filename.endswith(f".{kind.lower()}")
    return Path(waiting.value.path()).read_bytes()


@pytest.mark.parametrize("part", [slice(0, 4), slice(4, None)], ids=["first", "last"])
def test_every_chart_is_exported_as_png_and_csv(
    tab_of: TabOf, wide_file: Path, part: slice
) -> None:
    """The keyboard starts the export. The PNG has twice the chart's size.

    Chromium allows a tab about ten downloads at once.
    """
    tab = tab_of(wide_file).open()
    tab.show_all()
    figures = tab.page.locator("main figure")
    assert figures.count() == 7
    for figure in figures.all()[part]:
        figure.scroll_into_view_if_needed()
        tab.settle()
        picture = exported(tab, figure, "PNG")
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
        place = figure.locator(".chart, .bars").bounding_box()
        assert width >= 2 * int(place["width"])
        assert height >= 2 * int(place["height"])
        rows = list(csv.reader(exported(tab, figure, "CSV").decode().splitlines()))
        assert len(rows) > 1
        assert {len(row) for row in rows} == {len(rows[0])}
    assert tab.problems == []


def test_chart_without_data_offers_no_export(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    made: Any = enlarged(shown, 8, 20, 1, 5)
    made["steps"]["memory_bytes"] = [[None] for _ in range(8)]
    tab = tab_of(written(tmp_path, "no-memory", made)).open("#memory")
    for button in tab.show("memory").get_by_role("button").all():
        button.click()

    assert tab.show("memory").locator(".exports:visible").count() == 0
    assert tab.show("steps").locator(".exports:visible").count() == 1
    assert tab.problems == []


def test_exported_numbers_are_those_of_the_page(tab: Tab, shown: PageContents) -> None:
    tab.show_all()
    matrices = shown["steps"]
    assert matrices is not None
    rows = list(
        csv.DictReader(
            exported(tab, tab.show("steps").locator("figure"), "CSV").decode().splitlines()
        )
    )
    assert [float(row["p50_s"]) for row in rows] == pytest.approx(matrices["bands"]["p50_s"])
    assert [int(row["first_step"]) for row in rows] == matrices["columns"]["first_steps"]
    rows = list(
        csv.DictReader(
            exported(tab, tab.show("heat").locator("figure"), "CSV").decode().splitlines()
        )
    )
    found = np.array(
        [float(row["excess_share"] or "nan") for row in rows if row["rank"] == str(SLOW_RANK)]
    )
    np.testing.assert_allclose(found, Steps(matrices).excess()[SLOW_RANK], rtol=1e-5, atol=1e-6)
    phases = tab.show("phases").locator("#phases-host")
    parts = next(
        each for each in csv.DictReader(exported(tab, phases, "CSV").decode().splitlines())
    )
    typical = shown["report"]["ranks"][SLOW_RANK]["typical"]
    assert typical is not None
    assert parts["label"] == f"rank {SLOW_RANK}"
    assert float(parts["forward_s"]) == pytest.approx(typical["parts"]["forward"], rel=1e-4)


def test_exported_names_cannot_be_spreadsheet_formulas(tab: Tab) -> None:
    made = tab.value("""torchlens.csv([["=1+1", "@x", 'a"b,c', -1.5, NaN, null, "+\\u202ex"]])""")
    assert made == '\'=1+1,\'@x,"a""b,c",-1.5,,,\'+?x\r\n'
