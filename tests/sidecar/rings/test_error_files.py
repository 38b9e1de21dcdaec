"""Failures that only torchrun's error files describe."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchlens_perf.run.processes import process_start_ticks
from torchlens_perf.run.rank_facts import RankFacts
from torchlens_perf.sidecar.rings.error_files import add_reported_failures


def rank(ended: str, error_file: str | Path = "") -> Any:
    identity = SimpleNamespace(process_started=process_start_ticks(os.getpid()))
    facts = RankFacts(error_file=str(error_file))
    state = SimpleNamespace(
        identity=identity, facts=facts, ended=ended, failure=None, made_steps=10, end=None
    )
    observer = SimpleNamespace(read_end=lambda: {"signal": 9, "exit_code": None})
    return SimpleNamespace(
        settled=bool(ended), state=state, progress=SimpleNamespace(end_observer=observer)
    )


def nested(message: str) -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1"}}})


def failure_in(content: str | bytes, folder: Path, ended: str = "closed") -> Any:
    """Return the failure of a rank with this error file, while another rank has died."""
    path = folder / "error.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    first = rank(ended, path)
    add_reported_failures([first, rank("died")])
    return first.state.failure


@pytest.mark.parametrize(
    ("content", "kind", "message", "lost_peer"),
    [
        (nested("ValueError: bad batch: 3"), "ValueError", "bad batch: 3", False),
        (nested("KeyError: ''"), "KeyError", "''", False),
        (nested("two\nlines\x1b[31m"), "", "two lines?[31m", False),
        (nested("RuntimeError: Connection closed by peer"), "RuntimeError",
         "Connection closed by peer", True),
        (nested("BrokenPipeError: [Errno 32] Broken pipe"), "BrokenPipeError",
         "[Errno 32] Broken pipe", True),
        (json.dumps({"message": "Child died"}), "", "Child died", False),
        (nested("ValueError: " + "x" * 100_000), "ValueError", "x" * 300, False),
    ],
)  # fmt: skip
def test_failure_is_read_from_torchruns_error_file(
    content: str, kind: str, message: str, lost_peer: bool, tmp_path: Path
) -> None:
    found = failure_in(content, tmp_path)

    assert (found["type"], found["message"], found["lost_peer"]) == (kind, message, lost_peer)
    assert (found["step"], found["after_watch"]) == (10, True)
    assert not failure_in(content, tmp_path, "died")["after_watch"]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "7", "[]", "null", '{"message": 7}', '{"message": {"message": ["x"]}}',
        b"\xff\xfe", "[" * 100_000, b" " * (1 << 20) + b"{}", '{"message": ""}',
    ],
)  # fmt: skip
def test_other_content_is_no_failure(content: str | bytes, tmp_path: Path) -> None:
    assert failure_in(content, tmp_path) is None


def test_only_regular_files_of_the_rank_are_read(tmp_path: Path) -> None:
    before, link, fifo = tmp_path / "before", tmp_path / "link", tmp_path / "fifo"
    before.write_text(nested("ValueError: of an earlier process"))
    os.utime(before, ns=(0, 1))
    (tmp_path / "target").write_text(nested("ValueError: linked"))
    link.symlink_to(tmp_path / "target")
    os.mkfifo(fifo)
    ranks = [rank("died", path) for path in ("", before, link, fifo, tmp_path, "\0")]
    add_reported_failures(ranks)

    assert [each.state.failure for each in ranks] == [None] * 6


def test_run_that_ended_normally_has_not_failed(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(nested("ValueError: after the run"))
    closed, running = rank("closed", path), rank("", path)
    add_reported_failures([closed, rank("closed")])
    add_reported_failures([running, rank("died")])

    assert closed.state.failure is running.state.failure is None
    assert time.time_ns() > path.stat().st_mtime_ns
