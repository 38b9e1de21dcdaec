"""Tests that exceptions of the program's signal handlers, and of PyThreadState_SetAsyncExc, leave a
watch wherever they arrive.

The tests let a signal arrive before each line of the package that a short training runs.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchlens_perf as perf
from tests.support.busy_machine import PROCESSORS, busy_machine
from tests.support.figures import note
from tests.support.interruptions import (
    Line,
    exception_sender,
    functions_called,
    lines_run,
    sent_at,
    signal_sender,
)
from tests.support.leftovers import end_sidecars, remove
from tests.support.long import long
from tests.support.process_state import state
from torchlens_perf import watching
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.hooks.loop.training_loop import TrainingLoop

PACKAGE = str(Path(perf.__file__).parent)
SIGNAL = signal.SIGUSR1


class LimitReached(Exception):
    """The program's own exception."""

    def __init__(self, text: str = "by the program") -> None:
        super().__init__(text)


KINDS: tuple[type[BaseException], ...] = (LimitReached, TimeoutError, KeyboardInterrupt, SystemExit)


@pytest.fixture(autouse=True)
def _lenient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Do not raise internal errors, as in a user's process."""
    monkeypatch.setenv(RAISE, "0")
    yield
    end_sidecars()
    remove(tmp_path / "runs")


class Job:
    """A program that trains a few steps inside a watch."""

    def __init__(self, runs: Path, *, sidecar: bool = False) -> None:
        self._settings: dict[str, Any] = {
            "dir": str(runs), "sidecar": sidecar, "ring_records": 1024, "report": "text" if sidecar else "off",
        }  # fmt: skip
        self._model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._loader = DataLoader(TensorDataset(torch.ones(16, 4)), 2)

    def run(self) -> None:
        with perf.watch(self._model, self._optimizer, **self._settings):
            for (batch,) in self._loader:
                with perf.section("step"):
                    self._model(batch).sum().backward()
                    self._optimizer.step()
                    self._optimizer.zero_grad()
            gc.collect()


def attached() -> dict[str, Any]:
    """Return what a watch attaches to the process.

    An interrupted call of open() may leave one descriptor to the process, as in any Python code.
    The DataLoader draws random numbers.
    """
    ignored = ("files", "random", "threads")
    return {name: value for name, value in state().items() if name not in ignored}


class Senders:
    """Ways in which a program raises exceptions in its training thread."""

    def __init__(self) -> None:
        self._raised: type[BaseException] = LimitReached
        self._by_signal = signal_sender(SIGNAL)
        self.ways = [
            *((kind, True) for kind in KINDS),
            *((kind, False) for kind in (LimitReached, TimeoutError)),
        ]

    def handle(self, number: int, frame: FrameType | None) -> None:
        raise self._raised()

    def choose(self, way: tuple[type[BaseException], bool]) -> Any:
        self._raised, by_signal = way
        return self._by_signal if by_signal else exception_sender(self._raised)


@pytest.fixture
def senders() -> Iterator[Senders]:
    made = Senders()
    before = signal.signal(SIGNAL, made.handle)
    yield made
    signal.signal(SIGNAL, before)


def is_report_skipped(line: Line, kind: type[BaseException]) -> bool:
    """Return True if Ctrl-C only ends the wait for the report, which a message offers."""
    return kind is KeyboardInterrupt and "report" in f"{line[0].co_filename} {line[0].co_name}"


def find_problems(job: Job, lines: list[Line], senders: Senders, ways: list[Any]) -> list[str]:
    """Interrupt the job at each line. Return what went wrong."""
    problems, before = [], attached()
    for line, way in zip(lines, itertools.cycle(ways), strict=False):
        sender, caught = senders.choose(way), None
        name = f"{Path(line[0].co_filename).name}:{line[1]} {line[0].co_name} {way[0].__name__} {way[1]}"
        try:
            with sent_at(line, sender) as sent:
                job.run()
        except BaseException as error:
            caught = type(error)
        left = watching._running
        if sent and caught is not way[0] and not is_report_skipped(line, way[0]):
            problems.append(f"{name}: lost, {caught}")
        if left is not None:
            problems.append(f"{name}: still recording")
            left.stop()
        gc.collect()
        now = attached()
        if now != before:
            problems.append(f"{name}: left {[key for key in now if now[key] != before[key]]}")
            before = now
    return problems


@pytest.mark.parametrize("every", [40, *long(1)])
def test_exception_leaves_the_watch_from_any_line(
    every: int, tmp_path: Path, senders: Senders
) -> None:
    """Nothing stays attached, and the next watch records."""
    job = Job(tmp_path / "runs")
    for _ in range(2):
        # The first runs import modules and register what stays.
        job.run()
    lines = lines_run(job.run, PACKAGE)
    gc.collect()
    gc.freeze()

    problems = find_problems(job, lines[::every], senders, senders.ways)
    assert problems == []
    assert len(lines) > 1500
    assert lines_run(job.run, PACKAGE)


