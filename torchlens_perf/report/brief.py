"""The report's short form: what rank 0 prints at the end of a run. A healthy run has MAX_LINES lines at the most.

Where a rank, a link or the job has something, it may be longer: the verdict, what to do, and the evidence come first.
All the rest is in the report, and a command shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from torchlens_perf.analysis.statistics.quantities import printable
from torchlens_perf.report.captures import capture_lines
from torchlens_perf.report.rank_table import rank_table
from torchlens_perf.report.terminal import as_text, quality_line, safe, start_line, step_line, title
from torchlens_perf.report.verdict_text import earlier_line, is_finding, verdict_parts

if TYPE_CHECKING:
    from torchlens_perf.verdicts.words.report import Report

MAX_LINES = 25
_MAX_RANKS = 8


def brief(report: Report, run_dir: str, *, columns: int, color: bool, page: str = "") -> str:
    """The short form as text for a terminal of `columns`, 0 for none, with its escape sequences if `color`.

    page: the file of the run's page, if one is going to be written.
    """
    return as_text(brief_layout(report, run_dir, columns=columns, page=page), columns=columns, color=color)


def brief_layout(report: Report, run_dir: str, *, columns: int, page: str = "") -> RenderableType:
    """The same as a rich renderable."""
    report = safe(report)
    rows = [row for row in report["verdicts"] if not row["is_over"]]
    found = any(map(is_finding, rows))
    begin: list[RenderableType] = [title(report), Text("")]
    end: list[RenderableType] = [*_figures(report, ranks=found), *_asides(report), _where_the_rest_is(run_dir, page)]
    verdicts = [list(verdict_parts(row, report, brief=True)) for row in rows]
    if found:
        captured = map(Text, capture_lines(report, run_dir))
        return Group(*begin, *(part for each in verdicts for part in each), *captured, *end)
    left = MAX_LINES - _lines([*begin, *end], columns)
    shown = [part for each in verdicts for part in each]
    if _lines(shown, columns) > left:  # that the ranks are alike is short, and never left out
        alike = [part for each, row in zip(verdicts, rows, strict=True) for part in each if row["kind"] == "none"]
        rest = [each for each, row in zip(verdicts, rows, strict=True) if row["kind"] != "none"]
        shown = [*_fitting(rest, left - _lines(alike, columns), columns), *alike]
    return Group(*begin, *shown, *end)


def _figures(report: Report, *, ranks: bool) -> Iterator[RenderableType]:
    if report["steps"]["count"]:
        yield step_line(report)
        yield from start_line(report)
        if ranks:
            yield rank_table(report, _MAX_RANKS)


def _asides(report: Report) -> Iterator[RenderableType]:
    over = [row for row in report["verdicts"] if row["is_over"]]
    if over:
        yield Text(earlier_line(over))
    notes = len(report["quality"]["notes"])
    some = f"; {notes} note{'s' if notes > 1 else ''} in the full report" if notes else ""
    yield Text(quality_line(report) + some)


def _where_the_rest_is(run_dir: str, page: str) -> Text:
    also = f"\nsoon also as a page: {printable(page)}" if page else ""
    text = f"this is the short form; all of it: torchlens-perf report {printable(run_dir)}{also}"
    return Text(text, style="dim", no_wrap=True, overflow="ignore")  # to be copied as it is


def _fitting(verdicts: Sequence[Sequence[RenderableType]], lines: int, columns: int) -> list[RenderableType]:
    """The first verdicts that these lines have room for, and how many more there are."""
    shown: list[RenderableType] = []
    for place, parts in enumerate(verdicts):
        left = len(verdicts) - place
        more = Text(f"  and {left} more verdict{'s' if left > 1 else ''}\n")
        reserved = [more] if left > 1 else []
        if place and _lines([*shown, *parts, *reserved], columns) > lines:
            return [*shown, more]
        shown += parts
    return shown


def _lines(parts: Sequence[RenderableType], columns: int) -> int:
    return as_text(Group(*parts), columns=columns, color=False).count("\n")
