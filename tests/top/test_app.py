"""The application `top`, key by key, on runs that start, continue, end and disappear."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.live_simulation import LiveSimulation
from tests.support.long import long
from tests.top.drawn import Drawn, runs
from tests.top.reports import add_node
from torchlens_perf.top.text import Terminal


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    """Return a run of four ranks on two nodes.

    Rank 3 is slow from step 64 to step 160.
    """
    fault = "constant:rank=3,share=0.3,phase=forward,since=64,until=160"
    with LiveSimulation(tmp_path / "run", 4, fault, node_size=2) as running:
        yield running


def test_top_follows_a_run_from_start_to_end(live: LiveSimulation) -> None:
    """The screen waits, and then shows the first steps, the slow rank, its end, and the end of the
    run.
    """

    async def scenario() -> None:
        async with Drawn(live.run.path.with_name("nowhere"), live.run.path.parent) as drawn:
            # The path before it may be too long for a line.
            await drawn.sees("does not exist yet. Looking again every second.")
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees("has no data yet")
            live.add_blocks(2)
            await drawn.sees("simulation run 4 ranks LIVE ")
            await drawn.sees("64 steps")
            await drawn.sees(lambda lines: lines[1].startswith("  OK "))
            live.add_blocks(2)
            await drawn.sees(lambda lines: re.match(r"  SLOW RANK +rank 3 ", lines[1]))
            live.add_blocks(3)
            await drawn.sees("earlier no action needed: SLOW RANK rank 3")
            live.end_run()
            await drawn.sees("simulation run 4 ranks ENDED ")
            await drawn.sees("earlier no action needed: SLOW RANK rank 3")

    runs(scenario)


def test_each_key_of_top_does_what_the_help_says(live: LiveSimulation) -> None:
    async def scenario() -> None:
        live.add_blocks(4)
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees(lambda lines: chosen(lines) == 3)
            await drawn.press("down")
            await drawn.sees(lambda lines: chosen(lines) != 3)
            await drawn.press("o", "end")
            await drawn.sees(lambda lines: chosen(lines) == 3)
            await drawn.press("home")
            await drawn.sees(lambda lines: chosen(lines) == 0)
            await drawn.press("o", "enter")
            await drawn.sees("── rank 3")
            await drawn.sees("rank 3 (local rank 1) on node-0001, pid")
            await drawn.press("end")
            await drawn.sees("Collectives")
            await drawn.press("escape", "v")
            await drawn.sees("── findings")
            await drawn.sees("seen in ")
            await drawn.press("escape", "n")
            await drawn.sees("- simulated")
            await drawn.press("escape", "question_mark")
            await drawn.sees("── help")
            await drawn.press("escape", "c")
            assert re.fullmatch(r"torchlens-perf capture .* --rank 3", drawn.app.clipboard)
            assert drawn.app.is_running
            await drawn.press("q")
            assert drawn.app.return_code == 0

    runs(scenario)


def chosen(lines: list[str]) -> int:
    """Return the rank under the cursor."""
    return next((int(line.split()[1]) for line in lines if line.startswith("▶")), -1)


def test_cursor_stays_on_its_rank_when_rows_move(live: LiveSimulation) -> None:
    """The rank in the last row becomes slow, and moves to the first row."""

    async def scenario() -> None:
        live.add_blocks(2)
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees("rank step compute")
            await drawn.press("down")
            while chosen(drawn.lines()) != 3:
                await drawn.press("down")
            live.add_blocks(2)
            await drawn.sees("SLOW RANK")
            await drawn.sees(lambda lines: chosen(lines) == 3)

    runs(scenario)


@pytest.mark.slow
def test_all_of_512_ranks_can_be_selected(tmp_path: Path) -> None:
    """The slow rank comes first, and the number of others is shown."""

    async def scenario() -> None:
        with LiveSimulation(
            tmp_path / "run", 64, "constant:rank=19,share=0.3", node_size=64
        ) as live:
            live.add_blocks(2)
            for number in range(1, 8):
                add_node(live.run, number)
            async with Drawn(live.run.path, tmp_path) as drawn:
                await drawn.sees("1 of 512")
                await drawn.sees(lambda lines: chosen(lines) == 19)
                await drawn.press("o", "end")
                await drawn.sees("512 of 512")
                await drawn.sees(lambda lines: chosen(lines) == 763)
                await drawn.press("enter")
                await drawn.sees("── rank 763")

    runs(scenario)


def test_last_view_stays_if_files_are_removed_or_damaged(live: LiveSimulation) -> None:
    """A line states the problem until it is solved."""

    async def scenario() -> None:
        live.add_blocks(2)
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees("64 steps")
            path = live.run.node_state_path("node-0000")
            good = path.read_bytes()
            path.write_bytes(good[:-10])
            lines = await drawn.sees("cannot be read")
            assert any("64 steps" in line for line in lines)
            path.write_bytes(good)
            await drawn.sees(lambda lines: not any("cannot be read" in line for line in lines))
            kept = shutil.copytree(live.run.path, live.run.path.with_name("kept"))
            shutil.rmtree(live.run.path)
            lines = await drawn.sees("The figures are old")
            assert any("64 steps" in line for line in lines)
            kept.rename(live.run.path)
            await drawn.sees(lambda lines: not any("The figures are old" in line for line in lines))

    runs(scenario)


def test_live_run_can_be_chosen_from_the_list(tmp_path: Path) -> None:
    """The key `r` shows the list again, and another run can be chosen."""

    async def scenario() -> None:
        with (
            LiveSimulation(tmp_path / "first", 2) as first,
            LiveSimulation(tmp_path / "second", 4) as second,
        ):
            first.add_blocks()
            second.add_blocks()
            async with Drawn(second.run.path, tmp_path) as drawn:
                await drawn.sees("second 4 ranks")
                await drawn.press("r")
                lines = await drawn.sees(lambda lines: sum(" live " in line for line in lines) == 2)
                marked = next(line for line in lines if line.startswith("▶"))
                assert "second" in marked
                await drawn.press("down", "enter")
                await drawn.sees("first 2 ranks")
                await drawn.sees(lambda lines: not any("second" in line for line in lines))

    runs(scenario)


def test_no_run_opens_automatically_if_several_are_live(tmp_path: Path) -> None:
    """The list stays even if one of these runs ends."""

    async def scenario() -> None:
        with (
            LiveSimulation(tmp_path / "first", 2) as first,
            LiveSimulation(tmp_path / "second", 4) as second,
        ):
            first.add_blocks()
            second.add_blocks()
            async with Drawn(None, tmp_path) as drawn:
                await drawn.sees(lambda lines: sum(" live " in line for line in lines) == 2)
                first.end_run()
                await drawn.sees(lambda lines: sum(" live " in line for line in lines) == 1)
                assert "runs in" in drawn.lines()[0]
                assert "opens by itself" not in drawn.lines()[0]
                await drawn.press("enter")
                await drawn.sees(" ranks ")

    runs(scenario)


def test_first_live_run_opens_automatically(tmp_path: Path) -> None:
    """The list of runs is empty until the run starts."""

    async def scenario() -> None:
        async with Drawn(None, tmp_path / "runs") as drawn:
            await drawn.sees("no run here yet")
            with LiveSimulation(tmp_path / "runs" / "new", 2) as live:
                await drawn.sees("starting")
                live.add_blocks()
                await drawn.sees("new 2 ranks")

    runs(scenario)


@pytest.mark.parametrize(
    "size", [(1, 1), (40, 10), *long(((20, 4),), ((69, 19),), ((110, 20),), ((200, 60),))]
)
def test_screens_of_top_fit_every_terminal_size(
    live: LiveSimulation, size: tuple[int, int]
) -> None:
    """No line is wider than the terminal, and the keys stay visible, also after a change of
    size.
    """

    async def scenario() -> None:
        live.add_blocks(4)
        async with Drawn(live.run.path, live.run.path.parent, size) as drawn:
            if size[0] > 10:
                await drawn.sees("q quit")
                await drawn.sees("simu")
            await drawn.pilot.resize_terminal(80, 24)
            lines = await drawn.sees("SLOW RANK rank 3")
            assert len(lines) <= 24
            assert max(map(len, lines)) <= 80
            await drawn.pilot.resize_terminal(*size)
            await drawn.pilot.pause()
            assert max(map(len, drawn.lines()), default=0) <= size[0]

    runs(scenario)


def test_screens_of_top_are_ascii_if_the_locale_is_not_utf8(live: LiveSimulation) -> None:
    async def scenario() -> None:
        live.add_blocks(4)
        async with Drawn(
            live.run.path, live.run.path.parent, terminal=Terminal(ascii_only=True)
        ) as drawn:
            await drawn.sees("rank 3")
            for keys in ([], ["enter"], ["escape", "question_mark"], ["escape", "r"]):
                await drawn.press(*keys)
                lines = drawn.lines()
                assert all(line.isascii() for line in lines), lines

    runs(scenario)


def test_long_texts_scroll_with_arrow_keys(live: LiveSimulation) -> None:
    """The title has the visible range of lines."""

    async def scenario() -> None:
        live.add_blocks(4)
        async with Drawn(live.run.path, live.run.path.parent, (40, 20)) as drawn:
            await drawn.sees("SLOW RANK")
            await drawn.press("enter")
            await drawn.sees("lines 1-")
            await drawn.press("down", "down")
            await drawn.sees("lines 3-")
            await drawn.press("end", "up")
            await drawn.sees(lambda lines: re.search(r"lines \d+-(\d+) of (\d+)", " ".join(lines)))

    runs(scenario)


def test_error_of_the_reading_thread_ends_the_program(
    live: LiveSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the reading thread, the screen would show old data."""

    def broken(self: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("torchlens_perf.top.reading.RunReader.poll", broken)

    async def scenario() -> None:
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees(lambda lines: not drawn.app.is_running)

    with pytest.raises(ZeroDivisionError, match="planted"):
        runs(scenario)
