"""The addresses of the web server and their handlers. Start reading here.

::

    /                               the list of runs
    /runs/ID/                       the page of a run
    /runs/ID/api/contents           the page's data as JSON, see page/contents.py
    /runs/ID/api/news               the version of the newest page, and problems, see follow.py
    /runs/ID/api/step/N             any step, span by span
    /runs/ID/api/captures           POST ?ranks=&steps=: requests a capture
    /runs/ID/api/captures/ID        the results of a capture
    /runs/ID/captures/ID/RANK/FILE  a file of a capture
    /compare?before=RUN&after=RUN   the comparison of runs, or ?run=&run= for two, the older one first
    /offenders                      nodes that many jobs name, and lost rank hours
    /api/counts                     how often the server has looked at and read each run
    /static/FILE                    styles and scripts
"""

from __future__ import annotations

import gzip
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from torchlens_perf.actions.offenders import read_tables
from torchlens_perf.analysis.statistics.quantities import format_count
from torchlens_perf.errors import printable
from torchlens_perf.serve.access import PAGE_HEADERS
from torchlens_perf.serve.captures import (
    capture_progress,
    read_file_block,
    request_capture_for_viewer,
)
from torchlens_perf.serve.follow import RunFollower
from torchlens_perf.serve.list_page import (
    ROOT,
    build_list_page,
    build_message_page,
    build_tables_page,
)
from torchlens_perf.serve.live_page import render_comparison, step_as_json
from torchlens_perf.serve.readers import ReaderPool
from torchlens_perf.serve.run_list import RunLine, RunList
from torchlens_perf.serve.run_names import ReadError, parse_run_name, quote_name, unquote_name
from torchlens_perf.serve.static_files import (
    STYLE,
    compressed_file,
    content_digest,
    read_texts,
)
from torchlens_perf.store.run_folders import FoundRun

# Numbers of readers for quick calls, for whole runs and for the list of runs. Slow calls must not
# delay quick calls.
_QUICK, _SLOW, _LISTING = 2, 2, 1
# After this time, a viewer who opens a run receives a page that reloads until the run is read.
_FIRST_PAGE_TIMEOUT_S = 3.0
# Number of runs without a viewer whose newest page the server keeps.
_MAX_IDLE_FOLLOWERS = 16
_STEP_WITHIN_S, _CAPTURE_WITHIN_S, _BLOCK_WITHIN_S = 60.0, 30.0, 30.0
# Step numbers are stored as 64-bit integers.
_STEP = re.compile(r"[0-9]{1,18}")
_FOR_EVER = "private, max-age=31536000, immutable"


