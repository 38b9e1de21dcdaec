"""What the server reads, it reads in processes of their own: start here for how a disk that hangs is kept from it.

The server's own process touches no run directory once it listens. A reader that does not answer in time is killed, and
whoever asked hears so; the number of readers is bounded, and so is what a disk can hold up. Readers give way to every
other process of the node: training may run on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from torchlens_perf.errors import ConfigError, TorchlensPerfError, printable
from torchlens_perf.serve.memory_limit import limit_memory
from torchlens_perf.serve.run_names import NoSuchError, ReadError
from torchlens_perf.store.without_pandas import hide_pandas

_LOWEST_PRIORITY = 19
_START_S = 60.0
"""Of a new process, besides the time that a call may take."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Answer(Generic[_T]):
    value: _T


@dataclasses.dataclass(frozen=True)
class _Problem:
    status: int
    text: str


class Readers:
    """Some processes that call functions of this package. On the event loop's thread."""

    def __init__(self, most: int) -> None:
        """most: so many calls at a time; others wait."""
        self._most = most
        self._limiter: CapacityLimiter | None = None  # made where the loop runs
        self._tasks: set[asyncio.Task[Any]] = set()
        self.calls = 0

    @property
    def busy(self) -> int:
        """How many calls there are now, with those that wait."""
        return len(self._tasks)

    async def call(
        self, function: Callable[..., _T], *arguments: object, within_s: float, late: str = "its disk did not answer"
    ) -> _T:
        """What function(*arguments) returns in a reader; all must be picklable, and the function at a module's top.

        within_s: from now on, with the time that it waits for a reader. late: what is said where it takes longer.
        Raises ReadError then, and for whatever the function raises.
        """
        self.calls += 1
        begun, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.ensure_future(self._called_in_reader(begun, ready, function, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        # Not wait_for(): that waits until the reader is gone, and one that sleeps in the kernel survives a kill.
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
            if not done and begun.is_set() and not ready.is_set():  # a new process: that takes long on a busy machine
                started = asyncio.ensure_future(ready.wait())
                await asyncio.wait({task, started}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
                started.cancel()
                if ready.is_set():
                    done, _ = await asyncio.wait({task}, timeout=within_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            why = "all readers are busy; ask again in a moment"
            if begun.is_set():
                why = f"{late} within {within_s:g} s" if ready.is_set() else "no process could be started to read it"
            raise ReadError(503, why)
        try:
            answer = task.result()
        except BrokenWorkerProcess:
            raise ReadError(503, "its reader was ended from outside; is there too little memory?") from None
        if isinstance(answer, _Problem):
            raise ReadError(answer.status, answer.text)
        return answer.value

    async def _called_in_reader(
        self, begun: asyncio.Event, ready: asyncio.Event, function: Callable[..., _T], arguments: tuple[object, ...]
    ) -> _Answer[_T] | _Problem:
        self._limiter = self._limiter or CapacityLimiter(self._most)
        async with self._limiter:
            begun.set()
            # The process that has ended its last call takes the next one.
            await to_process.run_sync(_start, function.__module__, cancellable=True, limiter=CapacityLimiter(1))
            ready.set()
            return await to_process.run_sync(_called, function, arguments, cancellable=True, limiter=CapacityLimiter(1))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # somebody has heard of it, or nobody waits any more

    def close(self) -> None:
        """Ends what still reads."""
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


def _called(function: Callable[..., _T], arguments: tuple[object, ...]) -> _Answer[_T] | _Problem:
    """In the reader. Problems are values: not every exception can be unpickled."""
    try:
        return _Answer(function(*arguments))
    except NoSuchError as error:
        return _Problem(404, printable(str(error)))
    except ConfigError as error:
        return _Problem(400, printable(str(error)))
    except (TorchlensPerfError, OSError) as error:
        return _Problem(503, printable(str(error)))
    except MemoryError:
        gib = limit_memory() / (1 << 30)
        return _Problem(503, f"it takes more than {gib:.1f} GiB of memory to read, the limit of a reader")
    except Exception as error:  # some cannot be unpickled: this run cannot be shown, others can
        return _Problem(500, printable(f"this cannot be read: {type(error).__name__}: {error}"))
