"""Tests that a training process receives each text from the sidecar completely and only once.

Mailboxes leave no files behind.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from torchlens_perf.run.mailbox import (
    ALERTS,
    ANSWER,
    RESULTS,
    VIEW,
    Mailbox,
    deliver_text,
    read_question,
)


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return tmp_path / "rank-1-2.ring"


def test_each_delivered_text_is_returned_once(ring: Path) -> None:
    """A second delivery of an equal text counts as a change."""
    box = Mailbox(ring, VIEW)
    assert box.read_new_message() is None

    deliver_text(str(box.path), "first")
    os.utime(box.path, ns=(1, 1))
    assert (box.read_new_message(), box.read_new_message()) == ("first", None)
    deliver_text(str(box.path), "first")
    assert (box.read_new_message(), box.read_new_message()) == ("first", None)
    box.close()


def test_partial_text_is_returned_once_it_is_complete(ring: Path) -> None:
    box = Mailbox(ring, VIEW)
    with open(box.path, "wb", buffering=0) as file:
        file.write(b"ha")
        assert box.read_new_message() is None
        file.write(b"lf\0")
    assert box.read_new_message() == "half"
    box.close()


def test_question_is_visible_until_it_is_answered(ring: Path) -> None:
    """The reader never receives the question as its own answer."""
    box = Mailbox(ring, ANSWER, RESULTS)
    assert (read_question(box.path), box.read_new_message()) == (RESULTS, None)

    deliver_text(str(box.path), "")
    assert (read_question(box.path), box.wait_for_message(0.0)) == (None, "")
    box.close()
    assert read_question(box.path) is None


def test_delivery_after_the_reader_left_creates_no_file(ring: Path) -> None:
    """The reader has removed its mailbox file before the delivery."""
    box = Mailbox(ring, ALERTS)
    box.close()
    deliver_text(str(box.path), "late")

    assert list(ring.parent.iterdir()) == []


def test_full_disk_raises_and_leaves_no_mailbox(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mailbox without a question needs no space."""

    def full(descriptor: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="full"):
        Mailbox(ring, ANSWER, RESULTS)
    assert list(ring.parent.iterdir()) == []
    Mailbox(ring, VIEW).close()


def test_second_mailbox_of_a_kind_is_refused(ring: Path) -> None:
    """Two readers would receive each other's texts."""
    box = Mailbox(ring, ANSWER)
    with pytest.raises(FileExistsError):
        Mailbox(ring, ANSWER)
    box.close()


def test_mailbox_that_is_a_link_is_not_followed(ring: Path) -> None:
    """Another user may have made the link."""
    other = ring.parent / "precious"
    other.write_text("kept")
    ring.with_suffix(VIEW).symlink_to(other)
    with pytest.raises(FileExistsError):
        Mailbox(ring, VIEW)
    with pytest.raises(OSError, match="symbolic"):
        deliver_text(str(ring.with_suffix(VIEW)), "text")
    assert read_question(ring.with_suffix(VIEW)) is None
    assert other.read_text() == "kept"
