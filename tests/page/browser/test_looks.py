"""The look of pages on desktops, phones and paper: nothing is cut off, and text is readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.browser.conftest import WIDE_SINCE, WIDE_SLOW, WIDE_STEPS, TabOf, written
from tests.page.browser.tab import need_browser
from tests.page.conftest import FAULT, recorded
from torchlens_perf.page.gather.run_contents import gather_contents

need_browser()

LIGHT_AND_DARK = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
VIEW = f"#heat;steps={WIDE_SINCE - 20}-{WIDE_SINCE + 79};rank={WIDE_SLOW};step={WIDE_SINCE}"

OVERLAPS = """[...document.querySelectorAll("main > section")].flatMap(section => {
    const parts = "h2, h3, p, .chart, .bars, figcaption, .controls, .scrolls, summary, ul";
    const all = [...section.querySelectorAll(parts)].filter(each => each.checkVisibility() && each.textContent
      && !each.closest(".tip, .hidden-words") && !each.parentElement.closest("li, ul, .controls"));
    const boxes = all.map(each => [each.className || each.tagName, each, each.getBoundingClientRect()]);
    return boxes.flatMap(([name, one, a], at) => boxes.slice(at + 1)
      .filter(([, other, b]) => !one.contains(other) && a.bottom > b.top + 1 && b.bottom > a.top + 1
        && a.right > b.left + 1 && b.right > a.left + 1)
      .map(([other]) => [section.id, name, other])); })"""


@LIGHT_AND_DARK
@pytest.mark.parametrize("fragment", ["", VIEW], ids=["whole", "selection"])
def test_axe_finds_no_serious_accessibility_fault(
    tab_of: TabOf, wide_file: Path, dark: bool, fragment: str
) -> None:
    """axe-core checks the light and the dark theme with all charts drawn."""
    from axe_playwright_python.sync_playwright import Axe

    tab = tab_of(wide_file, dark=dark).open(fragment)
    tab.show_all()
    found = Axe().run(tab.page).response["violations"]
    serious = {
        each["id"]: [node["html"][:200] for node in each["nodes"][:4]]
        for each in found
        if each["impact"] in ("serious", "critical")
    }
    assert serious == {}


@LIGHT_AND_DARK
@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
def test_page_and_charts_fit_the_window(
    tab_of: TabOf, wide_file: Path, shots: Path, dark: bool, phone: bool
) -> None:
    """Charts are as wide as their containers, and no chart is too high."""
    tab = tab_of(wide_file, dark=dark, phone=phone).open(VIEW)
    tab.show_all()
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    sizes = tab.value(
        "[...document.querySelectorAll('.chart, .bars')].map(place => [place.scrollWidth -"
        " place.clientWidth, place.clientHeight])"
    )
    assert all(over <= 0 for over, _ in sizes)
    assert all(60 < height < 1400 for _, height in sizes)
    tab.value("scrollTo(0, 0)")
    name = f"{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}"
    tab.page.screenshot(path=str(shots / f"{name}.png"), full_page=True)
    tab.show("step")
    tab.page.screenshot(path=str(shots / f"{name}-step.png"))


def test_folded_verdicts_and_quality_are_readable_on_a_phone(tab_of: TabOf, tmp_path: Path) -> None:
    """A long cost wraps, words are not broken, and buttons cover no caption."""
    run = recorded(tmp_path, FAULT, "constant:rank=1,share=0.2")
    tab = tab_of(written(tmp_path, "two", gather_contents(run)), phone=True).open()
    cost = "document.querySelector('details.verdict > summary b')"
    tab.value(f"{cost}.textContent = 'of a step '.repeat(9)")
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    heads = "[...document.querySelectorAll('#quality tbody th')].map(th => th.offsetWidth)"
    assert min(tab.value(heads)) >= 140
    right = "each.getBoundingClientRect().right"
    captions = f"[...document.querySelectorAll('caption')].map(each => {right})"
    button = "document.querySelector('.csv').getBoundingClientRect()"
    assert max(tab.value(captions)) - 48 <= tab.value(f"{button}.left")


def test_tables_and_charts_fit_a_printed_page(tab_of: TabOf, device_file: Path) -> None:
    """Browsers would shrink all of the page, or cut charts that are as wide as the screen."""
    tab = tab_of(device_file).open()
    tab.value("dispatchEvent(new Event('beforeprint'))")
    tab.settle()
    screen = tab.value("document.querySelector('#step canvas').clientWidth")
    tab.page.emulate_media(media="print")
    # A browser does not announce the width of paper, and charts are not drawn again for it.
    tab.value("document.body.style.width = '718px'")
    assert screen > 718
    widths = tab.value(
        "[...document.querySelectorAll('canvas, table')].map(each => each.clientWidth)"
    )
    assert max(widths) <= 718


def test_a_printed_page_shows_the_advice_of_each_finding(tab_of: TabOf, tmp_path: Path) -> None:
    run = recorded(tmp_path, FAULT, "constant:rank=1,share=0.2")
    tab = tab_of(written(tmp_path, "printed", gather_contents(run))).open()
    shown = (
        "[...document.querySelectorAll('details.verdict > p')].map(each => each.checkVisibility())"
    )
    assert not any(on_screen := tab.value(shown))
    assert on_screen
    tab.page.emulate_media(media="print")
    assert all(tab.value(shown))


def test_elements_do_not_overlap_on_desktop_and_phone(tab_of: TabOf, wide_file: Path) -> None:
    """Headings, words, tables and charts are checked."""
    for phone in (False, True):
        tab = tab_of(wide_file, phone=phone).open(VIEW)
        tab.show_all()
        overlaps = tab.value(OVERLAPS)
        assert overlaps == []


def test_finger_scrolls_vertically_and_selects_horizontally(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file, phone=True).open("#heat")
    tab.show_all()
    actions = tab.value(
        "torchlensPage.charts.map(({plot}) => getComputedStyle(plot.over).touchAction)"
    )
    assert set(actions) == {"pan-y pinch-zoom"}
    tab.page.touchscreen.tap(*tab.at("heat", 100.5, 3.5))
    tab.settle()
    assert tab.view()["step"] is not None


SMALLEST = """[...document.querySelectorAll("figure *")].filter(each => each.checkVisibility() && !each.closest("title")
    && [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
    .map(each => parseFloat(getComputedStyle(each).fontSize))"""


def test_phone_shows_whole_charts_in_readable_letters(tab_of: TabOf, wide_file: Path) -> None:
    """No chart is wider than the screen or scrolls horizontally. Fonts have at least 11 pixels."""
    tab = tab_of(wide_file, phone=True).open()
    tab.show_all()
    edges = tab.value("[...document.querySelectorAll('figure, figure canvas, .bars')].map(each => "
                      "[each.getBoundingClientRect().left, each.getBoundingClientRect().right, "
                      "getComputedStyle(each).overflowX])")  # fmt: skip
    assert all(left >= 0 and right <= 390 and overflow != "auto" for left, right, overflow in edges)
    assert min(tab.value(SMALLEST)) >= 11
    fonts = tab.value(
        "torchlensPage.charts.flatMap(({plot}) => plot.axes.map(({font}) => font[0] ?? font))"
    )
    assert all(int(str(font).partition("px")[0].rpartition(" ")[2]) >= 11 for font in fonts)


def test_verdicts_tables_and_bars_are_shown_without_scripts(tab_of: TabOf, wide_file: Path) -> None:
    """A text says that charts need scripts. There are no requests."""
    tab = tab_of(wide_file, scripts=False)
    tab.page.goto(wide_file.as_uri())
    assert tab.page.locator("figure[data-chart]").count() == 6
    assert tab.page.locator(".chart, .controls, select").count() == 0
    assert tab.page.locator("figure[data-chart=heat]").get_by_text("needs JavaScript").is_visible()
    assert tab.page.locator("#phases-host svg.bar").count() == 8
    assert tab.page.locator("#phases-host svg.bar rect").first.bounding_box()["width"] > 2
    assert tab.page.locator("#verdict-1").is_visible()
    assert tab.foreign() == []


def test_selecting_a_range_takes_less_time_than_loading_the_page(
    tab_of: TabOf, wide_file: Path
) -> None:
    """The limit is relative to the time for decoding the page's data, so it fits any machine."""
    tab = tab_of(wide_file).open("#heat;order=slowness")
    tab.show_all()
    tab.show("heat")
    timed = """(async () => { const median = found => found.sort((one, other) => one - other)[2];
        const time = async work => { const began = performance.now(); await work(); return performance.now() - began; };
        const read = [], brush = []; for (let at = 0; at < 5; at++) {
          read.push(await time(() => torchlens.read(torchlensPage.contents)));
          brush.push(await time(async () => { torchlensPage.view.set({ steps: [10 + at, 300 + at] });
            await torchlensPage.draw(); })); }
        return [median(read), median(brush)]; })()"""
    read_ms, brush_ms = tab.value(timed)
    assert WIDE_STEPS > 300
    assert brush_ms < 2 * read_ms
