"""The server's addresses. Start here.

::

    /                               the list of runs
    /runs/ID/                       the page of a run
    /runs/ID/api/contents           the page's data as JSON, see page/contents.py
    /runs/ID/api/news               the version of the newest page, and problems, see follow.py
    /runs/ID/api/step/N             any step, span by span
    /runs/ID/api/captures           POST ?ranks=&steps=: requests a capture
    /runs/ID/api/captures/ID        the results of a capture
    /runs/ID/captures/ID/RANK/FILE  a file of a capture
    /api/counts                     how often the server has looked at and read each run
    /static/FILE                    styles and scripts
"""

from __future__ import annotations

import gzip
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from torchlens_perf.errors import printable
from torchlens_perf.serve.access import PAGE_HEADERS
from torchlens_perf.serve.captures import ask, block, progress
from torchlens_perf.serve.follow import Follower
from torchlens_perf.serve.list_page import ROOT, list_page, message_page
from torchlens_perf.serve.live_page import step_as_json
from torchlens_perf.serve.readers import Readers
from torchlens_perf.serve.run_list import Found, RunList
from torchlens_perf.serve.run_names import ReadError, address, name_in
from torchlens_perf.serve.static_files import NAMES, STYLE, digest, packed

if TYPE_CHECKING:
    from starlette.requests import Request
# Numbers of readers for calls of milliseconds, for whole runs, and for the list: slow calls must
# not delay quick ones.
_QUICK, _SLOW, _LISTING = 2, 2, 1
# After this time, a viewer who opens a run receives a page that asks for patience.
_FIRST_PAGE_TIMEOUT_S = 3.0
# Number of runs without a viewer whose newest page the server keeps.
_MAX_IDLE_FOLLOWERS = 16
_STEP_WITHIN_S, _CAPTURE_WITHIN_S, _BLOCK_WITHIN_S = 60.0, 30.0, 30.0
# Step numbers are stored as 64-bit integers.
_STEP = re.compile(r"[0-9]{1,18}")
_FOR_EVER = "private, max-age=31536000, immutable"


