"""Resident memory of the process at the end of each step."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.recording import recorded
from torchlens_perf.errors import RAISE, swallowed
from torchlens_perf.recorder import step_callbacks


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is the device's memory")
def test_each_step_has_the_resident_memory_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on the CPU that a step creates increases the memory recorded for the step."""
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
    kept = []
    with recorded(tmp_path) as recording:
        for _ in range(3):
            before = resident_bytes()
            recording.watch.step()
            after = resident_bytes()
            kept.append((before, after))
        big = torch.ones(1 << 24)
        recording.watch.step()

    *small, with_big = [step.value0 for step in recording.steps]
    for (before, after), value in zip(kept, small, strict=True):
        assert min(before, after) <= value <= max(before, after)
    assert with_big - small[-1] > big.nbytes / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is the device's memory")
def test_resident_memory_of_short_steps_is_read_once_in_50_ms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading of the memory costs as much as all other work at a step's end.

    Steps between two readings have the last number read.
    """
    reads, opened = [], os.open

    def counting(path: object, *args: int) -> int:
        reads.extend([path] * (path == "/proc/self/statm"))
        return opened(path, *args)  # type: ignore[arg-type]

    with recorded(tmp_path) as recording:
        with monkeypatch.context() as counted:
            counted.setattr(os, "open", counting)
            for _ in range(50):
                recording.watch.step()

    elapsed_ns = (
        recording.steps[-1].start_ns + recording.steps[-1].duration_ns - recording.steps[0].start_ns
    )
    assert 1 <= len(reads) <= 1 + elapsed_ns // 50_000_000
    assert all(step.value0 > 0 for step in recording.steps)


def test_steps_have_no_memory_if_the_setting_is_off(tmp_path: Path) -> None:
    with recorded(tmp_path, memory="off") as recording:
        recording.watch.step()

    assert [step.value0 for step in recording.steps] == [0]
    assert recording.metadata["memory_source"] == ""


def test_source_of_the_memory_numbers_is_published(tmp_path: Path) -> None:
    with recorded(tmp_path) as recording:
        recording.watch.step()

    expected = (
        "device allocator, peak" if torch.cuda.is_available() else "resident memory of the process"
    )
    assert expected == recording.metadata["memory_source"]


def test_memory_is_switched_off_with_a_note_after_a_failed_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is recorded for the step of the failed reading."""

    def fail(*args: object) -> int:
        raise OSError("no /proc here")

    with recorded(tmp_path) as recording:
        with monkeypatch.context() as broken:
            broken.setenv(RAISE, "0")
            broken.setattr(swallowed, "by_place", Counter())
            broken.setattr(os, "open", fail)
            for _ in range(3):
                recording.watch.step()

    assert len(recording.steps) == 3
    assert any("memory failed" in note for note in recording.notes)
    assert recording.internal_errors == 1
