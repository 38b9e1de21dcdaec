"""What reads run directories for the server: in a process of its own, so that a large run, or a disk that does not
answer, keeps nobody waiting who asks for something else."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from torchlens_perf.errors import TorchlensPerfError
from torchlens_perf.page.document.html import document
from torchlens_perf.page.gather.one_step import one_step
from torchlens_perf.page.gather.run_contents import contents
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.serve.live_page import live_part

_T = TypeVar("_T")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class NoAnswerError(TorchlensPerfError):
    """The run directory was not read in time."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A run as it is shown at one time."""

    html: str
    contents: bytes
    """The same as JSON, for a page that is open already."""
    is_live: bool
    took_s: float
    """To read it, without starting the process that does."""


def rendered(run: Path) -> Rendered:
    """Raises TorchlensPerfError where there is nothing to show."""
    began_s = time.monotonic()
    held = contents(RunDirectory(run))
    live = held["report"]["run"]["live"]
    html = document(held, live=live_part(is_live=live))
    text = json.dumps(held, allow_nan=False).encode()
    return Rendered(html, text, live, time.monotonic() - began_s)


def step(run: Path, number: int) -> bytes:
    """One step of all ranks, as StepTraces in JSON; no steps where it was not recorded."""
    return json.dumps(one_step(RunDirectory(run), number), allow_nan=False).encode()


def _end_with_the_server() -> None:
    """Else a server that is killed would leave this process behind. In the other process; Linux only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends this one
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


class Worker:
    """Runs such functions in another process; at most two at a time. On the server's thread."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        """timeout_s: after which a disk is taken not to answer."""
        self._timeout_s = timeout_s
        self._pool: ProcessPoolExecutor | None = None

    async def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What the function returns. Raises what it raises, and NoAnswerError after the timeout."""
        if self._pool is None:
            # Started anew rather than forked: this process has threads.
            self._pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), _end_with_the_server)
        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
            return await asyncio.wait_for(future, self._timeout_s)
        except (asyncio.TimeoutError, BrokenProcessPool) as error:
            self.close()
            late = isinstance(error, asyncio.TimeoutError)
            what = f"did not answer within {self._timeout_s:g} s" if late else "could not be read: its reader has ended"
            raise NoAnswerError(f"the run directory {what}") from None

    def close(self) -> None:
        """Ends the process, also one that waits for a disk."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())  # it has no public way to end one that is stuck
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            self._pool = None
