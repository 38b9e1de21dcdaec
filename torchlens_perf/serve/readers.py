"""What the server reads, it reads in processes of their own: start here for how a disk that hangs is kept from it.

The server's own process touches no run directory once it listens. A reader that does not answer in time is killed, and
whoever asked hears so; the number of readers is bounded, and so is what a disk can hold up. Readers give way to every
other process of the node: training may run on it.
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
from torchlens_perf.store.without_pandas import hide_pandas

_LOWEST_PRIORITY = 19
_START_S = 60.0
"""Of a new process, besides the time that a call may take."""
_MAX_BYTES = 8 << 30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_T = TypeVar("_T")


class Readers:
    """Some processes that call functions of this package. On the event loop's thread."""

    def __init__(self, most: int) -> None:
        """most: so many calls at a time; others wait."""
        self._free = asyncio.Semaphore(most)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(
        self, function: Callable[..., _T], *arguments: object, within_s: float, late: str = "its disk did not answer"
    ) -> _T:
        """What function(*arguments) returns in a reader; all must be picklable, and the function at a module's top.

        within_s: for a reader to be free, and then for its answer. late: what is said where that takes longer. Raises
        ReadError then, and for whatever the function raises.
        """
        loop = asyncio.get_running_loop()
        begun, ready = loop.create_future(), loop.create_future()
        task = asyncio.ensure_future(self._called_in_reader(begun, ready, function, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        # Not wait_for(): that waits until the reader is gone, and one that sleeps in the kernel survives a kill.
        for reached, limit_s, problem in (
            (begun, within_s, "all readers are busy; ask again in a moment"),
            (ready, _START_S, "no process could be started to read it"),
            (task, within_s, f"{late} within {within_s:g} s"),
        ):
            await asyncio.wait({task, reached}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not reached.done():
                task.cancel()
                raise ReadError(503, problem)
        try:
            return task.result()
        except BrokenWorkerProcess:
            raise ReadError(503, "its reader was ended from outside; is there too little memory?") from None

    async def _called_in_reader(
        self,
        begun: asyncio.Future[None],
        ready: asyncio.Future[None],
        function: Callable[..., _T],
        arguments: tuple[object, ...],
    ) -> _T:
        async with self._free:
            begun.set_result(None)
            # The process that has ended its last call takes the next one.
            await to_process.run_sync(_start, function.__module__, cancellable=True, limiter=CapacityLimiter(1))
            ready.set_result(None)
            return await to_process.run_sync(_called, function, arguments, cancellable=True, limiter=CapacityLimiter(1))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # somebody has heard of it, or nobody waits any more

    def close(self) -> None:
        """End what still reads. Calls raise asyncio.CancelledError."""
        for task in list(self._tasks):
            task.cancel()


def _start(module: str) -> None:
    """In the reader: what the call needs is imported, and other processes of the machine come first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    limit_memory()
    hide_pandas()
    importlib.import_module(module)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)


def _called(function: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """In the reader. Not every exception can be unpickled; ReadError can."""
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
        status, words = 503, f"it takes more than {gib:.1f} GiB of memory to read, the limit of a reader"
    except Exception as error:  # this run cannot be shown, others can
        status, words = 500, f"this cannot be read: {type(error).__name__}: {error}"
    raise ReadError(status, printable(words))


def limit_memory() -> int:
    """Limit this process to half of the machine's or the container's memory, and to 8 GiB. Return the limit in bytes.

    More raises MemoryError. The limit counts what can be written (RLIMIT_DATA): libraries reserve far more addresses
    than they use. A lower limit of the user's stays.
    """
    limits = [_MAX_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file
        limits.append(int(_CGROUP_LIMIT.read_text()) // 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min(limits + [each for each in (soft, hard) if each != resource.RLIM_INFINITY])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return limit
