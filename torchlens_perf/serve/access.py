"""Who may look: whoever has the token, on this machine, from a page of this server's own.

The token comes in the address that is printed, once; then a cookie has it, which no other site's page sends (SameSite).
The Host header must name this server, so that no name that somebody else's name server has pointed here is taken for
it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",  # beside that of the page itself
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_NO_TOKEN = (
    "This page is for who has started it. Open the address that `torchlens-perf serve` has printed: it ends in a "
    "token.\n"
)
_READS = ("GET", "HEAD")


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Guard:
    """Lets requests through that may pass, and adds HEADERS to all answers."""

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str]) -> None:
        """hosts: what the Host header may be, in lower case; empty: anything."""
        self._app, self._token, self._hosts = app, token, frozenset(hosts)
        self._cookie = f"torchlens_perf_{secrets.token_hex(4)}"  # two servers on one machine share its cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in given)]
            await send(message)

        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").lower()
        if self._hosts and host not in self._hosts:
            return PlainTextResponse("This server is not called so.\n", 421)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.pop("token", [""])[0]
        if given and self._is_token(given) and scope["method"] in _READS:
            path = scope["path"] + (f"?{urlencode(query, doseq=True)}" if query else "")
            answer = RedirectResponse("/" + path.lstrip("/"), 303)  # the token leaves the address, and so the history
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if not self._is_token(self._of_cookie(headers.get("cookie", ""))):
            return PlainTextResponse(_NO_TOKEN, 403)
        if scope["method"] not in _READS and headers.get("origin", "").lower() != f"http://{host}":
            return PlainTextResponse("Only this server's own page may ask for that.\n", 403)
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _of_cookie(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""
