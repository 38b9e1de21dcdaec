"""The grid: each rank can be found and read without colour, on any terminal, also one of thousands."""

from __future__ import annotations

from typing import Any

import pytest

from tests.top.reports import changed, report_of, verdict, view_of
from torchlens_perf.top.cells import EXCESS, WAIT, Cell, legend, node_cells, rank_cells
from torchlens_perf.top.grid import laid_out
from torchlens_perf.top.lettering import Lettering
from torchlens_perf.verdicts.words.hang import HangEvidence
from torchlens_perf.verdicts.words.report import Report

ASCII = Lettering(ascii_only=True)
HANG = HangEvidence("missing", 12.0, 40, (1,), (0, 2), {})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Four ranks, of which rank 3 is slow."""
    folder = tmp_path_factory.mktemp("cells")
    return report_of(view_of(folder / "run", 4, "constant:rank=3,share=0.3", blocks=3, node_size=2))


def letters(report: Report, view: str = EXCESS) -> str:
    return "".join(cell.letter for cell in rank_cells(report, view))


def many(count: int, a_node: int = 8, **letter: str) -> list[Cell]:
    """So many ranks; letter: of some, as r5="S"."""
    named = {int(name[1:]): value for name, value in letter.items()}
    return [
        Cell(rank, named.get(rank, "."), "", "+1%", f"node-{rank // a_node:04d}", (3 if rank in named else 0, 0.01))
        for rank in range(count)
    ]


def test_letters_of_a_slow_rank(report: Report) -> None:
    """The named rank has a letter of its own, and its number; the others wait for it."""
    assert letters(report) == "...S"
    assert rank_cells(report, EXCESS)[3].text in ("+29%", "+30%", "+31%")
    assert letters(report, WAIT)[:3] == "222"
    assert rank_cells(report, EXCESS)[3].host == "node-0001"


def test_a_rank_with_more_work_that_is_not_named(report: Report) -> None:
    """By the heat map's steps."""
    of: Any = report["heat"]
    rows = [{**row, "excess": [0.01, 0.01, 0.02 * 2 ** row["rank"]]} for row in of["ranks"]]

    assert letters(changed(report, verdicts=[], heat={**of, "ranks": rows})) == ".:+%"


def test_newest_window_without_work_is_left_out(report: Report) -> None:
    """The last one of a run may have too few steps: the one before it tells. What is older tells nothing of now."""
    of: Any = report["heat"]
    newest = [{**row, "excess": [0.3, None]} for row in of["ranks"]]
    older = [{**row, "excess": [0.3, None, None]} for row in of["ranks"]]

    assert letters(changed(report, verdicts=[], heat={**of, "ranks": newest})) == "####"
    assert letters(changed(report, verdicts=[], heat={**of, "ranks": older})) == "----"


def test_states(report: Report) -> None:
    """Died, ended while others run, nothing heard of, and whom the others wait for in a hang: that goes first."""
    ranks: Any = [
        {**rank, "state": state} for rank, state in zip(report["ranks"][:3], ("died", "running", "closed"), strict=True)
    ]
    hang = verdict("hang", "No step for 12 s.", rank=1, evidence=HANG)
    value = changed(report, ranks=ranks, world_size=6, verdicts=[hang])

    assert letters(value) == "DHE???"
    assert "H others wait for it; D died; E ended; ? nothing heard" in legend(rank_cells(value, EXCESS), EXCESS)


def test_damaged_number_of_ranks(report: Report) -> None:
    """A file that tells of a billion ranks costs neither memory nor time."""
    assert len(rank_cells(changed(report, world_size=10**9), EXCESS)) == 1 << 16
    assert len(rank_cells(changed(report, world_size=-5), EXCESS)) == 4


def test_unmeasured_waiting_is_not_zero(report: Report) -> None:
    """Without a step, or where waiting is a part of backward, there is no digit."""
    ranks: Any = [
        {**report["ranks"][0], "typical": None}, {**report["ranks"][1], "not_measured": ["communication"]},
        {**report["ranks"][2], "phases": {}},
    ]  # fmt: skip

    assert letters(changed(report, ranks=ranks, world_size=3, verdicts=[]), WAIT) == "--0"


