"""A live run: each viewer receives newer pages, and each change is read once for all viewers."""

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
from tests.support.page_server import ChangePoller, PageServer, Viewer
from torchlens_perf.serve.access import TOKEN_HEADER
from torchlens_perf.serve.follow import LOOK_INTERVAL_S

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Start a server on a folder in which each test has its own run."""
    with PageServer(tmp_path_factory.mktemp("runs")) as started:
        yield started


@pytest.fixture(scope="module")
def viewer(server: PageServer) -> Viewer:
    return server.viewer()


@pytest.fixture
def live(server: PageServer, request: pytest.FixtureRequest) -> Iterator[LiveSimulation]:
    """Return a run with 32 known steps."""
    with LiveSimulation(server.folder / request.node.name, 2) as run:
        run.add_blocks()
        yield run


def counts(viewer: Viewer, live: LiveSimulation) -> dict[str, int]:
    """Return how often the run was checked, and how often it was read."""
    found: dict[str, int] = viewer.json("/api/counts")["runs"][live.name]
    return found


def steps(viewer: Viewer, run: str) -> int:
    """Return how many steps of a rank the newest page has."""
    return int(viewer.json(f"/runs/{run}/api/contents")["report"]["ranks"][0]["steps"])


def newer(news: ChangePoller, version: object) -> dict[str, object]:
    """Wait for a version of the page other than the given one, and return the news about it."""
    while (now := news.next())["version"] == version:
        pass
    return now


def test_each_new_state_is_a_new_page_version_until_the_run_ends(
    live: LiveSimulation, viewer: Viewer
) -> None:
    news = viewer.poll_changes(live.name)
    first = news.wait_for(problem="")
    assert first["is_live"]
    assert f'data-version="{first["version"]}"' in viewer.page(live.name)
    known = steps(viewer, live.name)
    live.add_blocks()
    second = newer(news, first["version"])
    assert second["is_live"]
    assert steps(viewer, live.name) == known + 32
    live.end_run()
    last = news.wait_for(is_live=False)
    page = viewer.page(live.name)
    assert f'data-version="{last["version"]}"' in page
    assert 'data-live="ended"' in page


def test_each_change_is_read_once_for_twenty_viewers(live: LiveSimulation, viewer: Viewer) -> None:
    """Loading the page does not read the run again."""
    began_s = time.monotonic()
    viewers = [viewer.poll_changes(live.name) for _ in range(20)]
    (version,) = {news.next()["version"] for news in viewers}
    assert counts(viewer, live)["readings"] == 1
    live.add_blocks()
    assert len({str(newer(news, version)["version"]) for news in viewers}) == 1
    for _ in range(20):
        viewer.page(live.name)
    last = counts(viewer, live)
    assert last["readings"] == 2
    assert last["looks"] <= 2 + (time.monotonic() - began_s) / LOOK_INTERVAL_S


def test_run_is_not_read_while_it_has_no_viewer(live: LiveSimulation, viewer: Viewer) -> None:
    """A later viewer receives the newest data."""
    version = viewer.poll_changes(live.name).next()["version"]
    looks = counts(viewer, live)["looks"]
    time.sleep(3 * LOOK_INTERVAL_S)
    assert counts(viewer, live)["looks"] == looks
    live.add_blocks()
    assert newer(viewer.poll_changes(live.name), version)["problem"] == ""


def test_stalled_viewer_does_not_block_others(live: LiveSimulation, viewer: Viewer) -> None:
    """A viewer may not read the page, or may send only half a request."""
    host, port = viewer.host.split(":")
    with contextlib.ExitStack() as leaving:
        head = f"Host: {viewer.host}\r\n{TOKEN_HEADER}: {viewer.token}\r\n\r\n"
        for text in (
            f"GET /runs/{live.name}/ HTTP/1.1\r\n{head}",
            f"GET /runs/{live.name}/api/contents HTTP/1.1\r\n{head}",
            f"GET / HTTP/1.1\r\nHost: {viewer.host}\r\nX: ",
            f"POST /runs/{live.name}/api/captures HTTP/1.1\r\nContent-Length: 100\r\n",
        ):
            connection = leaving.enter_context(socket.create_connection((host, int(port))))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(text.encode())
        news = viewer.poll_changes(live.name)
        version = news.next()["version"]
        for _ in range(3):
            live.add_blocks()
            version = newer(news, version)["version"]


def test_silent_run_is_reported_in_the_page_and_in_the_list(
    live: LiveSimulation, viewer: Viewer
) -> None:
    before_s = time.time() - 300
    os.utime(live.run.nodes, (before_s, before_s))
    news = viewer.poll_changes(live.name)
    now = news.next()
    assert now["is_live"]
    assert now["problem"].startswith("no new data for 5 minutes. No rank has ended")
    assert eventually(lambda: "silent for 5 minutes" in viewer.ask(f"/?search={live.name}").text)
    live.add_blocks()
    assert newer(news, now["version"])["problem"] == ""


def test_page_of_a_removed_run_is_not_found(live: LiveSimulation, viewer: Viewer) -> None:
    """The list of runs still works. A later run of the same name is served."""
    news = viewer.poll_changes(live.name)
    news.next()
    copy = live.run.path.with_name("copy")
    shutil.copytree(live.run.path, copy)
    live.run.path.rename(live.run.path.with_name("gone"))
    shutil.rmtree(live.run.path.with_name("gone"))
    while "may have been removed" not in news.next()["problem"]:
        pass
    assert viewer.ask(f"/runs/{live.name}/").status == 404
    assert viewer.ask(f"/runs/{live.name}/api/step/3").status == 404
    assert viewer.ask("/").status == 200
    copy.rename(live.run.path)
    news.wait_for(problem="")
    assert viewer.ask(f"/runs/{live.name}/").status == 200


def test_damaged_state_file_keeps_the_previous_page(live: LiveSimulation, viewer: Viewer) -> None:
    """The page shows the reason. The page is renewed once the file is valid again."""
    news = viewer.poll_changes(live.name)
    version = news.next()["version"]
    (state,) = live.run.nodes.glob("*.json")
    whole, partial = state.read_bytes(), state.with_suffix(".x")
    partial.write_bytes(whole[: len(whole) // 2])
    partial.replace(state)
    while "cannot be read" not in (now := news.next())["problem"]:
        pass
    assert now["version"] == version
    assert steps(viewer, live.name) == 32
    partial.write_bytes(whole)
    partial.replace(state)
    assert newer(news, version)["problem"] == ""
