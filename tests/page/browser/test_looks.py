"""How pages look, on desks, phones and paper, light and dark: nothing cut off or hidden, and readable for everybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.browser.conftest import WIDE_SINCE, WIDE_SLOW, WIDE_STEPS, TabOf
from tests.page.browser.tab import need_browser
from torchlens_perf.page.contents import Contents
from torchlens_perf.page.document import html, scripts

need_browser()

LIGHT_AND_DARK = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
VIEW = f"#heat;steps={WIDE_SINCE - 20}-{WIDE_SINCE + 79};rank={WIDE_SLOW};step={WIDE_SINCE}"

OVERLAPS = """[...document.querySelectorAll("main > section")].flatMap(section => {
    const parts = "h2, p, .chart, .scale, .controls, .scrolls, summary, ul";
    const all = [...section.querySelectorAll(parts)].filter(each => each.checkVisibility() && each.textContent
      && !each.closest(".tip, .hidden-words") && !each.parentElement.closest("li, ul, .controls"));
    const boxes = all.map(each => [each.className || each.tagName, each, each.getBoundingClientRect()]);
    return boxes.flatMap(([name, one, a], at) => boxes.slice(at + 1)
      .filter(([, other, b]) => !one.contains(other) && a.bottom > b.top + 1 && b.bottom > a.top + 1
        && a.right > b.left + 1 && b.right > a.left + 1)
      .map(([other]) => [section.id, name, other])); })"""
TOUCH_ACTIONS = """torchlensPage.charts.map(({ drawn }) => { const walk = root => {
    for (const each of root.querySelectorAll("*")) {
      if (each.classList.contains("bk-events")) return getComputedStyle(each).touchAction;
      const found = each.shadowRoot && walk(each.shadowRoot);
      if (found) return found; } }; return walk(drawn); })"""


@LIGHT_AND_DARK
@pytest.mark.parametrize("fragment", ["", VIEW], ids=["whole", "selection"])
def test_axe_finds_no_serious_fault(tab_of: TabOf, wide_file: Path, dark: bool, fragment: str) -> None:
    """By axe-core, with all charts drawn, in both themes."""
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
def test_screenshots(tab_of: TabOf, wide_file: Path, shots: Path, dark: bool, phone: bool) -> None:
    """The page is as wide as the window, charts are as wide as their places, and none is higher than what one reads."""
    tab = tab_of(wide_file, dark=dark, phone=phone).open(VIEW)
    tab.show_all()
    assert tab.value("document.documentElement.scrollWidth <= innerWidth")
    sizes = tab.value(
        "torchlensPage.charts.map(({place}) => [place.scrollWidth - place.clientWidth, place.clientHeight])"
    )
    assert all(over <= 0 for over, _ in sizes)
    assert all(60 < height < 1400 for _, height in sizes)
    tab.value("scrollTo(0, 0)")
    name = f"{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}"
    tab.page.screenshot(path=str(shots / f"{name}.png"), full_page=True)
    tab.show("step")
    tab.page.screenshot(path=str(shots / f"{name}-step.png"))


def test_words_do_not_lie_above_each_other(tab_of: TabOf, wide_file: Path) -> None:
    """Of headings, words, tables and charts, none overlaps another, at any width."""
    for phone in (False, True):
        tab = tab_of(wide_file, phone=phone).open(VIEW)
        tab.show_all()
        overlaps = tab.value(OVERLAPS)
        assert overlaps == []


def test_a_finger_scrolls_the_page_and_selects_across(tab_of: TabOf, wide_file: Path) -> None:
    """Charts keep to themselves what goes sideways only."""
    tab = tab_of(wide_file, phone=True).open("#heat")
    tab.show_all()
    actions = tab.value(TOUCH_ACTIONS)
    assert set(actions) == {"pan-y pinch-zoom"}
    tab.page.touchscreen.tap(*tab.at("heat", 100.5, 30.5))
    tab.settle()
    assert tab.view()["step"] is not None


def test_without_the_library_tables_and_themes_still_work(
    tab_of: TabOf, wide: Contents, wide_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures in place of charts, under a policy that lets in no style but the page's own."""
    monkeypatch.setattr(html, "chart_library", lambda: None)
    path = tmp_path / "plain.html"
    path.write_text(html.document(wide), "utf-8")
    library = scripts.chart_library()
    assert library is not None
    assert path.stat().st_size <= wide_file.stat().st_size - len(library.packed)
    tab = tab_of(path).open("#ranks;theme=dark")
    assert tab.value("torchlensPage.charts.length") == 0
    assert tab.value("document.documentElement.dataset.theme") == "dark"
    tab.show("ranks").get_by_role("columnheader", name="wait", exact=True).get_by_role("button").click()
    assert tab.page.locator("figure[data-chart] > .picture:visible").count() >= 6
    assert "'unsafe-inline'" not in tab.page.content().partition("</head>")[0].partition("<style")[0]
    assert (tab.problems, tab.foreign()) == ([], [])


def test_without_scripts_everything_is_there(tab_of: TabOf, wide_file: Path) -> None:
    """Pictures, words and tables; nothing is asked for."""
    tab = tab_of(wide_file, scripts=False)
    tab.page.goto(wide_file.as_uri())
    assert tab.page.locator("figure[data-chart]").count() == 8
    assert tab.page.locator(".chart, .controls, select").count() == 0
    assert tab.page.locator("figure[data-chart=heat] > .picture").is_visible()
    assert tab.foreign() == []


def test_a_brush_costs_less_than_reading_the_page(tab_of: TabOf, wide_file: Path) -> None:
    """Whatever the machine: all that a selection changes is computed in less time than decoding took."""
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
