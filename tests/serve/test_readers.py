"""Reader processes of the server: limited in number, and killed when they take too long."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.busy_machine import PROCESSORS, busy_machine
from tests.support.leftovers import eventually
from torchlens_perf.errors import ConfigError, RunStoreError
from torchlens_perf.serve import run_list
from torchlens_perf.serve.reader_activity import ReaderActivity
from torchlens_perf.serve.readers import ReaderPool
from torchlens_perf.serve.run_names import ReadError
from torchlens_perf.store.run_folders import FoundRun, NotFoundError

pytestmark = pytest.mark.distributed

LONG_S, LONGEST_S = 600.0, 60.0
_T = TypeVar("_T")


# -- functions that reader processes run: they import this file


def pid_and_priority() -> tuple[int, int]:
    return os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)


def sleep(mark: str) -> None:
    Path(mark).write_text(str(os.getpid()))
    time.sleep(LONG_S)


def use_cpu(starts: str, until: str) -> str:
    """Compute until a file exists. Add a line to `starts`."""
    _add_line(starts)
    while not os.path.exists(until):
        sum(range(20_000))
    return "done"


def use_cpu_in_a_thread(starts: str, until: str) -> str:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use_cpu, starts, until).result()


def read_slowly(starts: str, until: str) -> str:
    """Read a file again and again, each time after a disk's delay, until another file exists."""
    _add_line(starts)
    while not os.path.exists(until):
        time.sleep(0.2)
        Path(starts).read_text()
    return "done"


def read_lines_when_file_exists(
    folder: str, runs: Sequence[FoundRun], budget_s: float
) -> list[run_list.RunLine]:
    """Replace read_lines() for a run whose name is a file that may not exist yet."""
    while not os.path.exists(runs[0].name):
        time.sleep(0.05)
    return [run_list.RunLine(*runs[0], state="ended")]


def _add_line(path: str) -> None:
    with open(path, "a") as file:
        file.write("started\n")


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
            return await asyncio.wait_for(work(readers), LONG_S)
        finally:
            readers.close()
            # asyncio closes the pipes of a killed process once the process has ended.
            while readers._tasks:
                await asyncio.sleep(0.01)

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


# -- calls that take long, but not because of a disk that does not answer

SLOW_CALLS = [
    (use_cpu, "s of CPU time"),
    (use_cpu_in_a_thread, "s of CPU time"),
    (read_slowly, "s for the disk"),
]


@pytest.mark.parametrize(("function", "reason"), SLOW_CALLS)
def test_slow_call_continues_and_later_callers_join_it(
    tmp_path: Path, function: Callable[[str, str], str], reason: str
) -> None:
    """Each caller is told what the time is needed for. The work is started once."""
    starts, until = tmp_path / "starts", tmp_path / "until"

    async def work(readers: ReaderPool) -> list[str]:
        await readers.call(pid_and_priority, within_s=LONGEST_S)
        said = []
        for _ in range(3):
            with pytest.raises(ReadError) as raised:
                await readers.call(function, str(starts), str(until), within_s=1)
            said.append(str(raised.value))
        last = asyncio.ensure_future(
            readers.call(function, str(starts), str(until), within_s=LONGEST_S)
        )
        until.touch()
        assert await last == "done"
        return said

    said = in_loop(work)
    assert all("did not answer" not in each for each in said)
    assert reason in said[-1]
    assert starts.read_text() == "started\n"


def test_result_without_a_caller_is_kept_for_the_next_one(tmp_path: Path) -> None:
    """The result is given to one caller. The caller after that one starts a new call."""
    starts, until = tmp_path / "starts", tmp_path / "until"

    async def work(readers: ReaderPool) -> None:
        await readers.call(pid_and_priority, within_s=LONGEST_S)
        call = readers.start(use_cpu, str(starts), str(until), within_s=LONGEST_S)
        with pytest.raises(ReadError):
            await call.wait(0.5)
        until.touch()
        await asyncio.wait({call.answer})
        for _ in range(2):
            assert await readers.call(use_cpu, str(starts), str(until), within_s=LONGEST_S)

    in_loop(work)
    assert starts.read_text() == "started\n" * 2


def test_failed_call_without_a_caller_is_started_again(tmp_path: Path) -> None:
    async def work(readers: ReaderPool) -> None:
        for text in ("before", "after"):
            (tmp_path / "text").write_text(text)
            call = readers.start(fail, OSError, "why", within_s=LONGEST_S)
            await asyncio.wait({call.answer})
            await asyncio.sleep(0)
            assert readers.start(fail, OSError, "why", within_s=LONGEST_S) is not call

    in_loop(work)


def test_call_whose_callers_have_left_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    """Otherwise requests without a caller would delay later ones."""
    starts, until = tmp_path / "starts", tmp_path / "until"

    async def work(readers: ReaderPool) -> None:
        first = readers.start(use_cpu, str(starts), str(until), within_s=LONGEST_S)
        for _ in range(3):
            with pytest.raises(ReadError, match="all reader processes are busy"):
                await readers.call(read_slowly, str(starts), str(until), within_s=0.01)
        until.touch()
        assert await first.wait() == "done"
        assert await readers.call(pid_and_priority, within_s=LONGEST_S)

    in_loop(work)
    assert starts.read_text() == "started\n"


def test_contention_for_cpus_is_reported(tmp_path: Path) -> None:
    """Readers have the lowest priority, so programs on all processors delay them."""
    until = tmp_path / "until"

    async def work(readers: ReaderPool) -> str:
        await readers.call(pid_and_priority, within_s=LONGEST_S)
        with busy_machine(3 * PROCESSORS), pytest.raises(ReadError) as raised:
            await readers.call(use_cpu, str(tmp_path / "starts"), str(until), within_s=3)
        until.touch()
        return str(raised.value)

    assert "because other processes use the CPUs" in in_loop(work)


@pytest.mark.long
def test_run_is_read_again_after_its_disk_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is being read shows what its reader waits for. An ended run does not change."""
    until = tmp_path / "until"
    monkeypatch.setattr(run_list, "_LOOK_INTERVAL_S", LONG_S)
    monkeypatch.setattr(run_list, "_READ_WITHIN_S", 1)
    monkeypatch.setattr(run_list, "read_lines", read_lines_when_file_exists)
    found = [FoundRun(os.fspath(until), 1)]

    async def work(readers: ReaderPool) -> None:
        runs = run_list.RunList(os.fspath(tmp_path), readers, found)
        while (head := (await runs.load_page(0)).lines[0].headline).status != "UNREADABLE":
            assert head.status == "READING"
        assert "the disk did not answer" in head.sentence
        until.touch()
        while (await runs.load_page(0)).lines[0].state != "ended":
            await asyncio.sleep(0.1)

    in_loop(work)


def test_call_that_has_just_begun_has_no_times() -> None:
    activity = ReaderActivity()
    activity.begin(os.getpid())
    activity.update()

    assert activity.describe() == "still reading"
