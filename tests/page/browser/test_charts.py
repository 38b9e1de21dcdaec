"""The page's charts in a real browser: they are drawn, they follow one view, and nothing in them is dangerous."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.conftest import Tab
from tests.support.processes import ROOT
from torchlens_perf.page.document.html import document
from torchlens_perf.page.gather.run_contents import contents
from torchlens_perf.run.directory import RunDirectory

TabOf = Callable[..., Tab]
RANKS, SLOW, SINCE = 8, 3, 60
HOSTILE = [
    "<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\x1b[2Jred\x1b[31m", "\u202egnp.exe",
    "line\nline", "x" * 10_000, "'\"&lt;", "{{constructor}}",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A simulated run, rank 3 of 8 slow in the forward pass from step 60 on."""
    path = tmp_path_factory.mktemp("page") / "run"
    fault = f"constant:rank={SLOW},share=0.25,phase=forward,since={SINCE}"
    command = ["simulate", "--topology", "dp=4,tp=2", "--node-size", "4", "--steps", "200", "--fault", fault]
    subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *command, "--out", str(path)],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    return RunDirectory(path)


@pytest.fixture(scope="module")
def held(run: RunDirectory) -> Any:
    return contents(run)


@pytest.fixture(scope="module")
def file(run: RunDirectory, held: Any) -> Path:
    path = run.path / "report.html"
    path.write_text(document(held), "utf-8")
    return path


@pytest.fixture
def tab(tab_of: TabOf, file: Path) -> Tab:
    return tab_of(file).open()


def cells(tab: Tab) -> Any:
    """The ranks in the heat map, from the top."""
    tab.settle()
    return tab.value("torchlensPage.charts[0].chart.order.map(each => torchlensPage.steps.places[each.row].rank)")


def test_every_chart_is_drawn_and_nothing_else_is_asked_for(tab: Tab) -> None:
    """No error in the console, no request beyond the file itself."""
    drawn = tab.value(
        "torchlensPage.charts.filter(each => each.figure.classList.contains('drawn')).map(each => each.key)"
    )
    assert {"heat", "steps", "phases", "step", "modules"} <= set(drawn)
    assert (tab.problems, tab.foreign()) == ([], [])


def test_what_is_drawn_is_what_is_in_the_contents(tab: Tab, held: Any) -> None:
    """Matrices are decoded to what Python decodes; the slow rank has the most work from the step on that is named."""
    from torchlens_perf.page.matrix import decoded

    work = decoded(held["steps"]["work"], RANKS)
    found = tab.value("Array.from(torchlensPage.steps.work, each => Number.isNaN(each) ? null : each)")
    expected = [None if value != value else value for value in work.ravel().tolist()]
    assert len(found) == len(expected)
    assert all(
        one == other or one == pytest.approx(other, rel=1e-5) for one, other in zip(found, expected, strict=True)
    )
    slowest = tab.value(
        """(() => { const {steps} = torchlensPage, values = steps.values('excess'), range = steps.range([100, 200]);
        return steps.places.map((place, row) => [steps.mean(values, row, range), place.rank]).sort((a, b) => b[0] -
        a[0])[0]; })()"""
    )
    assert slowest[1] == SLOW
    assert slowest[0] == pytest.approx(0.25, abs=0.05)


def test_brush_selects_steps_everywhere(tab: Tab) -> None:
    """Drawn with the mouse over the heat map: the table below holds these steps alone, and the address leads there."""
    before = tab.page.inner_text(".selected-ranks table")
    heat = tab.page.locator("figure[data-chart=heat] .chart")
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + box["width"] * 0.15, middle)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] * 0.3, middle, steps=5)
    tab.page.mouse.up()
    tab.page.wait_for_function("torchlensPage.view.now.steps !== null")
    tab.settle()
    since, until = tab.value("torchlensPage.view.now.steps")
    assert 0 <= since < until <= 200
    after = tab.page.inner_text(".selected-ranks table")
    assert f"steps {since} to {until - 1}" in after
    assert before != after
    assert f"steps={since}-{until}" in tab.page.url
    tab.page.get_by_role("button", name="all steps").click()
    tab.settle()
    assert "all steps" in tab.page.inner_text(".selected-ranks table")


