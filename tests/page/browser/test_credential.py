"""The browser's credential for the live page belongs to its origin, and to no other port."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser.tab import LOADS_WITHIN_MS, need_browser
from tests.support.page_server import PageServer
from tests.support.processes import ROOT

need_browser()

STORED = "JSON.stringify([{ ...sessionStorage }, { ...localStorage }, document.cookie])"


class Neighbour:
    """Another user's server on another port of the host, which stores what browsers send."""

    def __init__(self) -> None:
        self.requests: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self.requests.append(f"{handler.requestline}\n{handler.headers}")
                body = b"<title>neighbour</title><p>tensorboard"
                handler.send_response(200)
                handler.send_header("content-type", "text/html")
                handler.send_header("content-length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    made = Neighbour()
    yield made
    made.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    # Sidecars of runs with one name exclude each other, so each test process has its own name.
    made = folder / f"made-{os.getpid()}"
    command = ["simulate", "--ranks", "2", "--steps", "96", "--out", str(made), "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "torchlens_perf", *command],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    shutil.move(made, folder / "done")
    return folder


@pytest.fixture
def server(runs: Path) -> Iterator[PageServer]:
    with PageServer(runs) as started:
        yield started


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    made = browser.new_context()
    made.set_default_timeout(LOADS_WITHIN_MS)
    yield made
    made.close()


def opened(context: Any, address: str, selector: str = "main td a") -> Any:
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector(selector)
    return page


def test_server_on_another_port_receives_no_credential(
    context: Any, server: PageServer, neighbour: Neighbour
) -> None:
    """Neither requests nor storage reveal the credential, whether or not other pages are open."""
    token = server.address.partition("token=")[2]
    page = opened(context, server.address)
    page.click("main td a")
    page.wait_for_selector("#live-status")
    assert context.cookies() == []
    other = opened(context, f"{neighbour.origin}/tb", "p")
    assert token not in other.evaluate(STORED)
    page.goto(f"{neighbour.origin}/after")
    assert token not in page.evaluate(STORED)
    page.evaluate(f"fetch('{neighbour.origin}/again', {{ credentials: 'include' }})")
    assert len(neighbour.requests) >= 3
    for request in neighbour.requests:
        assert token not in request
        assert "cookie" not in request.lower()
        assert "torchlens" not in request.lower()


def test_page_from_another_port_cannot_read_the_live_page(
    context: Any, server: PageServer, neighbour: Neighbour
) -> None:
    """The other page's script cannot read the response, and its capture request is refused."""
    opened(context, server.address)
    other = opened(context, f"{neighbour.origin}/tb", "p")
    host = server.client_without_token().host
    asked = (
        f"fetch('http://{host}/api/counts', {{ credentials: 'include' }}).then(each => each.status,"
        " () => 'closed')"
    )
    assert other.evaluate(asked) == "closed"
    blind = (
        f"fetch('http://{host}/runs/done/', {{ mode: 'no-cors' }}).then(each => each.type, () =>"
        " 'closed')"
    )
    assert other.evaluate(blind) in ("opaque", "closed")
    assert not (server.folder / "done" / "captures").exists()


def test_navigation_works_after_the_token_left_the_address(
    context: Any, server: PageServer
) -> None:
    """Reload, links, back, a search, a deep link, and new tabs are tested."""
    page = opened(context, server.address)
    assert "token" not in page.url
    page.reload()
    page.wait_for_selector("main td a")
    with context.expect_page() as new:
        page.click("main td a", modifiers=["Control"])
    new.value.wait_for_selector("#live-status")
    assert "/runs/done/" in new.value.url
    typed = opened(
        context,
        f"http://{server.client_without_token().host}/runs/done/#heat;rank=1",
        "#live-status",
    )
    assert typed.url.endswith("#heat;rank=1")
    page.click("main td a")
    page.wait_for_selector("#live-status")
    page.reload()
    page.wait_for_selector("#live-status")
    page.go_back()
    page.wait_for_selector("main td a")
    page.fill("input[name=search]", "none of these")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=No run matches")
    history = page.evaluate("history.length")
    for _ in range(history):
        page.go_back()
        assert "token" not in page.url


def test_browser_without_the_token_is_told_what_to_do(context: Any, server: PageServer) -> None:
    """A bookmark alone shows no data.

    The printed address opens the page in the same tab, also after a restart.
    """
    page = opened(
        context, f"http://{server.client_without_token().host}/runs/done/", "#needs-token"
    )
    page.wait_for_timeout(1000)
    assert "Open the address that `torchlens-perf serve` printed" in page.inner_text("main")
    assert page.locator("#live-status").count() == 0
    page.goto(server.address)
    page.wait_for_selector("main td a")
    page.evaluate("sessionStorage.setItem(Object.keys(sessionStorage)[0], 'of-another-start')")
    page.reload()
    page.wait_for_selector("text=Open the address that `torchlens-perf serve` printed")
    page.goto(server.address)
    page.wait_for_selector("main td a")


def test_page_that_is_still_read_does_not_ask_for_a_token(context: Any, server: PageServer) -> None:
    """A large run takes seconds to read, during which the token is not known to be wrong."""
    page = opened(context, server.address)
    held: list[Any] = []
    page.route(lambda url: url.endswith("/runs/done/"), lambda route: held.append(route))
    page.click("main td a", no_wait_after=True)
    page.wait_for_timeout(500)
    held.pop().continue_()
    page.wait_for_selector("text=Loading")
    assert "token" not in page.inner_text("main")
    held.pop().continue_()
    page.wait_for_selector("#live-status")
