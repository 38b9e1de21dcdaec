"""The program top in a real terminal: drawing, resizing, missing colour or Unicode, and its end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("textual", reason="Textual is not installed: pip install 'torchlens-perf[top]'")

from tests.support.live_simulation import LiveSimulation
from tests.support.long import long
from tests.support.processes import SCRIPTS, clean_environ, wait_for_sidecar
from tests.support.tmux import PROMPT, Tmux
from tests.support.warm_python import WarmPython
from torchlens_perf.run.directory import RunDirectory

pytestmark = [pytest.mark.slow]

TOP = f"{sys.executable} -m torchlens_perf top"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveSimulation]:
    """Return a live run of eight ranks, in which rank 3 is slow."""
    path = tmp_path_factory.mktemp("terminal") / "run"
    with LiveSimulation(path, 8, "constant:rank=3,share=0.3,phase=forward", node_size=4) as live:
        live.add_blocks(4)
        yield live


def test_top_of_a_live_run_shows_progress_activity_and_end(tmp_path: Path) -> None:
    """The screen shows the training process's progress, time left, current activity, and end."""
    runs, stop = tmp_path / "runs", tmp_path / "stop"
    with open(tmp_path / "log", "wb") as log:
        command = [
            sys.executable,
            str(SCRIPTS / "train_until_told.py"),
            str(runs),
            str(stop),
            "1000000",
        ]
        training = WarmPython(command, cwd=tmp_path, env=clean_environ({}), stdout=log, stderr=log)
    try:
        with Tmux(environment={"TORCHLENS_PERF_DIR": str(runs)}) as terminal:
            terminal.type(f"stty -g > {tmp_path}/before; {TOP}", "Enter")
            terminal.sees("1 rank LIVE ")
            terminal.sees(
                lambda lines: any(
                    re.match(r"── [\d,]+ of 1,000,000 steps \([\d.]+%\) .* left", each)
                    for each in lines
                )
            )
            terminal.type("Enter")
            terminal.sees("── rank 0")
            terminal.sees(": running")
            # Between two steps, the line on the activity is missing for an instant.
            activity = re.compile(
                r"  at [\d:]{8}: in step [\d,]+ for [\d.]+ .?s, (inside|in code outside) "
            )
            terminal.sees(lambda lines: any(activity.match(line) for line in lines))
            stop.touch()
            terminal.sees("1 rank ENDED ")
            terminal.type("q")
            terminal.sees(lambda lines: lines[-1].startswith(PROMPT.strip()))
            terminal.type(f"echo code $?; stty -g > {tmp_path}/after; echo done", "Enter")
            lines = terminal.sees("code 0 done")
    finally:
        stop.touch()
        training.wait(60)
        for path in runs.glob("*/nodes"):
            wait_for_sidecar(RunDirectory(path.parent))
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text() != ""
    # The previous screen is shown again.
    assert not any("rank 0" in line for line in lines)


@pytest.mark.parametrize("size", [(80, 24), *long(((120, 40),), ((200, 60),))])
def test_slow_rank_cost_and_action_are_not_cut_off(
    planted: LiveSimulation, size: tuple[int, int]
) -> None:
    """All ranks, parts and keys are visible at the same time."""
    with Tmux(*size) as terminal:
        terminal.type(f"{TOP} {planted.run.path}", "Enter")
        terminal.sees("q quit")
        terminal.sees("SLOW RANK rank 3")
        # This is the last expected text that is drawn.
        lines = terminal.sees("░ comm wait")

    text = " ".join(" ".join(lines).split())
    assert len(lines) == size[1]
    assert lines[0].startswith("simulation  run  8 ranks")
    assert re.search(
        r"cost [\d.]+ ms per step = \d+% of a mean step of [\d.]+ ms evidence Rank 3 computes .* next .* --rank"
        r" 3 ──",
        text,
    )
    assert re.search(r"▶ 3 .*\d+ \+[\d.]+ \+\d+% █", text)
    assert all(part in text for part in ("█ forward", "▓ backward", "▒ optimizer", "░ comm wait"))
    assert lines[-1].startswith("q quit  ? help  Enter open")


@pytest.mark.long
def test_screen_adapts_to_a_resized_terminal(planted: LiveSimulation) -> None:
    """The size changes while the program runs, to small and large sizes."""

    def is_drawn(shown: list[str], columns: int, lines: int, keys: str) -> bool:
        """Return True if a screen of this size is complete: its first line has full width."""
        return len(shown) == lines and len(shown[0]) == columns and shown[-1].endswith(keys)

    with Tmux(120, 40) as terminal:
        terminal.type(f"{TOP} {planted.run.path}", "Enter")
        terminal.sees(lambda shown: is_drawn(shown, 120, 40, "r runs"))
        for columns, lines, keys in (
            (60, 16, "o order"),
            (20, 5, "? help"),
            (200, 60, "r runs"),
            (120, 40, "r runs"),
        ):
            terminal.resize(columns, lines)
            terminal.sees(partial(is_drawn, columns=columns, lines=lines, keys=keys))


def test_slow_rank_is_recognizable_without_colour(planted: LiveSimulation) -> None:
    """NO_COLOR is set."""
    with Tmux(environment={"NO_COLOR": "1"}) as terminal:
        terminal.type(f"{TOP} {planted.run.path}", "Enter")
        lines = terminal.sees("SLOW RANK rank 3")
        styled = "\n".join(terminal.lines(styled=True))
    with Tmux() as terminal:
        terminal.type(f"{TOP} {planted.run.path}", "Enter")
        terminal.sees("SLOW RANK rank 3")
        coloured = "\n".join(terminal.lines(styled=True))

    color = re.compile(r"\x1b\[[\d;]*\b(3[0-8]|4[0-8]|9\d|10\d)[;m]")
    assert color.search(coloured)
    assert not color.search(styled)
    assert lines


@pytest.mark.long
def test_screen_is_ascii_in_the_c_locale(planted: LiveSimulation) -> None:
    """The terminal supports Unicode, but LC_ALL is C."""
    with Tmux(environment={"LC_ALL": "C"}) as terminal:
        terminal.type(f"{TOP} {planted.run.path}", "Enter")
        lines = terminal.sees("SLOW RANK rank 3")
        terminal.type("Enter")
        rank = terminal.sees("-- rank 3")

    assert all(line.isascii() for line in (*lines, *rank))


@pytest.mark.parametrize("end", ["C-c", *long("SIGTERM", "C-z")])
def test_terminal_is_restored_after_the_end_of_top(planted: LiveSimulation, end: str) -> None:
    """The program ends by Ctrl-C or SIGTERM, or is suspended by Ctrl-Z."""
    with Tmux() as terminal:
        terminal.type("echo before", "Enter")
        terminal.type(f"{TOP} {planted.run.path}", "Enter")
        terminal.sees("q quit")
        if end == "SIGTERM":
            os.kill(terminal.pid(), signal.SIGTERM)
        else:
            terminal.type(end)
        terminal.sees("before")
        if end == "C-z":
            terminal.sees("Stopped")
            terminal.type("fg", "Enter")
            terminal.sees("q quit")
            terminal.type("q")
            terminal.sees("before")
        terminal.type("echo code $?", "Enter")
        terminal.sees(f"code {128 + signal.SIGTERM if end == 'SIGTERM' else 0} ")
