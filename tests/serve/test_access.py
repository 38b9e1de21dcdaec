"""Who may look: whoever has the token, by a name of this server's, from its own page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.page_server import PageServer, Viewer

pytestmark = pytest.mark.distributed


def test_without_the_token_nothing_is_shown(server: PageServer) -> None:
    """No page, no JSON, no stream, no script; a wrong token and another cookie are as none. Said in plain words."""
    stranger = server.stranger()
    for path in ("/", "/runs/done/", "/runs/done/api/contents", "/runs/done/api/changes", "/api/counts", "/none",
                 "/static/page.js", "/?token=", "/?token=wrong", "/?token=%ff%fe"):  # fmt: skip
        answer = stranger.ask(path)
        assert (answer.status, "done" in answer.text) == (403, False), path
        assert "Open the address that `torchlens-perf serve` has printed" in answer.text
    port = server.stranger().address.port
    for cookie in ("x=y", f"torchlens_perf_{port}=", f"torchlens_perf_{port}=wrong", ";;=;", "\xff"):
        assert stranger.ask("/", Cookie=cookie).status == 403


def test_the_token_becomes_a_cookie(server: PageServer, viewer: Viewer) -> None:
    """That no script reads and no other site sends; the address loses the token, and keeps the rest."""
    answer = server.stranger().ask(f"/runs/done/?a=b+c&{viewer.address.query}")
    cookie = answer.headers["set-cookie"]
    assert answer.status == 200
    assert 'content="0;url=./?a=b+c"' in answer.text  # from where it is
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    # A redirect would be followed without the cookie where another site's page has led here.
    assert "location" not in answer.headers
    assert viewer.ask("/", Cookie=f"other=1; {cookie.partition(';')[0]}; more=2").status == 200


def test_an_address_in_a_query_leads_nowhere_else(server: PageServer) -> None:
    """What is before the token is a name here, whatever it looks like."""
    stranger = server.stranger()
    for path in ("//evil.example/", "/%2f%2fevil.example", "/http:evil.example", '/"><script>', "/%0aRefresh:x"):
        answer = stranger.ask(f"{path}?{stranger.address.query}")
        assert 'content="0;url=./' in answer.text
        assert "<script>" not in answer.text
        assert "\n" not in answer.text.partition("url=")[2].partition('"')[0]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "localhost.evil"]
)
def test_another_name_is_not_taken_for_this_server(viewer: Viewer, host: str) -> None:
    """A name that somebody else's name server points to this machine reaches nothing, with the cookie too."""
    answer = viewer.ask("/", Host=host.format(port=viewer.address.port))
    assert answer.status in (400, 421)
    assert "done" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "LOCALHOST:{port}", "[::1]:80"])
def test_its_names(viewer: Viewer, host: str) -> None:
    """A tunnel may begin at any port."""
    assert viewer.ask("/", Host=host.format(port=viewer.address.port)).status == 200


@pytest.mark.parametrize(
    "origin", ["", "null", "http://evil.example", "http://{host}.evil.example", "http://127.0.0.1:1"]
)
def test_other_sites_cannot_ask_for_captures(viewer: Viewer, origin: str, runs: Path) -> None:
    answer = viewer.ask(
        "/runs/done/api/captures", "POST", "ranks=0&steps=3", Origin=origin.format(host=viewer.host)
    )  # fmt: skip
    assert answer.status == 403
    assert not (runs / "done" / "captures").exists()


def test_a_token_alone_changes_nothing(server: PageServer) -> None:
    """An address that somebody is made to send as a form is no way in."""
    stranger = server.stranger()
    answer = stranger.ask(
        f"/runs/done/api/captures?{stranger.address.query}", "POST", "ranks=0&steps=3", Origin=f"http://{stranger.host}"
    )
    assert answer.status == 403


def test_headers_of_every_answer(viewer: Viewer, server: PageServer) -> None:
    """Nothing is kept, framed, sniffed, referred to or shared with other sites; pages ask this server alone."""
    for path in ("/", "/runs/done/", "/runs/done/api/contents", "/runs/none/", "/nothing", "/static/page.js"):
        for answer in (viewer.ask(path), server.stranger().ask(path)):
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["x-frame-options"] == "DENY"
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy["frame-ancestors"] == policy["default-src"] == policy["base-uri"] == "'none'"
            assert policy.get("script-src", "'self'") == policy.get("connect-src", "'self'") == "'self'"
            assert "server" not in answer.headers


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "OPTIONS", "TRACE"])
def test_other_methods(viewer: Viewer, method: str) -> None:
    answer = viewer.ask("/runs/done/", method, Origin=f"http://{viewer.host}")
    assert answer.status == 405