class TimeLimit:
    """A handler that is an object, and restores the handler from before it raises."""

    def __init__(self) -> None:
        self.before = signal.signal(SIGNAL, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(SIGNAL, self.before)
        raise TimeoutError

    def limit(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError


def raise_limit(text: str, number: int, frame: FrameType | None) -> None:
    del frame
    raise TimeoutError(text)


def call_deeper(*arguments: Any) -> None:
    raise_limit("deeper", *arguments)


def wrapped(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return call


HANDLERS: dict[str, Callable[[], Any]] = {
    "object that restores": TimeLimit,
    "method": lambda: TimeLimit().limit,
    "partial": lambda: functools.partial(raise_limit, "a time limit"),
    "any arguments": lambda: call_deeper,
    "decorated": lambda: wrapped(call_deeper),
    "lambda": lambda: lambda number, frame: raise_limit("by lambda", number, None),
    "generator's throw": lambda: lambda number, frame: (_ for _ in ()).throw(TimeoutError),
}


@pytest.mark.parametrize("form", HANDLERS)
def test_handlers_of_every_form_end_the_loop(form: str, tmp_path: Path, senders: Senders) -> None:
    """The signal arrives in a hook of the optimizer, whose own exceptions do not reach the loop."""
    signal.signal(SIGNAL, HANDLERS[form]())
    code = next(
        each
        for each in functions_called(Job(tmp_path / "runs").run, PACKAGE)
        if each.co_name == "on_optimizer_step"
    )
    lines = (each for each in lines_run(Job(tmp_path / "runs").run, PACKAGE) if each[0] is code)
    with pytest.raises(TimeoutError), sent_at(next(lines), signal_sender(SIGNAL)):
        Job(tmp_path / "runs").run()
    assert watching._running is None


def test_errors_of_the_package_still_do_not_end_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that this package raises itself are contained, also those of the program's types."""
    raised = []

    def fail(*args: object, **more: object) -> None:
        raised.append(None)
        raise TimeoutError("of the package")

    with monkeypatch.context() as broken:
        broken.setattr(swallowed, "by_place", Counter())
        broken.setattr(TrainingLoop, "on_optimizer_step", fail)
        Job(tmp_path / "runs").run()
        counted = sum(swallowed.by_place.values())

    assert 0 < counted == len(raised)


SIGNALS = 1000


def count_lost(signals: int, runs: Path) -> int:
    """Let a timer's signals arrive at random moments of the job. Return how many were lost.

    A job that ends before its signal is repeated, so the number of signals does not depend on the
    machine's speed.
    """
    job, fired, caught = Job(runs), 0, 0

    def on_alarm(number: int, frame: FrameType | None) -> None:
        nonlocal fired
        fired += 1
        raise (LimitReached, TimeoutError)[fired % 2]

    before = signal.signal(signal.SIGALRM, on_alarm)
    generator = random.Random(0)
    try:
        job.run()
        lasts_s = 1.0
        while fired < signals:
            began_s = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-4, lasts_s))
                job.run()
                signal.setitimer(signal.ITIMER_REAL, 0)
                lasts_s = 1.2 * (time.monotonic() - began_s)
            except (LimitReached, TimeoutError):
                caught += 1
                # An exception at the end of torch.no_grad() leaves gradients off, in any program.
                torch.set_grad_enabled(True)
            assert watching._running is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return fired - caught


@pytest.mark.parametrize("signals", [50, *long(SIGNALS)])
def test_no_exception_is_lost_at_random_moments(
    signals: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before, began_s = attached(), time.monotonic()
    # An exception that arrives in a callback of another tool is lost in any program.
    callbacks, gc.callbacks[:] = list(gc.callbacks), []
    request.addfinalizer(lambda: gc.callbacks.extend(callbacks))
    before["collector"] = attached()["collector"]
    with busy_machine(2 * PROCESSORS if signals == SIGNALS else 0):
        lost = count_lost(signals, tmp_path / "runs")
    if signals == SIGNALS:
        note(
            "signal handlers that raise (`jobs/test_user_exceptions.py`)", signals, SIGNALS,
            f"{lost} of {signals} exceptions lost", time.monotonic() - began_s,
        )  # fmt: skip

    assert lost == 0
    assert attached() == before


@pytest.mark.long
def test_no_exception_is_lost_in_forked_processes(tmp_path: Path) -> None:
    for _ in range(8):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = int(count_lost(25, tmp_path / "runs") > 0)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
