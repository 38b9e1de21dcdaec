"""Who may look: whoever has the token, at an address of this server's, from a page of its own.

The token is in the address that is printed. Whoever opens that gets a cookie, which no script reads (HttpOnly) and no
other site's page sends (SameSite=Strict). The Host header must name this server: a name that somebody else's name
server has pointed here reaches nothing. What changes anything needs this server's own page as its origin besides.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from starlette.responses import HTMLResponse, PlainTextResponse, Response

from torchlens_perf.page.pictures.markup import html, tag

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "content-security-policy": POLICY,  # of what is no page; pages bring their own
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NO_TOKEN = (
    "This page is for who has started it.\n\nOpen the address that `torchlens-perf serve` has printed: it ends in a "
    "token. Each start has another one.\n"
)
_OTHER_NAME = "This server does not go by that name. Open it by the address that it has printed, or by an IP address.\n"
_OTHER_ORIGIN = "Only this server's own page may ask for that.\n"
_READS = ("GET", "HEAD")


def new_token() -> str:
    return secrets.token_urlsafe(32)


class Guard:
    """Lets requests through that may pass, and adds HEADERS to all answers that do not have them."""

    def __init__(self, app: ASGIApp, token: str, cookie: str, names: Collection[str]) -> None:
        """cookie: its name; servers on one machine share all cookies. names: this server's, besides IP addresses."""
        self._app, self._token, self._cookie = app, token, cookie
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in given)]
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answer = self._refusal(scope, headers)
        await (self._app if answer is None else answer)(scope, receive, with_headers)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """The answer instead of what was asked for; None where that may be had."""
        host = headers.get("host", "").lower()
        if not self._is_ours(host):
            return PlainTextResponse(_OTHER_NAME, 421)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), "")
        if self._is_token(given) and scope["method"] in _READS:
            return self._welcome(scope["path"], [(name, value) for name, value in query if name != "token"])
        if not self._is_token(self._of_cookie(headers.get("cookie", ""))):
            return PlainTextResponse(_NO_TOKEN, 403)
        if scope["method"] not in _READS and headers.get("origin", "").lower() not in (
            f"http://{host}",
            f"https://{host}",
        ):
            return PlainTextResponse(_OTHER_ORIGIN, 403)
        return None

    def _welcome(self, path: str, query: list[tuple[str, str]]) -> Response:
        """A page that leads to itself without the token, which so leaves the address and the history; with the cookie.

        No redirect: where another site's page has led here, as a terminal in a browser does, the browser would not send
        the cookie with that.
        """
        target = f"./{quote(path.rpartition('/')[2])}" + (f"?{urlencode(query)}" if query else "")
        page = tag(
            "html",
            tag(
                "head",
                tag("meta", charset="utf-8"),
                tag("title", "torchlens_perf"),
                tag("meta", http_equiv="refresh", content=f"0;url={target}"),
            ),
            tag("body", tag("p", tag("a", "on to the runs", href=target))),
            lang="en",
        )
        answer = HTMLResponse(f"<!DOCTYPE html>\n{html(page)}\n")
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header may be ours. Its port is not looked at: a tunnel to here may begin at any."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True  # an address needs no name server, which could lie

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), self._token.encode())

    def _of_cookie(self, header: str) -> str:
        for part in header.split(";"):
            name, _, value = part.strip().partition("=")
            if name == self._cookie:
                return value
        return ""
