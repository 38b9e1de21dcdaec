"""Access control: requests need the token, one of the server's host names and its own origin."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.support.page_server import PageServer, Viewer

pytestmark = pytest.mark.distributed


def test_requests_without_a_valid_token_receive_no_data(server: PageServer) -> None:
    """All addresses return the same page, which has no data of any run.

    Programs receive one sentence.
    """
    stranger = server.client_without_token()
    pages = ("/", "/runs/done/", "/runs/none/", "/none", "/runs/done/captures/x/0/trace.json.gz", "/?token=wrong",
             "/?search=done", "/compare?before=done&after=done", "/runs/%ff/")  # fmt: skip
    for token in ("", "wrong", "\xff", stranger.address.fragment):
        shown = {
            re.sub(r"(\.\./)+", "", stranger.ask(path, torchlens_perf_token=token).text)
            for path in pages
        }
        (page,) = shown
        # A script that gets itself again for a wrong token repeats its request forever.
        assert ("<script" in page) == (token == "")
        assert "Open the address that `torchlens-perf serve` printed" in page
        assert "done" not in page
        for path in (
            "/runs/done/api/contents",
            "/runs/done/api/news",
            "/runs/done/api/step/1",
            "/api/counts",
        ):
            answer = stranger.ask(path, torchlens_perf_token=token)
            assert (answer.status, "done" in answer.text) == (403, False), path
            assert "Open the address that `torchlens-perf serve` printed" in answer.text


@pytest.mark.parametrize(
    "path", ["/", "/runs/done/", "//evil.example/", "/%2f%2fevil.example/", '/"><script>/x']
)
def test_opening_page_loads_its_script_from_this_server_only(server: PageServer, path: str) -> None:
    answer = server.client_without_token().ask(path)
    (script,) = re.findall(r'<script src="([^"]*)"></script>', answer.text)
    assert re.fullmatch(r"(\.\./)*static/open\.js\?v=[0-9a-f]+", script)
    assert urljoin(f"http://{server.client_without_token().host}{path}", script).startswith(
        f"http://{server.client_without_token().host}/static/open.js"
    )
    assert "<script>" not in answer.text
    assert "connect-src 'self'" in answer.headers["content-security-policy"]


def test_no_cookie_is_set_or_accepted(server: PageServer, viewer: Viewer) -> None:
    """A browser would send a cookie to every port of the host."""
    stranger = server.client_without_token()
    for path in ("/", "/runs/done/", f"/?{viewer.address.fragment}", "/api/counts"):
        assert "set-cookie" not in stranger.ask(path).headers
        assert "set-cookie" not in viewer.ask(path).headers
    for cookie in (
        f"torchlens_perf_{viewer.address.port}={viewer.token}",
        f"torchlens-perf-token={viewer.token}",
    ):
        assert stranger.ask("/api/counts", Cookie=cookie).status == 403
    assert stranger.ask(f"/api/counts?{viewer.address.fragment}").status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "", "localhost.evil"]
)
def test_foreign_host_header_is_refused(viewer: Viewer, host: str) -> None:
    """A foreign name that resolves to this machine (DNS rebinding) has no access, even with a
    cookie.
    """
    answer = viewer.ask("/", Host=host.format(port=viewer.address.port))
    assert answer.status in (400, 421)
    assert "done" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "LOCALHOST:{port}", "[::1]:80"])
def test_own_host_names_are_accepted_with_any_port(viewer: Viewer, host: str) -> None:
    """A tunnel can use any port."""
    assert viewer.ask("/", Host=host.format(port=viewer.address.port)).status == 200


@pytest.mark.parametrize(
    "origin",
    ["", "null", "http://evil.example", "http://{host}.evil.example", "http://127.0.0.1:1"],
)
def test_other_sites_cannot_request_captures(viewer: Viewer, origin: str, runs: Path) -> None:
    path = "/runs/done/api/captures?ranks=0&steps=3"
    answer = viewer.ask(path, "POST", Origin=origin.format(host=viewer.host))
    assert answer.status == 403
    assert not (runs / "done" / "captures").exists()


def test_form_of_another_site_is_refused(server: PageServer, viewer: Viewer, runs: Path) -> None:
    """A form can send a token in its address or fields, but not in the header."""
    stranger = server.client_without_token()
    asked = "/runs/done/api/captures?ranks=0&steps=3"
    for path in (asked, f"{asked}&token={viewer.token}"):
        body = f"ranks=0&steps=3&token={viewer.token}"
        assert stranger.ask(path, "POST", body, Origin=f"http://{stranger.host}").status == 403
    assert (
        stranger.ask("/runs/done/api/captures", "OPTIONS", Origin="http://evil.example").status
        == 403
    )
    assert not (runs / "done" / "captures").exists()


def test_every_response_has_the_security_headers(viewer: Viewer, server: PageServer) -> None:
    """Responses must not be cached, framed, sniffed or shared with other sites.

    Pages may request only this server.
    """
    for path in (
        "/",
        "/runs/done/",
        "/runs/done/api/contents",
        "/runs/none/",
        "/nothing",
        "/static/page.js",
    ):
        for answer in (viewer.ask(path), server.client_without_token().ask(path)):
            assert answer.headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["x-frame-options"] == "DENY"
            policy = dict(
                part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
            )
            assert (
                policy["frame-ancestors"] == policy["default-src"] == policy["base-uri"] == "'none'"
            )
            assert (
                policy.get("script-src", "'self'")
                == policy.get("connect-src", "'self'")
                == "'self'"
            )
            assert "server" not in answer.headers


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "OPTIONS", "TRACE"])
def test_other_http_methods_get_status_405(viewer: Viewer, method: str) -> None:
    answer = viewer.ask("/runs/done/", method, Origin=f"http://{viewer.host}")
    assert answer.status == 405


# -- invalid numbers and names


_LONG = "9" * 5000
_NUMBERS = ("9999999999999999999999", "18446744073709551616", "9223372036854775808", "-1", "1e3", "0x10", "1.5", "NaN",
            "%D9%A2", "1%00", "%ff", "x" * 3000, _LONG, "+1", " 1", "1_000")  # fmt: skip


@pytest.mark.parametrize("number", _NUMBERS)
@pytest.mark.parametrize(
    "path", ["/runs/done/api/step/{}", "/runs/done/api/captures/{}", "/runs/done/captures/x/{}/trace.json.gz",
             "/runs/{}/", "/runs/{}/api/contents", "/runs/done/captures/{}/0/trace.json.gz", "/static/{}", "/{}"],
)  # fmt: skip
def test_invalid_number_in_an_address_is_a_client_error(
    viewer: Viewer, path: str, number: str
) -> None:
    answer = viewer.ask(path.format(number.replace(" ", "%20")))
    assert answer.status in range(400, 500), answer.text


@pytest.mark.parametrize("number", _NUMBERS)
@pytest.mark.parametrize(
    "query", ["page={}", "search={}", "page=0&search={}", "page={}&page={}", "{}={}"]
)
def test_run_list_is_shown_for_any_query(viewer: Viewer, query: str, number: str) -> None:
    assert viewer.ask("/?" + query.replace("{}", number.replace(" ", "%20"))).status == 200


@pytest.mark.parametrize("number", _NUMBERS)
@pytest.mark.parametrize(
    "fields", ["ranks={}&steps=3", "ranks=0&steps={}", "ranks=0-{}&steps=3", "ranks={}-0&steps=1"]
)
def test_invalid_numbers_in_a_capture_request_are_client_errors(
    viewer: Viewer, runs: Path, fields: str, number: str
) -> None:
    origin = f"http://{viewer.host}"
    query = fields.format(number).replace(" ", "%20")
    answer = viewer.ask(f"/runs/done/api/captures?{query}", "POST", Origin=origin)
    assert answer.status in range(400, 500), answer.text
    assert not (runs / "done" / "captures").exists()
