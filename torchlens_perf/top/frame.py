"""One frame as lines, as long as it needs: for scripts, and for terminals that cannot be drawn on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from torchlens_perf.top import overview
from torchlens_perf.top.cells import EXCESS, legend, rank_cells, window_steps
from torchlens_perf.top.grid import laid_out
from torchlens_perf.top.lettering import Lettering, clipped
from torchlens_perf.top.verdict_lines import verdict_lines

if TYPE_CHECKING:
    from torchlens_perf.top.reading import View
    from torchlens_perf.verdicts.words.report import Report

_MOST_LINES = 32  # of the grid; more ranks become one cell a node


def frame(view: View, width: int, lettering: Lettering) -> list[Text]:
    """The run as one frame."""
    lines = [overview.title_line(view, width, lettering), *overview.trouble_lines(view, width, lettering)]
    report = view.report
    if report is None:
        return clipped(lines, width)
    lines += overview.pace_lines(view, width, lettering)
    lines += [overview.rule("verdicts", width, lettering)]
    lines += verdict_lines(report["verdicts"], width, lettering, details=True)
    cells = rank_cells(report, EXCESS)
    grid = laid_out(cells, width, _MOST_LINES, lettering)
    lines += [
        overview.rule(grid_title(report, EXCESS, width, by_node=grid.by_node), width, lettering),
        *grid.lines(None),
    ]
    lines += [Text(line, style="dim") for line in lettering.wrapped(legend(grid.cells, EXCESS), width)]
    lines += [overview.rule(overview.phase_title(report, width), width, lettering)]
    lines += overview.phase_lines(report, width, lettering)
    lines += [overview.rule("", width, lettering), overview.quality_line(report, width, lettering)]
    lines += overview.note_lines(report, width, lettering) if report["quality"]["notes"] else []
    return clipped(lines, width)


def grid_title(report: Report, view: str, width: int, *, by_node: bool, page: str = "") -> str:
    """What the cells are. page: which of them are there, as Grid.page_of() has it."""
    who = page or ("nodes" if by_node else "ranks")
    if by_node and width > 60:
        who += ", by their worst ranks"
    if view != EXCESS:
        return f"{who}: waiting in communication" if width > 60 else f"{who}: waiting"
    steps = window_steps(report)
    newest = f", newest {steps} steps" if steps is not None else ""
    return f"{who}: more work than the others{newest}" if width > 60 else f"{who}: more work{newest}"
