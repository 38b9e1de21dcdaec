"""A program may close every descriptor and open its own files under the same numbers.

Daemons do so. torchlens_perf neither closes nor reads the program's files.
"""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlens_perf as perf
from tests.support.recorded_run import wait_for_sidecar
from tests.support.recording import recorded
from torchlens_perf.report.run_report import load_report
from torchlens_perf.run.directory import RunDirectory
from torchlens_perf.run.kept_file import KeptFile
from torchlens_perf.run.mailbox import ALERTS, Mailbox, deliver_text
from torchlens_perf.run.ring import Kind, RingFile
from torchlens_perf.run.rings import memory

TEXT = "results of the program"


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """Close the files in garbage of earlier tests now, and not during a test."""
    gc.collect()


def open_regular() -> int:
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor


def open_numbers() -> int:
    """Open a file with the text of a file of scheduling statistics."""
    descriptor = open_regular()
    os.write(descriptor, b"999999999999999 999999999999999 1\n")
    return descriptor


def open_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


KINDS: dict[str, Callable[[], int]] = {
    "file": open_regular,
    "numbers": open_numbers,
    "pipe": open_pipe,
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "null": lambda: os.open(os.devnull, os.O_RDWR),
    "duplicate": lambda: os.dup(2),
}


def numbers_in_use() -> set[int]:
    numbers = os.listdir("/proc/self/fd")  # includes the descriptor of this call
    return {int(name) for name in numbers if os.path.lexists(f"/proc/self/fd/{name}")}


@contextmanager
def files_in_place_of(numbers: set[int], open_file: Callable[[], int]) -> Iterator[None]:
    """Replace the files with these numbers, as a program does that closes what it does not know.

    Fail if a replaced file is not open at the end.
    """
    expected = {}
    for number in numbers:
        made = open_file()
        if made != number:
            os.dup2(made, number)
            os.close(made)
        expected[number] = os.fstat(number)
    yield
    for number, found in expected.items():
        assert os.path.samestat(os.fstat(number), found)
        os.close(number)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(8, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # Scheduling statistics are read in steps of 10 ms.
        threading.Event().wait(0.011)


@pytest.mark.parametrize("kind", KINDS)
def test_files_under_the_numbers_of_a_watch_stay_open_and_unread(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = numbers_in_use()
    with ExitStack() as replaced:
        with recorded(tmp_path, model, optimizer) as recording:
            train(model, optimizer, 3)
            replaced.enter_context(files_in_place_of(numbers_in_use() - before, KINDS[kind]))
            train(model, optimizer, 4)
        assert caplog.records == []

    assert [step.step for step in recording.steps] == list(range(7))
    assert all(step.value0 > 0 for step in recording.steps)
    times = recording.of(Kind.THREAD_TIME)
    # The file of step 3 was closed. The next step has a new one.
    assert {each.step for each in times} >= {4, 5, 6}
    assert all(each.value0 < 10**10 for each in times)
    assert numbers_in_use() == before


def test_closing_all_descriptors_loses_no_step(tmp_path: Path) -> None:
    """The program keeps no descriptor, so the numbers of the next files are those of the watch."""
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = numbers_in_use()
    with perf.watch(model, optimizer, dir=str(tmp_path), report="off") as watch:
        train(model, optimizer, 2)
        for number in numbers_in_use() - before:
            os.close(number)
        paths = [tmp_path / str(number) for number in range(12)]
        files = [path.open("w") for path in paths]
        train(model, optimizer, 3)
    for file in files:
        file.write(TEXT)
        file.close()
    assert [path.read_text() for path in paths] == [TEXT] * 12
    assert watch.run_dir is not None
    run = RunDirectory(watch.run_dir)
    wait_for_sidecar(run, 60)

    assert load_report(run)["steps"]["count"] == 5


def test_map_of_a_ring_has_no_descriptor(tmp_path: Path) -> None:
    before = numbers_in_use()
    mapped = memory.reserve_file(tmp_path / "ring", 1 << 16)

    assert numbers_in_use() == before
    mapped[5:8] = b"abc"
    assert (tmp_path / "ring").read_bytes()[5:8] == b"abc"
    mapped.close()


def test_ring_in_anonymous_memory_does_not_close_another_file(tmp_path: Path) -> None:
    before = numbers_in_use()
    ring = RingFile(tmp_path / "rank00000-attempt0-1-2.ring", 64, anonymous=True)
    with files_in_place_of(numbers_in_use() - before, open_regular):
        # No process can open the memory any more.
        assert not ring.release(60.0)
    ring.close()


def test_message_is_received_after_the_program_has_closed_the_mailbox(tmp_path: Path) -> None:
    before = numbers_in_use()
    mailbox = Mailbox(tmp_path / "rank.ring", ALERTS)
    with files_in_place_of(numbers_in_use() - before, open_numbers):
        assert mailbox.read_new_message() is None
        deliver_text(str(mailbox.path), "an alert")
        assert mailbox.read_new_message() == "an alert"
        mailbox.close()
    assert not mailbox.path.exists()


def test_kept_file_is_closed_once() -> None:
    number = open_regular()
    file = KeptFile(number)
    file.close()
    with files_in_place_of({number}, open_regular):
        file.close()
        assert file.stat() is None
        assert file.read(1) == b""


def run_daemon(work: Callable[[], None]) -> int:
    """Run a function in a daemon, and return the daemon's exit code."""
    child = os.fork()
    if not child:
        os.setsid()
        code = 1
        try:
            os.closerange(3, 256)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_daemon_forked_inside_a_watch_keeps_its_files_and_the_parents_steps(tmp_path: Path) -> None:
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = tmp_path / "out"

    def write_in_daemon() -> None:
        out.write_text(TEXT)

    with recorded(tmp_path, model, optimizer) as recording:
        train(model, optimizer, 2)
        assert run_daemon(write_in_daemon) == 0
        train(model, optimizer, 2)

    assert out.read_text() == TEXT
    assert len(recording.steps) == 4
