"""Checks of files tell an answer from what a signal handler raises."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchlens_perf.run.file_checks import is_file, is_missing, resolve_links
from torchlens_perf.run.kept_file import KeptFile
from torchlens_perf.run.rings.memory import wait_until_opened_elsewhere


@pytest.fixture
def signal_in_stat() -> Iterator[None]:
    """Let the next os.stat() or os.lstat() run a signal handler that raises TimeoutError."""

    def raise_timeout(number: int, frame: Any) -> None:
        raise TimeoutError

    def send(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and argument in (os.stat, os.lstat):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, raise_timeout)
    sys.setprofile(send)
    yield
    sys.setprofile(None)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("signal_in_stat")
@pytest.mark.parametrize("check", [is_missing, is_file, resolve_links])
def test_what_a_signal_handler_raises_is_no_answer(
    check: Callable[[str], object], tmp_path: Path
) -> None:
    with pytest.raises(TimeoutError):
        check(str(tmp_path))


@pytest.mark.usefixtures("signal_in_stat")
def test_function_of_the_standard_library_takes_it_for_an_answer(tmp_path: Path) -> None:
    assert not os.path.lexists(tmp_path)


def test_answers_are_those_of_the_standard_library(tmp_path: Path) -> None:
    file, link, dead = (tmp_path / name for name in ("file", "link", "dead"))
    file.touch()
    link.symlink_to(file)
    dead.symlink_to("gone")
    for path in map(str, (tmp_path, file, link, dead, tmp_path / "gone")):
        assert is_missing(path) != os.path.exists(path)
        assert is_missing(path, follow_links=False) != os.path.lexists(path)
        assert is_file(path) == os.path.isfile(path)
    assert resolve_links(str(link)) == os.path.realpath(link)
    assert resolve_links(str(tmp_path / "gone" / "x")) == str(tmp_path / "gone" / "x")


def test_path_is_only_missing_if_its_disk_says_so(tmp_path: Path) -> None:
    loop, file, limit = tmp_path / "loop", tmp_path / "file", os.pathconf(tmp_path, "PC_NAME_MAX")
    loop.symlink_to(loop)
    file.touch()
    for unreadable in (loop, loop / "ring", tmp_path / ("x" * (limit + 1))):
        assert not is_missing(unreadable)
    for gone in (tmp_path / "gone", tmp_path / "gone" / "ring", file / "ring"):
        assert is_missing(gone)


def test_ring_on_a_failing_disk_is_kept_in_memory(tmp_path: Path) -> None:
    """The process cannot know that another one has taken the ring over."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    file = KeptFile(os.open(tmp_path, os.O_RDONLY))

    assert not wait_until_opened_elsewhere(str(loop / "rank.ring"), file, 0.0)
    assert wait_until_opened_elsewhere(str(tmp_path / "rank.ring"), file, 0.0)
    file.close()