class Server:
    """The runs of a folder, for any number of viewers.

    Runs on the event loop's thread and accesses no disk.
    """

    def __init__(self, folder: str, found: Sequence[Found], *, is_one: bool) -> None:
        """folder: the folder of runs, or a run if is_one; without links.

        found: the result of find_runs().
        """
        self._folder, self._is_one = folder, is_one
        self._quick, self._slow, self._listing = Readers(_QUICK), Readers(_SLOW), Readers(_LISTING)
        self._list = RunList(folder, self._listing, found)
        self._followers: OrderedDict[str, Follower] = OrderedDict()

    def app(self) -> Starlette:
        run = "/runs/{run}"
        return Starlette(
            routes=[
                Route("/", self._runs),
                Route("/static/{file}", self._static),
                Route("/api/counts", self._counts),
                Route(f"{run}/", self._page),
                Route(f"{run}/api/contents", self._contents),
                Route(f"{run}/api/news", self._news),
                Route(f"{run}/api/step/{{step}}", self._step),
                Route(f"{run}/api/captures", self._ask, methods=["POST"]),
                Route(f"{run}/api/captures/{{capture}}", self._captured),
                Route(f"{run}/captures/{{capture}}/{{rank}}/{{file}}", self._file),
            ],
            exception_handlers={ReadError: _problem, 404: _not_found},
        )

    def close(self) -> None:
        """End the readers."""
        for readers in (self._quick, self._slow, self._listing):
            readers.close()

    # -- pages

    async def _runs(self, request: Request) -> Response:
        page, search, sort = (
            request.query_params.get(key, "") for key in ("page", "search", "sort")
        )
        listed = await self._list.page(
            int(page) if page.isdecimal() and len(page) < 9 else 0, search, sort
        )
        return HTMLResponse(list_page(self._folder, listed, search, sort), headers=PAGE_HEADERS)

    async def _page(self, request: Request) -> Response:
        now = await self._follower(request).page(_FIRST_PAGE_TIMEOUT_S)
        if now is None:
            words = (
                "This run is being read. It is large or its disk is slow. It is shown as soon as it"
                " is read."
            )
            page = message_page("Reading", words, ROOT, reloads=True)
            return HTMLResponse(page, headers=PAGE_HEADERS)
        return _packed(request, now.html, "text/html; charset=utf-8", PAGE_HEADERS)

    async def _contents(self, request: Request) -> Response:
        now = await self._follower(request).page()
        if now is None:
            raise ReadError(503, "this run is still being read")
        return _packed(request, now.contents, "application/json")

    async def _static(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in NAMES:
            return PlainTextResponse("there is no such file\n", 404)
        headers = (
            {"cache-control": _FOR_EVER} if request.query_params.get("v") == digest(name) else {}
        )
        kind = "text/css" if name == STYLE else "text/javascript"
        return _packed(request, packed(name), kind, headers)

    async def _counts(self, request: Request) -> Response:
        runs = {
            address(os.path.basename(path)): {"looks": each.looks, "readings": each.readings}
            for path, each in self._followers.items()
        }
        return JSONResponse({"runs": runs})

    # -- following a run

    async def _news(self, request: Request) -> Response:
        return JSONResponse(self._follower(request).news())

    async def _step(self, request: Request) -> Response:
        run, step = self._run(request), request.path_params["step"]
        if not _STEP.fullmatch(step):
            raise ReadError(404, f"there is no step {printable(step)[:100]}")
        found = await self._slow.call(
            step_as_json, run, int(step), within_s=_STEP_WITHIN_S, late="it was not read"
        )
        return _packed(request, found, "application/json")

    def _follower(self, request: Request) -> Follower:
        path = self._run(request)
        follower = self._followers.get(path)
        if follower is None:
            follower = self._followers[path] = Follower(path, self._quick, self._slow)
        self._followers.move_to_end(path)
        idle = [each for each, of in self._followers.items() if not of.is_needed and each != path]
        for each in idle[: max(0, len(idle) - _MAX_IDLE_FOLLOWERS)]:
            del self._followers[each]
        return follower

    def _run(self, request: Request) -> str:
        """Return the path of the requested run, which may not exist.

        Raise ReadError if the name is invalid.
        """
        name = name_in(request.scope["raw_path"])
        if not name or (self._is_one and name != os.path.basename(self._folder)):
            raise ReadError(404, f"There is no run {printable(name)[:100]} here.")
        return self._folder if self._is_one else os.path.join(self._folder, name)

    # -- captures

    async def _ask(self, request: Request) -> Response:
        asked = request.query_params
        ranks, steps = asked.get("ranks", "").replace(" ", ""), asked.get("steps", "")
        if not ranks or not steps.isdecimal() or len(steps) > 9:
            return JSONResponse(
                {"problem": "a capture needs ranks, such as 5 or 0-3, and a number of steps"}, 400
            )
        made = await self._quick.call(
            ask, self._run(request), ranks, int(steps), "python" in asked, "force" in asked,
            within_s=_CAPTURE_WITHIN_S,
        )  # fmt: skip
        return JSONResponse(made, 202)

    async def _captured(self, request: Request) -> Response:
        capture = request.path_params["capture"]
        call = self._quick.call(progress, self._run(request), capture, within_s=_CAPTURE_WITHIN_S)
        return JSONResponse(await call)

    async def _file(self, request: Request) -> Response:
        """Stream a file.

        A reader reads each block separately, since files can be large and the disk can hang.
        """
        parts = tuple(request.path_params[key] for key in ("capture", "rank", "file"))
        run = self._run(request)

        async def read(at: int, known: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
            return await self._quick.call(block, run, *parts, at, known, within_s=_BLOCK_WITHIN_S)

        first, identity = await read(0, ())

        async def blocks() -> AsyncIterator[bytes]:
            at, part = 0, first
            while part:
                yield part
                at += len(part)
                part = (await read(at, identity))[0] if at < identity[-1] else b""

        headers = {
            "content-length": str(identity[-1]),
            # The name needs no escaping: block() accepts only known names.
            "content-disposition": f'attachment; filename="{parts[-1]}"',
        }
        return StreamingResponse(blocks(), media_type="application/octet-stream", headers=headers)


def _packed(
    request: Request, packed: bytes, media_type: str, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with gzip-compressed content.

    It is decompressed for clients that do not accept gzip.
    """
    given = {**(headers or {}), "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            packed, media_type=media_type, headers={**given, "content-encoding": "gzip"}
        )
    return Response(gzip.decompress(packed), media_type=media_type, headers=given)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ReadError)
    text = printable(str(error))
    if "/api/" in request.url.path:
        return JSONResponse({"problem": text}, error.status)
    if error.status == 404:
        return await _not_found(request, error)
    return PlainTextResponse(f"{text}\n", error.status)


async def _not_found(request: Request, error: Exception) -> Response:
    """Return a 404 response: a page for browsers, a line of text for other clients."""
    words = (
        printable(str(error))
        if isinstance(error, ReadError)
        else "There is no page at this address."
    )
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{words}\n", 404)
    root = "../" * (request.scope["raw_path"].count(b"/") - 1)
    return HTMLResponse(message_page("Not found", words, root), 404, headers=PAGE_HEADERS)
