"""The page of a running job gets newer contents without a reload, and any step from the server."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.conftest import TabOf, written
from tests.page.browser.tab import Tab, need_browser
from tests.page.conftest import SINCE_STEP, SLOW_RANK, STEPS
from tests.support.page_contents import enlarged
from torchlens_perf.page.contents import PageContents
from torchlens_perf.page.document.html import build_document, contents_as_json

need_browser()

RENEWALS = 25


def grown(of: PageContents, steps: int) -> PageContents:
    """Return the contents of the same job some steps later."""
    made: Any = enlarged(of, 8, steps, SLOW_RANK, SINCE_STEP)
    made["written"] = f"2026-01-01T{steps // 60:02d}:{steps % 60:02d}:00+00:00"
    return made  # type: ignore[no-any-return]


def test_newer_contents_keep_selection_focus_and_open_elements(
    tab: Tab, shown: PageContents
) -> None:
    """The contents of words, tables and charts are replaced."""
    tab.open("#heat;steps=60-119;rank=3;order=rank;step=80")
    tab.show_all()
    tab.show("heat")
    tab.value("document.querySelector('#verdict-1 details').open = true")
    tab.chart("heat").focus()
    top = tab.chart("heat").bounding_box()["y"]
    before = {key: value for key, value in tab.view().items() if key != "section"}
    tab.page.evaluate(
        "newer => torchlensPage.update(newer)", build_document(grown(shown, 2 * STEPS))
    )
    tab.settle()
    assert {key: value for key, value in tab.view().items() if key != "section"} == before
    assert tab.value("torchlensPage.steps.columns") == 2 * STEPS
    assert tab.value(f"{tab.named('heat')}.shown.width") == 2 * STEPS
    assert tab.value(f"{tab.named('heat')}.plot.scales.x.max") == 2 * STEPS
    assert tab.value(f"{tab.named('steps')}.plot.data[0].length") == 2 * STEPS
    assert f"{2 * STEPS // 60:02d}:{2 * STEPS % 60:02d} UTC" in tab.page.inner_text("footer")
    assert f"{2 * STEPS} steps" in tab.page.inner_text("header")
    assert tab.value("document.querySelector('#verdict-1 details').open")
    assert tab.value(
        "document.activeElement === document.querySelector('figure[data-chart=heat] .chart')"
    )
    assert tab.chart("heat").bounding_box()["y"] == pytest.approx(top, abs=30)
    assert "steps 60 to 119" in tab.show("ranks").locator("table:visible caption").inner_text()
    tab.page.mouse.move(*tab.at("heat", STEPS + 20.5, 0.5))
    assert f"step {STEPS + 20}" in tab.tip()
    assert (tab.problems, tab.foreign()) == ([], [])


def test_zoomed_range_stays_and_full_view_grows_with_new_steps(
    tab: Tab, shown: PageContents
) -> None:
    tab.open("#heat;zoom=20-59")
    tab.page.evaluate(
        "newer => torchlensPage.update(newer)", build_document(grown(shown, 2 * STEPS))
    )
    tab.settle()
    assert tab.value(f"(({{min, max}}) => [min, max])({tab.named('heat')}.plot.scales.x)") == [
        20,
        60,
    ]
    assert tab.view()["zoom"] == [20, 60]


def test_new_ranks_and_quantities_appear_with_newer_contents(tab: Tab, shown: PageContents) -> None:
    """More ranks are more rows, and a new quantity has its chart."""
    tab.open("#heat")
    larger: Any = enlarged(shown, 16, STEPS, SLOW_RANK, SINCE_STEP)
    tab.page.evaluate("newer => torchlensPage.update(newer)", build_document(larger))
    tab.settle()
    assert len(tab.value(f"{tab.named('heat')}.order")) == 16
    tab.show("memory")
    tab.show("telemetry")
    assert (
        tab.value(
            "torchlensPage.charts.filter(({figure, plot}) => figure.dataset.title && plot).length"
        )
        == 2
    )
    tab.page.evaluate("newer => torchlensPage.update(newer)", build_document(shown))
    tab.show("heat")
    assert tab.value(f"{tab.named('heat')}.order.length") == 8
    assert tab.value("torchlensPage.charts.filter(({figure}) => figure.dataset.title).length") == 0
    assert tab.problems == []


def test_lines_become_a_heat_map_when_ranks_are_added(
    tab_of: TabOf, shown: PageContents, tmp_path: Path
) -> None:
    """At its start, the run has few known ranks, which are drawn as lines."""
    tab = tab_of(written(tmp_path, "few", enlarged(shown, 2, 60, 1, 20))).open("#heat")
    assert tab.value(f"{tab.named('compute')}.data.length") == 2
    tab.page.evaluate(
        "newer => torchlensPage.update(newer)", build_document(enlarged(shown, 8, 60, 1, 20))
    )
    tab.settle()
    assert len(tab.value(f"{tab.named('heat')}.order")) == 8
    assert tab.page.locator("#heat .chart").count() == 1
    assert tab.problems == []


def test_charts_are_renewed_by_new_contents_without_markup(tab: Tab, shown: PageContents) -> None:
    tab.open("#heat;steps=60-119")
    newer = json.loads(contents_as_json(grown(shown, 2 * STEPS)))
    tab.page.evaluate("newer => torchlensPage.update(newer)", newer)
    tab.settle()
    assert tab.value(f"{tab.named('heat')}.shown.width") == 2 * STEPS
    assert tab.view()["steps"] == [60, 120]


def test_number_of_figures_and_listeners_does_not_grow_with_renewals(
    tab: Tab, shown: PageContents
) -> None:
    tab.open("#heat")
    tab.show_all()
    tab.show("heat")
    count = """[torchlensPage.charts.length, torchlensPage.view.listeners.length,
        ...[".uplot", ".tip", "*"].map(each => document.querySelectorAll(each).length)]"""
    pages = [build_document(grown(shown, STEPS + more)) for more in (0, 1)]
    counts = []
    for renewal in range(RENEWALS):
        tab.page.evaluate("newer => torchlensPage.update(newer)", pages[renewal % 2])
        tab.settle()
        tab.show_all()
        counts.append(tab.value(count))
    assert counts[-1] == counts[4]
    assert tab.problems == []


@pytest.fixture
def served() -> Iterator[Callable[[str, dict[int, Any]], tuple[str, list[str]]]]:
    """Serve a page and some steps on loopback.

    Return the address and the requested paths.
    """
    with contextlib.ExitStack() as leaving:

        def serve(page: str, steps: dict[int, Any]) -> tuple[str, list[str]]:
            asked: list[str] = []

            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    asked.append(self.path)
                    step = self.path.rpartition("/")[2]
                    text = (
                        json.dumps(steps.get(int(step), {"names": [], "steps": []}))
                        if step.isdigit()
                        else page
                    )
                    self.send_response(200)
                    self.send_header(
                        "Content-Type", "application/json" if step.isdigit() else "text/html"
                    )
                    self.end_headers()
                    self.wfile.write(text.encode())

                def log_message(self, *_: Any) -> None: ...

            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            leaving.callback(lambda: (server.shutdown(), server.server_close(), thread.join()))
            return f"http://127.0.0.1:{server.server_port}/run/", asked

        yield serve


def test_step_not_in_the_page_is_requested_once_from_the_server(
    tab_of: TabOf,
    served: Callable[[str, dict[int, Any]], tuple[str, list[str]]],
    shown: PageContents,
) -> None:
    """For a step that was not recorded, the page shows the nearest one with a note."""
    recorded = {step["step"] for step in shown["traces"]["steps"]}
    wanted, missing = [step for step in range(STEPS) if step not in recorded][:2]
    trace = {**copy.deepcopy(shown["traces"]["steps"][0]), "step": wanted, "why": "asked for"}
    page = build_document(shown).replace('<html lang="en"', '<html lang="en" data-live="running"')
    assert 'data-live="running"' in page
    address, asked = served(page, {wanted: {"names": shown["traces"]["names"], "steps": [trace]}})
    tab = tab_of(Path("/"), bypass=True)
    tab.page.goto(f"{address}#step;step={wanted}")
    tab.settle()
    assert tab.value(f"{tab.named('step')}.trace.step") == wanted
    words = tab.page.locator("figure[data-chart=step] p.note")
    choice = tab.page.locator("select[name=recorded-step] option:checked")
    assert choice.inner_text() == f"{wanted}: asked for"
    assert "no spans of step" not in words.inner_text()
    tab.page.get_by_role("spinbutton", name="any step").fill(str(missing))
    tab.page.keyboard.press("Tab")
    tab.settle()
    assert f"This page has no spans of step {missing}" in words.inner_text()
    tab.value(f"torchlensPage.view.set({{step: {wanted}, rank: 1}})")
    tab.settle()
    assert tab.value(f"{tab.named('step')}.trace.step") == wanted
    tab.value(f"torchlensPage.view.set({{step: {missing}}})")
    tab.settle()
    assert f"This page has no spans of step {missing}" in words.inner_text()
    assert [each for each in asked if "api" in each] == [
        f"/run/api/step/{wanted}",
        f"/run/api/step/{missing}",
    ]


def test_nearest_step_is_shown_if_the_server_has_ended(
    tab_of: TabOf, tmp_path: Path, shown: PageContents
) -> None:
    path = tmp_path / "left.html"
    path.write_text(
        build_document(shown).replace('<html lang="en"', '<html lang="en" data-live="ended"'),
        "utf-8",
    )
    recorded = {step["step"] for step in shown["traces"]["steps"]}
    missing = next(step for step in range(STEPS) if step not in recorded)
    tab = tab_of(path).open(f"#step;step={missing}")
    assert f"This page has no spans of step {missing}" in tab.page.inner_text(
        "figure[data-chart=step] p.note"
    )
