"""Access control of the web server: requests need a token, a valid host name and origin.

The token is in the fragment of the printed address, which browsers send to no server. The script of
the opening page (static/open.js) keeps the token for its origin (host and port) and sends it in a
header with each request. A cookie would be unsafe, since browsers send cookies to every port of a
host. The header is not Authorization, so a proxy in front of the server can use that header for
itself.

Without the token the server sends only the opening page, which contains no data, and static scripts
and styles. The Host header must name this server: otherwise a foreign name that resolves to this
machine could be used to read data (DNS rebinding). A request that changes anything must also have
this server's own Origin.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchlens_perf.page.document.html import LIVE_POLICY
from torchlens_perf.serve.list_page import build_page
from torchlens_perf.serve.static_files import OPENING_SCRIPT, static_address
from torchlens_perf.view.markup import tag

TOKEN_HEADER = "torchlens-perf-token"
ON_TOKEN = "torchlens_perf.on_token"
"""Key in the state of a request. Its value is a function to call if the request has the token."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
PAGE_HEADERS = {"content-security-policy": f"{LIVE_POLICY}; frame-ancestors 'none'"}
_NEEDS_TOKEN = (
    "This page needs a token. Open the address that `torchlens-perf serve` printed: it ends in the"
    " token. The token changes with each start of the server."
)
_OTHER_NAME = (
    "The request names another server. Open the address that `torchlens-perf serve` printed, or"
    " use an IP address.\n"
)
_OTHER_ORIGIN = "Only a page of this server may send this request.\n"
_READS = ("GET", "HEAD")


class AccessGuard:
    """ASGI middleware that refuses unauthorized requests and adds HEADERS to all responses."""

    def __init__(self, app: ASGIApp, token: str, names: Collection[str]) -> None:
        """names: this server's host names. IP addresses are always accepted."""
        self._app, self._token = app, token.encode()
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._build_refusal(scope, Headers(scope=scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _build_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response that refuses a request; None if the request is permitted."""
        host, reads = headers.get("host", "").lower(), scope["method"] in _READS
        if not self._names_this_server(host):
            return PlainTextResponse(_OTHER_NAME, 421)
        token = headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(token, self._token):
            if reads and scope["path"].startswith("/static/"):
                return None
            # A script that sent a wrong token would get itself again, and repeat the request forever.
            if reads and not token and "/api/" not in scope["path"]:
                return _build_opening_page(scope)
            return PlainTextResponse(f"{_NEEDS_TOKEN}\n", 403)
        # Other servers than this package's have no such function.
        scope.get("state", {}).get(ON_TOKEN, lambda: None)()
        if not reads and headers.get("origin", "").lower() not in (
            f"http://{host}",
            f"https://{host}",
        ):
            return PlainTextResponse(_OTHER_ORIGIN, 403)
        return None

    def _names_this_server(self, host: str) -> bool:
        """Return True if a Host header names this server.

        Any port is accepted, since a tunnel can use any port.
        """
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        # An IP address needs no name server, so it cannot be part of a DNS rebinding attack.
        return True


def _build_opening_page(scope: Scope) -> Response:
    """Return the opening page, whose script requests the address again with the token.

    The page is the same for every address, so it does not reveal which runs exist.
    """
    root = "../" * (scope["raw_path"].count(b"/") - 1)
    script = tag("script", src=static_address(OPENING_SCRIPT, root))
    body = tag("body", tag("main", tag("p", _NEEDS_TOKEN, id="needs-token")), script)
    return HTMLResponse(build_page("Token needed", body, root), headers=PAGE_HEADERS)