def test_hover_says_what_is_there(tab: Tab) -> None:
    """Rank, host and step under the pointer, and values with units."""
    heat = tab.page.locator("figure[data-chart=heat] .chart")
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = tab.page.locator("figure[data-chart=heat] .tip")
    tip.wait_for(state="visible")
    text = tip.inner_text()
    assert "rank " in text
    assert "step" in text
    assert "ms" in text
    tab.page.mouse.move(0, 0)
    tip.wait_for(state="hidden")


def test_grouping_and_order(tab: Tab) -> None:
    """Rows by slowness begin with the slow rank; by node and by a dimension of the mesh they lie together."""
    assert cells(tab) == list(range(RANKS))
    tab.page.select_option("select[name=order]", "slowness")
    assert cells(tab)[0] == SLOW
    tab.page.select_option("select[name=group]", "node")
    assert set(cells(tab)[:4]) == {0, 1, 2, 3}
    options = tab.page.locator("select[name=group] option").all_inner_texts()
    assert len(options) >= 2


def test_quantity_changes_the_picture(tab: Tab) -> None:
    """Another quantity is another image."""
    picture = "document.querySelector('figure[data-chart=heat] .chart').querySelector('*').shadowRoot ? 1 : 0"
    assert tab.value(picture) in (0, 1)
    before = tab.page.locator("figure[data-chart=heat] .chart").screenshot()
    tab.page.select_option("select[name=quantity]", "forward")
    tab.settle()
    assert tab.page.locator("figure[data-chart=heat] .chart").screenshot() != before
    assert "quantity=forward" in tab.page.url


def test_step_is_chosen_by_click_and_by_key(tab: Tab) -> None:
    """The time line shows the step that was chosen, or says which one it shows instead; the keyboard does the same."""
    recorded = tab.value("torchlensPage.contents.traces.steps.map(each => each.step)")
    tab.value(f"torchlensPage.view.set({{step: {recorded[-1]}}})")
    tab.settle()
    assert tab.page.locator("select.step-picker").input_value() == str(recorded[-1])
    missing = next(step for step in range(200) if step not in recorded)
    tab.value(f"torchlensPage.view.set({{step: {missing}}})")
    tab.settle()
    assert f"Step {missing} is not in this page" in tab.page.inner_text("figure[data-chart=step] .said")
    heat = tab.page.locator("figure[data-chart=heat] .chart")
    heat.focus()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("ArrowRight")
    tab.settle()
    view = tab.value("torchlensPage.view.now")
    assert (view["rank"], view["step"]) == (1, 0) or (view["rank"], view["step"]) == (0, 0)
    assert f"Rank {view['rank']}, step {view['step']}" in tab.page.inner_text("main > .said")


def test_link_leads_to_the_very_view(tab: Tab) -> None:
    """All of a view is in the address."""
    fragment = f"#heat;steps=60-120;step=80;rank={SLOW};quantity=work;group=node;order=slowness;theme=dark"
    tab.open(fragment)
    view = tab.value("torchlensPage.view.now")
    assert view == {
        "section": "heat", "steps": [60, 120], "step": 80, "rank": SLOW, "quantity": "work", "group": "node",
        "order": "slowness", "theme": "dark",
    }  # fmt: skip
    assert tab.value("document.documentElement.dataset.theme") == "dark"
    assert tab.page.locator("select[name=quantity]").input_value() == "work"
    assert cells(tab)[0] == SLOW


@pytest.mark.parametrize(
    "fragment", ["#heat;steps=9-3;step=x;rank=-1", "#;;;===", "#x;quantity=nothing;group=__proto__"]
)
def test_hostile_addresses_do_nothing(tab: Tab, fragment: str) -> None:
    tab.open(fragment)
    assert tab.problems == []


