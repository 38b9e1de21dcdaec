"""Where a training process hears from the sidecar: whole texts only, each once, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from torchlens_perf.run.mailbox import ALERTS, ANSWER, RESULTS, VIEW, Mailbox, deliver, question


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return tmp_path / "rank-1-2.ring"


def test_each_text_is_news_once(ring: Path) -> None:
    """Also an equal one that was delivered anew is news."""
    box = Mailbox(ring, VIEW)
    assert box.news() is None

    deliver(str(box.path), "first")
    os.utime(box.path, ns=(1, 1))
    assert (box.news(), box.news()) == ("first", None)
    deliver(str(box.path), "first")
    assert (box.news(), box.news()) == ("first", None)
    box.close()


def test_a_text_that_is_being_written_is_none_yet(ring: Path) -> None:
    """The rest comes later; what is there meanwhile is neither shown nor forgotten."""
    box = Mailbox(ring, VIEW)
    with open(box.path, "wb", buffering=0) as file:
        file.write(b"ha")
        assert box.news() is None
        file.write(b"lf\0")
    assert box.news() == "half"
    box.close()


def test_a_question_is_asked_until_it_is_answered(ring: Path) -> None:
    """It is no answer to itself, and nobody is asked twice."""
    box = Mailbox(ring, ANSWER, RESULTS)
    assert (question(box.path), box.news()) == (RESULTS, None)

    deliver(str(box.path), "")
    assert (question(box.path), box.wait(0.0)) == (None, "")
    box.close()
    assert question(box.path) is None


def test_who_comes_too_late_leaves_nothing(ring: Path) -> None:
    """A process that does not wait any more has its file taken away, and the sidecar makes none."""
    box = Mailbox(ring, ALERTS)
    box.close()
    deliver(str(box.path), "late")

    assert list(ring.parent.iterdir()) == []


def test_no_room_for_a_question(ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no mailbox, and none is left; one without a question needs no room."""

    def full(descriptor: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        Mailbox(ring, ANSWER, RESULTS)
    assert list(ring.parent.iterdir()) == []
    Mailbox(ring, VIEW).close()


def test_one_of_a_kind(ring: Path) -> None:
    """A second one of the same process is refused: two readers would take one another's texts."""
    box = Mailbox(ring, ANSWER)
    with pytest.raises(FileExistsError):
        Mailbox(ring, ANSWER)
    box.close()


def test_no_link_is_followed(ring: Path) -> None:
    """Somebody has put one in its place."""
    other = ring.parent / "precious"
    other.write_text("kept")
    ring.with_suffix(VIEW).symlink_to(other)
    with pytest.raises(FileExistsError):
        Mailbox(ring, VIEW)
    with pytest.raises(OSError, match="symbolic"):
        deliver(str(ring.with_suffix(VIEW)), "text")
    assert question(ring.with_suffix(VIEW)) is None
    assert other.read_text() == "kept"
