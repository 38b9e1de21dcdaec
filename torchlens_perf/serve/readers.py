"""Reader processes, in which the server reads all files: a hanging disk must not block the server.

While the server listens, its own process accesses no run directory. A reader whose disk does not
answer is killed, and the caller receives an error. A reader that needs CPU time continues, also
without a caller, and its result is kept for the next caller. The number of readers is limited.
Readers have the lowest CPU priority, since training may run on the same node.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from torchlens_perf.errors import ConfigError, TorchlensPerfError, printable
from torchlens_perf.serve.reader_activity import ReaderActivity
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.store.run_folders import NotFoundError
from torchlens_perf.store.without_pandas import block_pandas_import

_LOWEST_PRIORITY = 19
_START_S = 60.0
"""Time limit for starting a process."""
_MAX_CPU_S = 600.0
"""Limit of a call's CPU time."""
_SAMPLE_INTERVAL_S = 0.5
_KEPT_S = 60.0
"""Time for which a result without a caller is kept."""
_MAX_BYTES = 8 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
# While anyio waits for its own limiter, another call could take the prepared process.
_NO_LIMITER = cast(CapacityLimiter, contextlib.nullcontext())
_STATUSES: Mapping[type, int] = {NotFoundError: 404, ConfigError: 400}
"""The HTTP status of an error of a read. Other expected errors have 503."""
_T = TypeVar("_T")


class ReaderCall(Generic[_T]):
    """A call in a reader process, for all callers that request the same meanwhile."""

    def __init__(
        self,
        free: asyncio.Semaphore,
        function: Callable[..., _T],
        arguments: tuple[object, ...],
        disk_limit_s: float,
    ) -> None:
        self.answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        # Mark an exception as retrieved, or asyncio would log it if no caller waits any more.
        self.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._free, self._function, self._arguments = free, function, arguments
        self._disk_limit_s = disk_limit_s
        self._callers, self._has_reader, self._activity = 0, False, ReaderActivity()
        # The task lasts longer than the call if its killed process is blocked in the kernel.
        self.task = asyncio.ensure_future(self._run())

    @property
    def is_awaited(self) -> bool:
        return self._callers > 0

    async def wait(self, limit_s: float | None = None) -> _T:
        """Return the result.

        limit_s: None to wait until the call ends. Raise ReadError if the call fails, or takes
        longer than limit_s. In the latter case the call continues, unless it has no reader yet.
        """
        self._callers += 1
        try:
            await asyncio.wait({self.answer}, timeout=limit_s)
            if self._activity.blocked_s >= self._disk_limit_s / 2:
                # Soon it is known whether the disk answers.
                await asyncio.wait({self.answer}, timeout=self._disk_limit_s)
        finally:
            self._callers -= 1
        if self.answer.done():
            return self.answer.result()
        problem = f"{self.describe()}; try again in a moment"
        if not self._has_reader and not self.is_awaited:
            self.fail(problem)
        raise ReadError(503, problem)

    def describe(self) -> str:
        """Return what an unfinished call waits for."""
        return self._activity.describe() if self._has_reader else "all reader processes are busy"

    def fail(self, problem: str) -> None:
        """End the call with a ReadError for its callers, and kill its process."""
        if not self.answer.done():
            self.answer.set_exception(ReadError(503, problem))
        self.task.cancel()

    async def _run(self) -> None:
        async with self._free:
            self._has_reader = True
            watch = asyncio.ensure_future(self._watch())
            try:
                result = await self._call_in_process()
                if not self.answer.done():
                    self.answer.set_result(result)
            except ReadError as error:
                if not self.answer.done():
                    self.answer.set_exception(error)
            except BrokenWorkerProcess:
                self.fail(
                    "the reader process was killed, possibly because memory was low"
                    if self._activity.pid
                    else "no reader process could be started"
                )
            finally:
                watch.cancel()

    async def _call_in_process(self) -> _T:
        pid = await to_process.run_sync(
            _prepare_reader, self._function.__module__, cancellable=True, limiter=_NO_LIMITER
        )
        self._activity.begin(pid)
        # anyio uses the process that became idle last, which is the prepared one.
        return await to_process.run_sync(
            _call_with_read_errors,
            self._function,
            self._arguments,
            cancellable=True,
            limiter=_NO_LIMITER,
        )

    async def _watch(self) -> None:
        """Fail the call if its process does not start, or takes more than it may."""
        began_s, activity = time.monotonic(), self._activity
        while not self.answer.done():
            await asyncio.sleep(min(_SAMPLE_INTERVAL_S, self._disk_limit_s / 10))
            activity.update()
            if not activity.pid and time.monotonic() - began_s > _START_S:
                self.fail(f"no reader process could be started within {_START_S:g} s")
            elif activity.blocked_s >= self._disk_limit_s:
                self.fail(f"the disk did not answer within {self._disk_limit_s:g} s")
            elif activity.cpu_s >= _MAX_CPU_S:
                self.fail(f"reading needs more than {_MAX_CPU_S:g} s of CPU time")