class Server:
    """A web application that shows the runs of a folder to any number of viewers.

    It runs on the event loop's thread and accesses no disk.
    """

    def __init__(self, folder: str, found: Sequence[FoundRun], *, is_one: bool) -> None:
        """folder: absolute path, without links, of the folder of runs or, if is_one, of a run.

        found: the result of find_runs().
        """
        self._folder, self._is_one = folder, is_one
        self._quick, self._slow = ReaderPool(_QUICK), ReaderPool(_SLOW)
        self._listing = ReaderPool(_LISTING)
        self._list = RunList(folder, self._listing, found)
        self._followers: OrderedDict[str, RunFollower] = OrderedDict()

    def create_app(self) -> Starlette:
        run = "/runs/{run}"
        return Starlette(
            routes=[
                Route("/", self._get_run_list),
                Route("/static/{file}", self._get_static_file),
                Route("/api/counts", self._get_counts),
                Route("/compare", self._get_comparison),
                Route("/offenders", self._get_offenders),
                Route(f"{run}/", self._get_run_page),
                Route(f"{run}/api/contents", self._get_contents),
                Route(f"{run}/api/news", self._get_state),
                Route(f"{run}/api/step/{{step}}", self._get_step),
                Route(f"{run}/api/captures", self._post_capture, methods=["POST"]),
                Route(f"{run}/api/captures/{{capture}}", self._get_capture_progress),
                Route(f"{run}/captures/{{capture}}/{{rank}}/{{file}}", self._get_captured_file),
            ],
            exception_handlers={ReadError: _error_response, 404: _error_response},
        )

    def close(self) -> None:
        """End the readers."""
        for readers in (self._quick, self._slow, self._listing):
            readers.close()

    # -- pages

    async def _get_run_list(self, request: Request) -> Response:
        asked = request.query_params
        page, search, sort = (asked.get(key, "") for key in ("page", "search", "sort"))
        pinned = [unquote_name(each) for each in asked.getlist("pin")]
        listed = await self._list.load_page(
            int(page) if page.isdecimal() and len(page) < 9 else 0,
            search,
            sort,
            pinned,
        )
        return HTMLResponse(
            build_list_page(self._folder, listed, search, sort, pinned), headers=PAGE_HEADERS
        )

    async def _get_run_page(self, request: Request) -> Response:
        follower = self._follower_of(request)
        now = await follower.wait_for_page(_FIRST_PAGE_TIMEOUT_S)
        if now is None:
            line = self._list.lines.get(parse_run_name(request.scope["raw_path"]))
            of = f" of {format_count(line.ranks, 'rank')}" if line and line.ranks else ""
            words = f"Reading this run{of} takes long ({follower.describe_reading()})."
            page = build_message_page("Reading", words, ROOT, renews=True)
            return HTMLResponse(page, headers=PAGE_HEADERS)
        return _gzip_response(request, now.html, "text/html; charset=utf-8", PAGE_HEADERS)

    async def _get_contents(self, request: Request) -> Response:
        follower = self._follower_of(request)
        now = await follower.wait_for_page()
        if now is None:
            raise ReadError(503, follower.describe_reading())
        return _gzip_response(request, now.contents, "application/json")

    async def _get_static_file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in read_texts():
            return PlainTextResponse("this file does not exist\n", 404)
        headers = (
            {"cache-control": _FOR_EVER}
            if request.query_params.get("v") == content_digest(name)
            else {}
        )
        kind = "text/css" if name == STYLE else "text/javascript"
        return _gzip_response(request, compressed_file(name), kind, headers)

    async def _get_counts(self, request: Request) -> Response:
        runs = {
            quote_name(os.path.basename(path)): {"looks": each.looks, "readings": each.readings}
            for path, each in self._followers.items()
        }
        return JSONResponse({"runs": runs})

    async def _get_comparison(self, request: Request) -> Response:
        ticked, before, after = (
            [unquote_name(each) for each in request.query_params.getlist(key)]
            for key in ("run", "before", "after")
        )
        # The older run is the side before, as far as the list has read when both started.
        ticked.sort(key=lambda name: (self._list.lines.get(name, RunLine(name)).started, name))
        sides = (*before, *ticked[:1]), (*after, *ticked[1:])
        if self._is_one or not all(sides) or "" in sides[0] + sides[1]:
            raise ReadError(404, "A comparison needs two runs: tick them in the list.")
        call = self._slow.start(render_comparison, self._folder, *sides, within_s=_STEP_WITHIN_S)
        found = await call.wait(_FIRST_PAGE_TIMEOUT_S)
        return _gzip_response(request, found, "text/html; charset=utf-8", PAGE_HEADERS)

    async def _get_offenders(self, request: Request) -> Response:
        call = self._slow.start(read_tables, self._folder, within_s=_STEP_WITHIN_S)
        return HTMLResponse(
            build_tables_page("Nodes", await call.wait(_FIRST_PAGE_TIMEOUT_S)), headers=PAGE_HEADERS
        )

    # -- following a run

    async def _get_state(self, request: Request) -> Response:
        return JSONResponse(self._follower_of(request).poll_state())

    async def _get_step(self, request: Request) -> Response:
        run, step = self._requested_run(request), request.path_params["step"]
        if not _STEP.fullmatch(step):
            raise ReadError(404, f"there is no step {printable(step)[:100]}")
        found = await self._slow.call(step_as_json, run, int(step), within_s=_STEP_WITHIN_S)
        return _gzip_response(request, found, "application/json")

    def _follower_of(self, request: Request) -> RunFollower:
        path = self._requested_run(request)
        follower = self._followers.get(path)
        if follower is None:
            follower = self._followers[path] = RunFollower(path, self._quick, self._slow)
        self._followers.move_to_end(path)
        idle = [each for each, of in self._followers.items() if not of.is_needed and each != path]
        for each in idle[: max(0, len(idle) - _MAX_IDLE_FOLLOWERS)]:
            del self._followers[each]
        return follower

    def _requested_run(self, request: Request) -> str:
        """Return the path of the requested run, which may not exist.

        Raise ReadError if the name is invalid.
        """
        name = parse_run_name(request.scope["raw_path"])
        if not name or (self._is_one and name != os.path.basename(self._folder)):
            raise ReadError(404, f"There is no run {printable(name)[:100]} here.")
        return self._folder if self._is_one else os.path.join(self._folder, name)

    # -- captures

    async def _post_capture(self, request: Request) -> Response:
        asked = request.query_params
        ranks, steps = asked.get("ranks", "").replace(" ", ""), asked.get("steps", "")
        if not ranks or not steps.isdecimal() or len(steps) > 9:
            return JSONResponse(
                {"problem": "a capture needs ranks, such as 5 or 0-3, and a number of steps"}, 400
            )
        made = await self._quick.call(
            request_capture_for_viewer,
            self._requested_run(request),
            ranks,
            int(steps),
            "python" in asked,
            "force" in asked,
            within_s=_CAPTURE_WITHIN_S,
        )
        return JSONResponse(made, 202)

    async def _get_capture_progress(self, request: Request) -> Response:
        progress = await self._quick.call(
            capture_progress,
            self._requested_run(request),
            request.path_params["capture"],
            within_s=_CAPTURE_WITHIN_S,
        )
        return JSONResponse(progress)

    async def _get_captured_file(self, request: Request) -> Response:
        """Stream a captured file. A reader reads each block separately, since the disk can hang."""
        parts = tuple(request.path_params[key] for key in ("capture", "rank", "file"))
        run = self._requested_run(request)

        async def read_block(at: int, known: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
            return await self._quick.call(
                read_file_block, run, *parts, at, known, within_s=_BLOCK_WITHIN_S
            )

        first, identity = await read_block(0, ())

        async def stream_blocks() -> AsyncIterator[bytes]:
            at, part = 0, first
            while part:
                yield part
                at += len(part)
                part = (await read_block(at, identity))[0] if at < identity[-1] else b""

        headers = {
            "content-length": str(identity[-1]),
            # The name needs no escaping, since read_file_block() accepts only known names.
            "content-disposition": f'attachment; filename="{parts[-1]}"',
        }
        return StreamingResponse(
            stream_blocks(), media_type="application/octet-stream", headers=headers
        )


def _gzip_response(
    request: Request, packed: bytes, media_type: str, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with gzip content, decompressed for clients that do not accept gzip."""
    given = {**(headers or {}), "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            packed, media_type=media_type, headers={**given, "content-encoding": "gzip"}
        )
    return Response(gzip.decompress(packed), media_type=media_type, headers=given)


async def _error_response(request: Request, error: Exception) -> Response:
    """Return JSON for the API, a page for browsers, and a line of text for other clients."""
    status, text = 404, "There is no page at this address."
    if isinstance(error, ReadError):
        status, text = error.status, printable(str(error))
        if "/api/" in request.url.path:
            return JSONResponse({"problem": text}, status)
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{text}\n", status)
    root = "../" * (request.scope["raw_path"].count(b"/") - 1)
    title = "Not found" if status == 404 else "Waiting for the run"
    page = build_message_page(title, text, root, renews=status != 404)
    # The page asks again every second, and browsers log each failure of a request.
    return HTMLResponse(page, 202 if status == 503 else status, headers=PAGE_HEADERS)