def test_theme_changes_colours(tab: Tab) -> None:
    """System, light, dark, in turn; charts are drawn anew in the colours."""
    button = tab.page.get_by_role("button", name="theme:")
    colours = set()
    for _ in range(3):
        button.click()
        tab.settle()
        colours.add(tab.value("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) >= 2
    assert tab.problems == []


def test_tables_are_sorted_by_their_numbers(tab: Tab) -> None:
    """With units, downwards and upwards; who cannot see hears which way."""
    head = tab.page.locator(".selected-ranks thead th").nth(1)
    head.get_by_role("button").click()
    first = tab.page.locator(".selected-ranks tbody tr").first.locator("th").inner_text()
    assert (first, head.get_attribute("aria-sort")) == (str(SLOW), "descending")
    head.get_by_role("button").click()
    first = tab.page.locator(".selected-ranks tbody tr").first.locator("th").inner_text()
    assert (first != str(SLOW), head.get_attribute("aria-sort")) == (True, "ascending")


def test_hostile_names_are_text(tab_of: TabOf, held: Any, tmp_path: Path) -> None:
    """What others may name is shown as text, in every chart and table, whatever is in it."""
    changed = json.loads(json.dumps(held))
    for place, name in zip(changed["steps"]["places"], HOSTILE, strict=True):
        place["host"] = name
        place["mesh"] = {name: 0}
    changed["traces"]["names"] = [HOSTILE[at % len(HOSTILE)] for at in range(len(changed["traces"]["names"]))]
    for at, module in enumerate(changed["report"]["modules"]):
        module["name"] = HOSTILE[at % len(HOSTILE)]
    changed["report"]["run"]["program"] = HOSTILE[1]
    for step in changed["traces"]["steps"]:
        step["why"] = HOSTILE[0]
        for collective in step["collectives"]:
            collective["name"], collective["group"] = HOSTILE[0], HOSTILE[4]
    path = tmp_path / "hostile.html"
    path.write_text(document(changed), "utf-8")
    tab = tab_of(path)
    asked: list[str] = []
    tab.page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    tab.open("#heat;group=node")
    for key in ("group", "quantity"):
        for option in tab.page.locator(f"select[name={key}]").locator("option").all()[:4]:
            tab.page.select_option(f"select[name={key}]", option.get_attribute("value"))
            tab.settle()
    assert (asked, tab.problems, tab.foreign()) == ([], [], [])
    assert tab.value("document.querySelectorAll('img[src=x], main script').length") == 0
    assert tab.value("document.documentElement.scrollWidth <= innerWidth + 1")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_fault(tab_of: TabOf, file: Path, dark: bool) -> None:
    """By axe-core, with charts drawn, in both themes."""
    from axe_playwright_python.sync_playwright import Axe

    tab = tab_of(file, dark=dark).open()
    found = Axe().run(tab.page).response["violations"]
    serious = {each["id"]: each["nodes"][0]["html"] for each in found if each["impact"] in ("serious", "critical")}
    assert serious == {}


def test_newer_contents_keep_the_view(tab: Tab, held: Any) -> None:
    """As the live page gives them: what is selected stays, what is new is drawn."""
    tab.open("#heat;steps=60-120;rank=3;order=slowness")
    changed = json.loads(json.dumps(held))
    changed["report"]["modules"] = changed["report"]["modules"][:1]
    tab.page.evaluate("(newer) => torchlensPage.update(newer)", changed)
    tab.settle()
    assert tab.value("torchlensPage.view.now.steps") == [60, 120]
    assert tab.value("torchlensPage.contents.report.modules.length") == 1
    assert (cells(tab)[0], tab.problems) == (SLOW, [])


def test_without_scripts_everything_is_there(tab_of: TabOf, file: Path) -> None:
    """Pictures and tables instead of charts; nothing is asked for."""
    tab = tab_of(file, scripts=False)
    tab.page.goto(file.as_uri())
    assert tab.page.locator("figure[data-chart]").count() >= 1
    assert tab.page.locator(".chart").count() == 0
    assert tab.foreign() == []


def test_phone_has_no_sideways_scroll(tab_of: TabOf, file: Path) -> None:
    tab = tab_of(file, phone=True).open()
    assert tab.value("document.documentElement.scrollWidth <= innerWidth + 1")