class ReaderPool:
    """A pool of processes that call functions of this package.

    Used only on the event loop's thread.
    """

    def __init__(self, most: int) -> None:
        """most: number of concurrent calls. Further calls wait."""
        self._free = asyncio.Semaphore(most)
        self._calls: dict[tuple[object, ...], ReaderCall[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, function: Callable[..., _T], *arguments: object, within_s: float) -> _T:
        """Call function(*arguments) in a reader process, and return the result.

        within_s: time limit for the result, and for the disk to answer. Raise ReadError if the
        limit is exceeded or the function fails.
        """
        return await self.start(function, *arguments, within_s=within_s).wait(within_s)

    def start(
        self, function: Callable[..., _T], *arguments: object, within_s: float
    ) -> ReaderCall[_T]:
        """Start a call, or return the same call if it is in progress or its result was kept.

        The function, its result and the arguments must be picklable, and the arguments hashable.
        within_s: time limit for the disk to answer.
        """
        key = (function, *arguments)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = ReaderCall(self._free, function, arguments, within_s)
            call.answer.add_done_callback(lambda _: self._keep_or_forget(key))
            self._tasks.add(call.task)
            call.task.add_done_callback(self._tasks.discard)
        elif call.answer.done():
            del self._calls[key]
        return call

    def _keep_or_forget(self, key: tuple[object, ...]) -> None:
        call = self._calls[key]
        if call.is_awaited or call.answer.cancelled() or call.answer.exception() is not None:
            del self._calls[key]
        else:
            asyncio.get_running_loop().call_later(_KEPT_S, self._forget, key, call)

    def _forget(self, key: tuple[object, ...], call: ReaderCall[Any]) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]

    def close(self) -> None:
        """Cancel running calls, which raise asyncio.CancelledError."""
        for call in self._calls.values():
            call.answer.cancel()
        for task in self._tasks:
            task.cancel()


def _prepare_reader(module: str) -> int:
    """Limit this process's memory, import the module of the call, and lower the priority.

    Return the process's id.
    """
    # Ignore Ctrl-C, since the server handles it and ends its readers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory()
    block_pandas_import()
    importlib.import_module(module)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    return os.getpid()


def _call_with_read_errors(function: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """Call the function, and convert exceptions to ReadError, which can be unpickled."""
    try:
        return function(*arguments)
    except (TorchlensPerfError, OSError) as error:
        status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 503)
        words = str(error)
    except MemoryError:
        gib = limit_memory() / (1 << 30)
        status = 503
        words = (
            f"reading the run needs more than {gib:.1f} GiB of memory, the limit of a reader"
            " process"
        )
    # An unexpected error must not affect other runs.
    except Exception as error:
        status, words = 500, f"this cannot be read: {type(error).__name__}: {error}"
    raise ReadError(status, printable(words))


def limit_memory() -> int:
    """Limit this process to half of the machine's or the container's memory, and to 8 GiB.

    Return the limit in bytes.

    Larger allocations raise MemoryError. The limit is on writable memory (RLIMIT_DATA), since
    libraries reserve far more address space than they use. A lower limit that the user has set
    remains.
    """
    limits = [_MAX_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    # The file may be missing, or contain "max".
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(_CGROUP_LIMIT.read_text()) // 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min(limits + [each for each in (soft, hard) if each != resource.RLIM_INFINITY])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit
