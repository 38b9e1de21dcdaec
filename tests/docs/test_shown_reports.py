"""Tests that each report in the docs equals the output of the command above it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.code_blocks import Block, blocks
from torchlens_perf.commands.cli import main

SIMULATED = "torchlens_perf  simulation"
_CLOCK = re.compile(r"\d\d:\d\d:\d\d UTC")


def examples() -> list[tuple[str, Block]]:
    """Return each report of a simulated run with the `simulate` command above it."""
    found, command = [], ""
    for block in blocks():
        if block.language == "sh":
            command = next(
                (str(each) for each in block.commands() if "simulate" in each.words), command
            )
        elif block.text.startswith(SIMULATED):
            found.append((command, block))
    return found


def test_docs_show_reports_of_a_slow_and_a_healthy_job() -> None:
    assert len({command for command, _ in examples()}) >= 2


@pytest.mark.parametrize(
    ("command", "block"), examples(), ids=[block.place for _, block in examples()]
)
def test_shown_report_lines_equal_the_commands_output(
    command: str,
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lines must be in the same order. `...` marks omitted lines, and times of day may differ."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    printed = iter(_CLOCK.sub("", capsys.readouterr().out).splitlines())
    shown = [
        line for line in _CLOCK.sub("", block.text).splitlines() if line.strip() not in ("", "...")
    ]
    assert len(shown) >= 5
    assert [line for line in shown if line not in printed] == []
