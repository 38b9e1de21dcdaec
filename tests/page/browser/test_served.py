"""The live page of a real server follows a running job and requests captures."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser.conftest import TabOf
from tests.page.browser.tab import Tab, need_browser
from tests.support.leftovers import eventually
from tests.support.live_simulation import LiveSimulation
from tests.support.page_server import PageServer
from torchlens_perf.analysis.statistics.quantities import format_percent
from torchlens_perf.run import captures as capture_files
from torchlens_perf.run.captures import TRACE, Outcome

need_browser()

# Number of steps in a simulated block.
BLOCK = 32
STATUS = "document.getElementById('live-status').textContent"
RANKS = 4


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    """Return a run with 128 known steps, in which rank 2 is slow."""
    with LiveSimulation(
        tmp_path / "runs" / "live", RANKS, "constant:rank=2,share=0.4,phase=forward"
    ) as run:
        run.add_blocks(4)
        run.sidecar.save_records()
        yield run


@pytest.fixture
def server(live: LiveSimulation) -> Iterator[PageServer]:
    with PageServer(live.run.path.parent) as started:
        yield started


@pytest.fixture
def tab(tab_of: TabOf, server: PageServer) -> Tab:
    """Open the list of runs by the printed address."""
    made: Tab = tab_of(Path("/"))
    made.page.goto(server.address)
    made.page.wait_for_selector("main td a")
    return made


def opened(tab: Tab, fragment: str = "") -> Tab:
    """Open the run's page by its link in the list."""
    tab.page.click("main td a")
    tab.page.wait_for_selector("#live-status")
    tab.until("Boolean(window.torchlensPage)")
    if fragment:
        tab.value(f"location.hash = '{fragment}'")
    return tab.settle()


def goes_on(live: LiveSimulation) -> None:
    """Continue the run.

    New records are also in segments, so steps and their spans are available.
    """
    live.add_blocks()
    live.sidecar.save_records()


def steps(tab: Tab) -> int:
    """Return the number of steps in the header."""
    found = re.search(r"([\d,]+) steps", tab.page.inner_text("header .facts"))
    assert found is not None
    return int(found[1].replace(",", ""))


def foreign(tab: Tab, server: PageServer) -> list[str]:
    """Return requests to other origins."""
    own = (f"http://{server.client_without_token().host}/", "data:", "about:")
    return [each for each in tab.requests if not each.startswith(own)]


def test_live_page_follows_its_run_without_a_reload(
    tab: Tab, live: LiveSimulation, server: PageServer
) -> None:
    """Words, tables and charts are renewed.

    The selection stays, and the end of the run is shown.
    """
    assert "token" not in tab.page.url
    opened(tab, "#heat;rank=2;steps=10-59")
    tab.until(f"{STATUS}.startsWith('Live, updated ')")
    first, before = steps(tab), tab.page.inner_text("#verdicts")
    tab.value("window.sameDocument = true")
    columns = tab.value("torchlensPage.steps.end")
    goes_on(live)
    tab.until(f"torchlensPage.steps.end > {columns}")
    tab.settle()
    assert steps(tab) == first + BLOCK
    assert (tab.view()["rank"], tab.view()["steps"]) == (2, [10, 60])
    assert tab.page.inner_text("#verdicts") != before
    share = tab.value("torchlensPage.contents.report.verdicts[0].evidence.share_of_steps")
    assert f"slow in {format_percent(share)} of the steps since then" in tab.page.inner_text(
        "#verdicts"
    )
    live.end_run()
    tab.until(f"{STATUS} === 'Ended'")
    assert "ended" in tab.page.inner_text("header .facts")
    assert tab.value("window.sameDocument")
    assert not tab.page.locator("#capture").is_visible()
    assert (tab.problems, foreign(tab, server)) == ([], [])


def test_charts_appear_when_the_first_steps_arrive(tab_of: TabOf, tmp_path: Path) -> None:
    """A young run has a verdict and no steps. Sections and charts appear without a reload."""
    with (
        LiveSimulation(tmp_path / "runs" / "young", RANKS) as live,
        PageServer(tmp_path / "runs") as server,
    ):
        live.add_blocks()
        tab: Tab = tab_of(Path("/"))
        tab.page.goto(server.address)
        opened(tab)
        assert tab.page.locator("#heat").count() == 0
        goes_on(live)
        tab.until("document.querySelector('#heat') !== null")
        tab.show("heat")
        tab.until(f"Boolean({tab.named('compute')}?.plot)")
        assert tab.problems == []


def test_any_recorded_step_is_requested_from_the_server(tab: Tab, live: LiveSimulation) -> None:
    """The step may be newer than the page."""
    opened(tab)
    goes_on(live)
    tab.until(f"torchlensPage.steps.end >= {5 * BLOCK}")
    held = set(tab.value("torchlensPage.contents.traces.steps.map(({step}) => step)"))
    wanted = next(step for step in range(5 * BLOCK - 1, 0, -1) if step not in held)
    tab.value(f"location.hash = '#step;step={wanted}'")
    tab.show("step")
    tab.until(f"{tab.named('step')}.trace?.step === {wanted}")
    assert tab.problems == []


