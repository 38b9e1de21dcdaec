"""A run that goes on: viewers hear of what is new, whoever they are, and it is read once for all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.leftovers import eventually
from tests.support.live_simulation import LiveSimulation
from tests.support.page_server import News, PageServer, Viewer
from torchlens_perf.serve.access import TOKEN_HEADER
from torchlens_perf.serve.follow import LOOK_S

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Of a folder in which each test has a run of its own."""
    with PageServer(tmp_path_factory.mktemp("runs")) as started:
        yield started


@pytest.fixture(scope="module")
def viewer(server: PageServer) -> Viewer:
    return server.viewer()


@pytest.fixture
def live(server: PageServer, request: pytest.FixtureRequest) -> Iterator[LiveSimulation]:
    """A run of which 32 steps are known."""
    with LiveSimulation(server.folder / request.node.name, 2) as run:
        run.goes_on()
        yield run


def counts(viewer: Viewer, live: LiveSimulation) -> dict[str, int]:
    """Of the run: who looks at it now, how often it was looked at, and read."""
    found: dict[str, int] = viewer.json("/api/counts")["runs"][live.name]
    return found


def steps(viewer: Viewer, run: str) -> int:
    """That the newest page has of a rank."""
    return int(viewer.json(f"/runs/{run}/api/contents")["report"]["ranks"][0]["steps"])


def newer(news: News, version: str) -> dict[str, object]:
    """The next event with another version."""
    while (event := news.next())["version"] == version:
        pass
    return event


def test_viewers_hear_of_what_is_new_to_the_end(live: LiveSimulation, viewer: Viewer) -> None:
    """Each state is one event with the version of the page; the last one says that the run has ended."""
    with viewer.news(live.name) as news:
        first = news.next()
        assert (first["is_live"], first["problem"]) == (True, "")
        assert f'data-version="{first["version"]}"' in viewer.page(live.name)
        known = steps(viewer, live.name)
        live.goes_on()
        second = newer(news, first["version"])
        assert second["is_live"]
        assert steps(viewer, live.name) == known + 32
        live.ends()
        last = news.until(is_live=False)
        page = viewer.page(live.name)
        assert f'data-version="{last["version"]}"' in page
        assert 'data-live="ended"' in page
        assert news.ids[0] == first["version"]
        assert news.ids[-1] == last["version"]


def test_all_viewers_share_one_reading(live: LiveSimulation, viewer: Viewer) -> None:
    """Each change is read once for twenty who look, and not again for those who load the page."""
    began_s = time.monotonic()
    with contextlib.ExitStack() as leaving:
        heard = [leaving.enter_context(viewer.news(live.name)) for _ in range(20)]
        version = {news.next()["version"] for news in heard}
        assert len(version) == 1
        before = counts(viewer, live)
        assert (before["viewers"], before["readings"]) == (20, 1)
        live.goes_on()
        assert len({str(newer(news, *version)["version"]) for news in heard}) == 1
        looks = counts(viewer, live)["looks"]
        for _ in range(20):
            viewer.page(live.name)
        assert eventually(lambda: counts(viewer, live)["looks"] >= looks + 2)
        last = counts(viewer, live)
        assert last["readings"] == 2
        assert last["looks"] <= 2 + (time.monotonic() - began_s) / LOOK_S
    assert eventually(lambda: counts(viewer, live)["viewers"] == 0)


def test_nobody_looks_nothing_is_read(live: LiveSimulation, viewer: Viewer) -> None:
    """Once the last viewer has gone, the directory is left alone; whoever comes later hears what is new."""
    with viewer.news(live.name) as news:
        version = news.next()["version"]
    assert eventually(lambda: counts(viewer, live)["viewers"] == 0)
    with LiveSimulation(live.run.path.with_name("meanwhile"), 2) as other:
        other.goes_on()
        with viewer.news(other.name) as news:
            news.next()
            assert eventually(lambda: counts(viewer, other)["looks"] >= 2)
            looks = counts(viewer, live)["looks"]
            assert eventually(lambda: counts(viewer, other)["looks"] >= 4)
            assert counts(viewer, live)["looks"] == looks
    live.goes_on()
    with viewer.news(live.name) as news:
        assert newer(news, str(version))["problem"] == ""


