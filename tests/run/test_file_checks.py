"""Checks of files tell an answer from what a signal handler raises."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchlens_perf.run.file_checks import exists, is_file, is_link, resolve_links


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
@pytest.mark.parametrize("check", [exists, is_file, is_link, resolve_links])
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
        assert exists(path) == os.path.lexists(path)
        assert is_file(path) == os.path.isfile(path)
        assert is_link(path) == os.path.islink(path)
    assert resolve_links(str(link)) == os.path.realpath(link)
    assert resolve_links(str(tmp_path / "gone" / "x")) == str(tmp_path / "gone" / "x")