def test_paused_page_does_not_change(tab: Tab, live: LiveSimulation) -> None:
    """After resuming, the page shows the newest steps at once."""
    opened(tab)
    tab.until(f"{STATUS}.startsWith('Live, updated ')")
    tab.page.get_by_role("button", name="Pause").click()
    first = steps(tab)
    goes_on(live)
    tab.until(f"{STATUS} === 'Paused, newer steps are available'")
    assert steps(tab) == first
    tab.page.get_by_role("button", name="Resume").click()
    tab.until(f"torchlensPage.steps.end >= {5 * BLOCK}")
    tab.until(f"{STATUS}.startsWith('Live, updated ')")


def test_capture_button_sends_the_request_and_shows_results(tab: Tab, live: LiveSimulation) -> None:
    """The request equals that of the command.

    Results of ranks appear with their files as they arrive.
    """
    opened(tab)
    tab.page.click("#captures summary")
    tab.page.fill("input[name=ranks]", "1, 3")
    tab.page.fill("input[name=steps]", "2")
    tab.page.get_by_role("button", name="Profile", exact=True).click()
    tab.until(
        "document.getElementById('capture-status').textContent.includes('Waiting for rank 1, 3.')"
    )
    (request,) = capture_files.read_requests(live.run.captures)[0]
    assert (request.ranks, request.steps, request.python, request.forced) == (
        (1, 3),
        2,
        False,
        False,
    )
    for rank, wait in ((1, "Waiting for rank 3."), (3, "Done.")):
        folder = capture_files.rank_folder(live.run.captures, request.id, rank)
        folder.mkdir(parents=True)
        (folder / TRACE).write_bytes(b"trace")
        outcome = Outcome(request.id, rank, request.from_step, 2, files={TRACE: 5})
        capture_files.write_capture_file(capture_files.outcome_path(folder), outcome)
        tab.until(f"document.getElementById('capture-status').textContent.includes('{wait}')")
    with tab.page.expect_download() as download:
        tab.page.click("#capture-status a >> nth=0")
    assert download.value.suggested_filename == TRACE
    assert Path(download.value.path()).read_bytes() == b"trace"
    goes_on(live)
    tab.until("document.querySelectorAll('#captured a').length === 2")
    tab.page.fill("input[name=ranks]", "77")
    tab.page.get_by_role("button", name="Profile", exact=True).click()
    tab.until(
        "document.querySelector('#capture-status .problem')?.textContent.includes('rank 77 does not run')"
    )


def test_page_shows_that_the_server_has_ended(tab: Tab, server: PageServer) -> None:
    """The rest of the page does not change."""
    opened(tab)
    tab.until(f"{STATUS}.startsWith('Live, updated ')")
    server.process.terminate()
    tab.until(f"{STATUS}.includes('the server does not answer')")
    assert "Rank 2" in tab.page.inner_text("#verdicts")


def test_list_of_runs_follows_its_folder(
    tab: Tab, live: LiveSimulation, server: PageServer
) -> None:
    """A new run appears in the list, which is filtered as the user types.

    There are no requests to other origins.
    """
    tab.until("document.querySelector('main').textContent.includes('SLOW RANK')")
    with LiveSimulation(live.run.path.with_name("<b>other"), 2) as other:
        other.add_blocks()
        tab.until("document.querySelectorAll('main tbody tr:not(.group)').length === 2")
        assert "<b>other" in tab.page.inner_text("main")
        tab.page.fill("input[name=search]", "OTHER")
        tab.page.wait_for_url("**/?search=OTHER")
        tab.until("document.querySelectorAll('main tbody tr:not(.group)').length === 1")
        opened(tab)
    assert (tab.problems, foreign(tab, server)) == ([], [])


def test_two_ticked_runs_lead_to_the_page_that_compares_them(
    tab: Tab, live: LiveSimulation, server: PageServer
) -> None:
    """Ticks stay when the list is renewed. A third ticked run replaces the first."""
    button = tab.page.get_by_role("button", name="Compare the two ticked runs")
    with (
        LiveSimulation(live.run.path.with_name("faster"), 2) as faster,
        LiveSimulation(live.run.path.with_name("third"), 2) as third,
    ):
        for run in (faster, third):
            run.add_blocks(4)
            run.sidecar.save_records()
        tab.until(
            "[...document.querySelectorAll('main td.run-step')].filter((cell) =>"
            " cell.textContent).length === 3"
        )
        tab.page.check("input[value=third]")
        assert button.is_disabled()
        tab.page.check("input[value=live]")
        tab.value("document.querySelector('main').dataset.old = ''")
        tab.until("document.querySelector('main').dataset.old === undefined")
        assert tab.page.is_checked("input[value=live]")
        tab.page.check("input[value=faster]")
        assert not tab.page.is_checked("input[value=third]")
        button.click()
        tab.page.wait_for_selector("#comparison")
        assert re.search(r"/compare\?run=\w+&run=\w+$", tab.page.url)
        assert "SLOW RANK rank 2" in tab.page.inner_text("#verdicts")
        tab.page.click("text=Swap before and after")
        tab.page.wait_for_selector("#comparison")
        assert "before=" in tab.page.url
        assert (tab.problems, foreign(tab, server)) == ([], [])