def test_nodes_are_shown_by_their_worst_rank(report: Report) -> None:
    first, second = node_cells(rank_cells(report, EXCESS))

    assert (first.host, first.ranks, first.letter) == ("node-0000", (0, 1), ".")
    assert (second.host, second.ranks, second.rank, second.letter) == ("node-0001", (2, 3), 3, "S")


def test_few_ranks_have_their_numbers() -> None:
    grid = laid_out(many(4, r3="S"), 44, 5, ASCII)

    assert [line.plain for line in grid.lines(0)] == ["0 .   +1%  1 .   +1%  2 .   +1%  3 S   +1%"]


def test_many_ranks_have_a_letter_each() -> None:
    """256 on a terminal of 80 columns, with the number of the first one of each line."""
    grid = laid_out(many(256, r130="S"), 44, 8, ASCII)
    lines = [line.plain for line in grid.lines(0)]

    assert (grid.by_node, grid.pages, len(lines)) == (False, 1, 8)
    assert lines[4] == "128 ..S..... ........ ........ ........"
    assert max(map(len, lines)) <= 44


def test_thousands_of_ranks_become_nodes() -> None:
    """Each can be reached: by node and then by rank, and by the key that looks for what stands out."""
    ranks = many(4096, r3001="S")
    grid = laid_out(ranks, 44, 8, ASCII)

    assert (grid.by_node, grid.pages, len(grid.cells)) == (True, 2, 512)
    assert grid.lines(0)[0].plain.startswith("   0 ........")
    assert len(grid.lines(0)) == 8
    at = grid.next_outstanding(0)
    assert (grid.cells[at].rank, grid.cells[at].host) == (3001, "node-0375")
    assert grid.page_of(at) == "nodes 257-512 of 512"
    assert grid.next_outstanding(at) == at
    of_node = [cell for cell in ranks if cell.host == grid.cells[at].host]
    assert laid_out(of_node, 24, 8, ASCII, False).lines(0)[0].plain == "3000 .   +1%"


def test_pages_of_ranks() -> None:
    """Where one cell a rank is asked for, there are pages, and keys turn them."""
    grid = laid_out(many(4096), 44, 8, ASCII, by_node=False)

    assert (grid.by_node, grid.pages) == (False, 16)
    at = grid.moved(0, "pagedown")
    assert grid.cells[at].rank == 256
    assert grid.lines(at)[0].plain.startswith(" 256 ")
    assert grid.moved(at, "end") == 4095
    assert grid.moved(4095, "pagedown") == grid.moved(4095, "right") == grid.moved(4095, "down") == 4095
    assert grid.moved(0, "up") == grid.moved(0, "left") == grid.moved(0, "pageup") == grid.moved(0, "home") == 0
    assert grid.moved(0, "down") == 32


def test_all_pages_as_text() -> None:
    """Without a cursor there are no pages."""
    assert len(laid_out(many(512), 44, 8, ASCII, by_node=False).lines(None)) == 16


@pytest.mark.parametrize("width", [1, 2, 5, 9, 12, 44, 200])
@pytest.mark.parametrize("count", [1, 7, 65, 1000])
@pytest.mark.parametrize("by_node", [None, True, False])
def test_no_size_breaks_it(width: int, count: int, by_node: bool | None) -> None:
    """Each cell is on some page; no page has more lines than there are."""
    grid = laid_out(many(count), width, 3, ASCII, by_node)
    seen = 0
    for index in range(0, len(grid.cells), 3 * grid.columns):
        lines = grid.lines(index, marked=True)
        assert len(lines) <= 3
        seen += sum(line.plain.count(".") for line in lines)

    assert seen == len(grid.cells)


def test_chosen_rank_stays_chosen() -> None:
    """Also where the cells are other ones: of a node, the one that has it."""
    ranks = many(64, 8)

    assert laid_out(ranks, 44, 8, ASCII, False).at(19) == 19
    assert laid_out(ranks, 44, 8, ASCII, True).at(19) == 2
    assert laid_out(ranks[:4], 44, 8, ASCII).at(19) == 0
