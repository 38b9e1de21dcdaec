"""The first screen, phones, copying, and tables that are expanded, sorted and saved."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.conftest import WIDE_RANKS, WIDE_SLOW, TabOf, written
from tests.page.browser.tab import DESK, PHONE, Tab, need_browser
from torchlens_perf.page.contents import PageContents
from torchlens_perf.view.specs import Column, Quantity, Table

need_browser()


def copied(tab: Tab) -> str:
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    return str(tab.value("navigator.clipboard.readText()"))


def shown_ranks(tab: Tab) -> list[str]:
    return [str(text) for text in tab.page.locator("#ranks tbody tr:visible th").all_inner_texts()]


def test_first_screen_contains_verdict_and_heat_map(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open()
    bottoms = [
        tab.page.locator(selector).bounding_box()["y"]
        + tab.page.locator(selector).bounding_box()["height"]
        for selector in ("#verdict-1", "#figures", "#heat .chart")
    ]

    assert bottoms == sorted(bottoms)
    assert bottoms[-1] <= DESK["height"]


@pytest.mark.parametrize("pages", ["file", "wide_file", "device_file"])
def test_page_does_not_scroll_sideways_on_a_phone(
    tab_of: TabOf, pages: str, request: pytest.FixtureRequest
) -> None:
    tab = tab_of(request.getfixturevalue(pages), phone=True).open()
    tab.show_all()

    assert tab.value("document.documentElement.scrollWidth") <= PHONE["width"]
    tables = tab.value(
        "[...document.querySelectorAll('.scrolls')].map(each => each.getBoundingClientRect().right)"
    )
    assert max(tables) <= PHONE["width"]


def test_copy_button_copies_the_command(tab_of: TabOf, file: Path, shown: PageContents) -> None:
    tab = tab_of(file).open()
    tab.page.locator("#verdict-1 .copies").click()
    tab.page.get_by_text("Copied").wait_for()

    assert copied(tab) == shown["headlines"][0].command


def test_copy_button_works_without_the_clipboard_interface(
    tab_of: TabOf, file: Path, shown: PageContents
) -> None:
    """Pages outside a secure context have no clipboard API."""
    tab = tab_of(file).open()
    tab.value("delete Navigator.prototype.clipboard")
    tab.page.locator("#verdict-1 .copies").click()
    tab.page.get_by_text("Copied").wait_for()
    tab.page.evaluate(
        "document.body.append(Object.assign(document.createElement('textarea'), {id: 'paste'}))"
    )
    tab.page.locator("#paste").focus()
    tab.page.keyboard.press("Control+v")

    assert tab.page.locator("#paste").input_value() == shown["headlines"][0].command


def test_copied_link_leads_to_the_same_view(tab_of: TabOf, file: Path) -> None:
    tab = tab_of(file).open()
    tab.page.locator("#verdict-1 .shows").click()
    tab.settle()
    view = tab.view()
    tab.page.get_by_role("button", name="Copy link to this view").click()
    link = copied(tab)
    other = tab_of(file)
    other.page.goto(link)
    other.settle()

    assert view["steps"] is not None
    assert other.view() == view


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_slow_ranks_come_first_in_a_table_and_all_can_be_shown(
    tab_of: TabOf, wide_file: Path, scripts: bool
) -> None:
    tab = tab_of(wide_file, scripts=scripts)
    tab.page.goto(wide_file.as_uri())
    first = shown_ranks(tab)
    tab.page.locator("#ranks").get_by_text("Show all").first.click()

    assert first[0] == str(WIDE_SLOW)
    assert len(first) == 8
    assert len(shown_ranks(tab)) == WIDE_RANKS


def test_sorted_table_shows_its_new_first_rows(tab_of: TabOf, wide_file: Path) -> None:
    tab = tab_of(wide_file).open()
    sort = (
        tab.show("ranks")
        .get_by_role("columnheader", name="rank", exact=True)
        .get_by_role("button")
        .first
    )
    sort.click()

    assert shown_ranks(tab) == [str(rank) for rank in range(WIDE_RANKS - 1, WIDE_RANKS - 9, -1)]


def test_saved_table_has_all_rows(tab_of: TabOf, wide_file: Path, tmp_path: Path) -> None:
    tab = tab_of(wide_file).open()
    with tab.page.expect_download() as download:
        tab.show("ranks").locator(".csv").first.click()
    download.value.save_as(tmp_path / "ranks.csv")
    rows = list(csv.reader((tmp_path / "ranks.csv").read_text("utf-8").splitlines()))

    assert rows[0][0] == "rank"
    assert len(rows) == 1 + WIDE_RANKS
    assert rows[1][0] == str(WIDE_SLOW)


def test_saved_table_has_names_that_the_page_shortens(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    """The table is sorted before it is saved."""
    names = [f"{each}{'.layer' * 20}" for each in "ab"]
    table = Table("collectives", "Collectives", [Column("collective", names, Quantity.TEXT)])
    tab = tab_of(written(tmp_path, "names", {**shown, "tables": [table]})).open()
    section = tab.show("collectives")
    section.get_by_role("columnheader").get_by_role("button").click()
    with tab.page.expect_download() as download:
        section.locator(".csv").click()
    download.value.save_as(tmp_path / "names.csv")

    assert (tmp_path / "names.csv").read_text("utf-8").split() == ["collective", *reversed(names)]


def test_chosen_theme_is_kept_in_the_address(tab_of: TabOf, file: Path) -> None:
    tab = tab_of(file).open()
    light = tab.value("getComputedStyle(document.body).backgroundColor")
    tab.page.get_by_label("Theme").select_option("dark")

    assert "theme=dark" in tab.address()
    assert tab.value("getComputedStyle(document.body).backgroundColor") != light


def test_start_is_shown_in_utc_and_in_the_local_time_zone(browser: Any, file: Path) -> None:
    context = browser.new_context(timezone_id="Asia/Kolkata")
    tab = Tab(context.new_page(), file).open()
    utc, local = re.findall(r"(\d\d:\d\d)", tab.page.inner_text("header time"))
    context.close()
    minutes = [60 * int(each[:2]) + int(each[3:]) for each in (utc, local)]

    assert (minutes[1] - minutes[0]) % (24 * 60) == 330


def test_question_mark_lists_the_keys(tab_of: TabOf, file: Path) -> None:
    """The dialog has no accessibility fault, and closing it returns the focus."""
    from axe_playwright_python.sync_playwright import Axe

    tab = tab_of(file).open()
    tab.chart("heat").focus()
    dialog = tab.page.get_by_role("dialog", name="Keys")
    assert not dialog.is_visible()
    tab.page.keyboard.press("?")

    assert "choose a step" in dialog.inner_text()
    assert Axe().run(tab.page).response["violations"] == []
    tab.page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert tab.value("document.activeElement.className") == "chart"
    tab.page.get_by_role("button", name="Keys").click()
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()


def test_link_to_a_heading_is_visible_when_it_has_the_focus(tab_of: TabOf, file: Path) -> None:
    tab = tab_of(file).open()
    link = tab.page.locator("#ranks .here")

    assert link.evaluate("each => getComputedStyle(each).opacity") == "0"
    link.focus()
    assert (
        link.evaluate("each => each === document.activeElement && getComputedStyle(each).opacity")
        == "1"
    )
