"""Reader processes, in which the server reads all files: a hanging disk must not block the server.

While the server listens, its own process accesses no run directory. A reader that does not answer
in time is killed, and the caller receives an error. The number of readers is limited. Readers have
the lowest CPU priority, since training may run on the same node.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from torchlens_perf.errors import ConfigError, TorchlensPerfError, printable
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.store.run_folders import NotFoundError
from torchlens_perf.store.without_pandas import block_pandas_import

_LOWEST_PRIORITY = 19
_START_S = 60.0
"""Time limit for starting a process, in addition to the time limit of a call."""
_MAX_BYTES = 8 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_T = TypeVar("_T")


class ReaderPool:
    """A pool of processes that call functions of this package.

    Used only on the event loop's thread.
    """

    def __init__(self, most: int) -> None:
        """most: number of concurrent calls. Further calls wait."""
        self._free = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(
        self,
        function: Callable[..., _T],
        *arguments: object,
        within_s: float,
        late: str = "the disk did not answer",
    ) -> _T:
        """Call function(*arguments) in a reader process, and return the result.

        Arguments, result and function must be picklable.

        within_s: time limit for a reader to become free, and again for its answer. late: error text
        if one of these limits is exceeded. Raise ReadError if a limit is exceeded or the function
        fails.
        """
        loop = asyncio.get_running_loop()
        begun, ready = loop.create_future(), loop.create_future()
        task = asyncio.ensure_future(self._call_in_process(begun, ready, function, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        # wait_for() would wait until the killed reader has exited, but a reader blocked in the
        # kernel survives a kill.
        for reached, limit_s, problem in (
            (begun, within_s, "all reader processes are busy; try again in a moment"),
            (ready, _START_S, "no reader process could be started"),
            (task, within_s, f"{late} within {within_s:g} s"),
        ):
            await asyncio.wait(
                {task, reached}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done() and not reached.done():
                task.cancel()
                raise ReadError(503, problem)
        try:
            return task.result()
        except BrokenWorkerProcess:
            raise ReadError(
                503, "the reader process was killed, possibly because memory was low"
            ) from None

    async def _call_in_process(
        self,
        begun: asyncio.Future[None],
        ready: asyncio.Future[None],
        function: Callable[..., _T],
        arguments: tuple[object, ...],
    ) -> _T:
        async with self._free:
            begun.set_result(None)
            # anyio reuses an idle process of an earlier call.
            await to_process.run_sync(
                _prepare_reader, function.__module__, cancellable=True, limiter=CapacityLimiter(1)
            )
            ready.set_result(None)
            return await to_process.run_sync(
                _call_with_read_errors,
                function,
                arguments,
                cancellable=True,
                limiter=CapacityLimiter(1),
            )

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved, or asyncio would log it. The caller has raised it, or
            # no longer waits.
            task.exception()

    def close(self) -> None:
        """Cancel running calls, which raise asyncio.CancelledError."""
        for task in list(self._tasks):
            task.cancel()


def _prepare_reader(module: str) -> None:
    """Limit this process's memory, import the module of the call, and lower the priority."""
    # Ignore Ctrl-C, since the server handles it and ends its readers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory()
    block_pandas_import()
    importlib.import_module(module)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)


def _call_with_read_errors(function: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """Call the function, and convert exceptions to ReadError, which can be unpickled."""
    try:
        return function(*arguments)
    except NotFoundError as error:
        status, words = 404, str(error)
    except ConfigError as error:
        status, words = 400, str(error)
    except (TorchlensPerfError, OSError) as error:
        status, words = 503, str(error)
    except MemoryError:
        gib = limit_memory() / (1 << 30)
        status, words = (
            503,
            f"reading the run needs more than {gib:.1f} GiB of memory, the limit of a reader"
            " process",
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
