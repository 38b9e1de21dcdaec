"""All charts share one view: a selection in one is visible in all others, and is in the address."""

from __future__ import annotations

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
from tests.page.conftest import SINCE_STEP, SLOW_RANK, STEPS
from tests.support.page_contents import LATE_RANK, LATE_STEPS
from tests.support.page_matrices import Steps
from torchlens_perf.analysis.statistics.quantities import format_duration
from torchlens_perf.page.contents import PageContents

need_browser()

NOTHING = {
    "section": "", "steps": None, "zoom": None, "step": None, "rank": None, "quantity": "excess", "group": "none",
    "order": "slowness", "rows": "few", "theme": "system",
}  # fmt: skip


def brushed(tab: Tab, name: str, since: float, until: float, y: float) -> None:
    """Select a range with the mouse."""
    begin, end = tab.at(name, since, y), tab.at(name, until, y)
    tab.page.mouse.move(*begin)
    tab.page.mouse.down()
    tab.page.mouse.move((begin[0] + end[0]) / 2, begin[1] + 3, steps=3)
    tab.page.mouse.move(*end, steps=3)
    tab.page.mouse.up()
    tab.settle()


def zoomed(tab: Tab, name: str) -> Any:
    """Return the range of the chart's horizontal axis."""
    return tab.value(f"(({{min, max}}) => [min, max])({tab.named(name)}.plot.scales.x)")


def rows(tab: Tab) -> Any:
    """Return the ranks in the heat map, from the top."""
    return tab.value(f"{tab.named('heat')}.order.map(row => torchlensPage.steps.places[row].rank)")


def test_range_selected_in_the_heat_map_applies_to_the_whole_page(
    tab: Tab, shown: PageContents
) -> None:
    """The selection affects the table of ranks, step times, the timeline and all words."""
    assert shown["steps"] is not None
    tab.show_all()
    brushed(tab, "heat", SINCE_STEP + 10.5, SINCE_STEP + 39.5, 4)
    since, until = tab.view()["steps"]
    assert (since, until) == pytest.approx((SINCE_STEP + 10, SINCE_STEP + 40), abs=1)
    where = f"steps {since} to {until - 1}"
    table = tab.show("ranks")
    assert where in table.locator("table:visible caption").inner_text()
    step_s = Steps(shown["steps"]).step_s()[SLOW_RANK, since:until].mean()
    cells = table.locator("table:visible tbody tr").first.locator("th, td").all_inner_texts()
    assert cells[:3] == [str(SLOW_RANK), "node-0001", format_duration(float(step_s))]
    assert (
        f"Selected {where}: rank {SLOW_RANK} has the largest excess"
        in tab.show("heat").inner_text()
    )
    values = np.sort(Steps(shown["steps"]).step_s()[:, since:until], axis=None)
    longest = format_duration(float(values[-1]))
    words = tab.show("steps").inner_text()
    assert f"Selected {where}: p50 {format_duration(float(values[values.size // 2 - 1]))}" in words
    assert f"longest {longest}" in words
    line = tab.show("step").locator("figure > p").first.inner_text()
    assert since <= tab.value(f"{tab.named('step')}.trace.step") < until
    assert line.startswith(f"Step {tab.value(tab.named('step') + '.trace.step')} takes")
    assert f"steps={since}-{until - 1}" in tab.address()
    assert where.replace("steps", "Steps") in tab.page.locator(".selected-words").inner_text()
    tab.page.get_by_role("button", name="do not select steps").click()
    tab.settle()
    assert tab.view()["steps"] is None
    assert (
        "Typical step of each rank"
        in tab.show("ranks").locator("table:visible caption").inner_text()
    )
    assert tab.problems == []


def test_missing_steps_of_a_late_rank_are_not_counted(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open(
        f"#heat;steps=0-{LATE_STEPS - 1};quantity=step;order=rank;rows=all"
    )
    count = LATE_STEPS * (WIDE_RANKS - 1)
    assert tab.value(f"torchlensPage.steps.spread([0, {LATE_STEPS}]).count") == count
    tab.show("ranks").locator("label:visible").click()
    row = tab.page.locator("#ranks").locator(
        "table:visible tbody tr", has=tab.page.get_by_role("button", name="rank 9", exact=True)
    )
    assert (
        row.locator("td").all_inner_texts()[1:6]
        == ["not measured", "not measured", "not compared"] + ["not measured"] * 2
    )
    tab.page.mouse.move(*tab.at("heat", 5.5, LATE_RANK + 0.5))
    assert "step time: not measured" in tab.tip()


def test_range_selected_in_any_chart_over_steps_selects_steps(
    tab_of: TabOf, wide_file: Path
) -> None:
    """Charts over time show the same range in seconds."""
    tab = tab_of(wide_file).open()
    tab.show_all()
    brushed(tab, "steps", 100.5, 199.5, 0.1)
    assert tab.view()["steps"] == pytest.approx([100, 200], abs=1)
    brushed(tab, "memory", 400.5, 499.5, 2.3e9)
    since, until = tab.view()["steps"]
    assert (since, until) == pytest.approx((400, 500), abs=1)
    tab.show("telemetry")
    box = tab.value(f"{tab.named('telemetry')}.selected()")
    started = tab.value("torchlensPage.steps.started_s")
    assert box == [pytest.approx(started[since]), pytest.approx(started[until])]


def test_selecting_an_empty_range_selects_nothing(tab: Tab) -> None:
    brushed(tab, "heat", 50.5, 99.5, 4)
    assert tab.view()["steps"] is not None
    tab.page.keyboard.press("Escape")
    tab.page.mouse.click(*tab.at("heat", 60.5, 4.5))
    tab.settle()
    assert tab.view()["step"] == 60


def test_heat_map_does_not_move_when_content_above_grows(tab: Tab) -> None:
    """The browser may lack scroll anchoring."""
    tab.open("#heat")
    tab.value("document.documentElement.style.overflowAnchor = 'none'")
    top = tab.chart("heat").bounding_box()["y"]
    brushed(tab, "heat", SINCE_STEP + 0.5, SINCE_STEP + 59.5, 4)
    tab.page.mouse.click(*tab.at("heat", 60.5, 4.5))
    tab.settle()
    assert tab.chart("heat").bounding_box()["y"] == pytest.approx(top, abs=3)


def test_ranks_are_sorted_by_slowness_and_grouped_by_node(tab: Tab) -> None:
    """Sorted by slowness, the slow rank is first.

    Grouped by node or mesh dimension, ranks of a group are adjacent.
    """
    tab.show("heat")
    assert rows(tab)[0] == SLOW_RANK
    tab.page.select_option("select[name=order]", "rank")
    tab.settle()
    assert rows(tab) == list(range(8))
    tab.page.select_option("select[name=order]", "slowness")
    tab.settle()
    tab.page.select_option("select[name=group]", "node")
    tab.settle()
    assert (set(rows(tab)[:4]), rows(tab)[4]) == ({0, 1, 2, 3}, SLOW_RANK)
    options = dict(
        zip(
            tab.page.locator("select[name=group] option").all_inner_texts(),
            [
                each.get_attribute("value")
                for each in tab.page.locator("select[name=group] option").all()
            ],
            strict=True,
        )
    )
    assert set(options) == {"nothing", "node", "mesh: dp", "mesh: tp"}
    tab.page.select_option("select[name=order]", "rank")
    tab.page.select_option("select[name=group]", options["mesh: tp"])
    tab.settle()
    assert rows(tab) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert tab.value(f"{tab.named('heat')}.label(0.5)") == "tp 0 · 0"
    assert "order=rank" in tab.address()
    assert "group=mesh%20tp" in tab.address()


def test_sorting_by_slowness_uses_the_selected_steps(tab_of: TabOf, wide_file: Path) -> None:
    """If only steps before the slowness are selected, another rank is first."""
    tab = tab_of(wide_file).open(f"#heat;order=slowness;steps={WIDE_SINCE}-{WIDE_STEPS - 1}")
    assert rows(tab)[0] == WIDE_SLOW
    tab.value(f"torchlensPage.view.set({{steps: [0, {WIDE_SINCE}]}})")
    tab.settle()
    assert rows(tab)[0] != WIDE_SLOW


def test_chosen_quantity_changes_cells_legend_and_words(tab: Tab) -> None:
    tab.show("heat")
    pixels = f"Array.from({tab.named('heat')}.shown.pixels.slice(0, 400)).join()"
    legend = tab.page.locator("figure[data-chart=heat] ul.legend")
    before, words = tab.value(pixels), legend.inner_text()
    tab.page.select_option("select[name=quantity]", "communication")
    tab.settle()
    assert tab.value(pixels) != before
    assert ("not measured" in legend.inner_text(), "not compared" in words) == (True, True)
    assert tab.page.locator("#heat h3").inner_text() == "Comm wait by rank and step"
    assert "quantity=communication" in tab.address()


def test_clicked_step_is_shown_in_timeline_and_tables(tab: Tab) -> None:
    """If the page does not contain the step, the nearest one is shown with a note."""
    recorded = tab.value("torchlensPage.contents.traces.steps.map(({step}) => step)")
    missing = next(
        step for step in range(SINCE_STEP, STEPS) if step not in recorded and step - 1 in recorded
    )
    tab.page.mouse.click(*tab.at("heat", missing + 0.5, 0.5))
    tab.settle()
    assert (tab.view()["rank"], tab.view()["step"]) == (SLOW_RANK, missing)
    section = tab.show("step")
    words = section.locator("figure p.note").inner_text()
    near = tab.value(f"{tab.named('step')}.trace.step")
    assert abs(near - missing) == 1
    assert (
        f"This page has no spans of step {missing}; the nearest step with spans is {near}." in words
    )
    captions = section.locator("caption:visible").all_inner_texts()
    assert [f"step {near} " in f"{each.lower()} " for each in captions[:1]] == [True]
    tab.page.mouse.click(*tab.at("steps", recorded[-1] + 0.5, 0.1))
    tab.settle()
    tab.show("step")
    assert tab.value(f"{tab.named('step')}.trace.step") == recorded[-1]
    tab.page.get_by_role("button", name="Previous").click()
    tab.settle()
    assert tab.view()["step"] == max(step for step in recorded if step < recorded[-1])


def test_link_restores_the_view_of_its_address(tab_of: TabOf, wide_file: Path) -> None:
    fragment = (
        f"heat;steps=100-199;zoom=50-349;step=120;rank={WIDE_SLOW};quantity=work;group=mesh%20tp;order=rank;"
        "rows=all;theme=dark"
    )
    tab = tab_of(wide_file).open(f"#{fragment}")
    expected = {
        **NOTHING, "section": "heat", "steps": [100, 200], "zoom": [50, 350], "step": 120, "rank": WIDE_SLOW,
        "quantity": "work", "group": "mesh tp", "order": "rank", "rows": "all", "theme": "dark",
    }  # fmt: skip
    assert tab.view() == expected
    assert tab.value("document.documentElement.dataset.theme") == "dark"
    assert {each.get_attribute("name"): each.input_value() for each in tab.page.locator("#heat select").all()} == {
        "quantity": "work", "group": "mesh tp", "order": "rank",
    }  # fmt: skip
    assert zoomed(tab, "heat") == [50, 350]
    assert tab.value(
        "document.getElementById('heat').getBoundingClientRect().top"
    ) == pytest.approx(50, abs=60)
    tab.value("torchlensPage.view.set({rank: 2})")
    assert tab.address() == fragment.replace(f"rank={WIDE_SLOW}", "rank=2")


def test_following_a_link_to_a_section_keeps_the_view(tab: Tab) -> None:
    """The back button returns to the previous section."""
    tab.open("#heat;rank=2;order=rank")
    tab.page.get_by_role("navigation").get_by_role("link", name="Phases").click()
    tab.settle()
    assert tab.address() == "phases;rank=2;order=rank"
    assert 0 <= tab.value("document.getElementById('phases').getBoundingClientRect().top") < 120
    tab.page.go_back()
    tab.until("torchlensPage.view.now.section === 'heat'")
    assert tab.view() == {**NOTHING, "section": "heat", "rank": 2, "order": "rank"}


@pytest.mark.parametrize(
    "fragment",
    [
        "#heat;steps=9-3;step=x;rank=-1;zoom=5", "#;;;===", "#x;quantity=nothing;group=__proto__;order=constructor",
        "#%E0%A4%A;rank=%E0;step=1e3", "#heat;steps=0-99999999999999;step=999999;rank=999999;zoom=900-999",
        "#heat;theme=<b>;clock=device;group=mesh%20__proto__;toString=1", "#constructor;steps=1-2-3",
    ],
)  # fmt: skip
def test_invalid_values_in_the_address_are_ignored(
    tab_of: TabOf, file: Path, fragment: str
) -> None:
    tab = tab_of(file).open(fragment)
    tab.show_all()
    assert tab.problems == []
    assert tab.page.locator(".chart canvas").count() > 0
    assert set(tab.view()) == set(NOTHING)


def test_keys_select_cells_of_the_heat_map(tab: Tab) -> None:
    """Arrows select a cell, Shift extends, Enter opens the step, Escape clears.

    The selection is announced to screen readers.
    """
    tab.open("#heat;order=rank")
    place = tab.chart("heat")
    tab.page.evaluate("document.querySelector('select[name=order]').focus()")
    for _ in range(4):
        tab.page.keyboard.press("Tab")
    assert tab.value(
        "document.activeElement === document.querySelector('figure[data-chart=heat] .chart')"
    )
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        tab.page.keyboard.press(key)
    tab.settle()
    assert (tab.view()["rank"], tab.view()["step"]) == (2, 2)
    said = tab.page.get_by_role("status").filter(has_text="Selected").inner_text()
    assert "rank 2 on node-0000; step 2: excess over the other ranks: not compared" in said
    tab.page.keyboard.press("End")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.settle()
    assert tab.view()["steps"] == [STEPS - 3, STEPS]
    tab.page.keyboard.press("+")
    tab.settle()
    assert tab.view()["zoom"] is not None
    tab.page.keyboard.press("0")
    tab.settle()
    assert tab.view()["zoom"] is None
    tab.page.keyboard.press("Enter")
    tab.settle()
    assert tab.value("document.activeElement.getAttribute('aria-roledescription')") == "timeline"
    place.focus()
    tab.page.keyboard.press("Escape")
    tab.settle()
    assert [tab.view()[key] for key in ("steps", "step", "rank")] == [None, None, None]


def test_cell_selected_by_keyboard_is_scrolled_into_view(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open("#heat;zoom=0-99;step=99;rank=0;order=rank")
    tab.chart("heat").focus()
    tab.page.keyboard.press("ArrowRight")
    tab.settle()
    assert tab.view()["step"] == 100
    assert tab.view()["zoom"] == [1, 101]


def test_keys_select_the_collectives_of_a_step_one_by_one(tab: Tab, shown: PageContents) -> None:
    tab.show("step")
    tab.chart("step").focus()
    tab.page.keyboard.press("ArrowRight")
    tab.settle()
    first = shown["traces"]["steps"][0]["collectives"][0]
    said = tab.page.locator("figure[data-chart=step] [role=status]").inner_text()
    assert f"number {first['number']}: last to arrive: rank {first['last_rank']}" in said
    line = tab.named("step")
    assert tab.value(f"{line}.laid.byKey.get({line}.pointed).length") == len(first["wait_us"])


def test_zoom_applies_to_all_charts_over_steps(tab_of: TabOf, wide_file: Path) -> None:
    """The wheel zooms while Ctrl is pressed, and otherwise scrolls the page."""
    tab = tab_of(wide_file).open()
    tab.show_all()
    x, y = tab.at("heat", 300.5, 3.5)
    tab.page.mouse.move(x, y)
    before = tab.value("scrollY")
    tab.page.mouse.wheel(0, -120)
    tab.page.wait_for_timeout(100)
    assert tab.view()["zoom"] is None
    tab.value(f"scrollTo(0, {before})")
    tab.page.mouse.move(*tab.at("heat", 300.5, 3.5))
    tab.page.keyboard.down("Control")
    tab.page.mouse.wheel(0, -240)
    tab.page.keyboard.up("Control")
    tab.until("torchlensPage.view.now.zoom")
    tab.settle()
    ranges = []
    for name in ("heat", "steps", "memory"):
        tab.show(name)
        ranges.append(zoomed(tab, name))
    assert ranges[0] == ranges[1] == ranges[2]
    assert 0 < ranges[0][0] < 300 < ranges[0][1] < WIDE_STEPS
    tab.page.get_by_role("button", name="show all steps").click()
    tab.settle()
    tab.show("steps")
    assert zoomed(tab, "steps") == [0, WIDE_STEPS]


def test_zoom_of_a_page_without_steps_does_nothing(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    tab = tab_of(written(tmp_path, "without-steps", {**shown, "steps": None})).open(
        "#step;zoom=3-9;step=4"
    )
    tab.page.locator(".selection button").last.click()
    tab.settle()

    assert tab.problems == []
    assert tab.page.get_by_role("button", name="show all steps").count() == 0


def test_theme_follows_the_system_setting(tab: Tab) -> None:
    """Charts use the colours of the theme."""
    tab.show("steps")
    colours = {}
    for theme in ("light", "dark"):
        tab.page.select_option("select[name=theme]", theme)
        tab.settle()
        colours[theme] = (
            tab.value("getComputedStyle(document.body).backgroundColor"),
            tab.value(f"{tab.named('steps')}.plot.axes[0].stroke()"),
        )
    assert colours["light"][0] != colours["dark"][0]
    assert colours["light"][1] != colours["dark"][1]
    assert "theme=dark" in tab.address()
    tab.page.select_option("select[name=theme]", "system")
    tab.page.emulate_media(color_scheme="dark")
    tab.settle()
    assert tab.value("getComputedStyle(document.body).backgroundColor") == colours["dark"][0]
    tab.until(f"{tab.named('steps')}.plot.axes[0].stroke() === '{colours['dark'][1]}'")


def test_charts_are_redrawn_narrower_in_a_narrow_window(tab: Tab) -> None:
    tab.show("heat")
    before = tab.value(f"{tab.named('heat')}.plot.width")
    tab.page.set_viewport_size({"width": 700, "height": 900})
    tab.until(f"{tab.named('heat')}.plot.width < {before} && torchlensPage.isDrawn")
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")


def test_tables_are_sorted_by_their_numbers(tab: Tab) -> None:
    """Numbers have units, and shares are sorted by share.

    Missing values come last in ascending and in descending order.
    """
    table = tab.show("ranks").locator("table:visible")
    wait = table.get_by_role("columnheader", name="comm wait")
    for direction in ("descending", "ascending"):
        wait.get_by_role("button").click()
        assert wait.get_attribute("aria-sort") == direction
        first = table.locator("tbody tr").first.locator("th").inner_text()
        assert (first == str(SLOW_RANK)) == (direction == "ascending")
    made = """(() => { const rows = [["x", "5 ms"], ["y", "-"], ["z", "1.2 s"], ["u", "900 us"], ["v", "not measured"],
          ["w", "7 of 10 (70%)"]], columns = [["a", row => row[0], "text"], ["b", row => row[1]]];
        const table = torchlens.table("t", rows, columns).querySelector("table"); document.body.append(table);
        const read = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent).join("");
        const button = table.querySelectorAll("button")[1]; button.click(); const down = read(); button.click();
        const up = read(); table.remove(); return [down, up]; })()"""
    assert tab.value(made) == ["zwxuyv", "uxwzyv"]


def test_button_of_a_verdict_selects_its_rank_and_steps(tab: Tab) -> None:
    since = tab.value("torchlensPage.contents.report.verdicts[0].since_step")
    tab.page.get_by_role("button", name="Show in charts").first.click()
    tab.settle()
    view = tab.view()
    assert (view["section"], view["rank"], view["steps"]) == ("heat", SLOW_RANK, [since, STEPS])
    assert 0 <= tab.value("document.getElementById('heat').getBoundingClientRect().top") < 120


def test_click_on_a_rank_number_in_the_table_toggles_its_selection(tab: Tab) -> None:
    """Other charts show the line of a selected rank."""
    button = tab.show("ranks").get_by_role("button", name="rank 2", exact=True)
    button.click()
    tab.settle()
    assert (tab.view()["rank"], button.get_attribute("aria-pressed")) == (2, "true")
    tab.show("steps")
    assert (
        tab.value(f"{tab.named('steps')}.plot.data[5].filter(value => value !== null).length")
        == STEPS
    )
    assert "rank 2" in tab.page.locator("#steps ul.legend").inner_text()
    button.click()
    assert tab.view()["rank"] is None


def test_button_shows_all_ranks_of_a_large_table(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open("#ranks;steps=10-19")
    assert tab.page.locator("#ranks table:visible tbody tr").count() == WIDE_RANKS


def test_printed_page_has_light_charts_without_controls(tab: Tab) -> None:
    """Controls and the selection are not printed, but the heads and ranks of tables are.

    Charts that were not visible are printed, too. The theme is restored after printing.
    """
    tab.open("#heat;steps=10-19;rank=1;step=12;theme=dark")
    colour = f"{tab.named('heat')}.plot.axes[0].stroke()"
    dark = tab.value(colour)
    tab.value("dispatchEvent(new Event('beforeprint'))")
    tab.page.emulate_media(media="print")
    seen = (
        "[...document.querySelectorAll('{}')].filter(each => each.getClientRects().length).length"
    )
    assert tab.value(seen.format(".controls, .selection, .share, .exports, .copies")) == 0
    for each in (".sorts", ".picks"):
        assert tab.value(seen.format(f"#ranks {each}")) > 1
    assert tab.value(seen.format("figure canvas")) == tab.value("torchlensPage.charts.length")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value(colour) != dark
    tab.page.emulate_media(media="screen")
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value(colour) == dark