def test_whoever_comes_again_hears_what_there_is(live: LiveSimulation, viewer: Viewer) -> None:
    """A connection that was lost is made anew by the browser: the first event has all, whatever was missed."""
    with viewer.news(live.name) as news:
        version = news.next()["version"]
    live.goes_on(2)
    with viewer.news(live.name) as again:
        assert newer(again, str(version))["is_live"]
    live.ends()
    with viewer.news(live.name) as again:
        assert again.until(is_live=False)["version"] != version


def test_a_viewer_who_does_not_read_holds_nobody_up(live: LiveSimulation, viewer: Viewer) -> None:
    """Neither one who takes no page nor one who sends half a request; what they are owed does not pile up."""
    host, port = viewer.host.split(":")
    with contextlib.ExitStack() as leaving:
        head = f"Host: {viewer.host}\r\n{TOKEN_HEADER}: {viewer.token}\r\n\r\n"
        for text in (
            f"GET /runs/{live.name}/ HTTP/1.1\r\n{head}",
            f"GET /runs/{live.name}/api/changes HTTP/1.1\r\n{head}",
            f"GET / HTTP/1.1\r\nHost: {viewer.host}\r\nX: ",
            f"POST /runs/{live.name}/api/captures HTTP/1.1\r\nContent-Length: 100\r\n",
        ):
            connection = leaving.enter_context(socket.create_connection((host, int(port))))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(text.encode())
        news = leaving.enter_context(viewer.news(live.name))
        version = news.next()["version"]
        for _ in range(3):
            live.goes_on()
            version = newer(news, str(version))["version"]


def test_a_run_that_falls_silent(live: LiveSimulation, viewer: Viewer) -> None:
    """No rank has ended, and nothing is written any more: that is said, in the page and in the list."""
    before_s = time.time() - 300
    os.utime(live.run.nodes, (before_s, before_s))
    with viewer.news(live.name) as news:
        event = news.next()
        assert event["is_live"]
        assert event["problem"].startswith("nothing new for 5 minutes: no rank has ended")
        assert eventually(lambda: "silent for 5 minutes" in viewer.ask(f"/?search={live.name}").text)
        live.goes_on()
        assert newer(news, event["version"])["problem"] == ""


def test_a_run_that_is_removed(live: LiveSimulation, viewer: Viewer) -> None:
    """Viewers hear it, the page is gone, and the list goes on; one of the same name is another one."""
    with viewer.news(live.name) as news:
        news.next()
        copy = live.run.path.with_name("copy")
        shutil.copytree(live.run.path, copy)
        live.run.path.rename(live.run.path.with_name("gone"))
        shutil.rmtree(live.run.path.with_name("gone"))
        event = news.next()
        while "was it removed?" not in event["problem"]:
            event = news.next()
        assert viewer.ask(f"/runs/{live.name}/").status == 404
        assert viewer.ask(f"/runs/{live.name}/api/step/3").status == 404
        assert viewer.ask("/").status == 200
        copy.rename(live.run.path)
        event = news.until(problem="")
        assert viewer.ask(f"/runs/{live.name}/").status == 200


def test_a_state_that_is_damaged_while_it_is_followed(live: LiveSimulation, viewer: Viewer) -> None:
    """The page before it stays, with the reason; when the file is well again, so is the page."""
    with viewer.news(live.name) as news:
        version = news.next()["version"]
        (state,) = live.run.nodes.glob("*.json")
        whole, partial = state.read_bytes(), state.with_suffix(".x")
        partial.write_bytes(whole[: len(whole) // 2])
        partial.replace(state)
        event = news.next()
        while "cannot be read" not in event["problem"]:
            event = news.next()
        assert event["version"] == version
        assert steps(viewer, live.name) == 32
        partial.write_bytes(whole)
        partial.replace(state)
        assert newer(news, str(version))["problem"] == ""