def test_pinned_run_stays_first(tab: Tab, live: LiveSimulation) -> None:
    """Also after a reload, until it is unpinned."""
    first = "document.querySelector('main tbody th')?.textContent.startsWith('Pinned')"
    tab.page.get_by_role("button", name="Pin live").click()
    tab.until(first)
    tab.page.reload()
    tab.until(f"document.querySelector('main .pin') && {first}")
    tab.page.get_by_role("button", name="Pin live").click()
    tab.until(f"!({first})")


def test_page_of_a_starting_run_becomes_the_page_of_the_run(tab: Tab, live: LiveSimulation) -> None:
    path = live.run.path.with_name("young")
    (path / "nodes").mkdir(parents=True)
    tab.page.goto(tab.page.url + "runs/young/")
    tab.until(
        "document.querySelector('main')?.textContent.includes('has no data yet. A run that starts')"
    )
    with LiveSimulation(path, 2) as young:
        young.add_blocks()
        tab.page.wait_for_selector("#live-status")


def test_list_on_a_phone_shows_all_verdicts_in_cards(tab: Tab) -> None:
    """Nothing is wider than the window. What is cut has an ellipsis."""
    tab.until("document.querySelector('main').textContent.includes('SLOW RANK')")
    tab.page.set_viewport_size({"width": 390, "height": 800})
    for column in ("program", "status", "rank", "cost", "since", "state"):
        box = tab.page.locator(f"td.run-{column}").first.bounding_box()
        assert box is not None
        assert 0 < box["x"] + box["width"] <= 390
    assert tab.value("document.documentElement.scrollWidth") <= 390
    cut = tab.value(
        "[...document.querySelectorAll('main *')].filter((each) => each.scrollWidth >"
        " each.clientWidth + 1 && each.clientWidth && getComputedStyle(each).display !== 'inline'"
        " && getComputedStyle(each).textOverflow !== 'ellipsis').map((each) => each.outerHTML)"
    )
    assert cut == []


@pytest.mark.parametrize("width", [768, 1000, 1440])
def test_list_does_not_scroll_sideways(tab: Tab, width: int) -> None:
    """Less important columns are left out, so the finding stays visible."""
    tab.until("document.querySelector('main').textContent.includes('SLOW RANK')")
    tab.page.set_viewport_size({"width": width, "height": 800})
    finding = tab.page.locator("td.run-verdict").first.bounding_box()

    assert (
        tab.value(
            "(each => each.scrollWidth - each.clientWidth)(document.querySelector('.scrolls'))"
        )
        == 0
    )
    assert finding is not None
    assert finding["width"] >= 250
    assert tab.page.locator("td.run-started").first.is_visible() == (width != 1000)


@pytest.mark.parametrize("dark", [False, True])
def test_list_and_live_page_are_accessible(tab_of: TabOf, server: PageServer, dark: bool) -> None:
    """No rule of WCAG 2.1 AA that can be checked by machine is violated."""
    from axe_playwright_python.sync_playwright import Axe

    tab = tab_of(Path("/"), dark=dark, bypass=True)
    tab.page.goto(server.address)
    tab.page.wait_for_selector("main td a")
    rules = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21aa"]}}
    assert Axe().run(tab.page, options=rules).response["violations"] == []
    tab.page.goto(f"{tab.page.url}compare?before=live&after=live")
    tab.page.wait_for_selector("#comparison")
    assert Axe().run(tab.page, options=rules).response["violations"] == []
    tab.page.go_back()
    tab.page.wait_for_selector("main td a")
    opened(tab)
    tab.page.click("#captures summary")
    found = Axe().run(tab.page, context="main", options=rules).response["violations"]
    assert found == [], found


def test_hidden_page_sends_no_requests_until_it_is_visible(tab: Tab, server: PageServer) -> None:
    viewer = server.viewer()

    def looks() -> int:
        return int(viewer.json("/api/counts")["runs"]["live"]["looks"])

    def hide(value: str) -> None:
        tab.value(
            f"Object.defineProperty(document, 'hidden', {{ value: {value}, configurable: true }})"
        )

    opened(tab)
    tab.until(f"{STATUS}.startsWith('Live, updated ')")
    hide("true")
    time.sleep(2)
    before = looks()
    time.sleep(4)
    assert looks() == before
    hide("false")
    assert eventually(lambda: looks() > before)


def test_page_of_a_run_that_begins_logs_no_error(tab_of: TabOf, tmp_path: Path) -> None:
    """The page asks again every second, until the run has data."""
    (tmp_path / "runs" / "begins" / "nodes").mkdir(parents=True)
    with PageServer(tmp_path / "runs") as server:
        tab = tab_of(Path("/"))
        tab.page.goto(server.address)
        tab.page.click("main td a")
        tab.page.get_by_text("This page renews itself.").wait_for()
        tab.problems.clear()
        for _ in range(2):
            with tab.page.expect_response(re.compile("/runs/begins/"), timeout=10_000) as answer:
                pass
            assert answer.value.status == 202
        assert tab.problems == []
