"""A run that goes on: viewers hear of what is new, whoever they are, and it is read once for all of them."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import eventually
from tests.support.live_simulation import LiveSimulation
from tests.support.page_server import News, PageServer, Viewer

pytestmark = pytest.mark.distributed


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    """A run named "live", of which 32 steps are known."""
    with LiveSimulation(tmp_path / "runs" / "live", 2) as run:
        run.goes_on()
        yield run


@pytest.fixture
def server(live: LiveSimulation) -> Iterator[PageServer]:
    with PageServer(live.run.path.parent) as started:
        yield started


@pytest.fixture
def viewer(server: PageServer) -> Viewer:
    return server.viewer()


def steps(viewer: Viewer) -> int:
    """That the newest page has of a rank."""
    return int(viewer.json("/runs/live/api/contents")["report"]["ranks"][0]["steps"])


def newer(news: News, version: str) -> dict[str, object]:
    """The next event with another version."""
    while (event := news.next())["version"] == version:
        pass
    return event


def test_viewers_hear_of_what_is_new_to_the_end(live: LiveSimulation, viewer: Viewer) -> None:
    """Each state is one event with the version of the page; the last one says that the run has ended."""
    with viewer.news("live") as news:
        first = news.next()
        assert (first["is_live"], first["problem"]) == (True, "")
        assert f'data-version="{first["version"]}"' in viewer.page("live")
        known = steps(viewer)
        live.goes_on()
        second = newer(news, first["version"])
        assert second["is_live"]
        assert steps(viewer) == known + 32
        live.ends()
        last = news.until(is_live=False)
        page = viewer.page("live")
        assert f'data-version="{last["version"]}"' in page
        assert 'data-live="ended"' in page
        assert news.ids[0] == first["version"]
        assert news.ids[-1] == last["version"]


def test_all_viewers_share_one_reading(live: LiveSimulation, viewer: Viewer) -> None:
    """Twenty who look cause as many looks at the directory as one, and each change is read once."""
    with contextlib.ExitStack() as leaving:
        heard = [leaving.enter_context(viewer.news("live")) for _ in range(20)]
        version = {news.next()["version"] for news in heard}
        assert len(version) == 1
        before = viewer.json("/api/counts")
        assert (before["viewers"], before["readings"]) == (20, 1)
        live.goes_on()
        assert len({str(newer(news, *version)["version"]) for news in heard}) == 1
        after = viewer.json("/api/counts")
        assert after["readings"] == 2
        for _ in range(20):
            viewer.page("live")
        assert viewer.json("/api/counts")["readings"] == 2
        assert viewer.json("/api/counts")["looks"] <= after["looks"] + 20  # one a second, however many ask
    assert eventually(lambda: viewer.json("/api/counts")["viewers"] == 0)


def test_nobody_looks_nothing_is_read(live: LiveSimulation, viewer: Viewer) -> None:
    """Once the last viewer has gone, the directory is left alone."""
    with viewer.news("live") as news:
        news.next()
    assert eventually(lambda: viewer.json("/api/counts")["viewers"] == 0)
    assert eventually(lambda: viewer.json("/api/counts")["calls_now"] == 0)
    live.goes_on()
    looks = viewer.json("/api/counts")["looks"]
    with viewer.news("live") as news:
        assert not news.next()["problem"]
        seen = viewer.json("/api/counts")["looks"]
    assert seen <= looks + 3  # of the one who is here again


def test_whoever_comes_again_hears_what_there_is(live: LiveSimulation, viewer: Viewer) -> None:
    """A connection that was lost is made anew by the browser: the first event has all, whatever was missed."""
    with viewer.news("live") as news:
        version = news.next()["version"]
    live.goes_on(2)
    with viewer.news("live") as again:
        assert newer(again, str(version))["is_live"]
    live.ends()
    with viewer.news("live") as again:
        assert again.until(is_live=False)["version"] != version


def test_a_viewer_who_does_not_read_holds_nobody_up(live: LiveSimulation, viewer: Viewer) -> None:
    """Neither one who takes no page nor one who sends half a request; what they are owed does not pile up."""
    host, port = viewer.host.split(":")
    with contextlib.ExitStack() as leaving:
        for text in (
            f"GET /runs/live/ HTTP/1.1\r\nHost: {viewer.host}\r\nCookie: {viewer.cookie}\r\n\r\n",
            f"GET /runs/live/api/changes HTTP/1.1\r\nHost: {viewer.host}\r\nCookie: {viewer.cookie}\r\n\r\n",
            f"GET / HTTP/1.1\r\nHost: {viewer.host}\r\nX: ",
            "POST /runs/live/api/captures HTTP/1.1\r\nContent-Length: 100\r\n",
        ):
            connection = leaving.enter_context(socket.create_connection((host, int(port))))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(text.encode())
        news = leaving.enter_context(viewer.news("live"))
        version = news.next()["version"]
        for _ in range(3):
            live.goes_on()
            version = newer(news, str(version))["version"]


def test_a_run_that_is_removed(live: LiveSimulation, viewer: Viewer) -> None:
    """Viewers hear it, the page is gone, and the list goes on; one of the same name is another one."""
    with viewer.news("live") as news:
        news.next()
        copy = live.run.path.with_name("copy")
        shutil.copytree(live.run.path, copy)
        live.run.path.rename(live.run.path.with_name("gone"))
        shutil.rmtree(live.run.path.with_name("gone"))
        event = news.next()
        while "was it removed?" not in event["problem"]:
            event = news.next()
        assert viewer.ask("/runs/live/").status == 404
        assert viewer.ask("/runs/live/api/step/3").status == 404
        assert viewer.ask("/").status == 200
        copy.rename(live.run.path)
        event = news.until(problem="")
        assert viewer.ask("/runs/live/").status == 200


def test_a_state_that_is_damaged_while_it_is_followed(live: LiveSimulation, viewer: Viewer) -> None:
    """The page before it stays, with the reason; when the file is well again, so is the page."""
    with viewer.news("live") as news:
        version = news.next()["version"]
        (state,) = live.run.nodes.glob("*.json")
        whole, partial = state.read_bytes(), state.with_suffix(".x")
        partial.write_bytes(whole[: len(whole) // 2])
        partial.replace(state)
        event = news.next()
        while "cannot be read" not in event["problem"]:
            event = news.next()
        assert event["version"] == version
        assert steps(viewer) == 32
        partial.write_bytes(whole)
        partial.replace(state)
        assert newer(news, str(version))["problem"] == ""


def test_what_is_no_http_is_refused(viewer: Viewer, server: PageServer) -> None:
    """And the server goes on, and says nothing."""
    host, port = viewer.host.split(":")
    for text in (b"\x00\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(connection)
            with contextlib.suppress(http.client.HTTPException):
                answer.begin()
                assert answer.status >= 400
    assert viewer.ask("/").status == 200
    server.process.terminate()
    assert server.said() == ""
