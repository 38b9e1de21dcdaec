"""The application's logic, key by key, on runs that go on, end, come and go."""

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
from torchlens_perf.top.lettering import Lettering


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveSimulation]:
    """Four ranks on two nodes; rank 3 is slow from step 64 to step 160."""
    fault = "constant:rank=3,share=0.3,phase=forward,since=64,until=160"
    with LiveSimulation(tmp_path / "run", 4, fault, node_size=2) as running:
        yield running


def test_run_from_its_beginning_to_its_end(live: LiveSimulation) -> None:
    """It waits, shows the first steps, the slow rank when it is named, that it is over, and at last that the run has
    ended, with the verdict still there."""

    async def scenario() -> None:
        async with Drawn(live.run.path.with_name("nowhere"), live.run.path.parent) as drawn:
            await drawn.sees("nowhere is not there yet. Looking again each second.")
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees("nothing in it yet that a sidecar has written")
            live.goes_on(2)
            await drawn.sees("simulation run 4 ranks LIVE ")
            await drawn.sees("64 steps")
            await drawn.sees("No slow rank in 64 steps")
            live.goes_on(2)
            await drawn.sees("verdicts: 1 now")
            await drawn.sees(
                lambda lines: any(re.match(r"(seen|since) [\d:]{8} Rank 3 .* is slow", each) for each in lines)
            )
            live.goes_on(3)
            await drawn.sees("1 over")
            live.ends()
            await drawn.sees("simulation run 4 ranks ENDED ")
            await drawn.sees("at the end, 1 over")
            await drawn.sees(lambda lines: any(re.match(r"[\d:]{8} over.*: Rank 3 was slow", each) for each in lines))

    runs(scenario)


def test_keys(live: LiveSimulation) -> None:
    """Each does what the bottom line and the help say."""

    async def scenario() -> None:
        live.goes_on(4)
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees("rank 0 on node-0000: ")
            await drawn.press("right")
            await drawn.sees("rank 1 on node-0000: ")
            await drawn.press("w")
            await drawn.sees("rank 3 on node-0001: slow, +29% work")
            await drawn.press("v")
            await drawn.sees("ranks: waiting")
            await drawn.sees("rank 3 on node-0001: slow, waits ")
            await drawn.press("v", "enter")
            await drawn.sees("── rank 3")
            await drawn.sees("rank 3 (local rank 1) on node-0001, pid")
            await drawn.press("end")
            await drawn.sees("── memory")
            await drawn.press("escape", "tab")
            await drawn.press("enter")
            await drawn.sees(lambda lines: any(line.startswith("── verdicts ──") for line in lines))
            await drawn.press("escape", "n")
            await drawn.sees("- simulated")
            await drawn.press("escape", "question_mark")
            await drawn.sees("── help; lines 1-")
            await drawn.press("escape", "g")
            await drawn.sees("nodes: more work")
            await drawn.press("enter")
            await drawn.sees("node-0001: ranks")
            await drawn.press("escape")
            await drawn.sees("── ranks: more work")
            assert drawn.app.is_running
            await drawn.press("q")
            assert drawn.app.return_code == 0

    runs(scenario)


def test_many_ranks(tmp_path: Path) -> None:
    """512 ranks, for which there is no room: a cell a node, with Enter the node's ranks, and then the rank."""

    async def scenario() -> None:
        with LiveSimulation(tmp_path / "run", 64, "constant:rank=19,share=0.3", node_size=64) as live:
            live.goes_on(2)
            for number in range(1, 8):
                add_node(live.run, number)
            async with Drawn(live.run.path, tmp_path) as drawn:
                await drawn.sees("nodes: more work")
                await drawn.press("w")
                await drawn.sees("node-0000, ranks 0-63; rank 19: slow, +")
                await drawn.press("enter")
                await drawn.sees("node-0000: ranks: more work")
                await drawn.sees("0 ........ ........ ...S.... ........")
                await drawn.press("enter")
                await drawn.sees("── rank 19")

    runs(scenario)


def test_removed_and_damaged(live: LiveSimulation) -> None:
    """What was read stays, with a line that says what is wrong; afterwards the line is gone."""

    async def scenario() -> None:
        live.goes_on(2)
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees("64 steps")
            path = live.run.node_state("node-0000")
            good = path.read_bytes()
            path.write_bytes(good[:-10])
            lines = await drawn.sees("cannot be read")
            assert any("64 steps" in line for line in lines)
            path.write_bytes(good)
            await drawn.sees(lambda lines: not any("cannot be read" in line for line in lines))
            kept = shutil.copytree(live.run.path, live.run.path.with_name("kept"))
            shutil.rmtree(live.run.path)
            lines = await drawn.sees("what is shown was read")
            assert any("64 steps" in line for line in lines)
            kept.rename(live.run.path)
            await drawn.sees(lambda lines: not any("what is shown was read" in line for line in lines))

    runs(scenario)


