"""Reader processes, in which the server reads all files, so that a hanging disk cannot block it.

Once it listens, the server's own process accesses no run directory. A reader that does not answer
in time is killed, and the caller receives an error. The number of readers is limited. They have the
lowest CPU priority, since training may run on the same node.
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
from torchlens_perf.serve.run_names import NoSuchError, ReadError
from torchlens_perf.store.without_pandas import block_pandas_import

_LOWEST_PRIORITY = 19
_START_S = 60.0
"""Time limit for starting a process, in addition to the time limit of a call."""
_MAX_BYTES = 8 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_T = TypeVar("_T")


class Readers:
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
        late: str = "its disk did not answer",
    ) -> _T:
        """Return function(*arguments), called in a reader.

        Arguments, result and function must be picklable.

        within_s: time limit for a reader to become free, and again for its answer. late: error text
        if the answer takes longer. Raise ReadError if a limit is exceeded, or the function raises
        any exception.
        """
        loop = asyncio.get_running_loop()
        begun, ready = loop.create_future(), loop.create_future()
        task = asyncio.ensure_future(self._called_in_reader(begun, ready, function, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        # wait_for() would wait until the killed reader has exited, but a reader blocked in the
        # kernel survives a kill.
        for reached, limit_s, problem in (
            (begun, within_s, "all readers are busy; ask again in a moment"),
            (ready, _START_S, "no process could be started to read it"),
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
                503, "its reader process was killed, possibly for lack of memory"
            ) from None

    async def _called_in_reader(
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
                _start, function.__module__, cancellable=True, limiter=CapacityLimiter(1)
            )
            ready.set_result(None)
            return await to_process.run_sync(
                _called, function, arguments, cancellable=True, limiter=CapacityLimiter(1)
            )

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved, or asyncio would log it. The caller has raised it, or
            # no longer waits.
            task.exception()

    def close(self) -> None:
        """Cancel running calls, which raise asyncio.CancelledError."""
        for task in list(self._tasks):
            task.cancel()


def _start(module: str) -> None:
    """Prepare the reader process: limit its memory, import the module of the call, and lower the
    priority.
    """
    # Ctrl-C is handled by the server, which ends its readers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_memory()
    block_pandas_import()
    importlib.import_module(module)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)


def _called(function: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """Call the function in the reader, and convert exceptions to ReadError: others may fail to
    unpickle.
    """
    try:
        return function(*arguments)
    except NoSuchError as error:
        status, words = 404, str(error)
    except ConfigError as error:
        status, words = 400, str(error)
    except (TorchlensPerfError, OSError) as error:
        status, words = 503, str(error)
    except MemoryError:
        gib = limit_memory() / (1 << 30)
        status, words = (
            503,
            f"it takes more than {gib:.1f} GiB of memory to read, the limit of a reader",
        )
    # An unexpected error affects only this run.
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
