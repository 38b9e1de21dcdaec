"""Reader processes of the server: limited in number, and killed when they take too long."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.leftovers import eventually
from torchlens_perf.errors import ConfigError, RunStoreError
from torchlens_perf.serve.readers import ReaderPool
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.store.run_folders import NotFoundError

pytestmark = pytest.mark.distributed

LONG_S, LONGEST_S = 600.0, 60.0
_T = TypeVar("_T")


# -- functions that reader processes run: they import this file


def pid_and_priority() -> tuple[int, int]:
    return os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)


def sleep(mark: str) -> None:
    Path(mark).write_text(str(os.getpid()))
    time.sleep(LONG_S)


def fail(kind: type[Exception], text: str) -> None:
    raise kind(text)


class UnpicklableError(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


def fail_oddly() -> None:
    raise UnpicklableError("one", "other")


def die() -> None:
    os._exit(3)


def in_loop(work: Callable[[ReaderPool], Coroutine[Any, Any, _T]], most: int = 1) -> _T:
    async def run() -> _T:
        readers = ReaderPool(most)
        try:
            return await work(readers)
        finally:
            readers.close()

    return asyncio.run(run())


def is_gone(pid: int) -> bool:
    """Return True if the process does not exist, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_reader_processes_have_the_lowest_priority_and_are_reused() -> None:
    async def work(readers: ReaderPool) -> list[tuple[int, int]]:
        return [await readers.call(pid_and_priority, within_s=LONGEST_S) for _ in range(2)]

    first, second = in_loop(work)
    assert first == second
    assert first[0] != os.getpid()
    assert first[1] == 19


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (NotFoundError, 404),
        (ConfigError, 400),
        (RunStoreError, 503),
        (OSError, 503),
        (ZeroDivisionError, 500),
    ],
)
def test_errors_of_readers_become_messages_with_an_http_status(
    kind: type[Exception], status: int
) -> None:
    async def work(readers: ReaderPool) -> ReadError:
        with pytest.raises(ReadError) as raised:
            await readers.call(fail, kind, "why\x1b[2J\nso", within_s=LONGEST_S)
        return raised.value

    error = in_loop(work)
    assert error.status == status
    assert "why?[2J?so" in str(error)


def test_unusual_errors_and_dead_readers_become_read_errors() -> None:
    """One error cannot be pickled, and one reader process dies.

    The next call uses a new process.
    """

    async def work(readers: ReaderPool) -> list[str]:
        said = []
        for function in (fail_oddly, die):
            with pytest.raises(ReadError) as raised:
                await readers.call(function, within_s=LONGEST_S)
            said.append(str(raised.value))
        assert await readers.call(pid_and_priority, within_s=LONGEST_S)
        return said

    odd, dead = in_loop(work)
    assert "UnpicklableError: one" in odd
    assert "was killed" in dead


def test_reader_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    """The caller receives an error.

    Concurrent callers are told that readers are busy, and later ones are served.
    """
    mark = tmp_path / "mark"

    async def work(readers: ReaderPool) -> tuple[str, str]:
        # Wait until the reader process has started.
        await readers.call(pid_and_priority, within_s=LONGEST_S)
        stuck = asyncio.ensure_future(readers.call(sleep, str(mark), within_s=LONGEST_S / 60))
        await asyncio.sleep(0)
        with pytest.raises(ReadError) as busy:
            await readers.call(pid_and_priority, within_s=0.01)
        with pytest.raises(ReadError) as late:
            await stuck
        assert await readers.call(pid_and_priority, within_s=LONGEST_S)
        return str(busy.value), str(late.value)

    busy, late = in_loop(work)
    assert "all reader processes are busy" in busy
    assert "did not answer within 1 s" in late
    assert eventually(lambda: is_gone(int(mark.read_text())))


def test_closing_the_readers_cancels_running_calls(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def work(readers: ReaderPool) -> None:
        stuck = asyncio.ensure_future(readers.call(sleep, str(mark), within_s=LONG_S))
        while not mark.exists() or not mark.read_text():
            await asyncio.sleep(0.01)
        readers.close()
        with pytest.raises(asyncio.CancelledError):
            await stuck

    in_loop(work)
    assert eventually(lambda: is_gone(int(mark.read_text())))