def test_several_live_runs(tmp_path: Path) -> None:
    """One is chosen from the list; the list is there with `r` again, and another one is shown from its beginning."""

    async def scenario() -> None:
        with LiveSimulation(tmp_path / "first", 2) as first, LiveSimulation(tmp_path / "second", 4) as second:
            first.goes_on()
            second.goes_on()
            async with Drawn(second.run.path, tmp_path) as drawn:
                await drawn.sees("second 4 ranks")
                await drawn.press("r")
                lines = await drawn.sees(lambda lines: sum(" live " in line for line in lines) == 2)
                marked = next(line for line in lines if line.startswith(">"))
                assert "second" in marked
                await drawn.press("down", "enter")
                await drawn.sees("first 2 ranks")
                await drawn.sees(lambda lines: not any("second" in line for line in lines))

    runs(scenario)


def test_choice_of_several(tmp_path: Path) -> None:
    """Where several are live when it starts, none opens by itself, also when one of them ends."""

    async def scenario() -> None:
        with LiveSimulation(tmp_path / "first", 2) as first, LiveSimulation(tmp_path / "second", 4) as second:
            first.goes_on()
            second.goes_on()
            async with Drawn(None, tmp_path) as drawn:
                await drawn.sees(lambda lines: sum(" live " in line for line in lines) == 2)
                first.ends()
                await drawn.sees(lambda lines: sum(" live " in line for line in lines) == 1)
                assert "runs in" in drawn.lines()[0]
                assert "opens by itself" not in drawn.lines()[0]
                await drawn.press("enter")
                await drawn.sees(" ranks ")

    runs(scenario)


def test_waits_for_a_live_run(tmp_path: Path) -> None:
    """Without any, the list is empty, and the first live one opens by itself."""

    async def scenario() -> None:
        async with Drawn(None, tmp_path / "runs") as drawn:
            await drawn.sees("no run here yet")
            with LiveSimulation(tmp_path / "runs" / "new", 2) as live:
                await drawn.sees("begins")
                live.goes_on()
                await drawn.sees("new 2 ranks")

    runs(scenario)


@pytest.mark.parametrize("size", [(1, 1), (40, 10), *long(((20, 4),), ((69, 19),), ((110, 20),), ((200, 60),))])
def test_sizes(live: LiveSimulation, size: tuple[int, int]) -> None:
    """Of any size, and changed to another one: nothing is wider than the terminal, and the keys stay."""

    async def scenario() -> None:
        live.goes_on(4)
        async with Drawn(live.run.path, live.run.path.parent, size) as drawn:
            if size[0] > 10:
                await drawn.sees("q quit")
                await drawn.sees("simu")
            await drawn.pilot.resize_terminal(80, 24)
            lines = await drawn.sees("Rank 3 (node-0001) is slow")
            assert len(lines) <= 24
            assert max(map(len, lines)) <= 80
            await drawn.pilot.resize_terminal(*size)
            await drawn.pilot.pause()
            assert max(map(len, drawn.lines()), default=0) <= size[0]

    runs(scenario)


def test_ascii(live: LiveSimulation) -> None:
    """Where the locale has no more, every screen does with ASCII."""

    async def scenario() -> None:
        live.goes_on(4)
        async with Drawn(live.run.path, live.run.path.parent, lettering=Lettering(ascii_only=True)) as drawn:
            await drawn.sees("Rank 3")
            for keys in ([], ["enter"], ["escape", "question_mark"], ["escape", "r"]):
                await drawn.press(*keys)
                lines = drawn.lines()
                assert all(line.isascii() for line in lines), lines

    runs(scenario)


def test_verdicts_scroll(live: LiveSimulation) -> None:
    """Where there are more lines than room, which are seen is said, and Tab and the arrows lead to the others."""

    async def scenario() -> None:
        live.goes_on(4)
        async with Drawn(live.run.path, live.run.path.parent, (40, 20)) as drawn:
            await drawn.sees("lines 1-")
            await drawn.press("tab", "down", "down")
            await drawn.sees("lines 3-")

    runs(scenario)


def test_evidence_where_there_is_room(live: LiveSimulation) -> None:
    """All of it or none, so that what is seen first is never pushed away by what somebody may want to know next."""

    async def scenario() -> None:
        live.goes_on(4)
        async with Drawn(live.run.path, live.run.path.parent, (100, 50)) as drawn:
            await drawn.sees("windows of the run.")
        async with Drawn(live.run.path, live.run.path.parent, (40, 20)) as drawn:
            await drawn.sees("lines 1-")
            await drawn.press("tab", "end")
            lines = await drawn.sees("Next:")
            assert "windows of the run." not in " ".join(lines)

    runs(scenario)


def test_failure_of_ours_is_no_stale_screen(live: LiveSimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the reading thread has a mistake, the application ends with it: nobody looks at what is not read any more."""

    def broken(self: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("torchlens_perf.top.reading.RunReader.look", broken)

    async def scenario() -> None:
        async with Drawn(live.run.path, live.run.path.parent) as drawn:
            await drawn.sees(lambda lines: not drawn.app.is_running)

    with pytest.raises(ZeroDivisionError, match="planted"):
        runs(scenario)
