"""What can be asked of the server.

::

    /                               the runs
    /runs/ID/                       one as its page
    /runs/ID/api/contents           the same as JSON
    /runs/ID/api/changes            server-sent events: there is something newer; the run has ended
    /runs/ID/api/step/N             any step, span by span
    /runs/ID/api/captures           POST ranks, steps: asks for a capture; /ID: what came of it
    /runs/ID/captures/ID/RANK/FILE  its files
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from torchlens_perf.errors import ConfigError, TorchlensPerfError, printable
from torchlens_perf.report.captures import capture_line, captures
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.serve.ask_capture import ask_capture
from torchlens_perf.serve.follow import Follower
from torchlens_perf.serve.list_page import list_page
from torchlens_perf.serve.runs import Run, find_runs, is_run, line_of
from torchlens_perf.serve.worker import Worker, step

if TYPE_CHECKING:
    from starlette.requests import Request

_A_PAGE = 50  # runs of the list
_MAX_FOLLOWED = 16  # runs that are held ready
_MAX_BODY_BYTES = 10_000
_KEEPALIVE_S = 15.0
_BLOCK_BYTES = 1 << 16
_HEARTBEAT = ": still there\n\n"


class Server:
    """The runs of a folder, for any number of viewers. On the event loop's thread."""

    def __init__(self, folder: Path, worker: Worker | None = None, ending: Callable[[], bool] = lambda: False) -> None:
        """folder: of runs, or a run. ending: whether the server is about to end: streams end then."""
        self.folder = folder
        self._worker = Worker() if worker is None else worker
        self.ending = ending
        self._followers: dict[str, Follower] = {}

    def app(self) -> Starlette:
        run = "/runs/{run}"
        return Starlette(
            routes=[
                Route("/", self._list),
                Route(f"{run}/", self._page),
                Route(f"{run}/api/contents", self._contents),
                Route(f"{run}/api/changes", self._changes),
                Route(f"{run}/api/step/{{step:int}}", self._step),
                Route(f"{run}/api/captures", self._ask, methods=["POST"]),
                Route(f"{run}/api/captures/{{id}}", self._captured),
                Route(f"{run}/captures/{{id}}/{{rank}}/{{file}}", self._file),
            ],
            exception_handlers={TorchlensPerfError: _problem, OSError: _problem},
        )

    def close(self) -> None:
        self._worker.close()

    # -- pages

    async def _list(self, request: Request) -> Response:
        runs = await asyncio.to_thread(find_runs, self.folder)
        pages = max(1, -(-len(runs) // _A_PAGE))
        text = request.query_params.get("page", "0")
        page = min(pages - 1, int(text)) if text.isdecimal() and len(text) < 9 else 0
        shown = runs[page * _A_PAGE : (page + 1) * _A_PAGE]
        lines = await asyncio.to_thread(lambda: [line_of(self.folder, run) for run in shown])
        return HTMLResponse(list_page(printable(str(self.folder)), lines, page, pages, len(runs)))

    async def _page(self, request: Request) -> Response:
        return HTMLResponse((await self._follower(request).current()).html)

    async def _contents(self, request: Request) -> Response:
        now = await self._follower(request).current()
        return Response(now.contents, media_type="application/json")

    async def _changes(self, request: Request) -> Response:
        follower = self._follower(request)
        last = request.headers.get("last-event-id", "")
        since = int(last) if last.isdecimal() and len(last) < 16 else -1
        if since > follower.version:
            since = -1  # of a server before this one
        return StreamingResponse(self._events(follower, since), media_type="text/event-stream")

    async def _events(self, follower: Follower, since: int) -> AsyncIterator[str]:
        changes = follower.changes(since)
        waiting: asyncio.Task[tuple[int, bool]] | None = None
        problem, silent_s = "", 0.0
        try:
            while not self.ending():
                waiting = waiting or asyncio.ensure_future(anext(changes))
                done, _ = await asyncio.wait([waiting], timeout=0.5)
                silent_s = 0.0 if done else silent_s + 0.5
                if done:
                    try:
                        version, is_live = waiting.result()
                    except StopAsyncIteration:
                        return
                    waiting = None
                    yield f"id: {version}\nevent: {'changed' if is_live else 'ended'}\ndata: {version}\n\n"
                elif follower.problem != problem:
                    problem = follower.problem
                    yield f"event: problem\ndata: {printable(problem)}\n\n"
                elif silent_s >= _KEEPALIVE_S:
                    silent_s = 0.0
                    yield _HEARTBEAT
        finally:
            if waiting is not None:
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await waiting
            await changes.aclose()

    async def _step(self, request: Request) -> Response:
        found = await self._worker.call(step, self._run(request), request.path_params["step"])
        return Response(found, media_type="application/json")

    # -- captures

    async def _ask(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                return PlainTextResponse("too long\n", 413)
        asked = {key: values[0] for key, values in parse_qs(body.decode(errors="replace")).items()}
        ranks, steps = asked.get("ranks", "").replace(" ", ""), asked.get("steps", "")
        if not steps.isdecimal() or not ranks:
            raise ConfigError("a capture needs ranks, such as 5 or 0-3, and a number of steps")
        made = await asyncio.to_thread(ask_capture, RunDirectory(self._run(request)), [ranks], int(steps[:9]))
        return JSONResponse({"id": made.id, "ranks": len(made.ranks)}, 202)

    async def _captured(self, request: Request) -> Response:
        run = RunDirectory(self._run(request))
        rows = [row for row in await asyncio.to_thread(captures, run) if row["id"] == request.path_params["id"]]
        outcomes: list[dict[str, Any]] = [
            {"rank": row["rank"], "line": capture_line(row, str(run.path)), "files": list(row["files"].values())}
            for row in rows
        ]
        return JSONResponse({"outcomes": outcomes, "over": False})

    async def _file(self, request: Request) -> Response:
        parts = [request.path_params[key] for key in ("id", "rank", "file")]
        if any(not part or part in (".", "..") or "/" in part or "\0" in part for part in parts):
            return PlainTextResponse("there is no such file\n", 404)
        try:
            descriptor, size = await asyncio.to_thread(_open_below, self._run(request) / "captures", parts)
        except OSError:
            return PlainTextResponse("there is no such file\n", 404)
        headers = {"content-length": str(size), "content-disposition": "attachment"}
        return StreamingResponse(_blocks(descriptor), media_type="application/octet-stream", headers=headers)

    # -- parts

    def _run(self, request: Request) -> Path:
        """The run that is asked for. Raises ConfigError where there is none: names come from outside."""
        name = str(request.path_params["run"])
        if is_run(self.folder) and name == self.folder.name:
            return self.folder
        path = self.folder / name
        if name in ("", ".", "..") or "/" in name or "\0" in name or path.is_symlink() or not is_run(path):
            raise ConfigError(f"there is no run {printable(name)[:100]} here")
        return path

    def _follower(self, request: Request) -> Follower:
        run = self._run(request)
        follower = self._followers.pop(run.name, None) or Follower(run, self._worker)
        self._followers[run.name] = follower  # the newest last
        for name in [name for name, each in self._followers.items() if not each.is_watched][:-_MAX_FOLLOWED]:
            del self._followers[name]
        return follower

    def index(self, advanced: Callable[[int, int | None], object]) -> list[Run]:
        """Looks at the folder once before anybody asks. Raises RunStoreError where it cannot be read."""
        return find_runs(self.folder, advanced)


async def _problem(request: Request, error: Exception) -> Response:
    text = printable(str(error))
    if "/api/" in request.url.path:
        return JSONResponse({"problem": text}, 400 if isinstance(error, ConfigError) else 503)
    return PlainTextResponse(f"{text}\n", 404 if isinstance(error, ConfigError) else 503)


def _open_below(folder: Path, parts: list[str]) -> tuple[int, int]:
    """A regular file below the folder, and its size; no link is followed on the way. Raises OSError."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise FileNotFoundError(parts[-1])
    return file, found.st_size


async def _blocks(descriptor: int) -> AsyncIterator[bytes]:
    with open(descriptor, "rb") as file:
        while block := await asyncio.to_thread(file.read, _BLOCK_BYTES):
            yield block
